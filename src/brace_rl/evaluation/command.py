"""``brace eval``: parsing and messages only; nothing heavy is imported before the input has been checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from brace_rl.errors import ConfigError
from brace_rl.overrides import parse_text, split_overrides
from brace_rl.tasks.registry import parse_settings, settings_class
from brace_rl.tasks.settings import TaskSettings

ALL_PROBLEMS = 10**9
"""``task.eval_problems`` of a task that reads a file: every row."""
DEFAULT_SAMPLES = 1
_PIPED_WIDTH = 120


class EvalCommand(click.Command):
    """``brace eval`` takes every setting of the task as ``--task.key value`` beside its own options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the settings out first (into ``ctx.obj``)."""
        ctx.obj, rest = split_overrides(args)
        return super().parse_args(ctx, rest)


@click.command("eval", cls=EvalCommand)
@click.option("--model", required=True, help="Model folder (a checkpoint's actor, for one) or hub name.")
@click.option("--task", "task_name", required=True, help="Task family, or path/to/file.py:ClassName.")
@click.option("--data", type=click.Path(path_type=Path), help="File of problems, for tasks that read one.")
@click.option("--samples", type=click.IntRange(min=1), help="Answers per problem.  [default: 1]")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.6, show_default=True)
@click.option("--top-p", type=click.FloatRange(min=0, min_open=True, max=1), default=0.95, show_default=True)
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0: all tokens.")
@click.option("--greedy", is_flag=True, help="The likeliest token always; one answer per problem.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first problems.")
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), default=4096, show_default=True)
@click.option("--max-response-tokens", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--slots", type=click.IntRange(min=1), default=64, show_default=True, help="Answers decoded together.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for the records.  [default: evaluations/TASK-MODEL]"
)
@click.pass_context
def eval_command(context: click.Context, /, model: str, task_name: str, data: Path | None, **options: Any) -> None:
    """Answer every problem of a task and report mean@k, pass@k and 95 % intervals.

    Writes records.jsonl (grows as problems are finished; run the same command again to go on after an interruption),
    records.parquet (a row per answer) and summary.json. Settings of the task are given as --task.key value, and
    listed by brace train --task.name NAME --help.
    """
    task_settings = _task_settings(task_name, data, options["limit"], context.obj)
    samples = _samples(options["samples"], options["greedy"])
    if options["greedy"]:
        _refuse_sampling(context)
    folder = options["out"] or Path("evaluations") / _folder_name(task_name, model)

    from brace_rl.evaluation.run import EvaluationSettings, fingerprint, open_log, run_evaluation
    from brace_rl.tasks.registry import task_class
    from brace_rl.training.engines.embedded import EmbeddedEngine
    from brace_rl.training.models import check_model, load_actor, load_tokenizer, resolve_device
    from brace_rl.training.types import SamplingParams

    settings = EvaluationSettings(
        samples=samples,
        sampling=SamplingParams(0.0) if options["greedy"] else _sampling(options),
        max_prompt_tokens=options["max_prompt_tokens"],
        max_response_tokens=options["max_response_tokens"],
        limit=options["limit"] or 0,
        seed=options["seed"],
    )
    check_model(model)
    device = resolve_device(options["device"])
    identity = fingerprint(settings, task_settings, model=model, dtype=options["dtype"], data=data)
    task = task_class(task_settings.name)(task_settings, seed=settings.seed)
    # Before the model is loaded, which takes long: a folder of another evaluation.
    open_log(folder, identity).close()
    tokenizer = load_tokenizer(model)
    engine = EmbeddedEngine(load_actor(model, dtype=options["dtype"], device=device), tokenizer, slots=options["slots"])
    engine.version = 0
    with _progress() as progress:
        summary = run_evaluation(
            folder=folder,
            identity=identity,
            settings=settings,
            task=task,
            engine=engine,
            tokenizer=tokenizer,
            slots=options["slots"],
            progress=progress,
        )
    _show(summary)
    click.echo(f"\nwritten: {folder / 'summary.json'}, {folder / 'records.parquet'}")


def _sampling(options: Mapping[str, Any]) -> Any:
    from brace_rl.training.types import SamplingParams

    if options["temperature"] == 0:
        raise ConfigError("--temperature: 0 is greedy decoding; pass --greedy instead")
    return SamplingParams(options["temperature"], options["top_p"], options["top_k"])


def _samples(samples: int | None, greedy: bool) -> int:
    if greedy and samples not in (None, 1):
        raise ConfigError(
            f"--samples: greedy decoding gives the same answer every time; leave out {samples} or --greedy"
        )
    return samples or DEFAULT_SAMPLES


def _refuse_sampling(context: click.Context) -> None:
    for name in ("temperature", "top_p", "top_k"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name.replace('_', '-')}: greedy decoding samples nothing; leave it or --greedy out")


def _task_settings(name: str, data: Path | None, limit: int | None, overrides: Mapping[str, str]) -> TaskSettings:
    """Of the family, with the file as its evaluation file and every row of it asked for."""
    cls = settings_class(name)
    fields = cls.model_fields
    values: dict[str, Any] = {"name": name}
    for key, text in overrides.items():
        section, _, field = key.partition(".")
        if section != "task":
            raise ConfigError(f"--{key}: brace eval takes settings of the task only, as --task.key value")
        known = fields.get(field)
        values[field] = text if known is not None and known.annotation is str else parse_text(text)
    if data is None and "eval_data" in fields and not values.get("eval_data"):
        raise ConfigError(f"--data: {name} reads its problems from a file; pass --data FILE")
    if data is not None:
        if "eval_data" not in fields:
            raise ConfigError(f"--data: {name} makes its own problems; leave it out")
        values["eval_data"] = str(data)
    if "eval_problems" not in values and (limit or "eval_data" in fields):
        values["eval_problems"] = limit or ALL_PROBLEMS
    return parse_settings(values)


def _folder_name(task: str, model: str) -> str:
    return re.sub(r"[^\w.-]+", "-", f"{task}-{model}").strip("-.")


@contextmanager
def _progress() -> Iterator[Callable[[int, int, float], None]]:
    """A bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("problems", total=None)

        def progress(done: int, total: int, success: float) -> None:
            bar.update(task, completed=done, total=total, description=f"problems, success {success:.3f}")

        yield progress


def _show(summary: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    counts = summary["counts"]
    table = Table(title=f"{summary['task']}: {counts['problems']} problems, {counts['answers']} answers")
    for heading in ("metric", "mean", "95 % interval", "problems"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for name, value in summary["metrics"].items():
        interval = f"{value['low']:.4f} to {value['high']:.4f}"
        table.add_row(name, f"{value['mean']:.4f}", interval, str(value["problems"]))
    console = Console()
    (console if console.is_terminal else Console(width=_PIPED_WIDTH)).print(table)
    if summary["exact_match"] is not None:
        click.echo(f"exact match over all judged answers: {summary['exact_match']:.4f}")
    remarks = {name.replace("_", " "): count for name, count in counts.items() if name not in ("problems", "answers")}
    click.echo(", ".join(f"{name} {count}" for name, count in remarks.items()))
    if before := summary["resumed_problems"]:
        click.echo(f"{before} problem{'s were' if before > 1 else ' was'} answered before")
