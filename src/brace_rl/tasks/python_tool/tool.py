"""The tool a policy calls."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field

from brace_rl.tasks.python_tool.runner import Limits, run_python
from brace_rl.tasks.tools import Tool, ToolError

LONGEST_CODE = 20_000
"""Characters."""


@dataclass(frozen=True)
class PythonTool(Tool):
    """Runs a script and answers what it printed. Every call starts afresh; nothing is kept between calls."""

    limits: Limits = field(default_factory=Limits)

    async def call(self, argument: str) -> str:
        """What the code printed.

        Raises:
            ToolError: the code failed or exceeded a limit; the message holds what it printed until then, and why.
            IsolationError: the machine does not permit the isolation; the code was not run.
        """
        if len(argument) > LONGEST_CODE:
            raise ToolError(f"error: the code is longer than {LONGEST_CODE} characters")
        outcome = await asyncio.to_thread(run_python, argument.strip("\n"), self.limits)
        output = outcome.output.rstrip()
        if outcome.ended == "wall":
            raise ToolError(_joined(output, f"error: stopped after {self.limits.wall_s:g} s"))
        if outcome.ended == "output":
            raise ToolError(_joined(output, f"error: stopped, more than {self.limits.output_bytes} bytes of output"))
        if outcome.status == 128 + signal.SIGXCPU:
            raise ToolError(_joined(output, f"error: stopped after {self.limits.cpu_s} s of CPU time"))
        if outcome.status > 128:
            raise ToolError(_joined(output, f"error: killed by signal {outcome.status - 128}"))
        if outcome.status != 0:
            raise ToolError(_joined(output, f"error: exit status {outcome.status}"))
        return output or "(no output)"


def _joined(output: str, message: str) -> str:
    return f"{output}\n{message}" if output else message
