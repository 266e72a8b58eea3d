"""Repeat-copy loss: what a model loses on the second occurrence of a rare n-gram, by the gap to the first.

    loss(gap) = mean over t of -log p(x_t | x_<t),   x_{t-k..t-k+n-1} = x_{s-k..s-k+n-1},   gap = t - s

Retrieval in natural text, without prompts and without an evaluator: the tokens after the first of a repeated n-gram can
be copied from `gap` tokens back (induction: Olsson et al. 2022, arXiv:2209.11895, there on random repeats). The loss of
the same tokens at their first occurrence, where nothing can be copied, is the control.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

Ngram = tuple[int, ...]


class Repeats(NamedTuple):
    """Tokens to be copied: indices into the document's tokens, in increasing order of `second`."""

    second: Int[np.ndarray, " N"]
    first: Int[np.ndarray, " N"]

    @property
    def gap(self) -> Int[np.ndarray, " N"]:
        """Tokens from the first occurrence to the second. The position that predicts it lies one before it, so that
        a window of `gap` tokens, self included, still shows it the first occurrence, and one of gap - 1 does not."""
        return self.second - self.first


def document_counts(documents: Iterable[Sequence[int]], n: int) -> Counter[Ngram]:
    """In how many of the documents each n-gram occurs: rarity that does not depend on the repeat itself."""
    counts: Counter[Ngram] = Counter()
    for ids in documents:
        counts.update(set(_ngrams(ids, n)))
    return counts


def find(ids: Sequence[int], n: int = 4, counts: Mapping[Ngram, int] | None = None, most_documents: int = 1) -> Repeats:
    """The tokens after the first of each rare n-gram's second occurrence that have no nearer copy.

    Rare: in at most `most_documents` of the documents that `counts` was made from (None: every n-gram counts as rare).
    Occurrences do not overlap; of a longer repeat, n-grams are taken from its start, one after the other; a third
    occurrence is not scored. A token is left out if the pair (token before it, it) occurs again between the two, so
    that induction has nothing nearer to copy from and `gap` is the distance. Raises ValueError for n < 2.
    """
    if n < 2:
        raise ValueError(f"n is {n}; expected at least 2 tokens, the first of which is the cue")
    latest = _latest_pair(ids)
    starts: dict[Ngram, list[int]] = {}
    second: list[int] = []
    first: list[int] = []
    free = 0  # the first token that no n-gram has taken
    for start, ngram in enumerate(_ngrams(ids, n)):
        seen = starts.setdefault(ngram, [])
        rare = counts is None or counts.get(ngram, 0) <= most_documents
        if len(seen) == 1 and start - seen[0] >= n and start >= free and rare:
            steps = [k for k in range(1, n) if latest[start + k] == seen[0] + k]
            second += [start + k for k in steps]
            first += [seen[0] + k for k in steps]
            free = start + n
        seen.append(start)
    return Repeats(np.array(second, dtype=np.int64), np.array(first, dtype=np.int64))


def gap_bins(longest: int) -> Int[np.ndarray, " G"]:
    """Edges below which the bins of gaps lie: powers of two from 2 up to the last one below `longest` tokens.

    A bin holds the gaps above its edge, up to the next one, so that a window of w = an edge shows none of them.
    """
    return 2 ** np.arange(1, max(2, int(np.ceil(np.log2(max(longest, 2))))), dtype=np.int64)


def by_gap(
    losses: Float[np.ndarray, " T"], repeats: Repeats, edges: Int[np.ndarray, " G"]
) -> tuple[Float[np.ndarray, " G"], Float[np.ndarray, " G"], Int[np.ndarray, " G"]]:
    """Sums of `losses` (nats; index t predicts token t) at second and at first occurrences, and tokens, of each bin.

    Edges as in gap_bins; the last bin has no end, gaps up to the first edge are left out.
    """
    index = np.searchsorted(edges, repeats.gap, side="left") - 1
    kept = index >= 0
    sums = [
        np.bincount(index[kept], weights=losses[where[kept]], minlength=len(edges))
        for where in (repeats.second, repeats.first)
    ]
    return sums[0], sums[1], np.bincount(index[kept], minlength=len(edges))


def _ngrams(ids: Sequence[int], n: int) -> list[Ngram]:
    ids = [int(token) for token in ids]
    return list(zip(*(ids[k:] for k in range(n)), strict=False))


def _latest_pair(ids: Sequence[int]) -> list[int]:
    """For each index t, the last earlier index at which the pair (x_{t-1}, x_t) ended; -1 without one."""
    at: dict[tuple[int, int], int] = {}
    found = [-1] * len(ids)
    for t in range(1, len(ids)):
        pair = (int(ids[t - 1]), int(ids[t]))
        found[t] = at.get(pair, -1)
        at[pair] = t
    return found
