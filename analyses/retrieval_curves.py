"""Curves of a run over its checkpoints, with intervals over prompts, and the tokens at which they cross marks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from analyses.bootstrap import interval, resampled_ratios
from analyses.crossings import crossing, crossing_tokens, log_mean
from analyses.result import Variable
from analyses.retrieval_heads import Head, ranked

RESAMPLES = 2000
UP, DOWN = True, False
SERIES: dict[str, tuple[str, bool | None, str]] = {
    "accuracy": ("accuracy", UP, "share of prompts with all digits right, teacher-forced"),
    "digits": ("accuracy", UP, "share of digits right, teacher-forced"),
    "mass, followed": ("mass", UP, "mean over the followed heads"),
    "mass, first": ("mass", UP, "of the head with most mass at the last checkpoint"),
    "mass, best of each": ("mass", UP, "of the head that had most mass at that checkpoint, on the choosing prompts"),
    "mass, others": ("mass", None, "mean over the other softmax heads of the followed heads' layers"),
    "copy, followed": ("mass", UP, "copy score, mean over the followed heads and the successful prompts"),
    "copy, others": ("mass", None, "copy score, mean over the other heads of those layers"),
    "entropy, followed": ("entropy", DOWN, "normalised entropy, mean over the followed heads"),
    "entropy, others": ("entropy", None, "mean over the other heads of those layers"),
    "distance, followed": ("distance", DOWN, "Q/K distance from the last checkpoint, mean over the followed heads"),
    "distance, others": ("distance", DOWN, "mean over the other heads of those layers"),
}
"""Name: whose marks apply, the direction of a crossing (None: none is sought), what it is."""


@dataclass(frozen=True, eq=False)
class Measured:
    """A run's values, C checkpoints by N prompts by layer and head; NaN for heads without softmax."""

    choosing: Float[np.ndarray, "C M L H"]
    mass: Float[np.ndarray, "C N L H"]
    entropy: Float[np.ndarray, "C N L H"]
    copy: Float[np.ndarray, "C N L H"]
    correct: Float[np.ndarray, "C N"]
    digits: Float[np.ndarray, "C N"]
    distance: Float[np.ndarray, "C L H"]


def others(followed: Sequence[Head], softmax: Bool[np.ndarray, "L H"]) -> list[Head]:
    """The softmax heads of the followed heads' layers that are not followed."""
    layers = {layer for layer, _ in followed}
    heads = [(int(layer), int(head)) for layer, head in np.argwhere(softmax)]
    return [head for head in heads if head[0] in layers and head not in followed]


def best_of_each(measured: Measured) -> list[Head]:
    """The head with most mass at each checkpoint, on the choosing prompts."""
    return [ranked(choosing.mean(0))[0] for choosing in measured.choosing]


def per_prompt(measured: Measured, followed: Sequence[Head], rest: Sequence[Head]) -> dict[str, np.ndarray]:
    """Every series [C, N] whose values come from prompts; NaN where a prompt gives none."""
    best = best_of_each(measured)
    found = {
        "accuracy": measured.correct,
        "digits": measured.digits,
        "mass, followed": over_heads(measured.mass, followed),
        "mass, first": over_heads(measured.mass, followed[:1]),
        "mass, best of each": np.stack([measured.mass[c, :, layer, head] for c, (layer, head) in enumerate(best)]),
        "mass, others": over_heads(measured.mass, rest),
    }
    for name, values in (("copy", measured.copy), ("entropy", measured.entropy)):
        found[f"{name}, followed"] = over_heads(values, followed)
        found[f"{name}, others"] = over_heads(values, rest)
    return found


def over_heads(values: Float[np.ndarray, "*C L H"], heads: Sequence[Head]) -> Float[np.ndarray, "*C"]:
    """Mean over heads, those without a value (a window of one key) left out; NaN for none."""
    if not heads:
        return np.full(values.shape[:-2], np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all of them NaN: NaN
        return np.nanmean(np.stack([values[..., layer, head] for layer, head in heads]), axis=0)


def curves(
    measured: Measured, followed: Sequence[Head], rest: Sequence[Head], seed: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{series: (values [C], resamples [R, C])}; prompts are redrawn alike at all checkpoints and series."""
    found = {}
    for name, values in per_prompt(measured, followed, rest).items():
        known = np.isfinite(values)
        columns = [
            resampled_ratios(np.where(mask, row, 0)[None], mask.astype(float), seed, RESAMPLES)
            for row, mask in zip(values, known, strict=True)
        ]
        found[name] = (np.array([c[0][0] for c in columns]), np.concatenate([c[1] for c in columns], axis=1))
    for name, heads in (("distance, followed", followed), ("distance, others", rest)):
        values = over_heads(measured.distance, heads)
        found[name] = (values, np.full((RESAMPLES, len(values)), np.nan))
    return {name: found[name] for name in SERIES}


def described(
    found: Mapping[str, tuple[np.ndarray, np.ndarray]], tokens: np.ndarray, marks: Mapping[str, Sequence[float]]
) -> dict[str, Variable]:
    """Variables of a run's summary: curves, areas, and one row `crossing` for every series and mark."""
    known = np.isfinite(tokens) & (tokens > 0)
    values = np.stack([value for value, _ in found.values()])
    bounds = np.stack([interval(sampled) for _, sampled in found.values()])
    area = [log_mean(value[known], tokens[known]) for value, _ in found.values()]
    series = {
        "curve": (("series", "checkpoint"), values, "1", "value at the checkpoint, mean over prompts"),
        "curve_interval": (("series", "checkpoint", "bound"), bounds, "1", "95 % bootstrap interval over prompts"),
        "area": (("series",), area, "1", "area under the curve over log tokens, divided by the range of log tokens"),
    }
    return {name: Variable(*fields) for name, fields in series.items()} | _crossings(found, tokens, known, marks)


def _crossings(
    found: Mapping[str, tuple[np.ndarray, np.ndarray]],
    tokens: np.ndarray,
    known: np.ndarray,
    marks: Mapping[str, Sequence[float]],
) -> dict[str, Variable]:
    rows = []
    for name, (quantity, upwards, _) in SERIES.items():
        values, sampled = found[name]
        for mark in marks[quantity] if upwards is not None else ():
            point = crossing(values[known], tokens[known], mark, bool(upwards))
            if np.isfinite(sampled).any() and known.sum() > 1:
                drawn = crossing_tokens(sampled[:, known], tokens[known], mark, bool(upwards))
                low, high = np.percentile(drawn, [2.5, 97.5], method="closest_observation")
                missed = float(np.isinf(drawn).mean())
            else:
                low = high = missed = np.nan
            undefined = not np.isfinite(values).any()
            status = "n/a: no values" if undefined else point.status
            rows.append((name, mark, point.tokens, point.after, point.by, (low, high), missed, status))
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    return {
        name: Variable(("crossing", "bound") if name.endswith("interval") else ("crossing",), columns[name], *text)
        for name, text in COLUMNS.items()
    }


COLUMNS = {
    "crossing_series": ("", "curve"),
    "crossing_mark": ("1", "mark: accuracy, mass and copy score are crossed upwards, entropy and distance downwards"),
    "crossing_tokens": ("token", "where it is crossed for good, interpolated in log tokens; NaN: see crossing_status"),
    "crossing_after": ("token", "last checkpoint that is not beyond the mark; NaN: none"),
    "crossing_by": ("token", "first checkpoint that is, as all later ones are; NaN: none"),
    "crossing_interval": ("token", "95 % bootstrap interval over prompts, inf: never; NaN: no prompts enter"),
    "crossing_never": ("1", "share of the resamples in which the mark is never crossed for good"),
    "crossing_status": ("", "empty: crossed between two checkpoints"),
}
