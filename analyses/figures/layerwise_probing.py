"""The layer-wise probing figure: accuracy after every layer, and under it the gain of each, a column a haystack.

Full-attention layers are dark and solid, efficient ones light and hatched, squares and circles on the curve; the same
architecture with random weights is drawn beside them, in grey, dashed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analyses.figures.style import COLOURS
from analyses.result import Dataset, Result

TRAINED, SHUFFLED, RANDOM, NULL = "trained", "shuffled labels", "random weights", "null"
BLUE, ORANGE, GREY = COLOURS[0], COLOURS[1], "#7f7f7f"
BARS: dict[bool, dict[str, Any]] = {
    True: {"facecolor": BLUE, "edgecolor": "black"},
    False: {"facecolor": "#f7d08a", "edgecolor": "black", "hatch": "////"},
}
MARKS = {True: ("s", BLUE), False: ("o", "white")}
HEIGHTS, INCHES, LETTERS_PER_INCH = (1.5, 1.0), (3.6, 3.1), 12
FIRST, TRAINED_ROW, TOTAL = "blocks.0.hook_resid_pre", 0, 0


def draw(results: Sequence[Result]) -> Figure:
    """Two rows a checkpoint (accuracy, gain), a column for every haystack of any file."""
    rows = [(result, name) for result in results for name in result.groups if name and "/" not in name]
    columns = list(dict.fromkeys(path.split("/")[1] for result in results for path in result.groups if "/" in path))
    columns = [haystack for haystack in columns if haystack != NULL]
    size = (1.0 + INCHES[0] * len(columns), 1.6 + INCHES[1] * len(rows))
    figure, axes = plt.subplots(
        2 * len(rows), len(columns), figsize=size, squeeze=False, sharex=False,
        gridspec_kw={"height_ratios": HEIGHTS * len(rows)},
    )  # fmt: skip
    limits = _gain_limits(rows, columns)
    for index, (result, name) in enumerate(rows):
        for column, haystack in enumerate(columns):
            above, below = axes[2 * index, column], axes[2 * index + 1, column]
            group = result.groups.get(f"{name}/{haystack}")
            if group is None:
                for axis in (above, below):
                    axis.axis("off")
                above.text(0.5, 0.5, f"{haystack}: n/a", ha="center", transform=above.transAxes)
                continue
            full = result.groups[name]["kind"] == "full"
            _accuracy(above, group, full, result.groups.get(f"{name}/{NULL}"))
            _gain(below, group, full)
            below.set_ylim(limits)
            above.set_title(f"{name}, {haystack}")
        axes[2 * index, 0].set_ylabel("accuracy")
        axes[2 * index + 1, 0].set_ylabel("gain of the layer")
    for axis in axes[-1]:
        axis.set_xlabel("layer")
    _legend_and_title(figure, axes, rows)
    return figure


def _after(group: Dataset) -> np.ndarray:
    """Indices of the stream before the first layer, then after each layer."""
    features = [str(name) for name in group["feature"]]
    layers = len(group["layer"])
    return np.array([features.index(n) for n in (FIRST, *(f"blocks.{i}.hook_resid_post" for i in range(layers)))])


def _accuracy(axis: Axes, group: Dataset, full: np.ndarray, null: Dataset | None) -> None:
    at, rows = np.arange(-1, len(full)), _after(group)
    controls = [str(control) for control in group["control"]]
    low, high = group["accuracy_interval"][TRAINED_ROW, rows].T
    axis.fill_between(at, low, high, color=BLUE, alpha=0.18, linewidth=0)
    axis.plot(at, group["accuracy"][TRAINED_ROW, rows], color=BLUE, label=TRAINED)
    for is_full, (marker, face) in MARKS.items():
        which = np.flatnonzero(np.concatenate([[False], full == is_full]))
        axis.plot(
            at[which], group["accuracy"][TRAINED_ROW, rows][which], linestyle="none", marker=marker,
            markerfacecolor=face, markeredgecolor="black", markersize=6, zorder=3,
        )  # fmt: skip
    if RANDOM in controls:
        row = controls.index(RANDOM)
        low, high = group["accuracy_interval"][row, rows].T
        axis.fill_between(at, low, high, color=GREY, alpha=0.15, linewidth=0)
        axis.plot(at, group["accuracy"][row, rows], color=GREY, linestyle="--", marker="x", label=RANDOM)
    if SHUFFLED in controls:
        row = controls.index(SHUFFLED)
        axis.plot(at, group["accuracy"][row, rows], color="black", linestyle=":", linewidth=1, label=SHUFFLED)
    if null is not None:
        values = null["accuracy"][TRAINED_ROW, _after(null)]
        axis.plot(at, values, color=COLOURS[5], linestyle="-.", linewidth=1, label="noise without its needle")
    axis.axhline(float(group["chance"][TRAINED_ROW]), color="black", linewidth=0.6)
    axis.set_ylim(-0.03, 1.05)
    _ticks(axis, full)


def _gain(axis: Axes, group: Dataset, full: np.ndarray) -> None:
    at, controls = np.arange(len(full)), [str(control) for control in group["control"]]
    beside = RANDOM in controls
    width = 0.42 if beside else 0.7
    for layer, is_full in enumerate(full):
        value = group["gain"][TRAINED_ROW, TOTAL, layer]
        low, high = group["gain_interval"][TRAINED_ROW, TOTAL, layer]
        place = layer - width / 2 * beside
        axis.bar(place, value, width, linewidth=0.7, **BARS[bool(is_full)])
        axis.plot([place, place], [low, high], color="black", linewidth=0.9)
    if beside:
        row = controls.index(RANDOM)
        values, bounds = group["gain"][row, TOTAL], group["gain_interval"][row, TOTAL]
        axis.bar(at + width / 2, values, width, facecolor="white", edgecolor=GREY, linewidth=0.9, linestyle="--")
        axis.vlines(at + width / 2, bounds[:, 0], bounds[:, 1], color=GREY, linewidth=0.9)
    axis.axhline(0, color="black", linewidth=0.8)
    _ticks(axis, full)
    if not str(group["share_status"]):
        axis.set_title("\n".join(_share(group, metric) for metric in ("accuracy", "log_loss")), fontsize=8, pad=2)


def _share(group: Dataset, metric: str) -> str:
    """The statistic chosen beforehand (of accuracy), and the same of the log-loss, which does not saturate."""
    column, name = [str(m) for m in group["metric"]].index(metric), metric.replace("_", "-")
    share, (low, high) = group["share"][TRAINED_ROW, column], group["share_interval"][TRAINED_ROW, column]
    if not np.isfinite(share):
        return f"no {name} gain"
    return f"full: {share:.2f} [{low:.2f}, {high:.2f}] of {name} gain, p = {group['share_p'][TRAINED_ROW, column]:.2f}"


def _ticks(axis: Axes, full: np.ndarray) -> None:
    """Full layers have shaded columns, so that a kind can be read off without colours or hatches."""
    step = max(1, len(full) // 10)
    axis.set_xticks([-1, *range(0, len(full), step)], ["emb", *map(str, range(0, len(full), step))])
    axis.set_xlim(-1.4, len(full) - 0.4)
    axis.grid(axis="x", visible=False)
    for layer in np.flatnonzero(full):
        axis.axvspan(layer - 0.5, layer + 0.5, color="black", alpha=0.05, linewidth=0, zorder=0)


def _gain_limits(rows: Sequence[tuple[Result, str]], columns: Sequence[str]) -> tuple[float, float]:
    """One scale for all panels: gains are compared across them."""
    bounds = [
        result.groups[f"{name}/{haystack}"]["gain_interval"][:, TOTAL]
        for result, name in rows for haystack in columns if f"{name}/{haystack}" in result.groups
    ]  # fmt: skip
    ends = np.concatenate([values[np.isfinite(values)] for values in bounds])
    low, high = (float(ends.min()), float(ends.max())) if len(ends) else (-0.1, 1.0)
    return low - 0.03 * (high - low), high + 0.03 * (high - low)


def _legend_and_title(figure: Figure, axes: np.ndarray, rows: Sequence[tuple[Result, str]]) -> None:
    handles: dict[str, Any] = {}
    for axis in axes[::2].ravel():
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    bars = {"full attention (squares)": Patch(**BARS[True]), "efficient (circles)": Patch(**BARS[False])}
    if RANDOM in handles:
        bars[f"gain, {RANDOM}"] = Patch(facecolor="white", edgecolor=GREY, linestyle="--")
    named = {**handles, **bars}
    width = figure.get_size_inches()[0]
    ncols = max(1, min(len(named), int(width // 1.9)))
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=ncols, frameon=False)
    groups = [group for result, name in rows for path, group in result.groups.items() if path.startswith(f"{name}/")]
    held_out = sorted({len(group["sample"]) for group in groups if "sample" in group.coords})
    lengths = sorted({int(result.groups[name]["length"]) for result, name in rows})
    text = (
        f"The needle's class at the probed token after every layer (emb: before the first): {_span(held_out)} held-out "
        f"prompts of {_span(lengths)} tokens; 95 % intervals over prompts; grey columns: full attention; thin line: "
        "chance"
    )
    figure.suptitle("\n".join(textwrap.wrap(text, int(LETTERS_PER_INCH * width))), fontsize=10)


def _span(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"
