"""Batched L-BFGS with a Hessian preconditioner and a line search in score space: all layers and classes at once.

Every problem (a layer, or a layer and class) has its own history, step length and stopping; one that is done keeps its
weights while the others go on. An iteration costs two passes over the features: x d and x^T residual. The objective is
1-strongly convex in the weights, so a small gradient is a proof of a small error: |W - W*| <= |dF|.
L-BFGS: Nocedal & Wright 2006, algorithm 7.4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from probes.layerwise.objective import Objective

PAIRS = 10  # differences of weights and gradients that L-BFGS remembers
REFRESH = 6  # iteration at which the preconditioner is built anew: the curvature at the optimum, not at zero
PATIENCE = 40  # iterations without a smaller gradient after which a problem counts as stalled (rounding floor)
SLOPE = 0.1  # share of the initial slope at which the line search stops
SEARCHES = 30


class Solution(NamedTuple):
    """Per layer, the worst of its problems: n_iter, gradient (max |dF| / (C N), from fresh scores)."""

    weights: Float[Tensor, "L D_and_1 classes"]
    gradient: Float[Tensor, " L"]
    n_iter: Float[Tensor, " L"]
    objective: Float[Tensor, " L"]  # summed over the layer's problems


@torch.no_grad()
def minimise(objective: Objective, *, tol: float, max_iter: int) -> Solution:
    """Minimises until max |dF| / (C N) <= tol in every problem, or max_iter, or until rounding allows no progress."""
    whole, objective = objective, objective.reduced()
    x, columns = objective.x, objective.target.shape[1]
    weights = x.new_zeros(x.shape[0], x.shape[2] + 1, columns)
    scores = objective.scores(weights)
    gradient = objective.gradient(scores, weights)
    size = objective.largest(gradient)
    best, waited, n_iter, fresh = size.clone(), torch.zeros_like(size), torch.zeros_like(size), True
    prior = objective.target.mean(0)
    precondition = Preconditioner(objective, ((prior * (1 - prior)).mean()).expand(x.shape[:2]))
    history = _History(objective.total)
    for iteration in range(max_iter):
        active = (size > tol) & (waited < PATIENCE)
        if not active.any():
            if fresh:
                break
            scores, fresh = objective.scores(weights), True  # sums of many steps drift: decide on exact scores
            gradient = objective.gradient(scores, weights)
            size = objective.largest(gradient)
            continue
        if iteration == REFRESH:
            precondition = Preconditioner(objective, objective.curvature(scores))
            history.pairs.clear()
        direction = active * history.direction(gradient, precondition)
        change = torch.baddbmm(direction[:, -1:], x, direction[:, :-1])
        step = active * _line_search(objective, gradient, weights, direction, scores, change)
        weights, scores, fresh = weights + step * direction, scores + step * change, False
        previous, gradient = gradient, objective.gradient(scores, weights)
        history.append(step * direction, gradient - previous)
        size, n_iter = objective.largest(gradient), n_iter + active
        waited = torch.where(size < best, 0, waited + active)
        best = torch.minimum(best, size)
    weights = objective.restored(weights)
    scores = whole.scores(weights)
    size = whole.largest(whole.gradient(scores, weights))
    return Solution(weights, size.amax((1, 2)), n_iter.amax((1, 2)), whole.value(scores, weights).sum((1, 2)))


class _History:
    """L-BFGS pairs (s, y) of every problem; a problem whose last step taught nothing skips that pair."""

    def __init__(self, total: Callable[[Tensor], Tensor]) -> None:
        self._total = total
        self.pairs: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=PAIRS)

    def append(self, step: Tensor, change: Tensor) -> None:
        product = self._total(step * change)
        floor = torch.finfo(step.dtype).eps * (self._total(step**2) * self._total(change**2)).sqrt()
        self.pairs.append((step, change, torch.where(product > floor, 1 / product, 0)))

    def direction(self, gradient: Tensor, precondition: Callable[[Tensor], Tensor]) -> Tensor:
        """-H gradient, H the inverse Hessian's estimate; -gradient where rounding made that no descent."""
        q, shares = gradient, []
        for step, change, inverse in reversed(self.pairs):
            shares.append(inverse * self._total(step * q))
            q = q - shares[-1] * change
        r = precondition(q)
        if self.pairs:
            step, change, inverse = self.pairs[-1]
            curved = inverse * self._total(change * precondition(change))  # 0 where the pair is skipped
            r = torch.where(curved > 0, r / curved, r)
        for (step, change, inverse), share in zip(self.pairs, reversed(shares), strict=True):
            r = r + step * (share - inverse * self._total(change * r))
        return torch.where(self._total(r * gradient) > 0, -r, -gradient)


def _line_search(
    objective: Objective, gradient: Tensor, weights: Tensor, direction: Tensor, scores: Tensor, change: Tensor
) -> Float[Tensor, "L 1 problems"]:
    """Step lengths near the minimum along the line: Newton's method on the slope, which increases, inside a bracket."""
    ridge, total = objective.ridge, objective.total
    linear, quadratic = total(ridge * weights * direction), total(ridge * direction * direction)
    descent = total(gradient * direction).abs()
    enough = SLOPE * descent
    step = torch.ones_like(linear)
    # the slope grows by at least `quadratic` per unit step, which bounds the minimum (0 / 0: a problem at rest)
    low, high = torch.zeros_like(linear), (descent / quadratic).nan_to_num(nan=torch.inf, posinf=torch.inf)
    for _ in range(SEARCHES):
        first, second = objective.along(scores + step * change, change)
        slope, bend = first + linear + quadratic * step, second + quadratic
        found: Bool[Tensor, "L 1 problems"] = slope.abs() <= enough
        if found.all():
            return step
        low, high = torch.where(slope < 0, step, low), torch.where(slope >= 0, step, high)
        newton = torch.minimum(step - slope / bend, 10 * step)  # a saturated loss is flat: no leap far beyond the bend
        inside = (newton > low) & (newton < high)
        middle = torch.where(high.isinf(), 10 * step, (low + high) / 2)
        step = torch.where(found, step, torch.where(inside, newton, middle))
    return torch.where(found, step, low)


class Preconditioner:
    """(I + C x^T diag(curvature) x)^-1 for every layer and all its classes; the intercept apart, since x is centred."""

    def __init__(self, objective: Objective, curvature: Float[Tensor, "L N"]) -> None:
        weight = objective.C * curvature
        width = objective.x.shape[2]
        self._inverse = objective.x.new_empty(len(weight), width, width)
        for i, (x, root) in enumerate(zip(objective.x, weight.sqrt(), strict=True)):
            scaled = root[:, None] * x  # a copy of one layer at a time
            gram = scaled.mT @ scaled
            # the ridge is 1; rounding of the Gram matrix must not outweigh it
            gram.diagonal().add_(1 + 10 * torch.finfo(x.dtype).eps * gram.diagonal().sum())
            self._inverse[i] = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        intercept = weight.sum(1)[:, None, None] + float(objective.penalise_intercept)
        self._intercept = intercept.clamp_min(torch.finfo(weight.dtype).tiny)

    def __call__(self, gradient: Float[Tensor, "L D_and_1 classes"]) -> Float[Tensor, "L D_and_1 classes"]:
        return torch.cat([self._inverse @ gradient[:, :-1], gradient[:, -1:] / self._intercept], 1)
