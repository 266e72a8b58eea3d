"""Noise haystacks of tokenizers whose tokens cross line ends: lines follow each other at random, and a joint is encoded
once for each pair of words that meet.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from probes.niah.haystack import Haystack
from probes.niah.seams import AGREE, Run, Side, run_of, weld
from probes.niah.tokens import Encoder

NEAR = 64  # characters of a line's beginning and end whose tokens are tabled; joints that reach further are not kept


class Chain(NamedTuple):
    """Lines drawn one by one. Line i keeps its tokens [skips[i], keeps[i]); its token 0 would be at `bases[i]`."""

    runs: list[Run]
    order: np.ndarray
    ids: np.ndarray
    ends: np.ndarray
    bases: np.ndarray
    skips: np.ndarray
    keeps: np.ndarray

    def left(self, line: int) -> tuple[Side, int]:
        run = self.runs[self.order[line - 1]]
        return Side(run, len(run.text), int(self.skips[line - 1]), int(self.keeps[line - 1])), int(self.bases[line - 1])

    def right(self, line: int) -> tuple[Side, int]:
        return Side(self.runs[self.order[line]], 0, int(self.skips[line]), int(self.keeps[line])), int(self.bases[line])


class _Zones:
    """Tokens round the joints of two words: zone z stands in place of the last left[z] characters of one line and the
    first right[z] ones of the next; left[z] < 0: not encoded yet.
    """

    def __init__(self, count: int) -> None:
        self.left, self.right = np.full(count, -1), np.zeros(count, int)
        self.first, self.last = np.full(count, -1), np.full(count, -1)  # -1: the zone is empty
        self.ids: list[list[int]] = [[]] * count
        self._pairs: set[int] = set()
        self._sorted = np.zeros(0, np.int64)

    def put(self, zone: int, ids: list[int], left: int, right: int) -> None:
        self.left[zone], self.right[zone], self.ids[zone] = left, right, ids
        self.first[zone], self.last[zone] = (ids[0], ids[-1]) if ids else (-1, -1)

    def meet(self, *tokens: int) -> None:
        """Note that these tokens have been neighbours in an encoding."""
        self._pairs.update((a << 32) | b for a, b in pairwise(tokens))

    def met(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Whether each pair of tokens has been neighbours."""
        if len(self._sorted) != len(self._pairs):
            self._sorted = np.sort(np.fromiter(self._pairs, np.int64, len(self._pairs)))
        codes = (before.astype(np.int64) << 32) | after
        at = np.minimum(np.searchsorted(self._sorted, codes), max(0, len(self._sorted) - 1))
        return self._sorted[at] == codes if len(self._sorted) else np.zeros(len(codes), bool)


class DrawnRuns:
    """Lines in any order. A joint is taken over from lines that ended and began with the same words if its tokens can
    stand beside those of these two lines: if these pairs have been neighbours where a window was encoded (`seams`).
    Memory grows with the pairs of words, not with the prompts.
    """

    def __init__(self, encoder: Encoder, haystack: Haystack, runs: list[Run]) -> None:
        self._encoder, self._runs = encoder, runs
        self._counts = np.asarray([len(run.ids) for run in runs])
        self._flat = np.concatenate([run.ids for run in runs])
        self._begins = np.cumsum(self._counts) - self._counts
        words = [line.split() for line in haystack.lines]
        self._reach = [(len(w[-1]) + len(" \n"), len(w[0]) + len(" ")) for w in words]
        lasts, self._last = np.unique([w[-1] for w in words], return_inverse=True)
        firsts, self._first = np.unique([w[0] for w in words], return_inverse=True)
        self._columns = len(firsts)
        self._zones = _Zones(len(lasts) * len(firsts))
        self._keep, self._skip = _boundaries(runs)

    @classmethod
    def of(cls, encoder: Encoder, haystack: Haystack) -> DrawnRuns | None:
        """None if the tokenizer's offsets are no places of tokens."""
        runs = [run_of(encoder, line + "\n") for line in haystack.lines]
        known = [run for run in runs if run is not None and len(run.ids)]
        return cls(encoder, haystack, known) if len(known) == len(runs) else None

    def stretch(self, order: np.ndarray, tokens: int) -> Chain | None:
        """Lines of `order`, `tokens` tokens or all of them but the last; None if two of them do not splice."""
        order = order[: int(np.searchsorted(np.cumsum(self._counts[order]), 1.25 * tokens)) + 4]
        a, b = order[:-1], order[1:]
        zone = self._last[a] * self._columns + self._first[b]
        keep, skip, good = self._known(a, b, zone)
        ids = [self._zones.ids[z] for z in zone.tolist()]
        for i in np.flatnonzero(~good).tolist():
            found = self._weld(int(a[i]), int(b[i]), int(zone[i]))
            if found is None:
                return None
            keep[i], ids[i], skip[i] = found
        skips = np.concatenate([[0], skip[:-1]])
        if (keep - skips < AGREE).any():
            return None
        own, joint = keep - skips, np.asarray([len(tokens) for tokens in ids])
        ends = np.concatenate([[0], np.cumsum(own + joint)])
        flat = np.empty(ends[-1], np.int32)
        flat[_places(ends[:-1], own)] = self._flat[_places(self._begins[a] + skips, own)]
        flat[_places(ends[:-1] + own, joint)] = np.fromiter(chain.from_iterable(ids), np.int32, int(joint.sum()))
        return Chain(self._runs, a, flat, ends, ends[:-1] - skips, skips, keep)

    def _known(self, a: np.ndarray, b: np.ndarray, zone: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens kept of lines `a`, tokens left out of lines `b`, and whether the zones between them may be used."""
        zones = self._zones
        left, right = zones.left[zone], zones.right[zone]
        keep, skip = self._keep[a, left, 0], self._skip[b, right, 0]
        before, after = self._keep[a, left, 1], self._skip[b, right, 1]
        empty = zones.first[zone] < 0
        good = (left >= 0) & (keep >= 0) & (skip >= 0)
        good &= zones.met(before, np.where(empty, after, zones.first[zone]))
        return keep, skip, good & zones.met(np.where(empty, before, zones.last[zone]), after)

    def _weld(self, a: int, b: int, zone: int) -> tuple[int, list[int], int] | None:
        left, right = self._runs[a], self._runs[b]
        found = weld(self._encoder, Side(left, len(left.text), 0, len(left.ids)), "", Side(right, 0, 0, len(right.ids)))
        if found is None:
            return None
        behind = len(left.text) - int(left.ends[found.keep - 1])
        front = int(right.starts[found.skip])
        # a zone's text is that of the two words and nothing else
        if behind <= min(self._reach[a][0], NEAR - 1) and front <= min(self._reach[b][1], NEAR - 1):
            if self._zones.left[zone] < 0:
                self._zones.put(zone, found.ids, behind, front)
            before, after = int(left.ids[found.keep - 1]), int(right.ids[found.skip])
            self._zones.meet(before, *found.ids, after)
        return found.keep, found.ids, found.skip


def _places(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """begins[0], begins[0] + 1, ... lengths[0] of them, then those from begins[1] on, ..."""
    return np.arange(lengths.sum()) + np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)


def _boundaries(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """[line, characters] -> (number, id): the tokens that end so many characters before the line's end and how many
    there are up to them; the tokens that begin behind its first characters. -1 where no token begins or ends.
    """
    keep, skip = np.full((len(runs), NEAR, 2), -1), np.full((len(runs), NEAR, 2), -1)
    for line, run in enumerate(runs):
        n, size = len(run.ids), len(run.text)
        clean = run.starts[1:] >= run.ends[:-1]
        for i in range(n):
            behind, front = size - int(run.ends[i]), int(run.starts[i])
            if i + 1 >= AGREE and behind < NEAR and (i + 1 == n or clean[i]):
                keep[line, behind] = i + 1, run.ids[i]
            if i + AGREE <= n and front < NEAR and (i == 0 or clean[i - 1]) and skip[line, front, 0] < 0:
                skip[line, front] = i, run.ids[i]
    return keep, skip
