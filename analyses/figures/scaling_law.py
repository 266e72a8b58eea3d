"""The scaling-law figure: a row an architecture (points, laws, profiles of alpha and beta, bootstrap), then the tests.

A joint study adds a row: what the law of the shared N term, the shared D term, or one law loses against the free one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analyses.figures.style import COLOURS, MARKERS, looks
from analyses.result import Dataset, Result

JOINT, RELEASED = "joint", "released fit"
COLUMNS = 4
CURVES = {"no constant, all points": "-", "no constant, largest N held out": "--"}
GREEK = {"alpha": "α", "beta": "β"}
LETTERS_PER_INCH = 12
SHOWN_ABOVE = 2.5
"""Profiles are drawn up to this many thresholds."""


def draw(results: Sequence[Result]) -> Figure:
    """One row for every architecture of all files, in their order, and one for every file with a joint study."""
    rows = [(result, name) for result in results for name in result.groups if name.split("/")[0] != JOINT]
    tests = [(result, f"{JOINT}/no constant") for result in results if f"{JOINT}/no constant" in result.groups]
    count = len(rows) + len(tests)
    figure, axes = plt.subplots(count, COLUMNS, figsize=(13.2, 0.9 + 3.1 * count), squeeze=False)
    for row, (result, name) in zip(axes, rows, strict=False):
        group = result.groups[name]
        _laws(row[0], group, name)
        for axis, parameter in zip(row[1:3], GREEK, strict=True):
            _profiles(axis, group, parameter)
        _bootstrap(row[3], group)
    for row, (result, name) in zip(axes[len(rows) :], tests, strict=True):
        _tests(row, result.groups[name])
    _legend_and_title(figure, axes, results)
    return figure


def _laws(axis: Axes, group: Dataset, name: str) -> None:
    """Loss against tokens, a colour a size; curves of the law without a constant."""
    n, d, loss, scale = (group[key] for key in ("n", "d", "loss", "scale"))
    fits = list(group["fit"])
    held_out = group["fitted"].min(axis=0) == 0
    span = np.geomspace(d.min() * 0.8, d.max() * 1.25, 80)
    for index, size in enumerate(np.unique(n)):
        mine, color = n == size, COLOURS[index % len(COLOURS)]
        face = "none" if held_out[mine].all() else color
        axis.plot(d[mine], loss[mine], linestyle="none", marker=MARKERS[index % len(MARKERS)], color=color,
                  markerfacecolor=face, label=f"{scale[mine][0]}{' (held out)' if face == 'none' else ''}")  # fmt: skip
        for label, line in CURVES.items():
            if label in fits:
                values = dict(zip(group["parameter"], group["parameters"][fits.index(label)], strict=True))
                axis.plot(span, _law(values, size, span), color=color, linestyle=line, linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="D, training tokens", ylabel="L, nats", title=name)
    axis.yaxis.set_major_formatter("{x:.2g}")
    axis.yaxis.set_minor_formatter("{x:.2g}")
    axis.legend(fontsize=7, frameon=False, ncols=1 + (len(np.unique(n)) > 4))


def _law(values: dict[str, float], n: float, d: np.ndarray) -> np.ndarray:
    """The law without a constant; by logarithms, as a may be huge."""
    term = np.exp(np.log(values["a"]) - values["alpha"] * np.log(n))
    return term + np.exp(np.log(values["b"]) - values["beta"] * np.log(d))


def _profiles(axis: Axes, group: Dataset, parameter: str) -> None:
    row = list(group["parameter"]).index(parameter)
    series = looks(list(group["fit"]))
    highest = float(np.nanmax(group["profile_threshold"])) if np.isfinite(group["profile_threshold"]).any() else 4.0
    for index, label in enumerate(group["fit"]):
        value, statistic = group["profile_value"][index, row], group["profile_statistic"][index, row]
        known = np.isfinite(value)
        look = series[str(label)]
        if known.any():
            line = "--" if group["split"][index] == "held out" else "-"  # as the curves of the first panel
            axis.plot(value[known], statistic[known], color=look.color, linestyle=line, label=str(label))
        elif group["law"][index] == RELEASED:
            axis.axvline(group["parameters"][index, row], color=look.color, linewidth=1, label=str(label))
    axis.axhline(highest, color="grey", linewidth=0.8)
    axis.set_ylim(0, SHOWN_ABOVE * highest)
    axis.set(xlabel=f"{GREEK[parameter]} held at", ylabel="2 Δ log-likelihood", title=f"profile of {GREEK[parameter]}")


def _bootstrap(axis: Axes, group: Dataset) -> None:
    series, names = looks(list(group["fit"])), list(group["parameter"])
    x, y = names.index("alpha"), names.index("beta")
    drawn = []
    for index, label in enumerate(group["fit"]):
        look, samples = series[str(label)], group["bootstrap"][index]
        if str(label) in CURVES:
            axis.plot(samples[:, x], samples[:, y], ".", markersize=2, alpha=0.3, color=look.color)
            drawn.append(samples[:, [x, y]])
        parameters = group["parameters"][index]
        axis.plot(parameters[x], parameters[y], marker=look.marker, color=look.color, linestyle="none",
                  markeredgecolor="white", markersize=8, zorder=3)  # fmt: skip
    if drawn:
        low, high = np.nanpercentile(np.concatenate(drawn), [0.5, 99.5], axis=0)
        for limits, edges in ((axis.set_xlim, (low[0], high[0])), (axis.set_ylim, (low[1], high[1]))):
            margin = 0.08 * (edges[1] - edges[0]) + 1e-9
            limits(edges[0] - margin, edges[1] + margin)
    axis.set(xlabel="α", ylabel="β", title="fits and bootstrap (without constant)")


def _tests(row: Sequence[Axes], group: Dataset) -> None:
    """A restricted law a panel: its null distribution, and the loss of log-likelihood that was observed."""
    laws = [str(law) for law in group["law"] if law != "free"]
    for axis, law in zip(row, laws, strict=False):
        index = list(group["law"]).index(law)
        null, observed = group["null"][index], float(group["statistic"][index])
        axis.hist(null[np.isfinite(null)], bins=30, color=COLOURS[4], label="simulated, law true")
        axis.axvline(observed, color="black", label="observed")
        axis.set(xlabel="2 Δ log-likelihood against the free law", ylabel="simulated sets",
                 title=f"{law}: p = {float(group['p_value'][index]):.3f}")  # fmt: skip
    row[0].legend(fontsize=7, frameon=False)
    row[3].axis("off")
    row[3].text(0, 0.9, textwrap.fill(str(group["verdict"]), 34), va="top", transform=row[3].transAxes)


def _legend_and_title(figure: Figure, axes: np.ndarray, results: Sequence[Result]) -> None:
    handles: dict[str, Any] = {}
    for axis in axes[:, 1:3].ravel():
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if ", " in label and "law true" not in label:
                handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False)
    level = sorted({f"{float(result.attributes['level']):.0%}" for result in results})
    lines = (
        "Scaling laws L = a N^-α + b D^-β (+ c), and what the points determine of them",
        f"Solid curves: fitted to all points, dashed: without the largest N; grey line: end of the {', '.join(level)} "
        "profile interval; dots: refits to redrawn points",
    )
    width = int(LETTERS_PER_INCH * figure.get_size_inches()[0])
    figure.suptitle("\n".join(part for line in lines for part in textwrap.wrap(line, width)), fontsize=10)
