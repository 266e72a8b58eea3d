"""The share of the gain that sits in full-attention layers: one statistic, chosen before any result was seen.

    share = sum_{l full} max(g_l, 0) / sum_l max(g_l, 0),    g_l = gain of layer l over the layer before it

A layer that loses counts as no gain: it is neither subtracted nor does it change the denominator. Noise in a layer
without a gain adds its positive part, so without any structure the share tends to the share of full layers, not to 0;
that is what the permutation test compares with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np
from jaxtyping import Bool, Float

from probes.layerwise.gains import Gain, LayerGains, layer_gains
from probes.layerwise.intervals import check_level
from probes.layerwise.resampling import resampled
from probes.layerwise.result import LayerwiseResult, Metric

_BLOCK = 512  # assignments held at once
_TIE = 1e-12  # shares closer than this are one: sums in another order round differently


@dataclass(frozen=True, eq=False)
class ShareOfGain:
    """The share, its interval over held-out prompts, and the test of full against other layers."""

    share: float  # NaN if no layer gains
    # percentile bootstrap over held-out prompts; noise in layers without a gain pulls it as it pulls the share
    interval: Float[np.ndarray, " 2"]
    p_value: float  # one-sided: share of the assignments of "full" whose share of gain is at least as large
    expected: float  # mean share over the assignments
    assignments: int  # how many were compared
    exact: bool  # all of them; then p_value >= 1 / assignments, however large the effect
    layers: tuple[int, ...]  # the layers that count: those whose gain is known
    full: tuple[int, ...]
    metric: str


def share_of_gain(
    result: LayerwiseResult,
    is_full: Sequence[bool] | Bool[np.ndarray, " L"],
    metric: Metric = "accuracy",
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    permutations: int = 10_000,
    seed: int = 0,
) -> ShareOfGain:
    """Tests whether gains concentrate in the layers that `is_full` marks (one entry for each of layer_gains().layers).

    Null: kinds are exchangeable over layers. Every assignment of the same number of "full" labels is compared if there
    are at most `permutations`, else that many seeded ones and the observed one. Depth is not held fixed: where full
    layers lie apart from the others, depth and kind cannot be told apart. Layers of unknown gain are left out. Probe
    what enters the first layer too (resid_pre or hook_embed): without it that layer's gain is over chance, and takes
    credit for what the embedding shows.
    """
    gains = layer_gains(result, metric)
    known, full = _marked(gains, is_full)
    observed = gains.total.value[known]
    share = float(_shares(observed[None], full[None])[0])
    compared = np.concatenate([_shares(observed[None], block) for block in _assignments(full, permutations, seed)])
    layers = tuple(np.asarray(gains.layers)[known].tolist())
    return ShareOfGain(
        share=share,
        interval=_bootstrap(gains.total, known, full, level, resamples, seed),
        p_value=float((compared >= share - _TIE).mean()) if not math.isnan(share) else math.nan,
        expected=float(compared.mean()),
        assignments=len(compared),
        exact=math.comb(len(full), int(full.sum())) <= permutations,
        layers=layers,
        full=tuple(np.asarray(layers)[full].tolist()),
        metric=metric,
    )


def _marked(
    gains: LayerGains, is_full: Sequence[bool] | Bool[np.ndarray, " L"]
) -> tuple[Bool[np.ndarray, " L"], Bool[np.ndarray, " known"]]:
    """Which layers have a known gain, and which of those are full."""
    marked = np.asarray(is_full)
    if marked.shape != (len(gains.layers),) or marked.dtype != np.bool_:
        raise ValueError(
            f"is_full has shape {marked.shape} and dtype {marked.dtype}; expected {len(gains.layers)} booleans, one "
            f"for each of the layers {gains.layers}"
        )
    known = ~np.isnan(gains.total.value)
    full = marked[known]
    if full.all() or not full.any():
        raise ValueError(
            f"is_full marks {int(full.sum())} of the {len(full)} layers with a known gain; expected at least one full "
            "and one other layer: without both the share of gain says nothing"
        )
    return known, full


def _shares(gains: Float[np.ndarray, "#R L"], full: Bool[np.ndarray, "#R L"]) -> Float[np.ndarray, " R"]:
    gained = np.maximum(gains, 0.0)
    whole = gained.sum(1)
    with np.errstate(invalid="ignore"):
        return np.where(whole > 0, (gained * full).sum(1) / whole, np.nan)


def _assignments(full: Bool[np.ndarray, " L"], permutations: int, seed: int) -> Iterator[np.ndarray]:
    """All assignments, or the observed one and `permutations` random ones (so that p is never 0)."""
    count, chosen = len(full), int(full.sum())
    if math.comb(count, chosen) > permutations:
        yield full[None]
        rng = np.random.default_rng(seed)
        for start in range(0, permutations, _BLOCK):
            rows = min(_BLOCK, permutations - start)
            yield rng.permuted(np.tile(full, (rows, 1)), axis=1)
        return
    every = combinations(range(count), chosen)
    while block := list(islice(every, _BLOCK)):
        marks = np.zeros((len(block), count), dtype=bool)
        np.put_along_axis(marks, np.asarray(block), True, axis=1)
        yield marks


def _bootstrap(
    gain: Gain, known: np.ndarray, full: np.ndarray, level: float, resamples: int, seed: int
) -> Float[np.ndarray, " 2"]:
    """One resample of the prompts serves all layers; resamples without any gain are left out."""
    tail = 100 * (1 - check_level(level)) / 2
    sums, rows, prompts = gain.prompt_sum[known], gain.prompt_rows, len(gain.prompt_rows)
    if prompts < 2:
        return np.full(2, np.nan)
    drawn = np.concatenate(
        [
            _shares((draws @ sums.T) / (draws @ rows)[:, None], full[None])
            for draws in resampled(prompts, resamples, seed)
        ]
    )
    return np.full(2, np.nan) if np.isnan(drawn).all() else np.nanpercentile(drawn, [tail, 100 - tail])
