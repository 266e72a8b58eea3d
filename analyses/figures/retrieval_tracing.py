"""The retrieval-tracing figure: accuracy, mass, entropy and distance over training tokens, all runs in each panel.

Under them for every run the mass of each head at each checkpoint, and the accuracy that remains when heads are ablated.
Runs differ by colour and marker, followed heads and others by line; masses go from white to black, so that a grey print
shows the same; layers without softmax are hatched: n/a. Grey lines are the marks whose crossings the table reports.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analyses.figures import retrieval_heads
from analyses.figures.retrieval_heads import MARKS, ablations, named
from analyses.figures.style import Look, looks
from analyses.result import Dataset, Result

PANELS = {
    "needle accuracy": (("accuracy", "-"), ("digits", ":")),
    "attention mass on the value": (("mass, followed", "-"), ("mass, best of each", "--"), ("mass, others", ":")),
    "normalised entropy": (("entropy, followed", "-"), ("entropy, others", ":")),
    "Q/K distance from the end": (("distance, followed", "-"), ("distance, others", ":")),
}
ROLES: dict[str, Any] = {
    "followed heads, or all digits right": "-",
    "best head of each checkpoint": "--",
    "other heads of those layers, or share of digits": ":",
}
CURVE_HEIGHT, RUN_HEIGHT, LETTERS_PER_INCH = 3.0, 3.6, 12


def draw(results: Sequence[Result]) -> Figure:
    """Curves of all runs of all files in one row, then a row for every run; without curves if no run has a second
    checkpoint."""
    rows = named(results)
    if all(len(result.groups[name]["tokens"]) == 1 for result, name in rows.values()):
        return retrieval_heads.draw(rows)
    figure = plt.figure(figsize=(13.5, 1.6 + CURVE_HEIGHT + RUN_HEIGHT * len(rows)))
    heights = [CURVE_HEIGHT, *[RUN_HEIGHT] * len(rows)]
    grid = figure.add_gridspec(1 + len(rows), 4, height_ratios=heights)
    series = looks(list(rows))
    for column, (title, drawn) in enumerate(PANELS.items()):
        axis = figure.add_subplot(grid[0, column])
        _curves(axis, rows, drawn, series)
        axis.set_title(title)
    for index, (label, (result, name)) in enumerate(rows.items(), 1):
        _masses(figure.add_subplot(grid[index, :2]), result, name, label)
        ablations(figure.add_subplot(grid[index, 2:]), result, name, label)
    _legend_and_title(figure, rows, series)
    return figure


def _curves(
    axis: Axes, rows: dict[str, tuple[Result, str]], drawn: Sequence[tuple[str, str]], series: dict[str, Look]
) -> None:
    for label, (result, name) in rows.items():
        group, look = result.groups[name], series[label]
        known = np.isfinite(group["tokens"]) & (group["tokens"] > 0)
        tokens, names = group["tokens"][known], list(group["series"])
        for index, (curve, line) in enumerate(drawn):
            row = names.index(curve)
            if not known.any():  # a checkpoint that does not say how many tokens it has seen
                axis.axhline(group["curve"][row, -1], color=look.color, linestyle=line)
                continue
            marker = look.marker if index == 0 else None
            values = group["curve"][row][known]
            axis.plot(tokens, values, color=look.color, linestyle=line, marker=marker, label=f"{label}: {curve}")
            if index == 0:
                low, high = group["curve_interval"][row][known].T
                axis.fill_between(tokens, low, high, color=look.color, alpha=0.18, linewidth=0)
    for mark in _marks(rows, [curve for curve, _ in drawn]):
        axis.axhline(mark, color="grey", linewidth=0.6, zorder=0)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("training tokens")
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))


def _marks(rows: dict[str, tuple[Result, str]], drawn: Sequence[str]) -> list[float]:
    groups = [result.groups[name] for result, name in rows.values()]
    return sorted({float(m) for g in groups for m in g["crossing_mark"][np.isin(g["crossing_series"], drawn)]})


def _masses(axis: Axes, result: Result, name: str, label: str) -> None:
    """Rows are heads in order of layers, columns checkpoints; followed heads are marked at the right."""
    group, heads = result.groups[name], result.groups[f"{name}/heads"]
    exists = heads["kind"] != ""
    layers, mass = np.argwhere(exists), heads["mass"][:, exists].T
    columns = np.arange(mass.shape[1] + 1) - 0.5
    axis.pcolormesh(
        columns, np.arange(len(mass) + 1), np.ma.masked_invalid(mass), cmap="Greys", vmin=0, vmax=1, rasterized=True
    )
    for row in np.flatnonzero(np.isnan(mass).all(1)).tolist():
        axis.add_patch(
            plt.Rectangle((-0.5, row), mass.shape[1], 1, facecolor="none", edgecolor="#9a9a9a", hatch="////", lw=0)
        )
    starts = np.flatnonzero(np.diff(layers[:, 0], prepend=-1))
    for start in starts[1:]:
        axis.axhline(start, color="black", linewidth=0.5)
    ends = [*starts[1:], len(layers)]
    kinds = ["/".join(dict.fromkeys(k for k in heads["kind"][layers[s, 0]] if k)) for s in starts]
    step = max(1, len(starts) // 20)
    axis.set_yticks(
        [(s + e) / 2 for s, e in zip(starts, ends, strict=True)][::step],
        [f"{layers[s, 0]} {kind}" for s, kind in zip(starts, kinds, strict=True)][::step],
    )
    for row in np.flatnonzero(heads["rank"][exists] > 0).tolist():
        axis.plot(mass.shape[1] - 0.5 + 0.012 * mass.shape[1], row + 0.5, marker="<", color="black", clip_on=False)
    step = max(1, -(-len(group["tokens"]) // 12))
    axis.set_xticks(np.arange(mass.shape[1])[::step], [_tokens(t) for t in group["tokens"]][::step])
    axis.set_xlim(-0.5, mass.shape[1] - 0.5)
    axis.invert_yaxis()
    axis.grid(False)
    axis.set(xlabel="training tokens, a column a checkpoint", ylabel="layer (rows: its heads)")
    axis.set_title(f"{label}: mass, n = {group['n_tracing']} prompts; ◂ followed" + _remark(group))
    bar = axis.figure.colorbar(axis.collections[0], ax=axis, pad=0.04, fraction=0.05)
    bar.outline.set_linewidth(0.5)


def _remark(group: Dataset) -> str:
    return f" ({group['status']})" if str(group["status"]) else ""


def _tokens(value: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return "n/a" if np.isnan(value) else f"{value:.3g}"


def _legend_and_title(figure: Figure, rows: dict[str, tuple[Result, str]], series: dict[str, Look]) -> None:
    handles: list[Any] = [Line2D([], [], **series[label].line) for label in rows]
    labels = list(rows)
    for role, line in ROLES.items():
        handles.append(Line2D([], [], color="black", linestyle=line))
        labels.append(role)
    handles += [Line2D([], [], linestyle="none", **mark) for mark in MARKS.values()]
    labels += ["ablated: full-attention head", "ablated: sliding-window head", "ablated: recurrent head"]
    handles.append(Patch(facecolor="white", edgecolor="#9a9a9a", hatch="////"))
    labels.append("n/a: no softmax")
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    counts = sorted({int(result.groups[name]["n_tracing"]) for result, name in rows.values()})
    lengths = sorted({int(result.groups[name]["length"]) for result, name in rows.values()})
    text = (
        "Retrieval heads over training. Heads are found on the last checkpoint, on prompts of their own; measured on "
        f"n = {', '.join(map(str, counts))} others of {', '.join(map(str, lengths))} tokens; shades and bars: 95 % "
        "over prompts, not over training seeds"
    )
    figure.suptitle("\n".join(textwrap.wrap(text, int(LETTERS_PER_INCH * figure.get_size_inches()[0]))), fontsize=10)
