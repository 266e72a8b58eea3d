"""What a set of points cannot tell: parameters on a bound, too few sizes, directions along which nothing changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from jaxtyping import Float

from probes.scaling.law import Layout
from probes.scaling.solver import jacobian, log_terms

FLAT = 0.5
"""Standard error of a direction from which it counts as flat: a term may be 1.6 times larger or smaller."""
TOUCHING = 1e-6
NEGLIGIBLE = 0.01
"""A term that is nowhere more than this share of the predicted loss."""
DISTINCT = 0.01
"""Sizes within 1 % of each other count as one."""
TERMS = {"a": "N", "b": "D", "c": "constant"}
TERM_PARAMETERS = {"a": ("a", "alpha"), "b": ("b", "beta"), "c": ("c",)}


def warnings_of(
    theta: Float[np.ndarray, " P"],
    layout: Layout,
    points: tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]],
    limits: tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]],
    bounds: Mapping[str, tuple[float, float]],
    scale: float,
) -> tuple[str, ...]:
    """One line each, for a layout of one group; `scale` is that of the residuals (likelihood.scale)."""
    n, d = points
    share = np.exp(_log_shares(theta, layout.design(n, d)).max(1))
    absent = {name for name, largest in zip(TERMS, share, strict=False) if largest < NEGLIGIBLE}
    found = [f"the {TERMS[name]} term is at most {share[list(TERMS).index(name)]:.1g} of the loss: the points do not "
             f"determine {' and '.join(TERM_PARAMETERS[name])}" for name in TERMS if name in absent]  # fmt: skip
    unknown = {parameter for name in absent for parameter in TERM_PARAMETERS[name]}
    found += [*_on_bounds(theta, layout, limits, bounds, unknown), *_too_few(layout, n, d)]
    for name, size in (("alpha", "N"), ("beta", "D")):
        if (value := theta[layout.index(name)]) < -TOUCHING and name not in unknown:
            found.append(f"{name} = {value:.3g} < 0: the loss would grow with {size}")
    if flat := flat_direction(theta, layout, n, d, limits, scale, unknown):
        found.append(flat)
    return tuple(found)


def flat_direction(
    theta: Float[np.ndarray, " P"],
    layout: Layout,
    n: Float[np.ndarray, " N"],
    d: Float[np.ndarray, " N"],
    limits: tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]],
    scale: float,
    unknown: Collection[str] = (),
) -> str:
    """The least determined direction of parameters neither `unknown` nor held by a bound; "" if its error is < FLAT.

    Standard errors from scale^2 (J'J)^-1 n / (n - p), J the Jacobian of log L: exact for Laplace noise and many points.
    The directions live where a unit is an e-fold: of a term at the centre of the data (log a, log b, log c there), or
    of its fall from the smallest to the largest N or D (alpha, beta times that range).
    """
    names = [name for name, _ in layout.columns]
    known = np.array([name not in unknown for name in names])
    free = np.flatnonzero(known & (theta > limits[0] + TOUCHING) & (theta < limits[1] - TOUCHING))
    if not len(free):
        return ""
    span = {"alpha": np.ptp(np.log(n)), "beta": np.ptp(np.log(d))}
    unit = np.array([span.get(name, 1.0) for name in names])
    sensitivity = jacobian(theta[None], layout.design(n, d))[0] / np.maximum(unit, 1e-12)
    _, values, directions = np.linalg.svd(sensitivity[:, free], full_matrices=False)
    with np.errstate(divide="ignore"):
        error = scale / values[-1] * np.sqrt(len(n) / max(len(n) - len(free), 1))
    if error < FLAT:
        return ""
    parts = sorted(zip(np.abs(directions[-1]), (names[i] for i in free), strict=True), reverse=True)
    mixed = [name for size, name in parts if size >= 0.3]
    moves = "changes" if len(mixed) == 1 else "change together"
    return f"flat direction: {', '.join(mixed)} {moves} {_times(error)} unnoticed (one standard error)"


def _times(error: float) -> str:
    return "without limit" if error > 20 else f"by a factor {np.exp(error):.3g}"


def _on_bounds(
    theta: np.ndarray,
    layout: Layout,
    limits: tuple[np.ndarray, np.ndarray],
    bounds: Mapping[str, tuple[float, float]],
    unknown: Collection[str],
) -> list[str]:
    found = []
    for column, (name, _) in enumerate(layout.columns):
        if name in unknown:
            continue
        for limit, side in zip(limits, (0, 1), strict=True):
            if abs(theta[column] - limit[column]) > TOUCHING:
                continue
            given = bounds.get(name, (-np.inf, np.inf))[side]
            if np.isfinite(given):
                found.append(f"{name} = {given:g} lies on its bound: the bound decides it, not the points")
            else:
                found.append(f"{name} ran to the numerical limit: the points do not determine it")
    return found


def _too_few(layout: Layout, n: np.ndarray, d: np.ndarray) -> list[str]:
    needed = 3 if any(name == "c" for name, _ in layout.columns) else 2
    found = []
    for letter, sizes, name in (("N", n, "alpha"), ("D", d, "beta")):
        count = distinct(sizes)
        if count < needed:
            found.append(f"{count} distinct {letter}, {needed} needed: {name} is not determined")
        elif count == needed:
            found.append(f"{count} distinct {letter}: nothing checks that the fall with {letter} is a power law")
    return found


def distinct(sizes: Float[np.ndarray, " N"]) -> int:
    """Sizes that differ by more than DISTINCT."""
    return 1 + int((np.diff(np.sort(np.log(sizes))) > np.log1p(DISTINCT)).sum())


def _log_shares(theta: np.ndarray, design: np.ndarray) -> np.ndarray:
    """[term, point]"""
    terms = log_terms(theta[None], design)[:, 0]
    return terms - np.logaddexp.reduce(terms, axis=0)
