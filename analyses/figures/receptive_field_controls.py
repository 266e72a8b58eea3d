"""Rows of the receptive-field figure for the controls: loss on repeated n-grams by gap, and losses by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from analyses.figures.style import Look
from analyses.result import Result

FIRST = "first occurrences"
ROWS = {"repeats": "repeats", "log_long_ppl": "lengths", "niah": "lengths"}
"""Row -> the group that it is drawn from; the rows by length are named after what they show."""


def rows_of(columns: Sequence[tuple[str, Result]]) -> list[str]:
    """Which of ROWS some column has data for; none for files from before there were controls."""
    return [row for row, part in ROWS.items() if any(_has(result, name, part) for name, result in columns)]


def _has(result: Result, name: str, part: str) -> bool:
    return f"{name}/{part}" in result.groups


def repeats(axis: Axes, result: Result, name: str, shown: Mapping[str, int | None], styles: Mapping[str, Look]) -> None:
    """Loss on second occurrences against the gap, of the conditions {label: row or None}; a dotted control."""
    if not _has(result, name, "repeats"):
        _missing(axis)
        return
    group = result.groups[f"{name}/repeats"]
    counted = np.flatnonzero(group["n_repeats"] > 0)
    gap = group["gap"][counted] * np.sqrt(2)  # the middle of a bin
    for label, row in shown.items():
        if row is None or not np.isfinite(group["repeat_loss"][row, counted]).any():
            continue
        look = styles[label]
        low, high = group["repeat_loss_interval"][row, counted].T
        axis.plot(gap, group["repeat_loss"][row, counted], label=label, **look.line)
        axis.fill_between(gap, low, high, color=look.color, alpha=0.18, linewidth=0)
    axis.plot(gap, group["repeat_first_loss"][0, counted], color="grey", linestyle=":", label=FIRST)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("gap to the first occurrence, tokens")


def mark_window(axis: Axes, window: int) -> None:
    """Beyond this gap the restriction hides the first occurrence."""
    axis.axvline(window, color="grey", linewidth=0.8)


def lengths(
    axis: Axes,
    result: Result,
    name: str,
    variable: str,
    shown: Mapping[str, int | None],
    styles: Mapping[str, Look],
) -> None:
    """A variable against the length; hollow markers where the model extrapolates."""
    if not _has(result, name, "lengths"):
        _missing(axis)
        return
    group = result.groups[f"{name}/lengths"]
    tokens, beyond = group["context"], group["extrapolation"].astype(bool)
    for label, row in shown.items():
        if row is None or np.isnan(group[variable][:, row]).all():
            continue
        look, value = styles[label], group[variable][:, row]
        low, high = group[f"{variable}_interval"][:, row].T
        axis.plot(tokens, value, label=label, **{**look.line, "marker": ""})
        axis.fill_between(tokens, low, high, color=look.color, alpha=0.18, linewidth=0)
        for chosen, face in ((~beyond, look.color), (beyond, "white")):
            axis.plot(
                tokens[chosen], value[chosen], linestyle="", marker=look.marker, color=look.color, markerfacecolor=face
            )
    axis.set_xscale("log", base=2)
    axis.set_xticks(tokens, [f"{number}" for number in tokens], rotation=30)
    axis.minorticks_off()
    axis.set_xlabel("length, tokens (hollow: extrapolation)")


def _missing(axis: Axes) -> None:
    axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes)
