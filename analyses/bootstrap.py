"""Percentile bootstrap intervals over samples (documents or prompts), paired: one resample serves all conditions.

A statistic is a ratio of sums, sum_i numerator_i / sum_i weight_i: a mean for unit weights, corpus log(LongPPL) for a
document's summed key-token loss and its number of key tokens. An interval says what other samples of the same kind
would give, nothing about other training seeds.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

RESAMPLES, LEVEL = 10_000, 0.95


def resampled_ratios(
    numerator: Float[np.ndarray, "C N"], weight: Float[np.ndarray, " N"], seed: int, resamples: int = RESAMPLES
) -> tuple[Float[np.ndarray, " C"], Float[np.ndarray, "R C"]]:
    """The ratio of each condition, and the same in R resamples of the N samples. NaN where no weight is left."""
    draws = np.random.default_rng(seed).multinomial(len(weight), np.full(len(weight), 1 / len(weight)), size=resamples)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = numerator.sum(1) / weight.sum()
        return ratio, (draws @ numerator.T) / (draws @ weight)[:, None]


def interval(draws: Float[np.ndarray, "R C"], level: float = LEVEL) -> Float[np.ndarray, "C 2"]:
    """Lower and upper percentile of each column, NaN where a condition was not measured."""
    tail = 100 * (1 - level) / 2
    bounds = np.full((draws.shape[1], 2), np.nan)
    for column in range(draws.shape[1]):
        values = draws[:, column]
        if np.isfinite(values).any() and not np.isnan(values).all():
            bounds[column] = np.nanpercentile(values, [tail, 100 - tail])
    return bounds
