"""Tokens round a joint of two texts whose tokens are known: only a window is encoded again, and spliced in where both
encodings agree.

    left run  ... l4 l5 l6 | r0 r1 r2 ... right run          keep l0..l4, take w5 w6 w7 of the window, go on with r2
    window        w4 w5 w6   w7 w8 w9                        w3 w4 == l3 l4 and w8 w9 == r2 r3, in ids and in characters

For BPE without a pre-tokenizer one shared token on each side proves that the result is the encoding of the whole text:
two encodings that end and begin with the same token join into one (corollary III of github/rust-gems, crates/bpe).
AGREE = 2 shared tokens are asked for; other tokenizers are held to the encoding of whole texts by the builder's
`verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from probes.niah.tokens import Encoder, Span

AGREE = 2  # tokens in a row that both encodings share where they are spliced
REACHES = (48, 192, 768)  # characters of context on each side of the joint, tried in turn


class Run(NamedTuple):
    """A text with its tokens; `starts` and `ends` are characters, never decreasing."""

    text: str
    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Side(NamedTuple):
    """One side of a joint: `run` cut at character `at`, of which only the tokens [low, high) may be shared."""

    run: Run
    at: int
    low: int
    high: int


class Weld(NamedTuple):
    """What goes between two runs: left tokens [.., keep), `ids`, right tokens [skip, ..). Offsets are in characters
    from the joint on.
    """

    keep: int
    ids: list[int]
    offsets: list[Span]
    skip: int


def run_of(encoder: Encoder, text: str) -> Run | None:
    """The encoding of `text` as a run; None if its offsets go backwards, so that nothing can be found by them."""
    ids, offsets = encoder.with_offsets(text)
    places = np.asarray(offsets, np.int64).reshape(-1, 2)
    if (np.diff(places, axis=0) < 0).any():
        return None
    return Run(text, np.asarray(ids, np.int32), places[:, 0].copy(), places[:, 1].copy())


def weld(encoder: Encoder, left: Side | None, text: str, right: Side | None) -> Weld | None:
    """Tokens of `text` between two runs (None: the prompt begins or ends there); None if the encodings never agree."""
    for reach in REACHES:
        before = left.run.text[max(0, left.at - reach) : left.at] if left else ""
        after = right.run.text[right.at : right.at + reach] if right else ""
        ids, offsets = encoder.with_offsets(before + text + after)
        offsets = [(a - len(before), b - len(before)) for a, b in offsets]
        head = _agreed_before(left, ids, offsets, len(before)) if left else (0, 0)
        tail = _agreed_after(right, ids, offsets, len(text), len(after)) if right else (len(ids), 0)
        if head and tail and head[0] <= tail[0]:
            return Weld(head[1], ids[head[0] : tail[0]], offsets[head[0] : tail[0]], tail[1])
        if (not left or len(before) < reach) and (not right or len(after) < reach):
            break
    return None


def _agreed_before(side: Side, ids: list[int], offsets: Sequence[Span], reach: int) -> tuple[int, int] | None:
    """(window token, run token) nearest to the joint in front of which AGREE tokens are the same."""
    run, at = side.run, side.at
    low = max(int(np.searchsorted(run.starts, at - reach)), side.low)
    high = min(int(np.searchsorted(run.ends, at, side="right")), side.high)
    own = run.ids[low:high].tolist()
    places = list(zip((run.starts[low:high] - at).tolist(), (run.ends[low:high] - at).tolist(), strict=True))
    last = {end: j for j, (_, end) in enumerate(offsets) if end <= 0}
    for i in range(len(own) - 1, AGREE - 2, -1):
        j = last.get(places[i][1])
        if (
            j is not None
            and j + 1 >= AGREE
            and (low + i + 1 == len(run.ids) or run.starts[low + i + 1] - at >= places[i][1])  # no character parted
            and (j + 1 == len(offsets) or offsets[j + 1][0] >= offsets[j][1])
            and all(own[i - k] == ids[j - k] and places[i - k] == tuple(offsets[j - k]) for k in range(AGREE))
        ):
            return j + 1, low + i + 1
    return None


def _agreed_after(
    side: Side, ids: list[int], offsets: Sequence[Span], joint: int, reach: int
) -> tuple[int, int] | None:
    """(window token, run token) nearest to the joint from which on AGREE tokens are the same."""
    run, by = side.run, joint - side.at
    low = max(int(np.searchsorted(run.starts, side.at)), side.low)
    high = min(int(np.searchsorted(run.ends, side.at + reach, side="right")), side.high)
    own = run.ids[low:high].tolist()
    places = list(zip((run.starts[low:high] + by).tolist(), (run.ends[low:high] + by).tolist(), strict=True))
    first: dict[int, int] = {}
    for j in range(len(offsets) - 1, -1, -1):
        if offsets[j][0] < joint:
            break
        first[offsets[j][0]] = j
    for i in range(len(own) - AGREE + 1):
        j = first.get(places[i][0], -1)
        if (
            0 <= j <= len(ids) - AGREE
            and (low + i == 0 or run.ends[low + i - 1] + by <= places[i][0])
            and (j == 0 or offsets[j - 1][1] <= offsets[j][0])
            and all(own[i + k] == ids[j + k] and places[i + k] == tuple(offsets[j + k]) for k in range(AGREE))
        ):
            return j, low + i
    return None
