"""Intervals over prompts: other prompts of the same kind, for the probe as fitted; nothing about other training sets.

Rows of one prompt are not independent, so every prompt counts once, however many rows it has.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import norm, t


def check_level(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level is {level!r}; expected a probability between 0 and 1, such as 0.95")
    return level


def effective_prompts(rows: Int[np.ndarray, " P"]) -> float:
    """(sum m)^2 / sum m^2 for m rows a prompt (Kish 1965): the number of prompts if all have as many rows."""
    return float(rows.sum() ** 2 / np.square(rows).sum())


def wilson(share: Float[np.ndarray, " F"], n: float, level: float) -> Float[np.ndarray, "F 2"]:
    """Wilson's score interval (1927) of a share over n prompts, NaN where the share is NaN.

    Chosen over Clopper-Pearson, whose coverage is above the level everywhere; like it, Wilson's has positive width at
    0 and 1. With several rows a prompt it is conservative: a prompt's share of right rows varies no more than one row.
    """
    z = norm.ppf(0.5 + check_level(level) / 2)
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return np.clip(np.stack([centre - half, centre + half], -1), 0.0, 1.0)


def paired_shares(difference: Float[np.ndarray, "L P"], level: float) -> Float[np.ndarray, "L 2"]:
    """Interval of a mean difference of two accuracies on the same prompts, each difference in [-1, 1].

    Bonett & Price (2012, J. Educ. Behav. Stat. 37): a normal interval after one prompt of difference +1 and one of -1
    were added. Unlike a bootstrap it keeps positive width, about 2.8 / P on each side at 95 %, when no prompt differs.
    """
    n = difference.shape[1] + 2
    mean = difference.sum(1) / n
    spread = np.sqrt(np.maximum((np.square(difference).sum(1) + 2) / n - mean**2, 0) / n)
    half = norm.ppf(0.5 + check_level(level) / 2) * spread
    return np.clip(np.stack([mean - half, mean + half], -1), -1.0, 1.0)


def paired_means(difference: Float[np.ndarray, "L P"], level: float) -> Float[np.ndarray, "L 2"]:
    """Student's interval of a mean difference over prompts, for log-losses; NaN with fewer than two prompts."""
    n = difference.shape[1]
    if n < 2:
        return np.full((len(difference), 2), np.nan)
    half = t.ppf(0.5 + check_level(level) / 2, n - 1) * difference.std(1, ddof=1) / np.sqrt(n)
    mean = difference.mean(1)
    return np.stack([mean - half, mean + half], -1)
