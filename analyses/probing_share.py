"""How much more of the gain sits in full layers than the same architecture untrained already shows.

share(trained) - share(random weights), share as in probes.layerwise.share_of_gain; both were probed on the same
held-out prompts, so one resample of the prompts serves both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from probes.layerwise import LayerwiseResult, layer_gains
from probes.layerwise.resampling import resampled
from probes.layerwise.result import Metric

RESAMPLES = 10_000


class ShareDifference(NamedTuple):
    """NaN where one of the two has no gain at all; the interval is a 95 % percentile bootstrap over prompts."""

    value: float
    interval: Float[np.ndarray, " 2"]


def share_difference(
    result: LayerwiseResult, control: LayerwiseResult, is_full: Bool[np.ndarray, " L"], metric: Metric, seed: int
) -> ShareDifference:
    """The difference over the layers whose gain is known in both. Resamples without any gain are left out."""
    gains = [layer_gains(found, metric).total for found in (result, control)]
    known = ~np.isnan(gains[0].value + gains[1].value)
    full, rows = np.asarray(is_full)[known], gains[0].prompt_rows
    observed = [_share(gain.value[None, known], full) for gain in gains]
    found = []
    for draws in resampled(len(rows), RESAMPLES, seed):
        a, b = (_share((draws @ gain.prompt_sum[known].T) / (draws @ rows)[:, None], full) for gain in gains)
        found.append(a - b)
    drawn = np.concatenate(found)
    value = float((observed[0] - observed[1])[0])
    unknown = np.isnan(value) or np.isnan(drawn).all() or len(rows) < 2
    return ShareDifference(value, np.full(2, np.nan) if unknown else np.nanpercentile(drawn, [2.5, 97.5]))


def _share(gains: Float[np.ndarray, "R L"], full: Bool[np.ndarray, " L"]) -> Float[np.ndarray, " R"]:
    gained = np.maximum(gains, 0.0)
    whole = gained.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, gained[:, full].sum(1) / whole, np.nan)
