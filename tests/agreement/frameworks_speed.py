"""Our value target beside those of verl and TorchRL, in one run: ``make bench-frameworks``.

What each computes is compared first: verl's loop with our GAE, TorchRL's with our V-trace. Then each is timed on the
same tensors, one thread, and the memory our own takes beyond its inputs is measured in processes of their own.
Prints Markdown. Times mean something only on a machine that does nothing else.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brace_rl import core
from brace_rl.bench.targets import SHAPE, WINDOWS, target_inputs
from brace_rl.bench.timing import median_seconds, torch_threads

CPU = torch.device("cpu")
WINDOW = 100
REPEATS, REPEATS_OF_LOOPS = 21, 5
BUDGET = 3.0
CLOSE = 1e-3
"""float32 sums over 16,384 tokens, added up in another order."""
AIMS = {"verl": 40.0, "TorchRL": 10.0}
"""How many times faster than theirs ours is meant to be; and then what a long window and the memory may be."""
MOST_WINDOW_RATIO = 3.0
MOST_EXTRA_INPUTS = 6.0
MEMORY_CASES = ("window 100", "window 100, tool spans", "a window per state", "windows chosen by path and used")

Run = Callable[[], Any]


def verl_gae(inputs: dict[str, Tensor]) -> Run:
    """verl's GAE; it wants the mask as numbers. Its time includes the whitening it ends with."""
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    mask = inputs["policy_mask"].float()
    return partial(compute_gae_advantage_return, inputs["rewards"], inputs["values"], mask, gamma=1.0, lam=1.0)


def torchrl_vtrace(inputs: dict[str, Tensor], *, time_first: bool) -> Run:
    """TorchRL's V-trace on ``[B, T, 1]``, or on one environment ``[1, T, B]`` of B features, where it runs fastest."""
    from torchrl.objectives.value.functional import vtrace_advantage_estimate

    done = torch.zeros(SHAPE, dtype=torch.bool)
    done[:, -1] = True
    following = torch.nn.functional.pad(inputs["values"][:, 1:], (0, 1))
    names = ("target_logprobs", "behavior_logprobs", "values")
    tensors = [*(inputs[name] for name in names), following, inputs["rewards"], done]
    laid_out = [x.t().contiguous()[None] if time_first else x[..., None] for x in tensors]
    return partial(vtrace_advantage_estimate, 1.0, *laid_out)


def check_same_figures(inputs: dict[str, Tensor]) -> None:
    """What is timed must be the same computation."""
    plain = {name: inputs[name] for name in ("values", "rewards", "policy_mask")}
    pairs = {
        "verl": (verl_gae(inputs)()[1], core.gae_targets(**plain, lam=1.0).targets),
        "TorchRL": (
            torchrl_vtrace(inputs, time_first=False)()[1][..., 0],
            core.vtrace_targets(**inputs, rho_clip=1.0, c_clip=1.0).targets,
        ),
    }
    for name, (theirs, ours) in pairs.items():
        difference = (theirs - ours).abs().max().item()
        print(f"largest difference to {name}'s figures (float32): {difference:.1e}")
        if not difference < CLOSE:
            sys.exit(f"{name} computes something else")


def measure_times(inputs: dict[str, Tensor]) -> dict[str, float]:
    """Median milliseconds by name."""
    theirs = {
        f"verl {version('verl')}, compute_gae_advantage_return": verl_gae(inputs),
        f"TorchRL {version('torchrl')}, vtrace_advantage_estimate": torchrl_vtrace(inputs, time_first=False),
        "TorchRL, the same laid out as [1, T, B]": torchrl_vtrace(inputs, time_first=True),
    }
    ours = {f"BRACE, window {window}": partial(core.brace_targets, **inputs, window=window) for window in WINDOWS}
    milliseconds = {}
    for runs, repeats in ((theirs, REPEATS_OF_LOOPS), (ours, REPEATS)):
        for name, run in runs.items():
            milliseconds[name] = 1e3 * median_seconds(run, repeats=repeats, device=CPU)
    return milliseconds


def print_times(milliseconds: dict[str, float]) -> None:
    """The table, and each aim with what was reached."""
    brace = milliseconds[f"BRACE, window {WINDOW}"]
    print(
        f"\n| [{SHAPE[0]}, {SHAPE[1]}] float32, one thread | milliseconds | times as long as BRACE, window {WINDOW} |"
    )
    print("| --- | --- | --- |")
    for name, value in milliseconds.items():
        print(f"| {name} | {value:,.1f} | {value / brace:.2f} |")
    print()
    for library, aim in AIMS.items():
        fastest = min(value for name, value in milliseconds.items() if name.startswith(library))
        _print_aim(f"times faster than {library} at its fastest", fastest / brace, aim, at_least=True)
    ratio = milliseconds[f"BRACE, window {WINDOWS[-1]}"] / milliseconds[f"BRACE, window {WINDOWS[0]}"]
    _print_aim(f"window {WINDOWS[-1]} over window {WINDOWS[0]}", ratio, MOST_WINDOW_RATIO, at_least=False)


def _print_aim(name: str, value: float, aim: float, *, at_least: bool) -> None:
    reached = value >= aim if at_least else value <= aim
    bound = "at least" if at_least else "at most"
    print(f"* {name}: {value:.2f} (aim: {bound} {aim:g}; {'reached' if reached else 'MISSED'})")


def print_memory() -> None:
    """Peak memory beyond the inputs, results included, each case in a fresh process."""
    print("\n| BRACE | peak extra memory, in input tensors |")
    print("| --- | --- |")
    largest = 0.0
    for case in MEMORY_CASES:
        # Every chunk straight from the system, so that the high-water mark sees it and nothing freed before hides it.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        words = [sys.executable, __file__, "memory", case]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        extra = float(done.stdout)
        largest = max(largest, extra)
        print(f"| {case} | {extra:.2f} |")
    print()
    _print_aim("largest of them", largest, MOST_EXTRA_INPUTS, at_least=False)


def measure_memory(case: str) -> float:
    """Rise of this process's resident memory at its highest, over the size of one input."""
    inputs = target_inputs(SHAPE, CPU)
    if case.endswith("tool spans"):
        inputs["policy_mask"] = (torch.arange(SHAPE[1]) % 576 < 512).repeat(SHAPE[0], 1)
    ratios = {name: inputs[name] for name in ("behavior_logprobs", "target_logprobs", "policy_mask")}
    choose = partial(core.path_windows, **ratios, budget=BUDGET)
    windows = choose() if case == "a window per state" else None
    small = {name: x[:1, :64].contiguous() for name, x in inputs.items()}
    core.brace_targets(**small, window=WINDOW)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    if case == MEMORY_CASES[-1]:
        core.brace_targets(**inputs, window=choose())
    else:
        core.brace_targets(**inputs, window=WINDOW if windows is None else windows)
    return (_resident("VmHWM") - before) / inputs["values"].untyped_storage().nbytes()


def _resident(name: str) -> int:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return 1024 * int(line.split()[1])


def main() -> None:
    """Everything; or with ``memory CASE`` one measurement of memory, for the process that asks."""
    if sys.argv[1:2] == ["memory"]:
        with torch_threads(1):
            print(measure_memory(sys.argv[2]))
        return
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.machine()
    print(f"processor: {processor} | python: {platform.python_version()} | torch: {torch.__version__}")
    inputs = target_inputs(SHAPE, CPU)
    with torch_threads(1):
        check_same_figures(inputs)
        print_times(measure_times(inputs))
    print_memory()


if __name__ == "__main__":
    main()
