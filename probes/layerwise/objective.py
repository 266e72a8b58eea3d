"""The probes' objective, for L layers at once, and its derivatives along a line.

    F(W, b) = C sum_i loss(x_i W + b, t_i) + 1/2 |W|^2 [+ 1/2 |b|^2 if the intercept is penalised]

softmax:  loss = logsumexp(z) - z_y, one problem a layer (scikit-learn's LogisticRegression with lbfgs).
sigmoid:  loss = log(1 + exp(-+z)), one problem a layer and column (liblinear: Fan et al. 2008, JMLR 9, eq. 2 and 4).
Scores z are linear in W, so F along a line needs the scores of its direction once and no further pass over x.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Objective:
    """`weights` [L, D + 1, classes] hold the intercept in their last row. Per-problem numbers are [L, 1, problems],
    problems being 1 (softmax) or the number of columns (sigmoid).
    """

    x: Float[Tensor, "L N D"]  # standardised
    target: Float[Tensor, "N classes"]  # one-hot; for two classes one column, 1 = the second class
    C: float
    softmax: bool
    penalise_intercept: bool
    basis: Float[Tensor, "L before N"] | None = None  # x is that of the features times this, see `reduced`

    @property
    def ridge(self) -> Float[Tensor, "D_and_1 1"]:
        """What multiplies the weights in the gradient: 1, and for the intercept 1 or 0."""
        ridge = self.x.new_ones(self.x.shape[2] + 1, 1)
        ridge[-1] = float(self.penalise_intercept)
        return ridge

    def total(self, values: Float[Tensor, "L any classes"]) -> Float[Tensor, "L 1 problems"]:
        """Sum over everything that belongs to one problem."""
        return values.sum((1, 2), keepdim=True) if self.softmax else values.sum(1, keepdim=True)

    def scores(self, weights: Float[Tensor, "L D_and_1 classes"]) -> Float[Tensor, "L N classes"]:
        return torch.baddbmm(weights[:, -1:], self.x, weights[:, :-1])

    def probabilities(self, scores: Float[Tensor, "L N classes"]) -> Float[Tensor, "L N classes"]:
        return scores.softmax(-1) if self.softmax else scores.sigmoid()

    def gradient(
        self, scores: Float[Tensor, "L N classes"], weights: Float[Tensor, "L D_and_1 classes"]
    ) -> Float[Tensor, "L D_and_1 classes"]:
        residual = self.probabilities(scores) - self.target
        slope = torch.cat([self.x.mT @ residual, residual.sum(1, keepdim=True)], 1)
        return self.C * slope + self.ridge * weights

    def largest(self, gradient: Float[Tensor, "L D_and_1 classes"]) -> Float[Tensor, "L 1 problems"]:
        """max |dF| / (C N), the gradient of F per sample: what lbfgs in scikit-learn compares with its tol."""
        gradient = self.restored(gradient)
        size = gradient.abs().amax(1, keepdim=True) / (self.C * self.x.shape[1])
        return size.amax(2, keepdim=True) if self.softmax else size

    def reduced(self) -> Objective:
        """The same problem in N instead of D > N dimensions: the best weights are combinations of the rows of x."""
        if self.x.shape[2] <= self.x.shape[1]:
            return self
        basis, triangle = torch.linalg.qr(self.x.mT)
        return replace(self, x=triangle.mT.contiguous(), basis=basis)

    def restored(self, weights: Float[Tensor, "L N_and_1 classes"]) -> Float[Tensor, "L D_and_1 classes"]:
        """Weights, or a gradient, of the problem before `reduced`."""
        if self.basis is None:
            return weights
        return torch.cat([self.basis @ weights[:, :-1], weights[:, -1:]], 1)

    def value(
        self, scores: Float[Tensor, "L N classes"], weights: Float[Tensor, "L D_and_1 classes"]
    ) -> Float[Tensor, "L 1 problems"]:
        """F in nats, summed in float64."""
        z, w = scores.double(), weights.double()
        if self.softmax:
            losses = z.logsumexp(-1, keepdim=True) - (z * self.target).sum(-1, keepdim=True)
        else:
            losses = torch.nn.functional.softplus((1 - 2 * self.target) * z)
        return self.C * self.total(losses) + 0.5 * self.total(self.ridge * w * w)

    def along(
        self, scores: Float[Tensor, "L N classes"], change: Float[Tensor, "L N classes"]
    ) -> tuple[Float[Tensor, "L 1 problems"], Float[Tensor, "L 1 problems"]]:
        """First and second derivative of the loss term at `scores` in the direction `change` (scores per unit step)."""
        p = self.probabilities(scores)
        first = self.C * self.total((p - self.target) * change)
        if self.softmax:
            mean = (p * change).sum(-1, keepdim=True)
            return first, self.C * self.total(p * (change - mean).square())
        return first, self.C * self.total(p * (1 - p) * change.square())

    def curvature(self, scores: Float[Tensor, "L N classes"]) -> Float[Tensor, "L N"]:
        """Mean over classes of p (1 - p): the weight of each sample in the averaged diagonal block of the Hessian."""
        p = self.probabilities(scores)
        return (p * (1 - p)).mean(-1)


def make_objective(
    x: Float[Tensor, "L N D"], label: Int[np.ndarray, " N"], n_classes: int, classifier: str, C: float
) -> Objective:
    """The objective that scikit-learn minimises under this classifier's name; two classes share one column."""
    one_vs_rest = classifier == "one-vs-rest"
    hot = torch.nn.functional.one_hot(torch.from_numpy(label).to(x.device), n_classes).to(x.dtype)
    target = hot[:, 1:] if n_classes == 2 else hot
    return Objective(x, target, C, softmax=not one_vs_rest and n_classes > 2, penalise_intercept=one_vs_rest)
