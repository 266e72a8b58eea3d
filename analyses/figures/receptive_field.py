"""The receptive-field figure: a column a checkpoint; loss on key tokens, needle retrieval, and what each layer felt;
below, where the file has them, the controls: repeated n-grams by gap, and lengths.

With one window the first two rows compare none, full -> w and efficient -> w; with several they are curves over w.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analyses.figures import receptive_field_controls as controls
from analyses.figures.style import Look, looks
from analyses.result import Dataset, Result

NAMES = {"none": "unrestricted", "full": "full attention → w", "efficient": "efficient layers → w"}
FLOOR = "last w tokens only"
LETTERS_PER_INCH, INCHES_PER_ENTRY = 12, 2.0
LOOKS = looks([*NAMES.values(), FLOOR])
ROWS = (
    ("log_long_ppl", "log(LongPPL), nats\n(loss on key tokens)"),
    ("niah", "needles found\n(all digits right)"),
)
CONTROLS = {
    "repeats": "second occurrences of\nrare n-grams: loss, nats",
    "log_long_ppl": "log(LongPPL), nats\n(behind other texts)",
    "niah": "needles found\n(longer prompts)",
}


def draw(results: Sequence[Result]) -> Figure:
    """One column for every checkpoint of all files, in their order."""
    columns = [(name, result) for result in results for name in result.groups if name and "/" not in name]
    more = controls.rows_of(columns)
    size = (1.2 + 2.9 * len(columns), 7.6 + 2.3 * len(more))
    figure, axes = plt.subplots(3 + len(more), len(columns), figsize=size, squeeze=False, sharey="row")
    for column, (name, result) in enumerate(columns):
        summary, layers = result.groups[name], result.groups[f"{name}/layers"]
        sinks = _sinks(summary)
        axes[0, column].set_title(f"{name}\n{_kinds(layers)}" + (f"\nwith {sinks} sinks" if sinks else ""))
        windows = _windows(summary)
        for row, (variable, _) in enumerate(ROWS):
            draw_panel = _categories if len(windows) == 1 else _curves
            draw_panel(axes[row, column], summary, variable, windows)
        _effects(axes[2, column], layers, windows)
        _controls(axes[3:, column], more, name, result, windows)
    for row, (_, label) in enumerate(ROWS):
        axes[row, 0].set_ylabel(label)
    axes[1, 0].set_ylim(-0.04, 1.1)
    axes[2, 0].set_ylim(bottom=-0.05)  # only now: it would fix the upper end to the columns drawn so far
    axes[2, 0].set_ylabel("change of a mixer's output\n‖o − o_w‖ / ‖o‖")
    for row, part in enumerate(more, start=3):
        axes[row, 0].set_ylabel(CONTROLS[part])
    _legend_and_title(figure, axes, columns)
    return figure


def _controls(axes: np.ndarray, parts: Sequence[str], name: str, result: Result, windows: list[int]) -> None:
    """The rows below, at the one window or the one nearest 512."""
    summary, window = result.groups[name], _shown_window(windows)
    shown = {label: _index(summary, group, window) for group, label in NAMES.items()}
    for axis, part in zip(axes, parts, strict=True):
        if part == "repeats":
            controls.repeats(axis, result, name, shown, LOOKS)
            controls.mark_window(axis, window)
        else:
            controls.lengths(axis, result, name, part, shown, LOOKS)


def _kinds(layers: Dataset) -> str:
    kinds = list(dict.fromkeys(str(kind) for kind in layers["kind"]))
    own = layers["own_window"][np.isfinite(layers["own_window"])]
    return " + ".join(f"{kind} {own[0]:.0f}" if kind == "swa" and len(own) else kind for kind in kinds)


def _windows(summary: Dataset) -> list[int]:
    chosen = np.isin(summary["restricted_group"], ["full", "efficient"]) & (summary["restricted_window"] > 0)
    return sorted(set(summary["restricted_window"][chosen].tolist()))


def _sinks(summary: Dataset) -> int:
    """The fewest sinks that were tried: the ones that are drawn."""
    chosen = np.isin(summary["restricted_group"], ["full", "efficient"]) & (summary["restricted_window"] > 0)
    return int(summary["restricted_sinks"][chosen].min(initial=2**31)) if chosen.any() else 0


def _index(summary: Dataset, group: str, window: int) -> int | None:
    """The condition's row, None if it is not there or was n/a."""
    match = summary["restricted_group"] == group
    if group != "none":
        match &= summary["restricted_window"] == window
    if group in ("full", "efficient"):
        match &= summary["restricted_sinks"] == _sinks(summary)
    rows = np.flatnonzero(match)
    if not len(rows) or str(summary["status"][rows[0]]).startswith("n/a"):
        return None
    return int(rows[0])


def _categories(axis: Axes, summary: Dataset, variable: str, windows: list[int]) -> None:
    shown = ["unrestricted", f"full\n→ {windows[0]}", f"efficient\n→ {windows[0]}"]
    for x, (group, name) in enumerate(NAMES.items()):
        row = _index(summary, group, windows[0])
        if row is None:
            axis.text(x, 0.5, "n/a", ha="center", va="center", transform=axis.get_xaxis_transform())
            continue
        value, (low, high) = summary[variable][row], summary[f"{variable}_interval"][row]
        look = LOOKS[name]
        axis.bar(x, value, width=0.62, alpha=0.9, **look.bar)
        top = value
        if np.isfinite(low):  # one document or prompt has no interval
            axis.errorbar(x, value, yerr=[[value - low], [high - value]], color="black", capsize=4, linewidth=1.2)
            top = high
        axis.annotate(f"{value:.2f}", (x, top), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axis.set_xticks(range(3), shown)
    axis.set_xlim(-0.5, 2.5)  # also where a bar is missing
    axis.margins(y=0.14)  # room for the numbers
    axis.grid(axis="x", visible=False)


def _curves(axis: Axes, summary: Dataset, variable: str, windows: list[int]) -> None:
    none = _index(summary, "none", 0)
    axis.axhline(float(summary[variable][none]), label=NAMES["none"], color=LOOKS[NAMES["none"]].color, linewidth=1.2)
    for group, name in (("full", NAMES["full"]), ("efficient", NAMES["efficient"]), ("floor", FLOOR)):
        rows = [(w, row) for w in windows if (row := _index(summary, group, w)) is not None]
        if not rows:
            continue
        at, index = np.array([w for w, _ in rows]), [row for _, row in rows]
        low, high = summary[f"{variable}_interval"][index].T
        axis.plot(at, summary[variable][index], label=name, **LOOKS[name].line)
        axis.fill_between(at, low, high, color=LOOKS[name].color, alpha=0.18, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("w, visible tokens")


def _effects(axis: Axes, layers: Dataset, windows: list[int]) -> None:
    """Per layer, at the one window, or the one nearest 512: mean and range over documents."""
    window = windows[0] if len(windows) == 1 else _shown_window(windows)
    effect = layers["effect"][list(layers["window"]).index(window)]
    for row, group in enumerate(("full", "efficient")):
        look: Look = LOOKS[NAMES[group]]
        present = np.flatnonzero(np.isfinite(effect[row]).any(axis=1))
        if not len(present):
            continue
        values = effect[row, present]
        mean = np.nanmean(values, axis=1)
        spread = np.abs(np.stack([np.nanmin(values, axis=1), np.nanmax(values, axis=1)]) - mean)
        axis.errorbar(present, mean, yerr=spread, **{**look.line, "linestyle": "none"}, capsize=3, label=NAMES[group])
        for x, y in zip(present, mean, strict=True):
            if y <= 1e-6:
                axis.annotate(
                    "no effect", (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=6, rotation=90
                )
    axis.set_xlabel(f"layer (w = {window})")
    axis.set_xticks(range(len(layers["layer"])))


def _shown_window(windows: list[int]) -> int:
    return min(windows, key=lambda w: abs(w - 512))


def _legend_and_title(figure: Figure, axes: np.ndarray, columns: Sequence[tuple[str, Result]]) -> None:
    handles: dict[str, Any] = {}
    for axis in axes[:, :].ravel():
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    width = figure.get_size_inches()[0]
    ncols = max(1, min(len(handles), int(width // INCHES_PER_ENTRY)))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=ncols, frameon=False)
    lines = (
        "What is lost when a group of layers sees only its last w tokens",
        f"95 % bootstrap intervals over {_counts(columns, 'n_documents')} documents (top) and "
        f"{_counts(columns, 'n_prompts')} needle prompts (second row); changes of output: mean and range",
    )
    wrapped = [part for line in lines for part in textwrap.wrap(line, int(LETTERS_PER_INCH * width))]
    figure.suptitle("\n".join(wrapped), fontsize=10)


def _counts(columns: Sequence[tuple[str, Result]], attribute: str) -> str:
    """The number that all columns share, else its range."""
    found = sorted({int(result.attributes[attribute]) for _, result in columns})
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
