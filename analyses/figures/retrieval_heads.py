"""The heads of single checkpoints: attention mass of each on the needle's value, and what ablating it leaves.

One row a checkpoint. Full-attention heads are filled squares, sliding-window heads open circles, recurrent heads
diamonds.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analyses.figures.style import COLOURS
from analyses.result import Result

NONE, SINGLE, TOP, RANDOM = "none", "single", "top", "random"
MARKS: dict[str, dict[str, Any]] = {
    "full": {"marker": "s", "markerfacecolor": COLOURS[0], "markeredgecolor": "black"},
    "swa": {"marker": "o", "markerfacecolor": "white", "markeredgecolor": "black"},
    "recurrent": {"marker": "D", "markerfacecolor": COLOURS[4], "markeredgecolor": "black"},
}
KINDS = {"full": "full-attention head", "swa": "sliding-window head", "recurrent": "recurrent head"}
ROW_HEIGHT, LETTERS_PER_INCH = 3.6, 12
SPREAD = (10, 90)  # percentiles over prompts


def named(results: Sequence[Result]) -> dict[str, tuple[Result, str]]:
    """{label: (result, run)}; runs of one name in several files are numbered."""
    found: dict[str, tuple[Result, str]] = {}
    for number, result in enumerate(results, 1):
        for name in result.groups:
            if name and "/" not in name:
                found[name if name not in found else f"{name} ({number})"] = (result, name)
    return found


def draw(rows: Mapping[str, tuple[Result, str]]) -> Figure:
    """Left the masses, right the ablations, of the last checkpoint of each run."""
    figure, axes = plt.subplots(len(rows), 2, figsize=(13.5, 1.4 + ROW_HEIGHT * len(rows)), squeeze=False)
    for (left, right), (label, (result, name)) in zip(axes, rows.items(), strict=True):
        masses(left, result, name, label)
        ablations(right, result, name, label)
    kinds = {
        _look(kind) for result, name in rows.values() for kind in result.groups[f"{name}/heads"]["kind"].flat if kind
    }
    shown = [kind for kind in KINDS if kind in kinds]
    handles = [Line2D([], [], linestyle="none", **MARKS[kind]) for kind in shown]
    figure.legend(handles, [KINDS[kind] for kind in shown], loc="outside lower center", ncols=3, frameon=False)
    groups = [result.groups[name] for result, name in rows.values()]
    counts, lengths = (sorted({int(group[key]) for group in groups}) for key in ("n_tracing", "length"))
    text = (
        "Retrieval heads: chosen on prompts of their own, measured on "
        f"n = {', '.join(map(str, counts))} others of {', '.join(map(str, lengths))} tokens. Bars of masses: "
        f"{SPREAD[0]} to {SPREAD[1]} % of the prompts; of ablations: 95 % bootstrap over prompts"
    )
    figure.suptitle("\n".join(textwrap.wrap(text, int(LETTERS_PER_INCH * figure.get_size_inches()[0]))), fontsize=10)
    return figure


def masses(axis: Axes, result: Result, name: str, label: str) -> None:
    """Mean mass of every head at its layer; recurrent heads by their share of absolute weights."""
    group, heads = result.groups[name], result.groups[f"{name}/heads"]
    mass = np.where(np.isnan(heads["mass"][-1]), heads["recurrent_mass"][-1], heads["mass"][-1])
    prompts = result.groups[f"{name}/prompts"]["mass"][-1]
    for layer, head in np.argwhere(heads["kind"] != "").tolist():
        place = _place(heads["kind"], layer, head)
        if np.isfinite(prompts[:, layer, head]).all():
            axis.plot([place, place], np.percentile(prompts[:, layer, head], SPREAD), color="black", linewidth=0.8)
        axis.plot(place, mass[layer, head], linestyle="none", zorder=3, **MARKS[_look(heads["kind"][layer, head])])
        if heads["rank"][layer, head] > 0:
            axis.plot(place, 1.05, marker="v", color="black", markersize=4, clip_on=False)
    axis.axhline(float(group["uniform_mass"]), color="black", linewidth=0.8, linestyle=":")
    step = max(1, len(mass) // 16)
    axis.set_xticks(range(0, len(mass), step))
    axis.set(xlabel="layer", ylabel="mass on the value", ylim=(-0.03, 1.08), xlim=(-0.7, len(mass) - 0.3))
    axis.grid(axis="x", visible=False)
    found = group["curve"][list(group["series"]).index("accuracy")][-1]
    remark = f" ({group['status']})" if str(group["status"]) else ""
    axis.set_title(f"{label}: {found:.2f} found; ▾ followed, dotted: all keys alike{remark}")


def _place(kinds: Any, layer: int, head: int) -> float:
    """Heads of a layer stand side by side."""
    n_heads = np.count_nonzero(kinds[layer] != "")
    return layer + (head - (n_heads - 1) / 2) * 0.8 / n_heads


def _look(kind: str) -> str:
    return kind if kind in MARKS else "recurrent"


def ablations(axis: Axes, result: Result, name: str, label: str) -> None:
    """Accuracy that remains: each head at its layer, then the top two and the random pairs."""
    group, heads = result.groups.get(f"{name}/ablation"), result.groups[f"{name}/heads"]
    if group is None:
        axis.axis("off")
        axis.text(0.5, 0.5, "no ablation", ha="center", transform=axis.transAxes)
        return
    n_layers = len(heads["kind"])
    gap = max(1.0, n_layers / 11)  # between the two labels at the end
    top = n_layers - 0.7 + gap
    accuracy, interval = group["accuracy"], group["accuracy"][0] + group["accuracy_change_interval"]
    for i in np.flatnonzero(group["kind"] == SINGLE):
        layer, head = group["heads"][i, 0]
        kind, place = heads["kind"][layer, head], _place(heads["kind"], layer, head)
        axis.plot([place, place], np.clip(interval[i], 0, 1), color="black", linewidth=0.8, zorder=2)
        followed = heads["rank"][layer, head] > 0
        axis.plot(place, accuracy[i], linestyle="none", zorder=3, **MARKS[_look(kind)])
        if followed:
            axis.plot(place, 1.09, marker="v", color="black", markersize=4, clip_on=False)
    for kind, place, marker in ((TOP, top, "*"), (RANDOM, top + gap, "x")):
        which = np.flatnonzero(group["kind"] == kind)
        spread = np.linspace(-0.3, 0.3, len(which)) if len(which) > 1 else np.zeros(len(which))
        for i, shift in zip(which, spread, strict=True):
            axis.plot([place + shift] * 2, np.clip(interval[i], 0, 1), color="black", linewidth=0.8)
        axis.plot(place + spread, accuracy[which], linestyle="none", marker=marker, color=COLOURS[3], markersize=8)
    axis.axhline(accuracy[0], color="black", linewidth=0.8, linestyle="--")
    step = max(1, n_layers // 16)
    ticks = [*range(0, n_layers, step), top, top + gap]
    axis.set_xticks(ticks, [*map(str, range(0, n_layers, step)), "top 2", "random\npairs"])
    axis.set(xlabel="layer of the ablated head", ylabel="accuracy that remains", ylim=(-0.05, 1.12))
    axis.set_xlim(-0.7, top + 1.6 * gap)
    axis.grid(axis="x", visible=False)
    axis.set_title(f"{label}: heads mean-ablated at the end; ▾ followed, dashed: none")
