"""Does a restriction matter? Judged against a margin that is stated before looking, not by a missing difference.

"matters": the interval of the change lies wholly beyond the margin; "equivalent": wholly inside it (the interval form
of two one-sided tests, Schuirmann 1987); else "undecided". With a 95 % interval each one-sided test is at 2.5 %.
A percentile bootstrap over few samples is too narrow, which makes "equivalent" too easy: these
intervals are expanded to the coverage of Student's t (Hesterberg 2015, arXiv:1411.5279, section 4.3.3).
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float
from scipy import stats

MATTERS, EQUIVALENT, UNDECIDED, NOT_APPLICABLE = "matters", "equivalent", "undecided", ""
LEVEL = 0.95


def expanded_interval(draws: Float[np.ndarray, "R C"], samples: int, level: float = LEVEL) -> Float[np.ndarray, "C 2"]:
    """Percentiles at Phi(-sqrt(n / (n - 1)) t), t the quantile of Student's t with n - 1 degrees of freedom.

    NaN for fewer than two samples, and where a condition was not measured.
    """
    bounds = np.full((draws.shape[1], 2), np.nan)
    if samples < 2:
        return bounds
    t = stats.t.ppf(1 - (1 - level) / 2, samples - 1)
    tail = 100 * stats.norm.cdf(-math.sqrt(samples / (samples - 1)) * t)
    for column, values in enumerate(draws.T):
        if not np.isnan(values).all():
            bounds[column] = np.nanpercentile(values, [tail, 100 - tail])
    return bounds


def verdicts(values: Float[np.ndarray, " C"], intervals: Float[np.ndarray, "C 2"], margin: float) -> list[str]:
    """One verdict a change of value; "" where there is no value, "undecided" where there is no interval."""
    return [_verdict(value, low, high, margin) for value, (low, high) in zip(values, intervals, strict=True)]


def _verdict(value: float, low: float, high: float, margin: float) -> str:
    if math.isnan(value):
        return NOT_APPLICABLE
    if low > margin or high < -margin:
        return MATTERS
    if -margin < low and high < margin:
        return EQUIVALENT
    return UNDECIDED
