"""What the figures are computed with: the estimator's options, and where they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from brace_rl.errors import DataError


@dataclass(frozen=True)
class Settings:
    """Options of the estimators, named as in a recipe; defaults are the paper's, but for ``eps``, which is ours.

    Attributes:
        window: policy tokens BRACE corrects.
        rho_clip, c_clip: caps of the residual's and of the trace's ratio.
        gamma, lam: discount and lambda; ``lam`` is used by GAE too.
        eps: weight of the return that the recommended window must leave (Eq. 45).
        seed: of the bootstrap.
    """

    window: int = 100
    rho_clip: float = 1.2
    c_clip: float = 1.1
    gamma: float = 1.0
    lam: float = 1.0
    eps: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, valid, wanted in (
            ("window", self.window >= 0, "at least 0"),
            ("rho-clip", self.rho_clip > 0, "above 0"),
            ("c-clip", self.c_clip > 0, "above 0"),
            ("gamma", 0 < self.gamma <= 1, "above 0 and at most 1"),
            ("lam", 0 < self.lam <= 1, "above 0 and at most 1"),
            ("eps", 0 < self.eps < 1, "between 0 and 1"),
        ):
            if not valid:
                raise DataError(f"--{name}: must be {wanted}")


def settings_for(folder: Path | None, options: Mapping[str, Any]) -> Settings:
    """Options where given, else what the run in ``folder`` was configured with, else the defaults.

    Args:
        folder: a run folder, or None.
        options: name -> value, None for an option not given.

    Raises:
        DataError: an option out of range, or a ``config.json`` that cannot be read.
    """
    chosen = _configured(folder) if folder is not None else {}
    return Settings(**{**chosen, **{name: value for name, value in options.items() if value is not None}})


def _configured(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        algorithm = json.loads(path.read_text(encoding="utf-8"))["algorithm"]
        known = {field.name for field in fields(Settings)}
        return {name: value for name, value in algorithm.items() if name in known}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}: not the configuration of a run; give the options instead") from None
