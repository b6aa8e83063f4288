"""What intervals over few seeds are made of."""

from __future__ import annotations

import math
from statistics import NormalDist

CONFIDENCE = 0.95


def student_quantile(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t.

    Exact for one and two degrees of freedom, else Cornish and Fisher's expansion (Abramowitz and Stegun 26.7.5), which
    is good to 0.01 from three on and to 1e-5 from nineteen on.
    """
    upper = (1 + CONFIDENCE) / 2
    if degrees == 1:
        return math.tan(math.pi * (upper - 0.5))
    if degrees == 2:
        return (2 * upper - 1) / math.sqrt(2 * upper * (1 - upper))
    z = NormalDist().inv_cdf(upper)
    terms: tuple[float, ...] = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))
