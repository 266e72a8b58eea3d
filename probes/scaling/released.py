"""The released fit of arXiv:2606.15378, for comparison only: its starts, its bounds and its stopping rule.

It minimises the same loss as `fit` with scipy's L-BFGS-B from 1,728 starts and stops when the objective changes by a
millionth of max(1, objective). The objective is about 2e-4, so that is an early stop, far from the optimum: `fit` with
RELEASED_BOUNDS finds a lower loss under the same bounds. Read from the released script (github
thunlp/rethinking-hybrid-attention, commit feaad08, law without a constant); written anew here.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from scipy.optimize import minimize

from probes.scaling.fitting import DELTA, SAME, Fit, checked, described, fit
from probes.scaling.law import Layout
from probes.scaling.solver import huber, log_sum

RELEASED_BOUNDS = {"alpha": (0.2, 0.3), "beta": (0.0, np.inf)}
LOG_A = (0, 1, 2, 4, 6, 8, 10, 12)
LOG_B = (0, 1, 2, 8, 10, 12)
ALPHA = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)
BETA = (0.1, 0.2, 0.5, 0.8, 1.0, 1.2)
FIRST = {"maxiter": 3000, "ftol": 1e-6}
LAST = {"maxiter": 20000, "ftol": 1e-8}
DIFFERENCE = 1e-8
"""Step of scipy's forward differences, which the script relies on: where it stops depends on them."""


def fit_released(n: Float[np.ndarray, " N"], d: Float[np.ndarray, " N"], loss: Float[np.ndarray, " N"]) -> Fit:
    """L = a N^-alpha + b D^-beta as the released script fits it: Huber (1e-3), alpha in [0.2, 0.3], beta >= 0.

    On the 17 released points of S1-S3 it stops at a = 104.85, b = 2951, alpha = 0.2475, beta = 0.3551. About 5 s.
    `converged` says whether the optimiser called it a success, not that it is an optimum. ValueError as in `fit`.
    """
    n, d, loss = checked(n, d, loss, constant=False)
    layout = Layout.of(n, d, constant=False, centred=False)
    objective = _Objective(layout.design(n, d), np.log(loss))
    bounds = [(None, None), (None, None), RELEASED_BOUNDS["alpha"], (0.0, None)]
    ends = [
        minimize(objective, np.array(start, float), jac=True, method="L-BFGS-B", bounds=bounds, options=FIRST)
        for start in itertools.product(LOG_A, LOG_B, ALPHA, BETA)
    ]
    best = min(ends, key=lambda end: end.fun)
    last = minimize(objective, best.x, jac=True, method="L-BFGS-B", bounds=bounds, options=LAST)
    tight = fit(n, d, loss, bounds=RELEASED_BOUNDS)
    theta = last.x.copy()  # to the centre of the data
    theta[0] -= theta[2] * tight.layout.centre[0]
    theta[1] -= theta[3] * tight.layout.centre[1]
    near = np.array([end.fun for end in ends]) <= best.fun * (1 + SAME)
    found = described(theta, tight.layout, (n, d, loss), DELTA, RELEASED_BOUNDS, bool(last.success), near)
    excess = found.objective / tight.objective - 1
    early = f"stopped early: its loss is {excess:.1%} above the optimum under the same bounds"
    kept = [line for line in found.warnings if "reached this optimum" not in line]
    return replace(found, warnings=(early, *kept))


class _Objective:
    """Sum of Huber losses and its forward differences, in one evaluation of all five points."""

    def __init__(self, design: Float[np.ndarray, "K N P"], target: Float[np.ndarray, " N"]):
        self.design, self.target = design, target
        self.high = np.array([np.inf, np.inf, RELEASED_BOUNDS["alpha"][1], np.inf])

    def __call__(self, theta: Float[np.ndarray, " P"]) -> tuple[float, Float[np.ndarray, " P"]]:
        step = np.where(theta + DIFFERENCE > self.high, -DIFFERENCE, DIFFERENCE)  # backwards at an upper bound
        moved = theta + np.concatenate([np.zeros((1, len(theta))), np.diag(step)])
        value = huber(log_sum(moved, self.design) - self.target, DELTA).sum(1)
        with np.errstate(invalid="ignore"):  # a start that ran to 1e8, where the step is nothing; scipy gives NaN too
            return float(value[0]), (value[1:] - value[0]) / (np.diagonal(moved[1:]) - theta)
