"""Reads the folder of a run and draws it. Depends on the files alone, never on the trainer that wrote them."""

from brace_rl.report.figure import training_figure
from brace_rl.report.page import write_report
from brace_rl.report.run_data import RunData, read_run

__all__ = ["RunData", "read_run", "training_figure", "write_report"]
