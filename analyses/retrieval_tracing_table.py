"""The result of a tracing study as text: for each run the heads, the curves, the crossings and the ablations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analyses.crossings import UNDEFINED
from analyses.result import Dataset, Result
from analyses.retrieval_ablation import SINGLE
from analyses.retrieval_tracing_summary import NOTED

CURVES = (
    "accuracy", "digits", "mass, followed", "mass, first", "mass, best of each", "mass, others", "copy, followed",
    "entropy, followed", "entropy, others", "distance, followed", "distance, others",
)  # fmt: skip
BOUNDED = ("accuracy", "mass, followed")
MOST_HEADS, MOST_INTERVALS, SHOWN_GROUPS = 24, 6, 4
LEGEND = (
    "Heads are layer.head. mass: attention on the needle's value; first: of the first head followed; best of each:\n"
    "the head with most mass at that checkpoint; others: the other softmax heads of the followed heads' layers; copy:\n"
    "over solved prompts; entropy / log(visible keys); distance: of W_Q and W_K rows from the last checkpoint, 0\n"
    "there by construction. Crossings hold at all later checkpoints, interpolated in log tokens. area: mean over log\n"
    "tokens. ablation: outputs replaced by their means, at the last checkpoint; * the interval leaves out 0.\n"
    "[95 % bootstrap over prompts, not over training seeds; all or none of n right also fits shares 3/n away]"
)


def table(result: Result) -> str:
    """A block a run, in the order of the file; n/a where a number does not exist."""
    names = [name for name in result.groups if name and "/" not in name]
    return "\n\n".join([*(_block(result, name) for name in names), LEGEND])


def _block(result: Result, name: str) -> str:
    group, heads = result.groups[name], result.groups[f"{name}/heads"]
    lines = [*_head(result, name), *_found(group, heads), "", *_aligned(_curve_rows(group))]
    if len(group["checkpoint"]) > 1:
        lines += ["", *_aligned(_crossing_rows(group))]
    if f"{name}/ablation" in result.groups:
        lines += ["", *_ablation(result.groups[f"{name}/ablation"], heads)]
    return "\n".join(lines)


def _head(result: Result, name: str) -> list[str]:
    group = result.groups[name]
    count = len(group["checkpoint"])
    text = (
        f"{name}   n = {group['n_tracing']} prompts of {group['length']} tokens ({result.attributes['haystack']}), "
        f"{group['n_choosing']} others choose heads; {count} checkpoint{'s' * (count != 1)}"
    )
    return [text, *["extrapolation: prompts longer than the training length"] * bool(group["extrapolation"])]


def _found(group: Dataset, heads: Dataset) -> list[str]:
    mass = heads["choosing_mass"][-1]
    followed = [f"{layer}.{head} ({mass[layer, head]:.2f})" for layer, head in group["followed"]]
    lines = [f"followed, by mass at the last checkpoint: {', '.join(followed) or group['status']}"]
    noted = f"{group['n_noted']} of {group['n_softmax']} softmax heads have a mean mass of {NOTED} or more"
    if not group["n_noted"]:
        noted = f"no retrieval head: none of {group['n_softmax']} softmax heads has a mean mass of {NOTED} or more"
        noted += "; those followed are the largest of these" if followed else ""
    lines.append(f"{noted}; attention to all keys alike: {group['uniform_mass']:.3f}")
    lines += _by_kv_group(heads)
    wide = [str(layer) for layer in np.flatnonzero(heads["window"] >= group["length"])]
    if wide:
        lines.append(f"layers {', '.join(wide)}: the window holds the whole prompt, so they see what full layers see")
    lines += [f"Q/K distance: n/a: {group['distance_refusal']}"] * bool(str(group["distance_refusal"]))
    recurrent = heads["recurrent_mass"][-1]
    if np.isfinite(recurrent).any():
        layer, head = np.unravel_index(np.nanargmax(recurrent), recurrent.shape)
        lines.append(
            f"recurrent heads, share of |W| on the value: at most {recurrent[layer, head]:.2f} ({layer}.{head})"
        )
    return lines


def _by_kv_group(heads: Dataset) -> list[str]:
    """The groups with most mass, where several query heads share one."""
    table, shared = heads["mass_group_mean"][-1], heads["kv_group_of_head"]
    groups = [(int(layer), int(group)) for layer, group in np.argwhere(np.isfinite(table))]
    if len(groups) == (shared >= 0).sum():
        return []
    first = sorted(groups, key=lambda place: (-table[place], place))[:SHOWN_GROUPS]
    most = heads["mass_group_max"][-1]
    cells = [f"{layer}.{group} ({table[layer, group]:.2f}, {most[layer, group]:.2f})" for layer, group in first]
    return [f"kv groups, layer.group (mean and maximum over their query heads): {', '.join(cells)}"]


def _curve_rows(group: Dataset) -> list[tuple[str, ...]]:
    """A row a curve, a column a checkpoint: those may be many, and then intervals are left to the file."""
    series, count = list(group["series"]), len(group["checkpoint"])
    rows = [("tokens", *(tokens_text(tokens) for tokens in group["tokens"]), "area")]
    for name in CURVES:
        index = series.index(name)
        cells = []
        for value, bounds in zip(group["curve"][index], group["curve_interval"][index], strict=True):
            inline = name in BOUNDED and count <= MOST_INTERVALS and np.isfinite(value)
            cells.append(_number(value) + (_bounds(bounds) if inline else ""))
        rows.append((name, *cells, _number(group["area"][index])))
        if name == "mass, best of each":
            rows.append(("  which head", *(".".join(str(n) for n in head) for head in group["best"]), ""))
    return rows if count > 1 else [row[:-1] for row in rows]


def _crossing_rows(group: Dataset) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("first for good", "mark", "tokens", "[95 %]", "between checkpoints at")]
    for i, name in enumerate(group["crossing_series"]):
        status = str(group["crossing_status"][i])
        after, by = (tokens_text(group[f"crossing_{key}"][i]) for key in ("after", "by"))
        low, high = group["crossing_interval"][i]
        bounds = f"[{tokens_text(low)}, {tokens_text(high)}]" if not np.isnan(low) else ""
        if status.startswith("n/a") or status == UNDEFINED:
            bounds = ""
        where = f"{after} and {by}" if not status else by if by != "n/a" else ""
        point = status or tokens_text(group["crossing_tokens"][i])
        rows.append((str(name), f"{group['crossing_mark'][i]:g}", point, bounds, where))
    return rows


def _ablation(group: Dataset, heads: Dataset) -> list[str]:
    """Changes by every single head as a grid of layer x head, then the top k against others."""
    lines = [
        f"ablated singly, change of accuracy from {group['accuracy'][0]:.2f} and, after /, of the answer's loss in nats"
    ]
    cells: dict[tuple[int, int], str] = {}
    for i in np.flatnonzero(group["kind"] == SINGLE).tolist():
        layer, head = (int(n) for n in group["heads"][i, 0])
        cells[layer, head] = f"{_starred(group, 'accuracy', i)} / {_starred(group, 'loss', i)}"
    columns = sorted({head for _, head in cells})[:MOST_HEADS]
    rows = [("layer", "kind", *(f"head {head}" for head in columns))]
    for layer in heads["layer"]:
        kind = "/".join(dict.fromkeys(kind for kind in heads["kind"][layer] if kind))
        rows.append((str(layer), kind or "mlp", *(cells.get((int(layer), head), "n/a") for head in columns)))
    lines += _aligned(rows, left=2)
    hidden = len({head for _, head in cells}) - len(columns)
    lines += [f"{hidden} more heads a layer are in the file"] if hidden > 0 else []
    return [*lines, *(_comparison(group, row, int(k)) for row, k in enumerate(group["k"]))]


def _starred(group: Dataset, name: str, i: int) -> str:
    low, high = group[f"{name}_change_interval"][i]
    return f"{group[f'{name}_change'][i]:+.2f}{'*' if low > 0 or high < 0 else ''}"


def _comparison(group: Dataset, row: int, k: int) -> str:
    def change(part: str) -> str:
        value, bounds = (group[f"{part}_accuracy_change{end}"][row] for end in ("", "_interval"))
        return f"{value:+.2f}{_bounds(bounds, '+.2f')}"

    if np.isnan(group["top_accuracy_change"][row]):
        return f"top {k}: n/a, fewer than {k} heads followed"
    count = int(group["n_others"][row])
    if not count:
        return f"top {k}: accuracy {change('top')}; no unselected full-attention heads to compare with"
    drawn = "each of all" if k == 1 else "random sets of"
    return (
        f"top {k}: accuracy {change('top')}; {drawn} {k if k > 1 else ''}".rstrip()
        + f" unselected full-attention heads (n = {count}): {change('others')}; difference {change('difference')}; "
        f"as harmful by loss: {group['others_as_harmful'][row]:.0%}"
    )


def tokens_text(value: float) -> str:
    """1.3e8 as 130M, inf as never, NaN as n/a."""
    if np.isnan(value):
        return "n/a"
    if np.isinf(value):
        return "never"
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _number(value: float) -> str:
    return "n/a" if np.isnan(value) else f"{value + 0.0:.2f}"


def _bounds(bounds: np.ndarray, form: str = ".2f") -> str:
    return "" if np.isnan(bounds).any() else f" [{bounds[0] + 0.0:{form}}, {bounds[1] + 0.0:{form}}]"


def _aligned(rows: Sequence[tuple[str, ...]], left: int = 1) -> list[str]:
    """Columns of equal width, the first `left` of them flush left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
