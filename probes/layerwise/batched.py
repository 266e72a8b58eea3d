"""The torch form: several layers standardised, fitted and scored at once, on a CPU or GPU.

Peak memory a chunk: about 3 copies of its features (raw and standardised parts of one layer at a time, the stacked
parts of all) and min(N, D)^2 numbers a layer for the preconditioner; one copy more where D > N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from probes.layerwise.features import Features, fault
from probes.layerwise.labels import Design
from probes.layerwise.objective import make_objective
from probes.layerwise.probe import Fit, Probe
from probes.layerwise.settings import Settings
from probes.layerwise.solver import minimise


@dataclass(frozen=True, eq=False)
class Standardised:
    """Both parts of one feature, scaled by the training part alone."""

    train: Float[Tensor, "N D"]
    test: Float[Tensor, "M D"]
    mean: Float[Tensor, " D"]  # float64
    scale: Float[Tensor, " D"]  # float64, inf where constant


def standardise(values: Float[Tensor, "N D"], test: Tensor, dtype: torch.dtype) -> Standardised:
    """StandardScaler, moments in float64, with its test for constant columns; those become exactly 0 on both sides."""
    train = values[~test].double()
    mean, variance = train.mean(0), train.var(0, correction=0)
    # error bound of a two-pass variance (Chan, Golub & LeVeque 1983), the one that scikit-learn applies
    rounding = len(train) * torch.finfo(torch.float64).eps
    constant = variance <= rounding * variance + (rounding * mean) ** 2
    scale = torch.where(constant, torch.inf, variance.sqrt())
    return Standardised(
        ((train - mean) / scale).to(dtype), ((values[test].double() - mean) / scale).to(dtype), mean, scale
    )


def fit_chunk(features: Features, indices: Sequence[int], design: Design, settings: Settings) -> list[Fit]:
    """Fits the features at `indices`, all of the same width."""
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    test = torch.from_numpy(design.test).to(device)
    width, n_test = features.widths[indices[0]], int(design.test.sum())
    train_x = torch.empty(len(indices), features.n - n_test, width, dtype=dtype, device=device)
    test_x = torch.empty(len(indices), n_test, width, dtype=dtype, device=device)
    reasons: list[str] = []
    scalers: list[tuple[np.ndarray, np.ndarray]] = []
    for index in indices:
        values = features.read(index).to(device)
        reasons.append(fault(values))
        if not reasons[-1]:
            scaled = standardise(values, test, dtype)
            train_x[len(scalers)], test_x[len(scalers)] = scaled.train, scaled.test
            scalers.append((scaled.mean.cpu().numpy(), scaled.scale.cpu().numpy()))
    fits = iter(_solve(train_x[: len(scalers)], test_x[: len(scalers)], scalers, design, settings) if scalers else ())
    return [Fit(reason=reason) if reason else next(fits) for reason in reasons]


def _solve(
    train_x: Float[Tensor, "L N D"],
    test_x: Float[Tensor, "L M D"],
    scalers: Sequence[tuple[np.ndarray, np.ndarray]],
    design: Design,
    settings: Settings,
) -> list[Fit]:
    objective = make_objective(train_x, design.train_label, len(design.classes), settings.classifier, settings.C)
    found = minimise(objective, tol=settings.tol, max_iter=settings.max_iter)
    scores = torch.baddbmm(found.weights[:, -1:], test_x, found.weights[:, :-1]).double().cpu().numpy()
    weights = found.weights.double().cpu().numpy()
    gradients, values, steps = found.gradient.tolist(), found.objective.tolist(), found.n_iter.tolist()
    fits = []
    for i, (mean, scale) in enumerate(scalers):
        probe = Probe(mean, scale, weights[i, :-1].T.copy(), weights[i, -1].copy(), settings.classifier)
        fits.append(
            Fit(
                probe=probe,
                scores=scores[i],
                converged=gradients[i] <= settings.tol,
                n_iter=int(steps[i]),
                gradient=gradients[i],
                objective=values[i],
                n_constant=int(np.isinf(scale).sum()),
            )
        )
    return fits
