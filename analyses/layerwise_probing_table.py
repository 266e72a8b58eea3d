"""The result of a probing study as text: a block a checkpoint and haystack, a line a layer, then the share of gain."""

from __future__ import annotations

import numpy as np

from analyses.layerwise_probing_plan import MEAN_EMBEDDING, NEEDLE_DEPTH
from analyses.layerwise_probing_results import RANDOM_WEIGHTS, SHUFFLED_LABELS, TRAINED, probe_result
from analyses.layerwise_probing_summary import METRICS
from analyses.result import Dataset, Result
from hooks.streams import EMBEDDING

COLUMNS = (
    "layer",
    "kind",
    "accuracy",
    "gain",
    "mixer",
    "MLP",
    "log-loss gain",
    "shuffled",
    "random weights",
    "over it",
)
NULL = "null"
LEGEND = (
    "accuracy after the layer; gain: over before it, = mixer + MLP; log-loss gain in nats, above 0 is better;\n"
    "shuffled: accuracy with shuffled labels; random weights: of the same architecture untrained, and over it.\n"
    "share: of the gain, in full layers; p: layer kinds permuted. [95 % over held-out prompts, not over training seeds]"
)


def table(result: Result) -> str:
    """Blocks in the order of the file; n/a where a number does not exist."""
    blocks = [_block(result, name) for name in result.groups if name.count("/") == 1]
    return "\n\n".join([*blocks, LEGEND])


def _block(result: Result, path: str) -> str:
    name, haystack = path.split("/")
    group, layers = result.groups[path], result.groups[name]
    lines = [_head(result, name, haystack)]
    if haystack == NULL:
        return "\n".join([*lines, _null(group)])
    if layers["extrapolation"]:
        lines.append("extrapolation: longer than the training length")
    rows = [COLUMNS, *(_row(group, layers, layer) for layer in range(len(layers["kind"])))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, *_remarks(group, layers), *_shares(group)])


def _head(result: Result, name: str, haystack: str) -> str:
    group, layers = result.groups[f"{name}/{haystack}"], result.groups[name]
    held_out = len(group["sample"])
    given = f", {layers['given']} answer tokens given" if layers["given"] else ""
    what = "noise without its needle" if haystack == NULL else haystack
    return (
        f"{name}, {what}   n = {held_out} held-out of {result.attributes['n_samples']} prompts of {layers['length']} "
        f"tokens{given}, {len(group['class'])} classes, chance {group['chance'][0]:.3f}"
    )


def _row(group: Dataset, layers: Dataset, layer: int) -> tuple[str, ...]:
    after = list(group["feature"]).index(f"blocks.{layer}.hook_resid_post")
    controls = list(group["control"])

    def accuracy(control: str) -> str:
        return _number(group["accuracy"][controls.index(control), after], ".2f") if control in controls else "-"

    over = RANDOM_WEIGHTS in controls
    return (
        str(layer),
        str(layers["kind"][layer]),
        _bounded(group["accuracy"][0, after], group["accuracy_interval"][0, after], ".2f"),
        _bounded(group["gain"][0, 0, layer], group["gain_interval"][0, 0, layer], "+.2f"),
        *(_number(group["gain"][0, part, layer], "+.2f") for part in (1, 2)),
        _number(group["log_loss_gain"][0, 0, layer], "+.2f"),
        accuracy(SHUFFLED_LABELS),
        accuracy(RANDOM_WEIGHTS),
        _bounded(group["over_random"][after], group["over_random_interval"][after], "+.2f") if over else "-",
    )


def _bounded(value: float, bounds: np.ndarray, form: str) -> str:
    return f"{value:{form}} [{bounds[0]:{form}}, {bounds[1]:{form}}]" if np.isfinite(value) else "n/a"


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if np.isfinite(value) else "n/a"


def _remarks(group: Dataset, layers: Dataset) -> list[str]:
    features = list(group["feature"])
    found = [
        f"{text} {_number(group['accuracy'][0, features.index(name)], '.2f')}"
        for name, text in (
            (EMBEDDING, "embedding of the probed token"), (MEAN_EMBEDDING, "mean embedding of the prompt"),
            (NEEDLE_DEPTH, "depth of the needle"),
        )
    ]  # fmt: skip
    lines = [f"accuracy without any layer: {', '.join(found)}"]
    wide = [str(i) for i, window in enumerate(layers["window"]) if window >= layers["length"]]
    if wide:
        lines.append(f"layers {', '.join(wide)}: the window holds the whole prompt, so they see what full layers see")
    failed = [(f, r) for f, r in zip(features, group["reason"][0], strict=True) if r]
    lines += [f"{feature}: {reason}" for feature, reason in failed]
    open_ends = int((~group["converged"][group["reason"] == ""]).sum())
    return [*lines, f"{open_ends} of {group['converged'].size} probes did not converge"] if open_ends else lines


def _null(group: Dataset) -> str:
    """Features are correlated: several may miss chance at once, so the level of all together is said too."""
    result = probe_result(group)
    count, chance = int(result.fitted.sum()), result.chance
    inside = [
        int(((low <= chance) & (chance <= high)).sum())
        for low, high in (result.accuracy_interval(level).T for level in (0.95, 1 - 0.05 / max(count, 1)))
    ]
    low, high = np.nanmin(result.accuracy), np.nanmax(result.accuracy)
    return (
        f"accuracy {low:.2f} to {high:.2f}; chance is inside the interval of {inside[0]} of {count} features, "
        f"{inside[1]} of {count} at 95 % for all together"
    )


def _shares(group: Dataset) -> list[str]:
    if str(group["share_status"]):
        return [f"share of the gain in full layers: {group['share_status']}"]
    lines = []
    for column, metric in enumerate(METRICS):
        text = []
        for control in (TRAINED, RANDOM_WEIGHTS):
            if control in list(group["control"]):
                row = list(group["control"]).index(control)
                share = _bounded(group["share"][row, column], group["share_interval"][row, column], ".2f")
                text.append(f"{control} {share} p = {_number(group['share_p'][row, column], '.3f')}")
        if len(text) == 2:
            over = _bounded(group["share_over_random"][column], group["share_over_random_interval"][column], "+.2f")
            text.append(f"difference {over}")
        lines.append(f"share of the {metric.replace('_', '-')} gain in full layers: {'; '.join(text)}")
    return lines
