"""``brace compare``: parsing and messages only; nothing heavy is imported before the input has been checked."""

from __future__ import annotations

import os
from pathlib import Path

import click

from brace_rl.errors import ConfigError
from brace_rl.overrides import split_overrides

METHODS = "ppo,areal,kpop,icepop,ppo_ewma,brace"
"""The six of the paper's Table 1."""


class CompareCommand(click.Command):
    """``brace compare`` takes every setting of a recipe as ``--section.key value`` beside its own options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the settings out first (into ``ctx.obj``): click would take one that comes first for RECIPE."""
        ctx.obj, rest = split_overrides(args)
        return super().parse_args(ctx, rest)


@click.command("compare", cls=CompareCommand)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--methods", default=METHODS, show_default=True, help="NAME[:KEY=VALUE]..., separated by commas.")
@click.option("--seeds", type=click.IntRange(min=1), default=5, show_default=True, help="How many.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The first.")
@click.option("--staleness", default="9", show_default=True, help="S in trainer steps; several separated by commas.")
@click.option("--workers", type=click.IntRange(min=1), help="Cells run side by side.  [default: one per core]")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: comparisons/RECIPE]")
@click.option("--retry", is_flag=True, help="Run failed cells again, from their beginning.")
@click.option("--report", is_flag=True, help="Run nothing; write the results of the cells there are.")
@click.option("--keep-models", is_flag=True, help="Keep the last checkpoint of every cell.")
@click.pass_context
def compare_command(
    context: click.Context,
    recipe: Path,
    methods: str,
    seeds: int,
    seed: int,
    staleness: str,
    workers: int | None,
    out: Path | None,
    retry: bool,
    report: bool,
    keep_models: bool,
) -> None:
    """Compare methods on RECIPE: same model, warm start, data order, budget and evaluations for all.

    A cell is one method at one S with one seed: a brace train in a process of its own, one thread each, under the lag
    schedule unless --schedule.mode says otherwise. Finished cells are kept: the same command goes on where it was
    stopped. Any setting of the recipe can be given as --section.key value, and then holds for all methods.

    \b
    brace methods lists the methods. What follows a colon is set for one of them alone, which is then a row of its own:
      estr:tau=0.5            an option of the method's actor rule
      brace:window=20         or else a key of [algorithm]
      ppo:optim.actor_lr=1e-4 or SECTION.KEY

    Writes table.csv, table.md, curves.csv, results.json, compare.html, compare.png and compare.svg.
    """
    from brace_rl.compare.folder import CompareFolder
    from brace_rl.compare.plan import make_plan

    folder = CompareFolder((out or Path("comparisons") / recipe.stem).absolute(), keep_models=keep_models)
    plan = make_plan(
        recipe,
        methods=names(methods),
        staleness=whole_numbers("--staleness", staleness),
        seeds=range(seed, seed + seeds),
        overrides=context.obj,
        out=folder.out,
    )
    from brace_rl.compare.run import run_cells, write_results

    if report:
        folder.check_there()
    else:
        run_cells(plan, folder, workers=workers or cores(), retry=retry)
    write_results(plan, folder)


def names(text: str) -> list[str]:
    """Names of ``--methods``.

    Raises:
        ConfigError: none, or one named twice.
    """
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ConfigError("--methods: names none; give some, separated by commas")
    if twice := [name for name in found if found.count(name) > 1]:
        raise ConfigError(f"--methods: {twice[0]} is named twice")
    return found


def whole_numbers(option: str, text: str) -> list[int]:
    """Ascending numbers of ``0,4,16``.

    Raises:
        ConfigError: not such a list.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ConfigError(f"{option}: {text!r} is no list of whole numbers such as 0,4,16")
    return sorted({int(word) for word in words})


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
