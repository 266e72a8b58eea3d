"""Bootstrap draws over prompts: the same for every statistic of one seed, so that differences of two are paired."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

_BLOCK = 512  # draws at once
_KEPT = 64e6  # bytes; drawing takes far longer than what is then done with the draws


def resampled(prompts: int, count: int, seed: int) -> Iterator[Int[np.ndarray, "R P"]]:
    """`count` resamples of `prompts` prompts with replacement, in blocks: how often each prompt was drawn."""
    return iter(_kept(prompts, count, seed)) if 2 * prompts * count <= _KEPT else _drawn(prompts, count, seed)


@functools.lru_cache(maxsize=2)
def _kept(prompts: int, count: int, seed: int) -> tuple[Int[np.ndarray, "R P"], ...]:
    return tuple(_drawn(prompts, count, seed))


def _drawn(prompts: int, count: int, seed: int) -> Iterator[Int[np.ndarray, "R P"]]:
    rng, shares = np.random.default_rng(seed), np.full(prompts, 1 / prompts)
    for start in range(0, count, _BLOCK):
        yield rng.multinomial(prompts, shares, size=min(_BLOCK, count - start)).astype(np.int16)
