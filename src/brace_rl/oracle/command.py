"""`brace oracle`: its options. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from brace_rl.actor.options import RULE_OPTIONS
from brace_rl.oracle.methods import MEANINGS, WHOLE_BATCH_RULES, Method
from brace_rl.oracle.settings import CRITIC_SEES, LearnConfig

PRESETS = "chain, branch, drift, mismatch"
METHODS = "mc,gae:0.95,vtrace,uncapped,capped:100,brace:10,brace:20,brace:100,drift:0.1,path:1"
MAP_METHODS = "mc,vtrace,uncapped,brace:20,brace:100,drift:0.1,path:1"


def _help() -> str:
    return "\n\n".join(
        [
            "Hold every value target against exact values on a small token MDP.",
            f"PRESET is one of {PRESETS}. Parts: exact (bias, spread, error, fixed points and the offset "
            "bound of one stale pair), pairs (exact figures of pairs and critics that PPO has made), curves (PPO at "
            "each lag), map (where a window pays over lag, horizon and engine noise).",
            "Every finished learning curve is kept under OUT/cells. The same command goes on where it was interrupted; "
            "curves made under other settings are neither used nor deleted.",
            "A method is a value target and, after a plus, the actor's rule with its options, as in "
            "brace:100+icepop:low=0.5. "
            f"Rules: {', '.join(name for name in RULE_OPTIONS if name not in WHOLE_BATCH_RULES)}; without one, ppo.",
            "\b\nValue targets; @CLIP after one sets both its clips, @RHO/C one each, such as brace:100@2/1.1:\n"
            + "\n".join(f"  {name}: {meaning}" for name, meaning in MEANINGS.items()),
        ]
    )


@click.command("oracle", help=_help())
@click.argument("preset")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for JSON, CSV, PNG and SVG.")
@click.option("--parts", default="exact,curves", show_default=True, help="Any of exact, pairs, curves, map.")
@click.option("--methods", default=METHODS, show_default=True, help="Targets, separated by commas.")
@click.option("--lags", default="0,5,10,15,30,50", show_default=True, help="S of the curves and the map.")
@click.option("--lag", default=10, show_default=True, type=int, help="S of the pair in the exact part.")
@click.option("--horizon", type=int, help="Tokens in a response, at most 2048.  [default: 256]")
@click.option("--success", type=float, help="Success of the starting policy.  [default: 0.03]")
@click.option("--classes", type=int, help="Classes of positions, learnt apart.  [default: 16, branch: 8]")
@click.option("--actions", type=int, help="Tokens to choose from.  [default: 2, branch: 4]")
@click.option("--seeds", default=20, show_default=True, type=int)
@click.option("--seed", default=0, show_default=True, type=int, help="Of all random numbers.")
@click.option("--steps", default=LearnConfig.steps, show_default=True, type=int, help="Trainer steps.")
@click.option("--batch", default=LearnConfig.batch, show_default=True, type=int, help="Responses per step.")
@click.option("--actor-lr", default=LearnConfig.actor_lr, show_default=True, type=float)
@click.option("--critic-lr", default=LearnConfig.critic_lr, show_default=True, type=float)
@click.option("--critic-bins", default=LearnConfig.critic_bins, show_default=True, type=int)
@click.option(
    "--critic-sees",
    type=click.Choice(CRITIC_SEES),
    default=LearnConfig.critic_sees,
    show_default=True,
    help="state: a table over states and positions; position: over positions alone.",
)
@click.option("--noise", default=0.0, show_default=True, type=float, help="Engine noise in logits, as recorded.")
@click.option("--after", default=60, show_default=True, type=int, help="Steps of PPO before a pair is taken.")
@click.option("--rho-clip", default=Method.rho_clip, show_default=True, type=float)
@click.option("--c-clip", default=Method.c_clip, show_default=True, type=float)
@click.option("--map-methods", default=MAP_METHODS, show_default=True)
@click.option("--map-horizons", default="256,512,1024", show_default=True, help="In place of --horizon.")
@click.option("--map-noises", default="0,0.1,0.2,0.4", show_default=True, help="Engine noise in logits, as recorded.")
def oracle_command(preset: str, out: Path, parts: str, **options: Any) -> None:
    """Hand over to `brace_rl.oracle.run`."""
    from rich.console import Console

    from brace_rl.oracle.run import run_oracle

    run_oracle(preset, out, parts, options, Console())
