"""A receptive-field restriction: the last `window` tokens (self included) and the first `sinks` tokens."""

from __future__ import annotations

from typing import NamedTuple


class Restriction(NamedTuple):
    """Token s stays visible to token t iff s <= t and (t - s < window or s < sinks)."""

    window: int
    sinks: int = 0
