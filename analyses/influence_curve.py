"""Reading a curve of influence over distance: log bins, the flat baseline, where the curve meets it, shares beyond.

Samples are rows (texts), columns distances from 0. Intervals are percentile bootstraps over texts, paired: one resample
of the texts serves every distance, the baseline and all that is derived from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from analyses.bootstrap import interval, resampled_ratios

RESAMPLES = 2000
BLOCK = 512  # distances resampled at a time
PER_OCTAVE = 4
TAIL, TAIL_BLOCKS = 0.25, 16
"""The baseline is read from the last quarter of the distances, in up to 16 blocks."""
SPREADS = 2.0
FIRST_TOKENS = 4  # of a text: softmax models park weight on them, so their influence says nothing of distance
LEAST_BINS = 3
MAD = 1.4826  # standard deviation / median absolute deviation of a normal


def log_bins(count: int, per_octave: int = PER_OCTAVE) -> Int[np.ndarray, " E"]:
    """Edges of bins over distances 0 .. count - 1: single distances first, then `per_octave` bins per doubling.

    What is left at the end joins the last bin unless it is half as wide.
    """
    powers = np.arange(int(per_octave * np.log2(max(count, 2))) + 1) / per_octave
    edges = np.concatenate(([0], np.unique(np.rint(2.0**powers).astype(np.int64))))
    edges = edges[edges < count]
    if len(edges) > 1 and 2 * (count - edges[-1]) < edges[-1] - edges[-2]:
        edges = edges[:-1]
    return np.append(edges, count)


def bin_means(values: Float[np.ndarray, "... T"], edges: Int[np.ndarray, " E"]) -> Float[np.ndarray, "... B"]:
    """Mean over the distances edges[b] .. edges[b + 1] - 1."""
    return np.add.reduceat(values, edges[:-1], axis=-1, dtype=np.float64) / np.diff(edges)


def mean_interval(values: Float[np.ndarray, "N T"], seed: int) -> tuple[np.ndarray, Float[np.ndarray, "T 2"]]:
    """Mean over samples per column, and its 95 % interval."""
    blocks = [resampled(values[:, start : start + BLOCK], seed) for start in range(0, values.shape[1], BLOCK)]
    return np.concatenate([mean for mean, _ in blocks]), np.concatenate([interval(draws) for _, draws in blocks])


def resampled(values: Float[np.ndarray, "N C"], seed: int) -> tuple[np.ndarray, Float[np.ndarray, "R C"]]:
    """Mean over samples per column, and that of RESAMPLES resamples (NaN with fewer than two samples)."""
    columns = np.asarray(values, dtype=np.float64).T
    return resampled_ratios(columns, np.ones(columns.shape[1]), seed, RESAMPLES)


@dataclass(frozen=True, eq=False)
class Baseline:
    """What the mean curve is at large distances. `draws` are those of the bootstrap."""

    value: float
    """Median over blocks of the mean curve at distances `first` and beyond."""
    draws: Float[np.ndarray, " R"]
    spread: float
    """Standard deviation of the blocks' means, by their median absolute deviation."""
    first: int
    block: float
    """Distances in a block."""
    drift: float
    """Median of the nearer half of the blocks / that of the farther half: 1 where the curve is flat."""
    drift_draws: Float[np.ndarray, " R"]


def baseline(norm: Float[np.ndarray, "N T"], seed: int) -> Baseline:
    """The flat end of the mean curve.

    A median, because the first tokens of a text act as sinks and stand out; of blocks' means rather than of distances,
    because influence is skewed over tokens: a mean curve would lie above the median of a flat one.
    """
    first = int(norm.shape[1] * (1 - TAIL))
    length = norm.shape[1] - first
    edges = np.linspace(0, length, min(TAIL_BLOCKS, length) + 1).astype(np.int64)
    blocks, draws = resampled(bin_means(norm[:, first:], edges), seed)
    half = (len(blocks) + 1) // 2
    value = float(np.median(blocks))
    with np.errstate(divide="ignore", invalid="ignore"):  # a curve that is exactly 0 there has no drift
        drift = np.median(blocks[:half]) / np.median(blocks[-half:])
        drifts = np.median(draws[:, :half], axis=1) / np.median(draws[:, -half:], axis=1)
    spread = MAD * float(np.median(np.abs(blocks - value)))
    return Baseline(value, np.median(draws, 1), spread, first, length / len(blocks), float(drift), _finite(drifts))


def excess(
    norm: Float[np.ndarray, "N T"], edges: Int[np.ndarray, " E"], base: Baseline, seed: int
) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, "B 2"]]:
    """Mean of the mean curve over each bin minus the baseline, with its paired interval."""
    mean, draws = resampled(bin_means(norm, edges), seed)
    return mean - base.value, interval(draws - base.draws[:, None])


def meeting(
    norm: Float[np.ndarray, "N T"], edges: Int[np.ndarray, " E"], base: Baseline, seed: int, spreads: float = SPREADS
) -> float:
    """The first distance from which on the curve cannot be told from its baseline; NaN if there is none.

    A stretch of distances touches the baseline if the lower end of its excess is at most `spreads` times what the mean
    of so many distances scatters there, spread * sqrt(block / count). The curve meets the baseline at the start of the
    first bin from which on every bin touches, and every stretch from a bin to where the baseline is read (the latter
    because single bins of few texts say little). Beyond, the curve is at its baseline by definition.
    """
    bins = int(np.searchsorted(edges[:-1], base.first))
    starts, ends = edges[:bins], np.minimum(edges[1 : bins + 1], base.first)
    total = np.concatenate([np.zeros((len(norm), 1)), np.cumsum(norm, axis=1, dtype=np.float64)], axis=1)
    away = np.zeros(bins, bool)
    for last in (ends, np.full(bins, base.first)):
        count = last - starts
        _, draws = resampled((total[:, last] - total[:, starts]) / count, seed)
        low = interval(draws - base.draws[:, None])[:, 0]
        if np.isnan(low).any():
            return float("nan")
        away |= low > spreads * base.spread * np.sqrt(base.block / count)
    start = int(edges[np.flatnonzero(away)[-1] + 1]) if away.any() else 0
    return float(start) if start < base.first else float("nan")


@dataclass(frozen=True, eq=False)
class Shares:
    """Per window w, value and 95 % interval [W, 2]."""

    raw: tuple[np.ndarray, np.ndarray]
    """Sum of the mean curve over d >= w / its whole sum."""
    subtracted: tuple[np.ndarray, np.ndarray]
    """The same of the mean curve minus its baseline; not clipped, so noise does not add up to a share."""
    band: tuple[np.ndarray, np.ndarray]
    """Mean of the mean curve from w to the next window (the end) / baseline - 1."""


def shares(norm: Float[np.ndarray, "N T"], windows: Sequence[int], base: Baseline, seed: int) -> Shares:
    """Shares of the total influence beyond each of the ascending `windows` (all below T)."""
    length = norm.shape[1]
    cumulative = np.concatenate([np.zeros((len(norm), 1)), np.cumsum(norm, axis=1, dtype=np.float64)], axis=1)
    at = np.array([*windows, length])
    sums, draws = resampled(np.concatenate([cumulative[:, -1:], cumulative[:, -1:] - cumulative[:, at]], 1), seed)
    count = np.array([length, *(length - at)])
    with np.errstate(divide="ignore", invalid="ignore"):
        raw, raw_draws = sums[1:-1] / sums[0], draws[:, 1:-1] / draws[:, :1]
        flat, flat_draws = sums - base.value * count, draws - base.draws[:, None] * count
        less, less_draws = flat[1:-1] / flat[0], flat_draws[:, 1:-1] / flat_draws[:, :1]
        width = np.diff(at)
        band = (sums[1:-1] - sums[2:]) / width / base.value - 1
        band_draws = (draws[:, 1:-1] - draws[:, 2:]) / width / base.draws[:, None] - 1
    pairs = ((raw, raw_draws), (less, less_draws), (band, band_draws))
    return Shares(*((_finite(value), interval(_finite(sampled))) for value, sampled in pairs))


def slopes(
    norm: Float[np.ndarray, "N T"], edges: Int[np.ndarray, " E"], windows: Sequence[int], seed: int
) -> tuple[Float[np.ndarray, " W"], Float[np.ndarray, "W 2"]]:
    """d log G / d log d of the mean curve from each window on, with its interval: 0 where it is flat, -k for d^-k.

    Least squares through the bins that begin at w or beyond, without the first FIRST_TOKENS tokens of the texts. NaN
    with fewer than LEAST_BINS bins, and where the curve is exactly 0.
    """
    last = norm.shape[1] - FIRST_TOKENS
    ends = np.append(edges[:-1][edges[:-1] < last], last)
    mean, draws = resampled(bin_means(norm[:, :last], ends), seed)
    at = np.log(np.sqrt((ends[:-1] + 1.0) * ends[1:]))  # of d + 1, so that the last position itself has a place
    found = np.full((len(draws) + 1, len(windows)), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):  # log 0
        logs = np.log(np.concatenate([mean[None], draws]))
        for column, window in enumerate(windows):
            chosen = ends[:-1] >= window
            if chosen.sum() >= LEAST_BINS:
                centred = at[chosen] - at[chosen].mean()
                found[:, column] = _finite(logs[:, chosen] @ centred / (centred @ centred))
    return found[0], interval(found[1:])


def _finite(ratios: np.ndarray) -> np.ndarray:
    """NaN where nothing was divided by."""
    return np.where(np.isfinite(ratios), ratios, np.nan)
