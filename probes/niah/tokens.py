"""The tokenizer as the needle builder sees it: ids without special tokens, character offsets that can be trusted,
lines in context.

A line is encoded behind a fixed first line, ids(anchor + line) minus ids(anchor): a tokenizer that puts a space in
front of a text's first word (SentencePiece's dummy prefix) then gives the ids the line has inside a text.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

Span = tuple[int, int]
ANCHOR = "A line.\n"


class Tokenizer(Protocol):
    """What the builder needs of a tokenizer. `encode` adds no special tokens (a leading BOS is removed)."""

    bos_id: int | None
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]: ...


class Piece(NamedTuple):
    """A line encoded in context. Offsets are in characters of the line; `clean` is False if the anchor's tokens
    changed.
    """

    ids: np.ndarray
    offsets: list[Span]
    clean: bool


def token_span(offsets: Sequence[Span], start: int, end: int) -> Span:
    """Tokens [i, j) that touch characters [start, end): a token shared with a neighbour counts. (0, 0) if none does."""
    inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def shift(span: Span, by: int) -> Span:
    """The span moved by `by`."""
    return span[0] + by, span[1] + by


def digits_held(offsets: Sequence[Span], values: Sequence[Span]) -> tuple[int, ...]:
    """Characters of the values held by each token from the first value's first token to the last value's last one."""
    start, end = token_span(offsets, *values[0])[0], token_span(offsets, *values[-1])[1]
    return tuple(sum(max(0, min(b, e) - max(a, s)) for s, e in values) for a, b in offsets[start:end])


class Encoder:
    """A tokenizer without its special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.bos_id = tokenizer.bos_id
        self.anchor = self.encode(ANCHOR)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; a BOS that the tokenizer put in front by itself is removed."""
        ids = list(self.tokenizer.encode(text))
        return ids[self._leading_bos(ids) :]

    def _leading_bos(self, ids: list[int]) -> int:
        n = 0
        while self.bos_id is not None and n < len(ids) and ids[n] == self.bos_id:
            n += 1
        return n

    def with_offsets(self, text: str, ranges: Sequence[Span] | None = None) -> tuple[list[int], list[Span]]:
        """Ids and character offsets. Missing or zero-width offsets (Llama 3's (0, 0), (3, 3), ...) are rebuilt by
        decoding.

        `ranges` (characters) are the only places that are then rebuilt; other tokens keep the empty offset (0, 0).
        """
        try:
            ids, offsets = self.tokenizer.encode_with_offsets(text)
        except NotImplementedError:
            ids, offsets = self.encode(text), []
        skip = self._leading_bos(list(ids))
        ids, offsets = list(ids)[skip:], [(int(a), int(b)) for a, b in offsets][skip:]
        if len(offsets) != len(ids) or 2 * sum(b > a for a, b in offsets) < len(ids):
            offsets = self._offsets_by_decoding(ids, text, ranges or ((0, len(text)),))
        return ids, offsets

    def _offsets_by_decoding(self, ids: list[int], text: str, ranges: Sequence[Span]) -> list[Span]:
        """Token i covers what decode(ids[:i+1]) has beyond decode(ids[:i]); exact wherever decode(encode(text)) is
        the text.

        A decoder that drops the first space only shifts all offsets. Cost: one decoding of a prefix per token in
        `ranges`.
        """
        whole = self.tokenizer.decode(ids)
        shift = len(text) - len(whole)
        if not text.endswith(whole):
            raise ValueError(
                f"the tokenizer gives no usable character offsets and decode(encode(text)) is {whole[-60:]!r}, not "
                f"the text "
                f"{text[-60:]!r}, so the value's tokens cannot be located; give encode_with_offsets real offsets"
            )

        def end(n: int) -> int:  # characters completed by the first n tokens
            return len(self.tokenizer.decode(ids[:n]).rstrip("\ufffd")) + shift if n else 0

        offsets: list[Span] = [(0, 0)] * len(ids)
        for start, stop in ranges:
            i = bisect.bisect_left(range(len(ids)), start, key=end)
            i -= i > 0 and end(i) > start
            at = end(i)
            while i < len(ids) and at < stop:
                # a token that completes no character shares the offset of the one it belongs to, as byte-level
                # tokenizers report it
                done = end(i + 1)
                offsets[i] = (at, max(done, at + 1))
                i, at = i + 1, done
        return offsets

    def line(self, text: str) -> Piece:
        """Ids of `text` as a following line of a longer text, with offsets relative to it."""
        ids, offsets = self.with_offsets(ANCHOR + text)
        k, shift = len(self.anchor), len(ANCHOR)
        return Piece(
            np.asarray(ids[k:], np.int32), [(a - shift, b - shift) for a, b in offsets[k:]], ids[:k] == self.anchor
        )

    def line_ids(self, text: str) -> tuple[np.ndarray, bool]:
        """`line` without offsets: (ids, clean)."""
        ids = self.encode(ANCHOR + text)
        k = len(self.anchor)
        return np.asarray(ids[k:], np.int32), ids[:k] == self.anchor

    def require_value(self, ids: Sequence[int], value: str) -> None:
        """Refuse a value that its tokens do not spell (unknown token, or offsets that lie). White space is not
        compared.
        """
        spelled = self.tokenizer.decode(list(ids))
        if "".join(value.split()) not in "".join(spelled.split()):
            raise ValueError(
                f"the tokens {list(ids)} of the value {value!r} decode to {spelled!r}, so a model could not be "
                f"asked for it; choose "
                f"values this tokenizer can spell, or mend encode_with_offsets"
            )

    def line_count(self, text: str) -> int:
        """How many tokens the line adds to a text; an estimate where tokens cross line ends."""
        return len(self.encode(ANCHOR + text)) - len(self.anchor)

    def bos(self, policy: bool | None) -> tuple[int, ...]:
        """The ids in front of a prompt: (bos_id,) or (). None = a BOS exactly if the tokenizer has one."""
        if policy and self.bos_id is None:
            raise ValueError("bos=True, but the tokenizer's bos_id is None; pass bos=None or bos=False")
        return () if self.bos_id is None or policy is False else (self.bos_id,)
