"""Needles put into the token ids of a training stream, in microseconds: [BOS] announcement, stream .. needle ..
stream, question VALUE.

The sentences are encoded once and kept: when no token of the vocabulary holds a digit beside anything else, a
sentence is its key's ids, cached, with the digits' ids in between; otherwise sentences are encoded per (key, value).
The stream's own ids are kept as they are, so decoding gives the text, while encoding that text anew may differ where
the stream was cut.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from probes.niah.sample import NIAHSample, Span
from probes.niah.tokens import Encoder, Tokenizer, token_span
from probes.niah.wording import Filled, Template, draw_key, draw_number, fill

REACH = 48  # tokens searched on each side of the requested place for a line end
MAX_CACHED = 40_000  # sentences; two for each of the 16,129 word keys fit
_ANY_KEY = "amber-falcon"


class _Sentence(NamedTuple):
    """An encoded sentence; spans are tokens of `ids`, the value's and the key's."""

    ids: np.ndarray
    value: Span
    key: Span
    digits: tuple[int, ...]


class Inserter:
    """Makes needle sequences of one tokenizer and template; keeps what it has encoded. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template: Template | None = None, bos: bool | None = None) -> None:
        self.tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self.template = template or Template()
        head = self._encoder.encode(self.template.announce + "\n")
        self._head = np.asarray([*self._encoder.bos(bos), *head], np.int32)
        plain = self._encoder.encode("a")
        broken = self._encoder.encode("a\n")
        self._newline = np.asarray(broken[len(plain) :] if broken[: len(plain)] == plain else [], np.int32)
        self._ends_line, self._whole, self._digit_ids = self._scan_vocabulary()
        self._cache: dict[tuple[str, ...], _Sentence] = {}

    def _scan_vocabulary(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Per id: ends a line, is made of whole characters; and the ids of 0..9 if digits always stand alone."""
        tokenizer = self._encoder.tokenizer
        texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
        ends = np.asarray([text.endswith("\n") for text in texts])
        whole = np.asarray(["\ufffd" not in text for text in texts])
        holders = [i for i, text in enumerate(texts) if any(c in "0123456789" for c in text)]
        if sorted(texts[i] for i in holders) != list("0123456789"):
            return ends, whole, None
        ids = np.zeros(10, np.int32)
        for i in holders:
            ids[int(texts[i])] = i
        probe = self._encode(fill(self.template.needle, _ANY_KEY, ("0123456789",)), "\n")
        alone = np.array_equal(probe.ids[slice(*probe.value)], ids)
        return ends, whole, ids if alone else None

    def _encode(self, filled: Filled, end: str) -> _Sentence:
        ids, offsets, clean = self._encoder.line(filled.text + end)
        if not clean:  # the line's first token reaches back over the line end: take the line as a text of its own
            own, offsets = self._encoder.with_offsets(filled.text + end)
            ids = np.asarray(own, np.int32)
        value, key = token_span(offsets, *filled.values[0]), token_span(offsets, *filled.key)
        start, stop = filled.values[0]
        return _Sentence(ids, value, key, tuple(min(b, stop) - max(a, start) for a, b in offsets[slice(*value)]))

    def _sentence(self, kind: str, key: str, value: str) -> _Sentence:
        """The needle ("needle") or the question ("question") with this key and value."""
        digit_ids = self._digit_ids if value.isascii() and value.isdigit() else None
        at = (kind, key, str(len(value))) if digit_ids is not None else (kind, key, "=" + value)
        found = self._cache.get(at)
        if found is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            found = self._encode(fill(getattr(self.template, kind), key, (value,)), "\n" if kind == "needle" else "")
            self._encoder.require_value(found.ids[slice(*found.value)].tolist(), value)
            if kind == "question" and found.value[1] != len(found.ids):
                raise ValueError(
                    f"tokens follow the answer {value!r} of the question; encode() must add no special tokens"
                )
            self._cache[at] = found
        if digit_ids is not None:
            ids = found.ids.copy()
            ids[slice(*found.value)] = digit_ids[np.frombuffer(value.encode(), np.uint8) - 48]
            return found._replace(ids=ids)
        return found

    def __call__(
        self,
        ids_haystack: Int[np.ndarray, "S"],
        rng: np.random.Generator,
        length: int,
        *,
        depth: float | None = None,
        key: str | None = None,
        value: str | None = None,
    ) -> NIAHSample:
        """See `insert`."""
        drawn = float(rng.random())
        depth = drawn if depth is None else depth
        key = draw_key(rng, "words") if key is None else key
        value = draw_number(rng, 7) if value is None else value
        needle, question = self._sentence("needle", key, value), self._sentence("question", key, value)
        room = length - len(self._head) - len(needle.ids) - len(question.ids)
        self._check(length, room, len(ids_haystack), depth)
        hay = ids_haystack[:room]
        place = self._place(hay, round(depth * room))
        line_before = place == 0 or bool(self._ends_line[hay[place - 1]])
        line_last = place == room or bool(self._ends_line[hay[-1]])
        breaks = (self._newline[: 0 if line_before else None], self._newline[: 0 if line_last else None])
        skip = len(breaks[0]) + len(breaks[1])  # room for them comes off the front of the haystack
        pieces = (
            self._head,
            hay[min(skip, place) : place],
            breaks[0],
            needle.ids,
            hay[max(skip, place) :],
            breaks[1],
            question.ids,
        )
        ids = np.concatenate(pieces, dtype=np.int32, casting="unsafe")
        return _sample(ids, needle, question, sum(map(len, pieces[:3])), depth, key, value)

    def _check(self, length: int, room: int, given: int, depth: float) -> None:
        least = 2 * len(self._newline) + 1
        if room < least or given < room or not 0.0 <= depth <= 1.0:
            raise ValueError(
                f"cannot insert a needle: length {length} leaves room for {room} tokens of haystack, {given} were "
                f"given, depth is {depth}; expected room for at least {least}, a haystack of at least that room "
                "(pass `length` ids) and a depth in [0, 1]"
            )

    def _place(self, hay: np.ndarray, wanted: int) -> int:
        """The line end nearest to `wanted` within REACH tokens, else the nearest place not inside a character."""
        low, high = max(0, wanted - REACH), min(len(hay), wanted + REACH)
        near = hay[max(0, low - 1) : high]
        places = np.flatnonzero(self._ends_line[near]) + max(0, low - 1) + 1
        if low == 0:
            places = np.append(places, 0)
        if len(places) == 0:
            whole = self._whole[hay]
            places = np.append(np.flatnonzero(whole[:-1] & whole[1:]) + 1, (0, len(hay)))
        place = int(places[np.abs(places - wanted).argmin()])
        # a place this near to the front would lose all before it to the line breaks
        return place if place > 2 * len(self._newline) else 0


def _sample(
    ids: np.ndarray, needle: _Sentence, question: _Sentence, at: int, depth: float, key: str, value: str
) -> NIAHSample:
    value_span = (needle.value[0] + at, needle.value[1] + at)
    answer = (len(ids) - question.value[1] + question.value[0], len(ids))
    return NIAHSample(
        input_ids=ids,
        value_span=value_span,
        answer_span=answer,
        key_span=(needle.key[0] + at, needle.key[1] + at),
        depth=value_span[0] / len(ids),
        depth_requested=depth,
        key=key,
        value=value,
        label=-1,
        index=-1,
        values=(value,),
        value_spans=(value_span,),
        answer_spans=(answer,),
        answer_digits=question.digits,
        distractors=(),
        probe=answer[0] - 1,
    )


_DEFAULT = Template()
_inserters: list[Inserter] = []


def insert(
    ids_haystack: Int[np.ndarray, "S"],
    tokenizer: Tokenizer,
    rng: np.random.Generator,
    length: int,
    *,
    depth: float | None = None,
    key: str | None = None,
    value: str | None = None,
    template: Template | None = None,
) -> NIAHSample:
    """A needle sequence of exactly `length` ids out of at least that many ids of a token stream.

    Key, 7-digit value and depth are drawn from `rng` unless given (always one draw for the depth). The needle stands
    on a line of its own at a line end near depth * haystack; if there is none near, a line is broken between two
    characters. Special ids inside the stream (document separators) stay. ValueError if the stream or the length is
    too short.
    """
    wanted = _DEFAULT if template is None else template
    for found in _inserters:
        if found.tokenizer is tokenizer and found.template == wanted:
            break
    else:
        found = Inserter(tokenizer, wanted)
        _inserters.append(found)
        del _inserters[:-4]  # the four last used tokenizers keep their tables
    return found(ids_haystack, rng, length, depth=depth, key=key, value=value)
