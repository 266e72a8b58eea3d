"""Likelihoods for Huber's loss: the density whose -log is that loss up to a scale, and criteria built on it.

    f(r) = exp(-huber(r) / (delta s)) / Z(s),   Z(s) = integral of the numerator (Huber 1964's least favourable density)
It is Laplace's density with mean absolute deviation s for s >> delta and normal for s << delta. With s at its best
value the log-likelihood depends on the data only through the sum of huber(r) and the number of points.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr
from scipy.stats import f as f_distribution


def log_likelihood(objective: float, points: int, delta: float) -> float:
    """Of `points` residuals whose Huber losses sum to `objective`, at the best scale. Infinite for a perfect fit."""
    if objective <= 0.0:
        return float("inf")
    return -_best_scale(objective, points, delta)[1]


def scale(objective: float, points: int, delta: float) -> float:
    """The best scale s of the residuals of log loss: their mean absolute deviation where that is far above delta."""
    return float(np.exp(_best_scale(objective, points, delta)[0])) if objective > 0.0 else 0.0


def statistic(objective: Float[np.ndarray, " F"], best: float, points: int, delta: float) -> Float[np.ndarray, " F"]:
    """Likelihood-ratio statistic 2 (log-likelihood of `best` - that of each objective) >= 0."""
    top = log_likelihood(best, points, delta)
    values = [2.0 * (top - log_likelihood(float(value), points, delta)) for value in objective]
    return np.maximum(np.nan_to_num(values, nan=0.0), 0.0)


def threshold(level: float, points: int, parameters: int) -> float:
    """Where a profile's statistic ends an interval: (pi / 2) n log(1 + F / (n - p)), F a quantile of F(1, n - p).

    n log(1 + F / (n - p)) would be right for least squares and normal noise. A least-absolute-deviation fit loses
    2 / pi of the information when the noise is normal, hence the factor; under heavier tails the interval is wide.
    Simulated coverage at 95 % with 17 and 50 points: 92..97 % (normal), 97..99 % (Laplace, t with 3 degrees of
    freedom); without the factor 84..91 % (normal). NaN without a point to spare.
    """
    spare = points - parameters
    if spare < 1:
        return float("nan")
    return float(np.pi / 2 * points * np.log1p(f_distribution.ppf(level, 1, spare) / spare))


def aicc(log_likelihood: float, parameters: int, points: int) -> float:
    """Akaike's criterion, corrected (Hurvich and Tsai); the scale counts as a parameter. NaN with too few points."""
    count = parameters + 1
    if points - count - 1 < 1:
        return float("nan")
    return -2 * log_likelihood + 2 * count + 2 * count * (count + 1) / (points - count - 1)


def bic(log_likelihood: float, parameters: int, points: int) -> float:
    """Schwarz's criterion; the scale counts as a parameter."""
    return -2 * log_likelihood + (parameters + 1) * float(np.log(points))


def _best_scale(objective: float, points: int, delta: float) -> tuple[float, float]:
    """log s and the negative log-likelihood there.

    At the best s the mean of huber(r) / (delta s) is the density's own, between 1/2 (normal) and 1 (Laplace).
    """
    lowest = np.log(objective / (points * delta))

    def negative(log_scale: float) -> float:
        return objective / (delta * np.exp(log_scale)) + points * _log_normaliser(np.exp(log_scale), delta)

    bounds = (lowest - 0.01, lowest + np.log(2) + 0.01)
    best = minimize_scalar(negative, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    return float(best.x), float(best.fun)


def _log_normaliser(scale: float, delta: float) -> float:
    """log Z: linear tails 2 s exp(-delta / 2s) plus the quadratic middle sqrt(2 pi delta s) erf(sqrt(delta / 2s))."""
    tails = np.log(2 * scale) - delta / (2 * scale)
    root = np.sqrt(delta / scale)
    inside = -np.expm1(log_ndtr(-root) + np.log(2))  # erf(root / sqrt 2) = 1 - 2 Phi(-root)
    middle = 0.5 * np.log(2 * np.pi * delta * scale) + np.log(inside)
    return float(np.logaddexp(tails, middle))
