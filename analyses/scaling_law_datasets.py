"""Fits as labelled arrays: what one unit of a scaling-law study stores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from analyses.result import Dataset, Variable
from analyses.scaling_points import Points
from probes import scaling
from probes.scaling.law import PARAMETERS

GRID = 25
"""Points of a stored profile."""
SCALARS = {
    "n_points": ("1", "points fitted"),
    "r2": ("1", "R2 of the fitted points: 1 - sum (L - law)^2 / sum (L - mean L)^2, of the loss, not of its log"),
    "r2_held_out": ("1", "R2 of the held-out points, about their own mean; NaN: none held out"),
    "objective": ("1", "sum over points of Huber's loss of log L - log law"),
    "log_likelihood": ("nat", "of Huber's density at the best scale of residuals"),
    "aicc": ("1", "corrected Akaike criterion; NaN: too few points"),
    "bic": ("1", "Schwarz criterion"),
    "n_starts": ("1", "starting points of the optimiser"),
    "agreeing": ("1", "share of the starts that reached this optimum"),
    "converged": ("1", "1: the optimiser converged"),
}
LIKELIHOOD = "2 (log-likelihood of the best law - with the parameter held)"


def single(
    found: scaling.Fit,
    points: Points,
    fitted: Bool[np.ndarray, " N"],
    sampled: scaling.Bootstrap | None = None,
    profiles: Sequence[scaling.Profile] = (),
) -> Dataset:
    """One fit of one architecture: parameters, intervals (NaN where none were asked for), residuals, warnings."""
    variables = _values(found, points, fitted) | _profiles(profiles) | _bootstrap(sampled)
    notes = [profile.warning for profile in profiles if profile.warning]
    lines = [*found.warnings, *(note for note in notes if not _said(note.split()[0].rstrip(":"), found.warnings))]
    variables["warnings"] = Variable((), "\n".join(lines), "", "what the points leave open, a line each")
    return Dataset(variables, {"parameter": _parameter()})


def joint(points: Points, constant: bool, delta: float, resamples: int, seed: int) -> Dataset:
    """The four joint laws of probes.scaling.fit_joint with their comparisons."""
    found = scaling.fit_joint(
        points.n, points.d, points.loss, points.architecture, constant=constant, delta=delta, resamples=resamples,
        seed=seed,
    )  # fmt: skip
    laws = list(found.laws.values())
    parameters = np.full((len(laws), len(found.architectures), len(PARAMETERS)), np.nan)
    null = np.full((len(laws), resamples), np.nan)
    for row, law in enumerate(laws):
        parameters[row, :, : len(found.names)] = law.parameters
        null[row, : len(law.null)] = law.null
    variables = {
        "parameters": Variable(("law", "architecture", "parameter"), parameters, "1", _text("parameters")),
        "predicted": Variable(("law", "point"), [law.predicted for law in laws], "nat", "loss that the law gives"),
        "null": Variable(("law", "resample"), null, "1", "statistic of simulated sets for which the law is true"),
        "verdict": Variable((), found.verdict, "", "what the tests at the 5 % level say"),
        "warnings": Variable((), "\n".join(found.warnings), "", "what the points leave open, a line each"),
    }
    texts = {
        "n_parameters": ("1", "parameters of the law, all architectures"),
        "statistic": ("1", "2 (log-likelihood of the free law - of this one)"),
        "p_value": ("1", "share of the null that is at least as large; NaN: the free law"),
        **{name: SCALARS[name] for name in ("objective", "log_likelihood", "aicc", "bic")},
    }
    for name, (unit, text) in texts.items():
        variables[name] = Variable(("law",), [float(getattr(law, name)) for law in laws], unit, text)
    coords = {
        "law": Variable(("law",), list(found.laws), "", "free: own terms; shared N, shared D: that term in common"),
        "architecture": Variable(("architecture",), list(found.architectures), "", "architecture"),
        "parameter": _parameter(),
    }
    return Dataset(variables, coords)


def _values(found: scaling.Fit, points: Points, fitted: np.ndarray) -> dict[str, Variable]:
    rest, predicted = points.where(~fitted), found.predict(points.n, points.d)
    scalars = {name: float(getattr(found, name)) for name in SCALARS if hasattr(found, name) and name != "r2"}
    scalars |= {"n_points": float(fitted.sum()), "r2": found.r2()}
    scalars["r2_held_out"] = found.r2(rest.n, rest.d, rest.loss) if len(rest.n) else np.nan
    values = [found.parameters.get(name, np.nan) for name in PARAMETERS]
    edges = [found.bounds.get(name, (-np.inf, np.inf)) for name in PARAMETERS]
    return {
        "parameters": Variable(("parameter",), values, "1", _text("parameters")),
        "bounds": Variable(("parameter", "bound"), edges, "1", "bounds given; infinite: none"),
        "fitted": Variable(("point",), fitted, "1", "whether the point was fitted (else held out)"),
        "predicted": Variable(("point",), predicted, "nat", "loss that the law gives"),
        "residual": Variable(("point",), np.log(points.loss) - np.log(predicted), "1", "log observed - log predicted"),
        **{name: Variable((), scalars[name], *SCALARS[name]) for name in SCALARS},
    }


def _profiles(profiles: Sequence[scaling.Profile]) -> dict[str, Variable]:
    value, statistic = np.full((2, len(PARAMETERS), GRID), np.nan)
    interval = np.full((len(PARAMETERS), 2), np.nan)
    for profile in profiles:
        row, count = PARAMETERS.index(profile.parameter), len(profile.value)
        value[row, :count], statistic[row, :count] = profile.value, profile.statistic
        interval[row] = profile.interval
    threshold = profiles[0].threshold if profiles else np.nan
    ends = "profile-likelihood interval; infinite (or 0 for a, b, c): the points give no limit"
    return {
        "profile_value": Variable(("parameter", "grid"), value, "1", "where the parameter is held; NaN: past the grid"),
        "profile_statistic": Variable(("parameter", "grid"), statistic, "1", LIKELIHOOD),
        "profile_threshold": Variable((), threshold, "1", "statistic at which the interval ends"),
        "profile_interval": Variable(("parameter", "bound"), interval, "1", ends),
    }


def _bootstrap(sampled: scaling.Bootstrap | None) -> dict[str, Variable]:
    if sampled is None:
        return {}
    samples = np.full((len(sampled.samples), len(PARAMETERS)), np.nan)
    samples[:, : len(sampled.names)] = sampled.samples
    return {"bootstrap": Variable(("resample", "parameter"), samples, "1", f"refits to redrawn {sampled.over}")}


def _parameter() -> Variable:
    return Variable(("parameter",), list(PARAMETERS), "", "parameter of L = a N^-alpha + b D^-beta + c")


def _text(name: str) -> str:
    return {"parameters": "N parameters without embeddings, D tokens, L in nats; NaN: not in the law"}[name]


def _said(parameter: str, warnings: Sequence[str]) -> bool:
    """Whether the fit itself has already given the parameter up."""
    gave_up = ("do not determine", "is not determined", "on its bound")
    return any(parameter in line.replace(",", " ").split() and any(w in line for w in gave_up) for line in warnings)
