"""When a quantity crosses a mark for good, on checkpoints spaced in log tokens, and its mean over log tokens.

A crossing is sustained: the value is beyond the mark at the checkpoint and at all later ones. Between the last
checkpoint that is not and the first that is, it is placed by a straight line in log tokens; the two checkpoints are
reported beside it, for they are all that was observed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

NEVER, EARLIER, SINGLE = "never", "at or before the first checkpoint", "n/a: fewer than two checkpoints"
UNDEFINED = "undefined at the checkpoint before"


class Crossing(NamedTuple):
    """Tokens. NaN where `status` says why; an empty status is a crossing between two checkpoints."""

    tokens: float
    after: float
    """The last checkpoint before the crossing."""
    by: float
    """The first checkpoint from which on the value stays beyond the mark."""
    status: str


def crossing(values: Float[np.ndarray, " C"], tokens: Float[np.ndarray, " C"], mark: float, upwards: bool) -> Crossing:
    """The sustained crossing of one curve. `tokens` rise and are above 0; NaN values are not beyond any mark."""
    nan = float("nan")
    if len(values) < 2:
        return Crossing(nan, nan, nan, SINGLE)
    place = crossing_tokens(values[None], tokens, mark, upwards)[0]
    if np.isinf(place):
        return Crossing(nan, float(tokens[-1]), nan, NEVER)
    index = int(_first(values[None], mark, upwards)[0])
    if index == 0:
        return Crossing(nan, nan, float(tokens[0]), EARLIER)
    if np.isnan(values[index - 1]):
        return Crossing(nan, float(tokens[index - 1]), float(tokens[index]), UNDEFINED)
    return Crossing(float(place), float(tokens[index - 1]), float(tokens[index]), "")


def crossing_tokens(
    values: Float[np.ndarray, "R C"], tokens: Float[np.ndarray, " C"], mark: float, upwards: bool
) -> Float[np.ndarray, " R"]:
    """Of R curves at once (resamples): inf for never; at a curve's first checkpoint, that checkpoint's tokens.

    Where the value before the crossing is NaN the later checkpoint is given.
    """
    first = _first(values, mark, upwards)
    count, rows = values.shape[1], np.arange(len(values))
    at, before = np.minimum(first, count - 1), np.clip(first - 1, 0, count - 1)
    log = np.log(tokens)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (mark - values[rows, before]) / (values[rows, at] - values[rows, before])
        place = np.exp(log[before] + share * (log[at] - log[before]))
    place = np.where(np.isfinite(place), place, tokens[at])
    return np.where(first == count, np.inf, np.where(first == 0, tokens[0], place))


def log_mean(values: Float[np.ndarray, " C"], tokens: Float[np.ndarray, " C"]) -> float:
    """Area under the curve over log tokens divided by its range: integral of v d log t / log(t_last / t_first).

    NaN with fewer than two checkpoints or an undefined value.
    """
    if len(values) < 2:
        return float("nan")
    log = np.log(tokens)
    return float(np.trapezoid(values, log) / (log[-1] - log[0]))


def _first(values: np.ndarray, mark: float, upwards: bool) -> np.ndarray:
    """Index from which on each row stays beyond the mark; C where it never does."""
    beyond = values >= mark if upwards else values <= mark
    stays = np.logical_and.accumulate(beyond[:, ::-1], axis=1)
    return values.shape[1] - stays.sum(1)
