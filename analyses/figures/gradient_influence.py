"""The gradient-influence figure: influence over distance, and beside it the loss when only the last w are given.

A curve a checkpoint, told apart in grey by marker and line; the baseline each falls to is drawn where it was read.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, ScalarFormatter

from analyses.figures.style import LINES, Look, looks
from analyses.result import Dataset, Result

WIDTH, HEIGHT, LETTERS_PER_INCH = 9.6, 4.6, 12
SHADE, SHIFT = 0.18, 1.06
SCORES = {"log_prob": "log p of the next token", "logit_sum": "sum of logits", "argmax_logit": "largest logit"}


def draw(results: Sequence[Result]) -> Figure:
    """Two panels; the checkpoints of all files, in their order. Curves of different scores share no scale: scaled."""
    curves = [(name, result) for result in results for name in result.groups if name and "/" not in name]
    labels = _labels(curves)
    series = {  # many points lie close: in grey the lines must differ too, not only their markers
        label: dataclasses.replace(look, linestyle=LINES[index % len(LINES)])
        for index, (label, look) in enumerate(looks(labels).items())
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, HEIGHT))
    scores = list(dict.fromkeys(str(result.attributes["score"]) for _, result in curves))
    for index, (label, (name, result)) in enumerate(zip(labels, curves, strict=True)):
        group = result.groups[name]
        _influence(left, group, label, series[label], scaled=len(scores) > 1)
        if f"{name}/noise" in result.groups:
            _floor(left, group, result.groups[f"{name}/noise"], label, series[label], scaled=len(scores) > 1)
        _truncation(right, group, label, series[label], SHIFT ** (index - (len(curves) - 1) / 2))
    marked = sorted({int(w) for n, r in curves for w in r.groups[n]["window"][r.groups[n]["marked"]]})
    longest = max(len(result.groups[name]["distance"]) for name, result in curves)
    for axis in (left, right):
        _distance_axis(axis, marked, longest)
    left.set_yscale("log")
    left.set_xlabel("distance d + 1 from the last position read, tokens")
    left.set_ylabel(
        "G(d), relative to the baseline" if len(scores) > 1 else f"G(d) = ‖∂s / ∂e‖, s: {SCORES[scores[0]]}"
    )
    left.set_title("influence of a token's embedding")
    right.axhline(0, color="black", linewidth=0.8)
    right.set_xlabel("w, tokens given")
    right.set_ylabel("loss with the last w − loss with all, nats")
    right.set_title("loss at the same targets, last w tokens only")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False)
    figure.suptitle("\n".join(textwrap.wrap(_title(curves), int(LETTERS_PER_INCH * WIDTH))), fontsize=10)
    return figure


def _labels(curves: Sequence[tuple[str, Result]]) -> list[str]:
    """Names, with the score, and a number where that is still not enough, behind those that occur twice."""
    plain = [name for name, _ in curves]
    labels = [n if plain.count(n) == 1 else f"{n}, {r.attributes['score']}" for n, r in curves]
    return [label if labels.count(label) == 1 else f"{label} ({i + 1})" for i, label in enumerate(labels)]


def _influence(axis: Axes, group: Dataset, label: str, look: Look, scaled: bool) -> None:
    """Log-binned mean curve; exact zeros have no place on a logarithmic axis and end a curve."""
    scale = float(group["baseline"]) if scaled and group["baseline"] > 0 else 1.0
    first = group["bin"]
    last = np.append(first[1:], len(group["distance"])) - 1
    at = np.sqrt((first + 1.0) * (last + 1.0))  # d + 1, so that the last position itself has a place
    mean = np.where(group["binned"] > 0, group["binned"], np.nan) / scale
    axis.plot(at, mean, label=label, markevery=4, **look.line)
    low, high = group["binned_interval"].T / scale
    axis.fill_between(at, np.where(low > 0, low, np.nan), high, color=look.color, alpha=SHADE, linewidth=0)
    if group["baseline"] > 0:
        ends = [int(group["baseline_first"]) + 1, len(group["distance"])]
        base, spread = float(group["baseline"]) / scale, float(group["baseline_spread"]) / scale
        axis.plot(ends, [base, base], color="black", linewidth=2.2, solid_capstyle="butt", zorder=3)
        axis.fill_between(ends, base - min(spread, 0.9 * base), base + spread, color="black", alpha=0.12, linewidth=0)
        axis.plot([1, ends[0]], [base, base], color=look.color, linewidth=0.8, linestyle=(0, (1, 3)))
    if np.isfinite(group["meeting_distance"]) and group["baseline"] > 0:
        met = float(group["meeting_distance"]) + 1
        axis.plot(met, base, marker="|", markersize=14, markeredgewidth=2, color=look.color, linestyle="none")


def _floor(axis: Axes, group: Dataset, noise: Dataset, label: str, look: Look, scaled: bool) -> None:
    """What of the curve the number format could make up: the norm of the gradient's error."""
    scale = float(group["baseline"]) if scaled and group["baseline"] > 0 else 1.0
    first = noise["bin"]
    at = np.sqrt((first + 1.0) * np.append(first[1:], len(group["distance"])))
    floor = np.where(noise["noise_floor"] > 0, noise["noise_floor"], np.nan) / scale
    axis.plot(at, floor, label=f"{label}: noise floor", color=look.color, linewidth=0.8)


def _truncation(axis: Axes, group: Dataset, label: str, look: Look, shift: float) -> None:
    """Bars rather than bands, as windows are few; `shift` (a factor) keeps those of several checkpoints apart."""
    shown = np.isfinite(group["truncation_loss_change"])
    at, change = group["window"][shown] * shift, group["truncation_loss_change"][shown]
    axis.plot(at, change, label=label, **look.line)
    low, high = group["truncation_loss_change_interval"][shown].T
    if np.isfinite(low).all():  # one text has no interval
        axis.vlines(at, low, high, color=look.color, linewidth=1.2)


def _distance_axis(axis: Axes, marked: Sequence[int], longest: int) -> None:
    axis.set_xscale("log", base=2)
    ticks = [2**k for k in range(int(longest).bit_length() + 1) if k % 2 == 0]
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    for window in marked:
        axis.axvline(window, color="black", linewidth=0.8, linestyle="--", alpha=0.6)
        axis.annotate(
            f"{window}", (window, 1), (2, -2), xycoords=axis.get_xaxis_transform(), textcoords="offset points",
            fontsize=8, va="top", rotation=90,
        )  # fmt: skip


def _title(curves: Sequence[tuple[str, Result]]) -> str:
    groups = [result.groups[name] for name, result in curves]
    counts = sorted({int(group["n_texts"]) for group in groups})
    lengths = sorted({int(group["length"]) for group in groups})
    targets = sorted({int(result.attributes["n_targets"]) for _, result in curves})

    def span(values: list[int]) -> str:
        return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"

    return (
        f"How far back a prediction's gradient reaches: mean over {span(counts)} texts of {span(lengths)} tokens, last "
        f"{span(targets)} positions; shaded, and bars: 95 % bootstrap intervals over texts; black: baseline, where it "
        "is read, with its spread; upright strokes: where a curve meets it; dashed: windows"
    )
