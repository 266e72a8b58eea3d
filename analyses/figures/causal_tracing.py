"""The causal-tracing figure, a row a checkpoint: patches, heads, knockouts, states by distance, the last token.

Shades go from white (nothing recovered) to black (all of it), so that a grey print shows the same; hatched is n/a.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from analyses.figures.style import COLOURS, looks
from analyses.result import Dataset, Result

SHOWN = (("resid_post", "residual"), ("attn_out", "mixer"), ("mlp_out", "MLP"))
DENOISING, TRAINED, RANDOM, SHUFFLED = 0, "trained", "random weights", "shuffled labels"
NEEDLE, ELSEWHERE = 0, 1
BARS: dict[bool, dict[str, Any]] = {
    True: {"facecolor": COLOURS[0], "edgecolor": "black"},
    False: {"facecolor": "#f7d08a", "edgecolor": "black", "hatch": "////"},
}
ALL: dict[str, Any] = {"facecolor": "white", "edgecolor": "black"}
GREY, SMALLEST = "#7f7f7f", 0.5
ROW_HEIGHT, LETTERS_PER_INCH, MOST_TICKS = 3.3, 12, 20


def draw(results: Sequence[Result]) -> Figure:
    """Five panels for every checkpoint of every file."""
    rows = [(result, name) for result in results for name in result.groups if name and "/" not in name]
    figure = plt.figure(figsize=(18.5, 1.7 + ROW_HEIGHT * len(rows)))
    grid = figure.add_gridspec(len(rows), 5, width_ratios=(1.5, 0.8, 1.5, 1.3, 1.1))
    for index, (result, name) in enumerate(rows):
        axes = [figure.add_subplot(grid[index, column]) for column in range(5)]
        group, patched, knocked = (result.groups[name + part] for part in ("", "/patching", "/knockout"))
        _patches(axes[0], group, patched, name)
        _heads(axes[1], group, patched)
        _knockouts(axes[2], group, knocked)
        probes = result.groups.get(f"{name}/probes")
        _states(axes[3], probes)
        _last_token(axes[4], group, probes)
    _legend_and_title(figure, rows)
    return figure


def _patches(axis: Axes, group: Dataset, patched: Dataset, name: str) -> None:
    """Rows are layers, columns the groups of positions of each component."""
    components, positions = list(patched["component"]), [str(position) for position in patched["position"]]
    table = np.concatenate(
        [patched["recovered"][DENOISING, :, components.index(component)] for component, _ in SHOWN], axis=1
    )
    _map(axis, table)
    for start in range(len(positions), table.shape[1], len(positions)):
        axis.axvline(start, color="black", linewidth=1.2)
    axis.set_xticks(np.arange(table.shape[1]) + 0.5, positions * len(SHOWN), rotation=60, ha="right")
    for index, (_, label) in enumerate(SHOWN):
        axis.text((index + 0.5) * len(positions), -0.15, label, ha="center", va="bottom", fontsize=9)
    _layer_ticks(axis, group)
    counts = f"{group['n_separated']} of {group['n_pairs']} pairs"
    axis.set_title(f"{name}: recovered by one clean activation ({counts})", pad=18)


def _heads(axis: Axes, group: Dataset, patched: Dataset) -> None:
    """Single heads, at the last token and at the value's tokens."""
    positions, share = list(patched["position"]), patched["head_recovered"][DENOISING]
    if np.isnan(share).all():
        _nothing(axis, "no pair separates" if not group["n_separated"] else "heads left out")
        return
    shown = ("last", "needle")
    table = np.concatenate([share[:, :, positions.index(position)] for position in shown], axis=1)
    _map(axis, table)
    heads = share.shape[1]
    axis.axvline(heads, color="black", linewidth=1.2)
    step = max(1, heads // 6)
    axis.set_xticks(np.arange(0, 2 * heads, step) + 0.5, [str(i % heads) for i in range(0, 2 * heads, step)])
    for index, position in enumerate(shown):
        axis.text((index + 0.5) * heads, -0.15, position, ha="center", va="bottom", fontsize=9)
    _layer_ticks(axis, group)
    axis.set_xlabel("head")
    axis.set_title("single heads", pad=18)


def _map(axis: Axes, table: np.ndarray) -> None:
    rows, columns = table.shape
    axis.pcolormesh(
        np.arange(columns + 1), np.arange(rows + 1), np.ma.masked_invalid(table), cmap="Greys", vmin=0, vmax=1,
        rasterized=True,
    )  # fmt: skip
    for row, column in np.argwhere(np.isnan(table)):
        axis.add_patch(Rectangle((column, row), 1, 1, facecolor="none", edgecolor="#9a9a9a", hatch="////", lw=0))
    axis.set(xlim=(0, columns), ylim=(rows, 0))
    axis.grid(False)


def _layer_ticks(axis: Axes, group: Dataset) -> None:
    kinds = [str(kind) for kind in group["kind"]]
    step = max(1, len(kinds) // MOST_TICKS)
    labels = [f"{layer} {kind}" for layer, kind in enumerate(kinds)][::step]
    axis.set_yticks(np.arange(0, len(kinds), step) + 0.5, labels)


def _knockouts(axis: Axes, group: Dataset, knocked: Dataset) -> None:
    """Change of the value's log probability: every layer, then the groups; the control span as open diamonds."""
    kinds = knocked["set_kind"]
    layers, groups = np.flatnonzero(kinds == "layer"), np.flatnonzero(kinds == "group")
    full = np.array([str(kind) == "full" for kind in group["kind"]])
    change, bounds = knocked["log_p_change"], knocked["log_p_change_interval"]
    places, labels = [], []
    for index, row in enumerate([*layers, *groups]):
        single = index < len(layers)
        place = index if single else index + 0.8
        name = str(knocked["knockout"][row])
        group_style = ALL if name.startswith("all") else BARS[name.startswith("full")]
        style = BARS[bool(full[int(name)])] if single else group_style
        if np.isnan(change[row, NEEDLE]):
            axis.text(place, 0, "n/a", ha="center", va="top", fontsize=7, rotation=90)
        else:
            axis.bar(place, change[row, NEEDLE], 0.75, linewidth=0.7, **style)
            axis.plot([place, place], bounds[row, NEEDLE], color="black", linewidth=0.9)
            axis.plot(place, change[row, ELSEWHERE], marker="D", color="white", markeredgecolor="black", markersize=4)
        places.append(place)
        labels.append(name.replace(", answer", "").replace(", later", " (later)"))
    axis.axhline(0, color="black", linewidth=0.8)
    axis.axvline(len(layers) - 0.1, color=GREY, linewidth=0.6)
    axis.set_xticks(places, labels, rotation=60, ha="right", fontsize=7 if len(places) > MOST_TICKS else 8)
    axis.grid(axis="x", visible=False)
    low, high = axis.get_ylim()
    axis.set(ylabel="change of log p(value), nats", ylim=(low, max(high, 0) + 0.05 * (high - low)))
    axis.set_title(f"knockout; log p = {group['log_p']:.2f}, accuracy {group['accuracy']:.2f}")


def _states(axis: Axes, probes: Dataset | None) -> None:
    """Accuracy against the distance from the value's first token, a curve a recurrent layer; untrained ones in grey."""
    if probes is None or not probes["is_state"].any():
        _nothing(axis, "no recurrent layer" if probes is not None else "no probes")
        return
    controls, chosen = [str(c) for c in probes["control"]], np.flatnonzero(probes["is_state"])
    layers = np.unique(probes["feature_layer"][chosen])
    series = looks([f"layer {layer}" for layer in layers])
    for layer in layers:
        own = chosen[probes["feature_layer"][chosen] == layer]
        distance, look = np.maximum(probes["distance"][own], SMALLEST), series[f"layer {layer}"]
        low, high = probes["accuracy_interval"][controls.index(TRAINED), own].T
        axis.fill_between(distance, low, high, color=look.color, alpha=0.12, linewidth=0)
        axis.plot(distance, probes["accuracy"][controls.index(TRAINED), own], label=f"layer {layer}", **look.line)
        axis.plot(distance, probes["accuracy"][controls.index(RANDOM), own], color=GREY, linestyle="--", linewidth=1)
        axis.plot(
            distance, probes["accuracy"][controls.index(SHUFFLED), own], color="black", linestyle=":", linewidth=0.8
        )
    axis.axhline(float(probes["chance"][0]), color="black", linewidth=0.6)
    axis.set_xscale("log")
    ticks = np.unique(np.maximum(probes["distance"][chosen], SMALLEST))
    ticks = ticks[np.append(ticks[1:] / ticks[:-1] > 2, True)]  # the last token's may lie close to the one before
    axis.set_xticks(ticks, [f"{tick:.0f}" if tick > SMALLEST else "0" for tick in ticks])
    axis.minorticks_off()
    axis.set(ylim=(-0.03, 1.05), xlabel="tokens since the needle", ylabel="accuracy")
    axis.legend(frameon=False, fontsize=7, loc="upper right")
    axis.set_title("class in a recurrent state")


def _last_token(axis: Axes, group: Dataset, probes: Dataset | None) -> None:
    """Figure 4's curve: accuracy at the last token after every layer."""
    if probes is None:
        _nothing(axis, "no probes")
        return
    rows = [i for i, name in enumerate(probes["feature"]) if str(name).endswith("hook_resid_post")]
    at, controls = probes["feature_layer"][rows], [str(c) for c in probes["control"]]
    low, high = probes["accuracy_interval"][controls.index(TRAINED), rows].T
    axis.fill_between(at, low, high, color=COLOURS[0], alpha=0.18, linewidth=0)
    axis.plot(at, probes["accuracy"][controls.index(TRAINED), rows], color=COLOURS[0], marker="s")
    axis.plot(at, probes["accuracy"][controls.index(RANDOM), rows], color=GREY, linestyle="--")
    axis.plot(at, probes["accuracy"][controls.index(SHUFFLED), rows], color="black", linestyle=":", linewidth=0.8)
    axis.axhline(float(probes["chance"][0]), color="black", linewidth=0.6)
    step = max(1, len(at) // 10)
    axis.set_xticks(at[::step])
    axis.set(ylim=(-0.03, 1.05), xlabel="after layer")
    axis.set_title("class at the last token")


def _nothing(axis: Axes, text: str) -> None:
    axis.axis("off")
    axis.text(0.5, 0.5, text, ha="center", transform=axis.transAxes)


def _legend_and_title(figure: Figure, rows: Sequence[tuple[Result, str]]) -> None:
    handles: list[Any] = [
        *(Patch(**BARS[full]) for full in (True, False)),
        Patch(**ALL),
        Line2D([], [], linestyle="none", marker="D", color="white", markeredgecolor="black"),
        Line2D([], [], color=COLOURS[0], marker="s"),
        Line2D([], [], color=GREY, linestyle="--"),
        Line2D([], [], color="black", linestyle=":"),
        Patch(facecolor="white", edgecolor="#9a9a9a", hatch="////"),
    ]
    labels = ["full attention", "efficient", "all layers", "as many tokens elsewhere", TRAINED, RANDOM, SHUFFLED, "n/a"]
    figure.legend(handles, labels, loc="outside lower center", ncols=8, frameon=False)
    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), "Greys"), ax=figure.axes, fraction=0.012, pad=0.01)
    bar.set_label("share of the logit difference recovered")
    lengths = sorted({int(result.groups[name]["length"]) for result, name in rows})
    text = (
        "Value-swap patching, knockout and state probes. Prompts of "
        f"{', '.join(map(str, lengths))} tokens; needle: the value's, between: those behind it, last: the token "
        "that predicts the value; (later): no token behind the value sees it. Bars and shades: 95 % over prompts"
    )
    figure.suptitle("\n".join(textwrap.wrap(text, int(LETTERS_PER_INCH * figure.get_size_inches()[0]))), fontsize=10)
