"""Lets the tests in this folder and below, and processes they spawn, import ``fakes``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
