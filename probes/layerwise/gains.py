"""Gains: how much better one probe does than another on the same held-out prompts.

A layer's gain is score(after it) - score(before it); with the stream between its mixer and its MLP it splits exactly:
    post - pre = (mid - pre) [mixer] + (post - mid) [MLP].
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from probes.layerwise.intervals import paired_means, paired_shares
from probes.layerwise.result import LayerwiseResult, Metric

_RESIDUAL = re.compile(r"blocks\.(\d+)\.hook_resid_(pre|mid|post)")
_EMBEDDING = "hook_embed"


@dataclass(frozen=True, eq=False)
class Gain:
    """Paired differences of L probes; positive is better. Units: share of rows (accuracy) or nats (log_loss)."""

    value: Float[np.ndarray, " L"]
    interval: Float[np.ndarray, "L 2"]  # over held-out prompts
    prompt_sum: Float[np.ndarray, "L P"]  # difference summed over the rows of each prompt
    prompt_rows: Float[np.ndarray, " P"]


@dataclass(frozen=True, eq=False)
class LayerGains:
    """total = mixer + mlp; the parts are NaN where resid_mid was not probed."""

    layers: tuple[int, ...]  # absolute layer ids, or positions where the names are not residual hook points
    before: tuple[str, ...]  # what each layer was compared with: a feature, or "chance"
    after: tuple[str, ...]
    total: Gain
    mixer: Gain
    mlp: Gain


def layer_gains(result: LayerwiseResult, metric: Metric = "accuracy", *, level: float = 0.95) -> LayerGains:
    """The gain of every layer over the layer before it, in accuracy or in log-loss (which does not saturate).

    Names "blocks.N.hook_resid_pre | mid | post" are read as the residual stream; other features among them have no
    gain. After layer N: resid_post N, or resid_pre N+1. Before it: resid_pre N, or the nearest earlier point (of
    resid_post N-1, the same tensor, if no layer was left out; else the gain is that of all layers since), or
    hook_embed. The first layer is compared with chance if nothing is before it. Without residual names every feature
    is a layer, in the order given.
    """
    chain = _chain(result.names)
    rows = {name: row for name, row in zip(result.names, result.score(metric), strict=True)}
    rows["chance"] = result.chance_score(metric)
    unknown = np.full(len(result.row), np.nan)

    def gain(ends: list[tuple[str, str]]) -> Gain:
        pairs = [rows[b] - rows[a] if a and b else unknown for a, b in ends]
        return _gain(result, np.stack(pairs), metric, level)

    return LayerGains(
        layers=tuple(step.layer for step in chain),
        before=tuple(step.before for step in chain),
        after=tuple(step.after for step in chain),
        total=gain([(step.before, step.after) for step in chain]),
        mixer=gain([(step.mid and step.before, step.mid) for step in chain]),
        mlp=gain([(step.mid, step.mid and step.after) for step in chain]),
    )


def gain_over(
    result: LayerwiseResult, control: LayerwiseResult, metric: Metric = "accuracy", *, level: float = 0.95
) -> Gain:
    """result - control for every feature of `result`, on the same prompts.

    For random weights, shuffled labels, or a baseline: a control of one feature (embedding, position) is compared with
    every feature, otherwise the names must be the same. ValueError if the two were not held out on the same rows.
    """
    same = result.row.shape == control.row.shape and (result.row == control.row).all()
    if not same or (result.prompt != control.prompt).any():
        raise ValueError(
            f"result and control were held out on different rows ({len(result.row)} and {len(control.row)}); expected "
            "the same split: fit both with the same labels, groups, test_size and seed"
        )
    if len(control.names) > 1 and control.names != result.names:
        raise ValueError(
            f"control has features {control.names[:3]}..., result {result.names[:3]}...; expected the same names, or "
            "one feature in the control"
        )
    return _gain(result, result.score(metric) - control.score(metric), metric, level)


def _gain(result: LayerwiseResult, difference: Float[np.ndarray, "L M"], metric: Metric, level: float) -> Gain:
    sums, rows = result.prompt_sums(difference), result.prompt_rows.astype(np.float64)
    means = sums / rows.mean()  # their plain mean over prompts is the mean over rows
    interval = paired_shares(means, level) if metric == "accuracy" else paired_means(means, level)
    return Gain(difference.mean(1), interval, sums, rows)


@dataclass(frozen=True)
class _Step:
    layer: int
    before: str
    after: str
    mid: str = ""  # "" where it was not probed


def _chain(names: tuple[str, ...]) -> list[_Step]:
    if not any(_RESIDUAL.fullmatch(name) for name in names):
        return [_Step(i, names[i - 1] if i else "chance", name) for i, name in enumerate(names)]
    # entry[n]: the stream as it enters layer n; leaving[n]: as it leaves layer n
    entry: dict[int, str] = {0: _EMBEDDING} if _EMBEDDING in names else {}
    mid: dict[int, str] = {}
    leaving: dict[int, str] = {}
    for part in ("post", "pre", "mid"):
        for name in names:
            match = _RESIDUAL.fullmatch(name)
            if match is None or match[2] != part:
                continue
            layer = int(match[1])
            if part == "mid":
                mid[layer] = name
            elif part == "post":
                leaving[layer] = entry[layer + 1] = name
            else:  # of two names of one tensor, a layer starts from its own resid_pre and ends in its own resid_post
                entry[layer] = name
                leaving.setdefault(layer - 1, name)
    leaving.pop(-1, None)
    steps = []
    for layer in sorted(leaving):
        at = max((n for n in entry if n <= layer), default=None)
        before = "chance" if at is None else entry[at]
        steps.append(_Step(layer, before, leaving[layer], mid.get(layer, "")))
    return steps
