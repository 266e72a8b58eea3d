"""The reference: scikit-learn's own classifiers, one feature after the other (scikit-learn >= 1.5, no option that a
later version takes away).

multinomial: LogisticRegression (lbfgs; the intercept is not penalised).
one-vs-rest: OneVsRestClassifier(LogisticRegression(solver="liblinear")), which penalises the intercept; with C = 0.1
and max_iter = 1000 the classifier of the paper's released scripts, whose multi_class="ovr" scikit-learn 1.8 removed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import StandardScaler

from probes.layerwise.features import Features, fault
from probes.layerwise.labels import Design
from probes.layerwise.objective import make_objective
from probes.layerwise.probe import Fit, Probe
from probes.layerwise.settings import Settings


def fit_reference(features: Features, indices: Sequence[int], design: Design, settings: Settings) -> list[Fit]:
    """Fits the features at `indices` one by one. `converged` = scikit-learn did not warn of the opposite."""
    return [_fit_one(features, index, design, settings) for index in indices]


def _fit_one(features: Features, index: int, design: Design, settings: Settings) -> Fit:
    values = features.read(index)
    reason = fault(values)
    if reason:
        return Fit(reason=reason)
    x = values.numpy().astype(settings.dtype)
    scaler = StandardScaler()
    train = scaler.fit_transform(x[~design.test])
    with _convergence() as complaints:
        classifier = _classifier(settings).fit(train, design.train_label)
    parts = getattr(classifier, "estimators_", [classifier])
    coef = np.concatenate([part.coef_ for part in parts]).astype(np.float64)
    intercept = np.concatenate([part.intercept_ for part in parts]).astype(np.float64)
    constant = scaler.scale_ != np.sqrt(scaler.var_)  # StandardScaler divides constant columns by 1
    coef[:, constant] = 0.0  # a constant column has no say; what is left there is rounding
    mean, scale = scaler.mean_.astype(np.float64), np.where(constant, np.inf, scaler.scale_)
    probe = Probe(mean, scale, coef, intercept, settings.classifier)
    gradient, objective = _certificate(train, probe, design, settings)
    return Fit(
        probe=probe,
        scores=scaler.transform(x[design.test]).astype(np.float64) @ coef.T + intercept,
        converged=not complaints,
        n_iter=int(max(np.max(part.n_iter_) for part in parts)),
        gradient=gradient,
        objective=objective,
        n_constant=int(constant.sum()),
    )


def _classifier(settings: Settings) -> LogisticRegression | OneVsRestClassifier:
    common = {"C": settings.C, "max_iter": settings.max_iter, "tol": settings.tol, "random_state": settings.seed}
    if settings.classifier == "multinomial":
        return LogisticRegression(solver="lbfgs", **common)
    return OneVsRestClassifier(LogisticRegression(solver="liblinear", **common))


def _certificate(train: np.ndarray, probe: Probe, design: Design, settings: Settings) -> tuple[float, float]:
    """max |dF| / (C N) and F at scikit-learn's weights, in float64: comparable with the torch form's."""
    x = torch.from_numpy(train.astype(np.float64))[None]
    objective = make_objective(x, design.train_label, len(design.classes), settings.classifier, settings.C)
    weights = torch.from_numpy(np.concatenate([probe.coef, probe.intercept[:, None]], 1).T[None])
    scores = objective.scores(weights)
    gradient = objective.largest(objective.gradient(scores, weights))
    return float(gradient.max()), float(objective.value(scores, weights).sum())


@contextmanager
def _convergence() -> Iterator[list[warnings.WarningMessage]]:
    """Catches convergence warnings, which become a flag of the layer; any other warning goes on to the caller."""
    complaints: list[warnings.WarningMessage] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        yield complaints
    for warning in caught:
        if issubclass(warning.category, ConvergenceWarning):
            complaints.append(warning)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
