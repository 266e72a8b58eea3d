"""The result of a causal-tracing study as text: for each checkpoint the patches, the knockouts and the probes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analyses.causal_knockouts import ELSEWHERE, NEEDLE
from analyses.layerwise_probing_results import RANDOM_WEIGHTS, SHUFFLED_LABELS, TRAINED
from analyses.result import Dataset, Result

MOST_HEADS, NOTED = 8, 0.05
LEGEND = (
    "Shares of clean minus corrupted logit difference that come back when this activation alone is clean (denoising);\n"
    "lost: what goes when it alone is corrupted (noising). needle: the value's tokens; between: those behind them;\n"
    "last: the token that predicts the value. Knockouts: change of the value's log probability (nats, all its tokens)\n"
    "and of accuracy when the tokens that predict it (later: all tokens behind it) cannot see it; [elsewhere]: as\n"
    "many other tokens hidden.\n"
    "Relative difference: of the states of two prompts that differ in the value, ||S - S'|| / ||S||.\n"
    "Recurrent layers: the state that is read is one into which the hidden tokens never wrote.\n"
    "[95 % bootstrap over prompts, of probes Wilson; not over training seeds]"
)


def table(result: Result) -> str:
    """A block a checkpoint, in the order of the file; n/a where a number does not exist."""
    names = [name for name in result.groups if name and "/" not in name]
    return "\n\n".join([*(_block(result, name) for name in names), LEGEND])


def _block(result: Result, name: str) -> str:
    group, patched, knocked = (result.groups[name + part] for part in ("", "/patching", "/knockout"))
    lines = [
        f"{name}   {group['n_pairs']} pairs of {group['length']} tokens ({result.attributes['haystack']}); accuracy "
        f"{group['accuracy']:.2f}, logit difference {group['clean']:.2f} clean, {group['corrupt']:.2f} corrupted",
        f"{group['n_separated']} of {group['n_pairs']} pairs separate by {result.attributes['separation']:g} nats; "
        f"untrained: {group['n_separated_untrained']}",
    ]
    lines += ["extrapolation: prompts longer than the training length"] * bool(group["extrapolation"])
    lines += ["", *aligned(_layer_rows(group, patched)), "", *_heads(patched, group)]
    lines += ["", *aligned(_knockout_rows(knocked))]
    if f"{name}/states" in result.groups:
        lines += ["", *aligned(_difference_rows(result.groups[f"{name}/states"]))]
    if f"{name}/probes" in result.groups:
        lines += ["", *aligned(_probe_rows(result.groups[f"{name}/probes"]))]
    return "\n".join(lines)


def _layer_rows(group: Dataset, patched: Dataset) -> list[tuple[str, ...]]:
    components, positions = list(patched["component"]), list(patched["position"])
    columns = [
        ("resid_post, needle", 0, "resid_post", "needle"),
        ("between", 0, "resid_post", "between"),
        ("last", 0, "resid_post", "last"),
        ("mixer, needle", 0, "attn_out", "needle"),
        ("last", 0, "attn_out", "last"),
        ("MLP, needle", 0, "mlp_out", "needle"),
        ("last", 0, "mlp_out", "last"),
        ("lost: mixer, last", 1, "attn_out", "last"),
    ]
    rows = [("layer", *(label for label, *_ in columns))]
    for layer, kind in enumerate(group["kind"]):
        cells = []
        for _, way, component, position in columns:
            share = patched["recovered"][way, layer, components.index(component), positions.index(position)]
            cells.append(number(1 - share if way else share))
        rows.append((f"{layer} {kind}", *cells))
    return rows


def _heads(patched: Dataset, group: Dataset) -> list[str]:
    """Heads whose output at the last token brings most back."""
    share = patched["head_recovered"][0, :, :, list(patched["position"]).index("last")]
    bounds = patched["head_recovered_interval"][0, :, :, list(patched["position"]).index("last")]
    if not np.isfinite(share).any():
        return ["heads, recovered at the last token: n/a"]
    order = [np.unravel_index(i, share.shape) for i in np.argsort(-np.nan_to_num(share, nan=-np.inf), axis=None)]
    found = [
        f"{layer}.{head} ({group['head_kind'][layer, head]}) {number(float(share[layer, head]))}"
        + interval_text(bounds[layer, head])
        for layer, head in order[:MOST_HEADS]
        if share[layer, head] >= NOTED
    ]
    return [f"heads, recovered at the last token, {NOTED} or more: {', '.join(found) or 'none'}"]


def _knockout_rows(knocked: Dataset) -> list[tuple[str, ...]]:
    spans = list(knocked["span"])
    needle, other = spans.index(NEEDLE), spans.index(ELSEWHERE)
    rows: list[tuple[str, ...]] = [("knockout", "log p", "[95 %]", "accuracy", "[elsewhere: log p]")]
    for row, kind in enumerate(knocked["set_kind"]):
        if kind in ("group", "layer", "window"):
            change, bounds = knocked["log_p_change"][row, needle], knocked["log_p_change_interval"][row, needle]
            rows.append((f"{kind} {knocked['knockout'][row]}", number(change), interval_text(bounds).strip(),
                         number(knocked["accuracy_change"][row, needle]),
                         number(knocked["log_p_change"][row, other])))  # fmt: skip
    return rows


def _difference_rows(states: Dataset) -> list[tuple[str, ...]]:
    rows = [("state, relative difference at distance", *(f"{distance:.0f}" for distance in states["distance"]))]
    for index, control in enumerate(states["control"]):
        for row, layer in enumerate(states["recurrent"]):
            rows.append((f"  layer {layer}, {control}", *(f"{value:.2g}" for value in states["mean"][index, row])))
    return rows


def _probe_rows(probes: Dataset) -> list[tuple[str, ...]]:
    """A row a recurrent layer and a column a distance; then the stream at the last token."""
    controls, states = [str(c) for c in probes["control"]], np.flatnonzero(probes["is_state"])
    rows: list[tuple[str, ...]] = []
    if len(states):
        layers, distances = probes["feature_layer"][states], probes["distance"][states]
        columns = distances[layers == layers[0]]
        rows.append(("state, accuracy at distance", *(f"{distance:.0f}" for distance in columns)))
        for layer in np.unique(layers):
            for control in (TRAINED, RANDOM_WEIGHTS, SHUFFLED_LABELS):
                values = probes["accuracy"][controls.index(control), states[layers == layer]]
                rows.append((f"  layer {layer}, {control}", *map(number, values)))
    posts = [i for i, name in enumerate(probes["feature"]) if str(name).endswith("hook_resid_post")]
    shown = [("last token, accuracy after layer", *(str(probes["feature_layer"][i]) for i in posts))]
    for control in (TRAINED, RANDOM_WEIGHTS, SHUFFLED_LABELS):
        shown.append((f"  {control}", *(number(probes["accuracy"][controls.index(control), i]) for i in posts)))
    width = max(map(len, [*rows, *shown]))
    return [(*row, *[""] * (width - len(row))) for row in [*rows, *shown]]


def number(value: float) -> str:
    """Two decimals; n/a for what does not exist."""
    return "n/a" if np.isnan(value) else f"{value + 0.0:.2f}".replace("-0.00", "0.00")


def interval_text(bounds: np.ndarray) -> str:
    """ " [low, high]", or nothing where there is none."""
    return "" if np.isnan(bounds).any() else f" [{number(bounds[0])}, {number(bounds[1])}]"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of equal width, the first flush left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
