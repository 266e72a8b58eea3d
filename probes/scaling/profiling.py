"""Profile-likelihood intervals: how far can one parameter move when all others follow?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from probes.scaling import likelihood
from probes.scaling.fitting import SAME, Fit
from probes.scaling.law import LOGARITHMIC
from probes.scaling.solver import Problem, minimise

LEVEL = 0.95
COARSE, REFINED, CURVE = 20, 12, 12
SMALLEST_STEP, LOG_REACH = 1e-3, 40.0
LEVELS = {"a": ("alpha", 0), "b": ("beta", 1)}


@dataclass(frozen=True, eq=False)
class Profile:
    """`statistic` = 2 (best log-likelihood - the one with the parameter held at `value`), ascending in `value`.

    `interval` is where it first exceeds `threshold` on either side of the optimum. An end is -inf or inf (0 or inf for
    a, b, c) where it does so nowhere, and the caller's bound where it does not within the bounds.
    """

    parameter: str
    best: float
    value: Float[np.ndarray, " G"]
    statistic: Float[np.ndarray, " G"]
    interval: tuple[float, float]
    threshold: float
    level: float
    lower_at: float = float("nan")
    """Where the fit's own objective is undercut, so that it was no optimum; NaN: nowhere."""

    @property
    def closed(self) -> bool:
        """Whether something bounds the parameter on both sides."""
        return all(np.isfinite(self.interval)) and (self.parameter not in LOGARITHMIC or self.interval[0] > 0)

    @property
    def warning(self) -> str:
        """What the profile says against the parameter, or ""."""
        low, high = self.interval
        name, size = self.parameter, {"alpha": "N", "beta": "D"}.get(self.parameter, "")
        if np.isfinite(self.lower_at):
            return f"{name}: a lower loss lies at {self.lower_at:.4g}, so the fit is no optimum"
        if np.isnan(self.threshold):
            return f"{name}: no interval, as there is no point to spare"
        if size and low <= 0 <= high:
            return f"{name} = 0 is compatible with the points: no dependence on {size} is shown"
        if size and high - low > abs(self.best):
            return f"{name} is weakly determined: {low:.3g} to {high:.3g} at {self.level:.0%}"
        if size and not self.closed:
            return f"{name}: the points give no limit {'above' if np.isfinite(low) else 'below'}"
        return ""


def profile(fit: Fit, parameter: str, *, level: float = LEVEL) -> Profile:
    """The profile of alpha, beta, or (on a log scale) a, b, c; the others are refitted within the fit's bounds.

    Likelihood: `likelihood.log_likelihood`; where the interval ends: `likelihood.threshold` (NaN, so no end, without
    a point more than parameters). About 0.1 s. ValueError: a parameter that the fit has not.
    """
    if parameter not in fit.parameters:
        raise ValueError(f"parameter is {parameter!r}; the fit has {', '.join(fit.parameters)}")
    held = _Held(fit, parameter)
    threshold = likelihood.threshold(level, len(fit.n), len(fit.parameters))
    low, high = held.end(-1, threshold), held.end(1, threshold)
    last = [held.best + 1.1 * (end - held.best) if np.isfinite(end) else held.shown(end) for end in (low, high)]
    value = np.concatenate([np.linspace(last[0], held.best, CURVE + 1), np.linspace(held.best, last[1], CURVE + 1)[1:]])
    value = np.unique(np.clip(value, held.limit(-1), held.limit(1)))
    statistic, best, lower_at = held.statistic(value), held.best, held.lower_at
    if parameter in LOGARITHMIC:
        with np.errstate(over="ignore"):
            value = np.exp(value)
            best, low, high, lower_at = (float(np.exp(x)) for x in (best, low, high, lower_at))
    return Profile(parameter, best, value, statistic, (low, high), threshold, level, lower_at)


class _Held:
    """Refits with one parameter held. log a and log b are held as in the law, so N or D is not centred for them."""

    def __init__(self, fit: Fit, parameter: str):
        self.fit, self.parameter, self.column = fit, parameter, fit.layout.index(parameter)
        self.low, self.high = fit.layout.limits(fit.bounds)
        self.theta, centre = fit.theta.copy(), list(fit.layout.centre)
        self.follower: tuple[int, float] | None = None
        if parameter in LEVELS:
            exponent, axis = LEVELS[parameter]
            self.follower = (fit.layout.index(exponent), centre[axis])
            self.theta[self.column] += self.theta[self.follower[0]] * centre[axis]
            self.low[self.column], self.high[self.column] = -np.inf, np.inf
            centre[axis] = 0.0
        self.design = replace(fit.layout, centre=(centre[0], centre[1])).design(fit.n, fit.d)
        self.best, self.lower_at = float(self.theta[self.column]), float("nan")

    def limit(self, direction: int) -> float:
        """How far the parameter may go: a bound or a numerical limit."""
        edge = (self.high if direction > 0 else self.low)[self.column]
        return float(edge) if np.isfinite(edge) else self.best + direction * LOG_REACH

    def end(self, direction: int, threshold: float) -> float:
        """Where the statistic first exceeds the threshold, to a hundredth of a coarse step; infinite if nowhere."""
        reach = abs(self.limit(direction) - self.best)
        coarse = np.geomspace(SMALLEST_STEP, max(reach, SMALLEST_STEP), COARSE)
        steps = np.concatenate([[0.0], np.minimum(coarse, reach)])
        for _ in range(2):
            statistic = self.statistic(self.best + direction * steps)
            beyond = np.flatnonzero(statistic > threshold)
            if not len(beyond):
                bounded = self.parameter in self.fit.bounds and np.isfinite(self._bound(direction))
                return self.limit(direction) if bounded else direction * float("inf")
            outside = max(int(beyond[0]), 1)
            found = np.interp(threshold, statistic[[outside - 1, outside]], steps[[outside - 1, outside]])
            steps = np.linspace(steps[outside - 1], steps[outside], REFINED)
        return self.best + direction * float(found)

    def _bound(self, direction: int) -> float:
        bound = self.fit.bounds[self.parameter][direction > 0]
        return bound if self.parameter != "c" or bound > 0 else -np.inf

    def shown(self, end: float) -> float:
        """How far to draw towards an infinite end: three units, in logs or of an exponent."""
        return self.best + 3.0 * np.sign(end)

    def statistic(self, values: np.ndarray) -> np.ndarray:
        rows, points = len(values), len(self.fit.n)
        low, high, start = (np.tile(row, (rows, 1)) for row in (self.low, self.high, self.theta))
        low[:, self.column] = high[:, self.column] = start[:, self.column] = values
        if self.follower:  # the term keeps its size at the centre of the data
            exponent, centre = self.follower
            start[:, exponent] += (values - self.best) / centre
        target, weight = np.tile(np.log(self.fit.loss), (rows, 1)), np.ones((rows, points))
        found = minimise(Problem(self.design, target, weight, low, high, self.fit.delta), start)
        if found.objective.min() < self.fit.objective * (1 - SAME) - 1e-12:
            self.lower_at = float(values[found.objective.argmin()])
        return likelihood.statistic(found.objective, self.fit.objective, points, self.fit.delta)
