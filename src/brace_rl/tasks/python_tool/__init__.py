"""Runs Python a model wrote, in processes that can reach neither the network nor anybody's files."""

from brace_rl.tasks.python_tool.runner import Limits, Outcome, check_isolation, run_python
from brace_rl.tasks.python_tool.tool import PythonTool

__all__ = ["Limits", "Outcome", "PythonTool", "check_isolation", "run_python"]
