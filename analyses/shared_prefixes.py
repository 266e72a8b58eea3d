"""Which prompts to compute together, and from where on: what they begin with in common is computed once.

One prompt, the trunk, is computed as far as it is needed; the others leave it where they first differ from it, in
batches. A batch starts where its first prompt leaves, so its other prompts repeat what lies between: few large batches
repeat much, many small ones launch much. The cuts that cost least are found exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int

WORTH_SHARING = 0.1
"""Share of the cost that must be saved: a cached token costs a little more than a plain one."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """`order`: row numbers as they are computed; batch (first, last, start) = its places first .. last - 1, from token
    `start` on. `trunk`: the place of the row that is continued; None: every start is 0.
    """

    order: Int[np.ndarray, " N"]
    batches: tuple[tuple[int, int, int], ...]
    trunk: int | None


def whole(n: int, length: int, budget: int) -> Schedule:
    """Every prompt on its own, as many at once as `budget` tokens hold."""
    size = max(1, budget // length)
    batches = tuple((first, min(first + size, n), 0) for first in range(0, n, size))
    return Schedule(np.arange(n), batches, None)


def schedule(ids: Int[np.ndarray, "N T"], latest: int, budget: int, launch: float, align: int = 1) -> Schedule:
    """Shared prefixes, or every prompt whole where they would not save a tenth.

    latest: the first token that is read; prompts leave the trunk there at the latest. budget: tokens of a batch.
    launch: what one forward costs whatever it computes, in tokens. align: starts are multiples of it.
    """
    n, length = ids.shape
    plain = whole(n, length, budget)
    row, shared = common_prefixes(ids)
    shared = np.minimum(shared, latest) // align * align
    order = np.argsort(shared, kind="stable")
    starts = shared[order]
    cuts, cost = _cuts(length - starts, budget, 2 * launch)  # of the trunk and of the batch
    batches = tuple((first, last, int(starts[first])) for first, last in pairwise(cuts))
    if cost + batches[-1][2] > (1 - WORTH_SHARING) * (n * length + launch * len(plain.batches)):
        return plain
    return Schedule(order, batches, int(np.flatnonzero(order == row)[0]))


def _cuts(rest: Int[np.ndarray, " N"], budget: int, launch: float) -> tuple[list[int], float]:
    """Where to cut rows of `rest` tokens (falling) so that sum over batches of rows x longest + launch is least."""
    n = len(rest)
    best, came = np.zeros(n + 1), np.zeros(n + 1, dtype=np.int64)
    for last in range(1, n + 1):
        rows = np.arange(last, 0, -1)
        tokens = rows * rest[:last]
        cost = best[:last] + tokens + launch
        cost[(tokens > budget) & (rows > 1)] = np.inf
        came[last] = int(cost.argmin())
        best[last] = cost[came[last]]
    cuts = [n]
    while cuts[-1]:
        cuts.append(int(came[cuts[-1]]))
    return cuts[::-1], float(best[n])


def common_prefixes(ids: Int[np.ndarray, "N T"]) -> tuple[int, Int[np.ndarray, " N"]]:
    """The row that shares most with the others, and how many leading tokens each row has in common with it."""
    order = sorted(range(len(ids)), key=lambda row: ids[row].astype(">i8").tobytes())
    near = np.array([_common(ids[a], ids[b]) for a, b in pairwise(order)], dtype=np.int64)
    # in this order two rows share the least of what the neighbours between them share
    best, lengths = -1, np.zeros(len(ids), dtype=np.int64)
    for at in range(len(order)):
        ahead = np.minimum.accumulate(near[at:])
        behind = np.minimum.accumulate(near[:at][::-1])[::-1]
        if best < 0 or ahead.sum() + behind.sum() > lengths.sum():
            best, lengths = at, np.concatenate([behind, ahead])
    found = np.full(len(ids), ids.shape[1])
    found[[row for at, row in enumerate(order) if at != best]] = lengths
    return order[best], found


def _common(a: np.ndarray, b: np.ndarray) -> int:
    different = a != b
    return int(different.argmax()) if different.any() else len(a)
