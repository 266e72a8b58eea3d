"""Filler lines of an exact number of tokens: what is left between the last whole haystack line and the requested
length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from probes.niah.tokens import Encoder

_SPEECH = (
    "and so it goes on and on as it did in the old days when we had no need of a map and the road was long but we all "
    "came to the end of it by and by"
)
_ENDINGS = (".", "", "!", " a", " a b", " I", " x.", " no!", " a b c")
_BACKTRACK = 12


class Filler:
    """Lines by token count, for one tokenizer."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._table: dict[int, str] = {}
        self._found: dict[tuple[str, int, int], tuple[str, ...] | None] = {}
        words = _SPEECH.split()
        for n in range(1, len(words) + 1):
            for ending in _ENDINGS:
                line = " ".join(words[:n]) + ending
                self._table.setdefault(encoder.line_count(line + "\n"), line)

    def lines(self, next_line: str, need: int, variant: int = 0) -> tuple[str, ...] | None:
        """At most two lines that add exactly `need` tokens: `next_line` cut short, a stock line, or both; None if
        none fit. `variant`: that many fits are passed over.
        """
        key = next_line, need, variant
        if key not in self._found:
            if len(self._found) > 50_000:  # bounds memory on long streams
                self._found.clear()
            self._found[key] = next(islice(self._fits(next_line, need), variant, None), None)
        return self._found[key]

    def _fits(self, line: str, need: int) -> Iterator[tuple[str, ...]]:
        cuts = _cut_points(line)
        low, high = 0, len(cuts)  # the number of cuts whose prefix takes at most `need` tokens
        while low < high:
            middle = (low + high) // 2
            if self._count(line[: cuts[middle]]) <= need:
                low = middle + 1
            else:
                high = middle
        for at in reversed(cuts[max(0, low - _BACKTRACK) : low]):
            left = need - self._count(line[:at])
            if left == 0:
                yield (line[:at],)
            elif left in self._table:
                yield (line[:at], self._table[left])
        if need in self._table:
            yield (self._table[need],)

    def _count(self, line: str) -> int:
        return self._encoder.line_count(line + "\n")


def _cut_points(line: str) -> list[int]:
    """Ends of words; every character of runs longer than 24, such as scripts written without spaces. The whole line
    is no cut.
    """
    points: list[int] = []
    for match in re.finditer(r"\S+", line):
        start, end = match.span()
        points.extend(range(start + 1, end + 1) if end - start > 24 else [end])
    return [p for p in points if p < len(line)]
