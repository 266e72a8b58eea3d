"""Many robust fits at once: minimise sum_i w_i huber(log sum_k exp(X_ki . theta) - y_i) for a batch of problems.

Huber's loss of the log residual (Hoffmann et al. 2022, arXiv:2203.15556, eq. 3 of appendix D.3):
    huber(r) = r^2 / 2 for |r| <= delta, else delta (|r| - delta / 2)
With delta far below the noise this is nearly least absolute deviations, and a quasi-Newton method stopped on small
changes of the objective stops early. So: Newton's method with the exact Hessian, damped until it descends (Levenberg),
projected on bounds (Bertsekas 1982), and delta lowered in steps to its value, each stage started from the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

STAGES = (1.0, 0.1, 0.03, 0.01, 0.003)  # delta before its final value; 1.0 is least squares for log losses
STAGE_ITERATIONS, FINAL_ITERATIONS = 40, 300
TOLERANCE, STAGE_TOLERANCE = 1e-9, 1e-4  # of the projected gradient per delta and unit of weight
FIRST_DAMPING, LOWEST_DAMPING, HIGHEST_DAMPING = 1e-4, 1e-14, 1e12
SUCCESS, FAILURE = 0.1, 6.0  # what a step that descends, or does not, multiplies the damping by
ON_BOUND = 1e-9


@dataclass(frozen=True, eq=False)
class Problem:
    """F problems that share the K terms of the law and N points, and differ in data, weights or bounds.

    `design` gives log term k at point i as design[k, i] @ theta.
    """

    design: Float[np.ndarray, "K N P"]
    target: Float[np.ndarray, "F N"]
    """log of the loss (loss in nats)."""
    weight: Float[np.ndarray, "F N"]
    """How often a point counts; 0 leaves it out."""
    low: Float[np.ndarray, "F P"]
    high: Float[np.ndarray, "F P"]
    delta: float

    def take(self, index: np.ndarray) -> Problem:
        """The problems of `index`, in its order."""
        target, weight, low, high = self.target[index], self.weight[index], self.low[index], self.high[index]
        return Problem(self.design, target, weight, low, high, self.delta)

    def residual(self, theta: Float[np.ndarray, "F P"]) -> Float[np.ndarray, "F N"]:
        """log predicted - log observed."""
        return log_sum(theta, self.design) - self.target

    def objective(self, theta: Float[np.ndarray, "F P"], delta: float | None = None) -> Float[np.ndarray, " F"]:
        return (self.weight * huber(self.residual(theta), delta or self.delta)).sum(1)


@dataclass(frozen=True, eq=False)
class Solution:
    """The minima found, one a problem."""

    theta: Float[np.ndarray, "F P"]
    objective: Float[np.ndarray, " F"]
    converged: Bool[np.ndarray, " F"]
    """The projected gradient is zero to TOLERANCE, or no damped Newton step descends any more."""


def huber(residual: Float[np.ndarray, "*shape"], delta: float) -> Float[np.ndarray, "*shape"]:
    """Quadratic up to delta, linear beyond; continuous with its first derivative."""
    size = np.abs(residual)
    small = np.minimum(size, delta)
    return small * (size - 0.5 * small)


def log_terms(theta: Float[np.ndarray, "F P"], design: Float[np.ndarray, "K N P"]) -> Float[np.ndarray, "K F N"]:
    """The log of each term of the law."""
    return theta @ design.transpose(0, 2, 1)


def log_sum(theta: Float[np.ndarray, "F P"], design: Float[np.ndarray, "K N P"]) -> Float[np.ndarray, "F N"]:
    """log of the predicted loss, without overflow."""
    terms = log_terms(theta, design)
    top = terms.max(0)
    return top + np.log(np.exp(terms - top).sum(0))


def jacobian(theta: Float[np.ndarray, "F P"], design: Float[np.ndarray, "K N P"]) -> Float[np.ndarray, "F N P"]:
    """d log(predicted loss) / d theta: the design of each term, weighted by the term's share."""
    return np.einsum("kfn,knp->fnp", _shares(theta, design), design)


def minimise(problem: Problem, start: Float[np.ndarray, "F P"]) -> Solution:
    """One descent a problem from its start (clipped to the bounds)."""
    theta = np.clip(start, problem.low, problem.high)
    for delta in (stage for stage in STAGES if stage > problem.delta):
        theta, _ = _newton(problem, theta, delta, STAGE_ITERATIONS, STAGE_TOLERANCE)
    theta, converged = _newton(problem, theta, problem.delta, FINAL_ITERATIONS, TOLERANCE)
    return Solution(theta, problem.objective(theta), converged)


def _shares(theta: np.ndarray, design: np.ndarray) -> np.ndarray:
    terms = log_terms(theta, design)
    shares = np.exp(terms - terms.max(0))
    return shares / shares.sum(0)


def _newton(
    problem: Problem, start: np.ndarray, delta: float, iterations: int, tolerance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Damped projected Newton steps; problems leave the batch as they converge."""
    theta, converged = start.copy(), np.zeros(len(start), dtype=bool)
    running, part = np.arange(len(start)), problem
    damping, value = np.full(len(start), FIRST_DAMPING), problem.objective(start, delta)
    for _ in range(iterations):
        gradient, hessian = _derivatives(part, theta[running], delta)
        free = _free(part, theta[running], gradient)
        slope = np.abs(np.where(free, gradient, 0.0)).max(1)
        done = slope <= tolerance * delta * part.weight.sum(1)
        step = _step(gradient, hessian, free, damping[running])
        moved = np.clip(theta[running] + step, part.low, part.high)
        reached = part.objective(moved, delta)
        better = (reached < value[running]) & ~done
        theta[running[better]], value[running[better]] = moved[better], reached[better]
        damping[running] *= np.where(better, SUCCESS, FAILURE)
        damping = np.clip(damping, LOWEST_DAMPING, HIGHEST_DAMPING)
        done |= damping[running] >= HIGHEST_DAMPING
        converged[running[done]] = True
        if done.any():
            running, part = running[~done], part.take(np.flatnonzero(~done))
        if not len(running):
            break
    return theta, converged


def _derivatives(problem: Problem, theta: np.ndarray, delta: float) -> tuple[np.ndarray, np.ndarray]:
    """Gradient [F, P] and Hessian [F, P, P] of the objective."""
    shares, design = _shares(theta, problem.design), problem.design
    slope = np.einsum("kfn,knp->fnp", shares, design)
    residual = problem.residual(theta)
    force = problem.weight * np.clip(residual, -delta, delta)
    stiffness = problem.weight * (np.abs(residual) <= delta)
    hessian = ((stiffness - force)[:, :, None] * slope).transpose(0, 2, 1) @ slope
    for share, term in zip(shares, design, strict=True):  # d2 log-sum-exp = sum_k share_k x_k x_k' - slope slope'
        outer = (term[:, :, None] * term[:, None, :]).reshape(len(term), -1)
        hessian += ((force * share) @ outer).reshape(hessian.shape)
    return (force[:, None] @ slope)[:, 0], hessian


def _free(problem: Problem, theta: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Parameters that are not held by a bound against which the gradient pushes them."""
    width = ON_BOUND * np.maximum(1.0, np.abs(theta))
    held_low = (theta <= problem.low + width) & (gradient > 0)
    held_high = (theta >= problem.high - width) & (gradient < 0)
    return ~(held_low | held_high | (problem.low == problem.high))


def _step(gradient: np.ndarray, hessian: np.ndarray, free: np.ndarray, damping: np.ndarray) -> np.ndarray:
    """-(|H| + damping scale I)^-1 g on the free parameters: |H| by eigenvalues, so that it always descends."""
    both = free[:, :, None] & free[:, None, :]
    values, vectors = np.linalg.eigh(np.where(both, hessian, 0.0))
    scale = np.maximum(np.abs(values).max(1), 1e-300)
    sizes = np.abs(values) + (damping * scale)[:, None] + 1e-300
    along = np.where(free, gradient, 0.0)[:, None] @ vectors
    return np.where(free, -(vectors @ (along[:, 0] / sizes)[:, :, None])[:, :, 0], 0.0)
