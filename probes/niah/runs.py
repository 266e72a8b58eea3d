"""Haystacks of tokenizers whose tokens cross line ends: true token numbers and places of line ends.

Documents and repeated sentences are one text, encoded once, of which every prompt takes a slice. (Noise lines follow
each other at random: `drawn`.)
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from probes.niah.haystack import Haystack
from probes.niah.seams import AGREE, Run, Side, run_of, weld
from probes.niah.tokens import Encoder

BLOCK = 8  # lines encoded at once


class Stretch(Protocol):
    """Haystack lines in the order of one prompt, encoded. `ends[n]`: tokens of the first n lines."""

    @property
    def ids(self) -> np.ndarray: ...
    @property
    def ends(self) -> np.ndarray: ...

    def left(self, line: int) -> tuple[Side, int]:
        """The text before `line`, and the place in `ids` of its run's token 0."""

    def right(self, line: int) -> tuple[Side, int]:
        """The text from `line` on, and the place in `ids` of its run's token 0."""


class Slice(NamedTuple):
    """Lines of one run from line `first` on."""

    run: Run
    chars: np.ndarray  # where each line of the run begins
    first: int
    ends: np.ndarray

    @property
    def ids(self) -> np.ndarray:
        return self.run.ids

    def left(self, line: int) -> tuple[Side, int]:
        return Side(self.run, int(self.chars[self.first + line]), 0, len(self.ids)), 0

    def right(self, line: int) -> tuple[Side, int]:
        return Side(self.run, int(self.chars[self.first + line]), 0, len(self.ids)), 0


class CyclicRuns:
    """All lines of a haystack in their order and round again, `tokens` beyond the last start."""

    def __init__(self, run: Run, lines: Haystack, count: int) -> None:
        n = len(lines.lines)
        lengths = np.asarray([len(line) + 1 for line in lines.lines])
        self._run = run
        self._chars = np.concatenate([[0], np.cumsum(lengths[np.arange(count) % n])])
        self._tokens = np.searchsorted(run.starts, self._chars)

    @classmethod
    def of(cls, encoder: Encoder, haystack: Haystack, tokens: int) -> CyclicRuns | None:
        """None if blocks of lines do not splice."""
        n, count, short, mean = len(haystack.lines), 0, tokens, float(haystack.counts.mean())
        pieces: list[Run] = []
        while short > 0:
            aim = count + max(BLOCK, n - count, int(1.02 * short / mean))
            while count < aim:
                text = "".join(haystack.lines[i % n] + "\n" for i in range(count, count + BLOCK))
                piece = run_of(encoder, text)
                if piece is None:
                    return None
                pieces.append(piece)
                count += BLOCK
            run = _joined(encoder, pieces)
            if run is None:
                return None
            runs = cls(run, haystack, count)
            short, mean = int(runs._tokens[n] + tokens - runs._tokens[-1]), len(run.ids) / count
        return runs

    def stretch(self, order: np.ndarray, tokens: int) -> Slice | None:
        """The lines from order[0] on, as far as they are needed."""
        first = int(order[0])
        last = int(np.searchsorted(self._tokens, self._tokens[first] + tokens)) + 2
        ends = self._tokens[first : min(last, first + len(order) + 1)]
        return Slice(self._run, self._chars, first, ends - ends[0])


def _joined(encoder: Encoder, pieces: list[Run]) -> Run | None:
    """The encoding of all texts together; None if two of them do not splice."""
    ids, starts, ends = [], [], []
    skip = at = 0
    for i, piece in enumerate(pieces):
        seam = None
        keep = len(piece.ids)
        if i + 1 < len(pieces):
            seam = weld(
                encoder, Side(piece, len(piece.text), skip, keep), "", Side(pieces[i + 1], 0, 0, len(pieces[i + 1].ids))
            )
            if seam is None or seam.keep - skip < AGREE:
                return None
            keep = seam.keep
        ids.append(piece.ids[skip:keep])
        starts.append(piece.starts[skip:keep] + at)
        ends.append(piece.ends[skip:keep] + at)
        at += len(piece.text)
        if seam is not None:
            places = np.asarray(seam.offsets, np.int64).reshape(-1, 2) + at
            ids.append(np.asarray(seam.ids, np.int32))
            starts.append(places[:, 0])
            ends.append(places[:, 1])
            skip = seam.skip
    text = "".join(piece.text for piece in pieces)
    return Run(text, np.concatenate(ids), np.concatenate(starts), np.concatenate(ends))
