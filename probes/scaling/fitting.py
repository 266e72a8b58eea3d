"""One law fitted to one set of points: Huber's loss of the log residual, many starts, the optimum found tightly."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float

from probes.scaling import likelihood
from probes.scaling.identifiability import warnings_of
from probes.scaling.law import EXPONENT_LIMIT, Layout, names_of, predict
from probes.scaling.solver import Problem, minimise

DELTA = 1e-3
START_EXPONENTS = (0.05, 0.15, 0.3, 0.6, 1.2)
START_SHARES = (0.1, 0.5, 0.9)
"""Of the N term among N and D terms at the centre of the data."""
START_CONSTANTS, CONSTANT_EXPONENTS = (0.02, 0.5, 0.9), (0.1, 0.3, 0.9)
"""With a constant: its share in the smallest loss, and the exponents beside it."""
SAME = 1e-4
"""Starts that end within this relative distance of the lowest objective found the same optimum."""
Bounds = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted law. `parameters` has a, b, alpha, beta and, with a constant, c: L = a N^-alpha + b D^-beta + c in nats.

    `theta` are the numbers the optimiser works with (see law.Layout). Without `warnings` every parameter is determined
    by the points; what they say is computed, never assumed.
    """

    parameters: Mapping[str, float]
    n: Float[np.ndarray, " N"]
    d: Float[np.ndarray, " N"]
    loss: Float[np.ndarray, " N"]
    delta: float
    bounds: Bounds
    theta: Float[np.ndarray, " P"]
    layout: Layout
    objective: float
    """Sum over points of Huber's loss of the log residual."""
    converged: bool
    n_starts: int
    agreeing: float
    """Share of the starts that reached this optimum."""
    warnings: tuple[str, ...] = field(default=())

    @property
    def constant(self) -> bool:
        return "c" in self.parameters

    def predict(self, n: Float[np.ndarray, " *N"], d: Float[np.ndarray, " *N"]) -> Float[np.ndarray, " *N"]:
        """Loss in nats at N parameters and D tokens."""
        return predict(self.parameters, np.asarray(n, float), np.asarray(d, float))

    @property
    def residual(self) -> Float[np.ndarray, " N"]:
        """log observed - log predicted, of the fitted points."""
        return np.log(self.loss) - np.log(self.predict(self.n, self.d))

    def r2(
        self,
        n: Float[np.ndarray, " N"] | None = None,
        d: Float[np.ndarray, " N"] | None = None,
        loss: Float[np.ndarray, " N"] | None = None,
    ) -> float:
        """1 - sum (L - predicted)^2 / sum (L - mean L)^2, of the loss itself, not of its log; default: fitted points.

        As the released script reports it. For held-out points the mean is theirs. NaN where all losses are equal.
        """
        if n is None or d is None or loss is None:
            n, d, loss = self.n, self.d, self.loss
        spread = float(((loss - np.mean(loss)) ** 2).sum())
        return 1 - float(((loss - self.predict(n, d)) ** 2).sum()) / spread if spread > 0 else float("nan")

    @property
    def log_likelihood(self) -> float:
        return likelihood.log_likelihood(self.objective, len(self.n), self.delta)

    @property
    def aicc(self) -> float:
        return likelihood.aicc(self.log_likelihood, len(self.parameters), len(self.n))

    @property
    def bic(self) -> float:
        return likelihood.bic(self.log_likelihood, len(self.parameters), len(self.n))


def fit(
    n: Float[np.ndarray, " N"],
    d: Float[np.ndarray, " N"],
    loss: Float[np.ndarray, " N"],
    *,
    constant: bool = False,
    delta: float = DELTA,
    bounds: Bounds | None = None,
) -> Fit:
    """L = a N^-alpha + b D^-beta (+ c) by Huber's loss (delta, in log loss) of log L; arXiv:2203.15556, D.3.

    n: parameters without embeddings; d: training tokens; loss: nats. `bounds` {"alpha" | "beta" | "c": (low, high)};
    none by default, so exponents may come out negative (and a warning says so). 75 starts, 81 with a constant; about
    0.3 s for 20 points. ValueError: unequal lengths, values that are not positive and finite, too few points, bounds
    that are none. `fit_released` is the released script's early stop instead.
    """
    n, d, loss = checked(n, d, loss, constant)
    bounds = checked_bounds(bounds, constant)
    if not delta > 0:
        raise ValueError(f"delta is {delta}; expected a positive number, in units of log loss")
    layout = Layout.of(n, d, constant=constant)
    low, high = layout.limits(bounds)
    starts = starting_points(layout, loss)
    rows = len(starts)
    problem = Problem(
        layout.design(n, d), np.tile(np.log(loss), (rows, 1)), np.ones((rows, len(n))),
        np.tile(low, (rows, 1)), np.tile(high, (rows, 1)), delta,
    )  # fmt: skip
    found = minimise(problem, starts)
    best = int(found.objective.argmin())
    same = agrees(found.objective)
    return described(found.theta[best], layout, (n, d, loss), delta, bounds, bool(found.converged[best]), same)


def described(
    theta: Float[np.ndarray, " P"],
    layout: Layout,
    data: tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"], Float[np.ndarray, " N"]],
    delta: float,
    bounds: Bounds,
    converged: bool,
    same: Bool[np.ndarray, " starts"],
) -> Fit:
    """A Fit from the optimiser's numbers, with its warnings."""
    n, d, loss = data
    values = layout.parameters(theta[None])[0]
    parameters = {name: float(value) for (name, _), value in zip(layout.columns, values, strict=True)}
    low, high = layout.limits(bounds)
    design = layout.design(n, d)
    one = Problem(design, np.log(loss)[None], np.ones((1, len(n))), low[None], high[None], delta)
    objective, agreeing = float(one.objective(theta[None])[0]), float(same.mean())
    spread = likelihood.scale(objective, len(n), delta)
    warnings = warnings_of(theta, layout, (n, d), (low, high), bounds, spread)
    if not converged:
        warnings = (*warnings, "the optimiser did not converge")
    elif agreeing < 0.05:
        warnings = (*warnings, f"only {agreeing:.0%} of {len(same)} starts reached this optimum")
    return Fit(
        parameters, n, d, loss, delta, bounds, theta, layout, objective, converged, len(same), agreeing, warnings
    )


def agrees(objective: Float[np.ndarray, " F"]) -> Bool[np.ndarray, " F"]:
    """Which starts reached the lowest objective; the absolute part is for data that the law fits exactly."""
    return objective <= objective.min() * (1 + SAME) + 1e-12


def starting_points(layout: Layout, loss: Float[np.ndarray, " N"]) -> Float[np.ndarray, "F P"]:
    """A grid over exponents and shares, for a layout of one group."""
    middle = float(np.log(loss).mean())
    constant = len(layout.columns) == 5
    rows = []
    exponents = CONSTANT_EXPONENTS if constant else START_EXPONENTS
    for part in START_CONSTANTS if constant else (0.0,):
        rest = np.exp(middle) - part * loss.min()
        for share, alpha, beta in itertools.product(START_SHARES, exponents, exponents):
            row = [np.log(share * rest), np.log((1 - share) * rest), alpha, beta]
            rows.append([*row, np.log(part * loss.min())] if constant else row)
    return np.array(rows)


def checked(
    n: Float[np.ndarray, " N"], d: Float[np.ndarray, " N"], loss: Float[np.ndarray, " N"], constant: bool
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """The points as float64, or a ValueError that names array, index and value."""
    arrays = {"n": np.asarray(n, float), "d": np.asarray(d, float), "loss": np.asarray(loss, float)}
    lengths = {name: array.shape for name, array in arrays.items()}
    if len(set(lengths.values())) > 1 or arrays["n"].ndim != 1:
        raise ValueError(f"n, d and loss have shapes {lengths}; expected one value a point in each")
    for name, array in arrays.items():
        bad = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
        if len(bad):
            raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]}; expected a positive, finite number")
    least = len(names_of(constant)) + 1
    if len(arrays["n"]) < least:
        raise ValueError(f"{len(arrays['n'])} points for {least - 1} parameters; expected {least} points or more")
    return arrays["n"], arrays["d"], arrays["loss"]


def checked_bounds(bounds: Bounds | None, constant: bool) -> dict[str, tuple[float, float]]:
    """The bounds as given, or a ValueError: only alpha, beta and c can have them, low below high."""
    bounds = dict(bounds or {})
    allowed = ("alpha", "beta", "c") if constant else ("alpha", "beta")
    for name, edges in bounds.items():
        if name not in allowed:
            raise ValueError(f"bounds name {name!r}; expected {', '.join(allowed)}")
        low, high = edges
        least, most = (0.0, np.inf) if name == "c" else (-EXPONENT_LIMIT, EXPONENT_LIMIT)
        if not (low <= high and high > least and low < most):
            raise ValueError(f"bounds of {name} are {edges}; expected low <= high, within {least:g} to {most:g}")
    return bounds
