"""Peak memory of log-probs and entropies from hidden states, at a large vocabulary; the table in docs/learner.md.

    PYTHONPATH=src python tests/agreement/logprob_memory.py [--tokens 16384] [--vocabulary 152064] [--width 64]

Each figure is of a process of its own: the highest resident memory during the pass, less what was resident before it,
which is the inputs and, for the backward pass, room for their gradients.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from brace_rl.training.head_logprobs import LogitForm, head_logprobs

MEBIBYTE = 2**20


def resident(field: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: this needs Linux")


def measure(tokens: int, vocabulary: int, width: int, *, backward: bool) -> int:
    """Bytes beyond the inputs and their gradients."""
    hidden = torch.randn(tokens, width, requires_grad=backward)
    weight = torch.randn(vocabulary, width).div_(width**0.5).requires_grad_(backward)
    ids = torch.randint(vocabulary, (tokens,))
    if backward:
        hidden.grad, weight.grad = torch.zeros(tokens, width), torch.zeros(vocabulary, width)
    head_logprobs(hidden[:2].detach(), weight.detach(), None, ids[:2], form=LogitForm())  # libraries are loaded
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    logprobs, entropies = head_logprobs(hidden, weight, None, ids, form=LogitForm())
    if backward:
        logprobs.sum().backward()
    assert bool(torch.isfinite(entropies).all())
    return resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--one", choices=["forward", "backward"], help="measure in this process, and print bytes")
    options = parser.parse_args()
    if options.one:
        print(
            json.dumps(measure(options.tokens[0], options.vocabulary, options.width, backward=options.one != "forward"))
        )
        return
    print("tokens  forward  forward and backward  whole logits, one tensor")
    for tokens in options.tokens:
        sizes = ["--tokens", str(tokens), "--vocabulary", str(options.vocabulary), "--width", str(options.width)]
        figures = [
            int(
                subprocess.run(
                    [sys.executable, __file__, *sizes, "--one", kind], check=True, capture_output=True
                ).stdout
            )
            for kind in ("forward", "backward")
        ]
        columns = [*figures, tokens * options.vocabulary * 4]
        print(tokens, *(f"{figure / MEBIBYTE:,.0f} MiB" for figure in columns), sep="  ")


if __name__ == "__main__":
    main()
