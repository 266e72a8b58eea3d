"""Putting one prompt together: which haystack lines, where the needles go between them, and the ids of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from probes.niah.filler import Filler
from probes.niah.haystack import Haystack
from probes.niah.sample import NIAHSample, Span
from probes.niah.tokens import Encoder, Piece, digits_held, shift, token_span
from probes.niah.wording import Draft, Parts, Template

CORRECTIONS = 6  # whole encodings per prompt, when the tokenizer is not additive, that follow what was missing;
NEARBY = 6  # then haystack sizes up to this much smaller or larger are tried,
ATTEMPTS = CORRECTIONS + 3 * (2 * NEARBY + 1)  # with three different fillers
DROPS = 8  # whole lines given up in search of a filler that fits


class NoFiller(ValueError):
    """No filler line adds the tokens that are missing."""


class _Encoded(NamedTuple):
    """Parts as pieces; needles end in a line break, the question does not."""

    announce: np.ndarray
    needles: tuple[Piece, ...]
    question: Piece

    @property
    def tokens(self) -> int:
        return len(self.announce) + sum(len(p.ids) for p in self.needles) + len(self.question.ids)


class _Layout(NamedTuple):
    """Lines of a prompt in order. `places[j]` is the line number of needle j; `special` are all lines not of the
    haystack.
    """

    lines: list[str]
    ids: list[np.ndarray]
    slots: list[int]
    places: list[int]
    special: list[int]


class Composer:
    """Builds prompts of one length for one tokenizer and haystack; `given`: answer tokens before the probed place."""

    def __init__(
        self, encoder: Encoder, haystack: Haystack, filler: Filler, template: Template, bos: bool | None, length: int,
        given: int,
    ) -> None:  # fmt: skip
        self._encoder, self._haystack, self._filler, self._template = encoder, haystack, filler, template
        self._bos = encoder.bos(bos)
        self._length, self._given = length, given
        self._heads: dict[str, np.ndarray] = {}

    def frame(self, parts: Parts) -> int:
        """Tokens of a prompt with an empty haystack, BOS included."""
        encoded = self._encode(parts)
        for (start, end), value in zip(parts.question.values, parts.values, strict=True):
            span = token_span(encoded.question.offsets, start, end)
            self._encoder.require_value(encoded.question.ids[slice(*span)].tolist(), value)
        return len(self._bos) + encoded.tokens

    def _encode(self, parts: Parts) -> _Encoded:
        if parts.announce not in self._heads:
            self._heads[parts.announce] = np.asarray(self._encoder.encode(parts.announce + "\n"), np.int32)
        needles = tuple(self._encoder.line(needle.text + "\n") for needle in parts.needles)
        return _Encoded(self._heads[parts.announce], needles, self._encoder.line(parts.question.text))

    def sample(
        self, index: int, rng: np.random.Generator, draft: Draft, *, verify: bool, fall_back: bool
    ) -> NIAHSample:
        """Build prompt `index`. `verify` encodes the whole text again; a difference is an error unless `fall_back`."""
        parts = Parts.of(draft, self._template)
        encoded = self._encode(parts)
        budget = self._length - len(self._bos) - encoded.tokens
        if budget < 1:
            raise ValueError(
                f"sample {index}: length {self._length} leaves {budget} tokens for the haystack beside announcement, "
                f"needles and question (key {draft.needles[0][0]!r}); ask for at least {self._length + 1 - budget}"
            )
        order = self._haystack.order(rng, budget)
        if self._haystack.additive:
            layout = self._lay_out(order, budget, 0, draft, parts, encoded)
            if self._joints_hold(layout):
                ids = np.concatenate(layout.ids)
                if not verify or self._encoder.encode("\n".join(layout.lines)) == ids.tolist():
                    return self._assembled(index, draft, parts, encoded, layout, ids)
                if not fall_back:
                    raise ValueError(
                        f"sample {index}: ids put together from lines differ from encode(text), although they agree "
                        "line by line: the tokenizer looks further than a line; pass verify=1 to encode every prompt "
                        "as a whole"
                    )
        return self._encoded_whole(index, rng, draft, parts, encoded, order, budget)

    def _lay_out(
        self,
        order: np.ndarray,
        budget: int,
        drop: int,
        draft: Draft,
        parts: Parts,
        encoded: _Encoded,
        slots: Sequence[int] | None = None,
    ) -> _Layout:
        """Whole lines, then filler, to `budget` tokens; needles at `slots`, or at the line ends nearest their depth."""
        hay = self._haystack
        ends = np.concatenate([[0], np.cumsum(hay.counts[order])])
        whole, filler = self._whole_and_filler(order, ends, budget, drop)
        numbers = order[:whole].tolist()
        lines = [hay.lines[i] for i in numbers] + list(filler)
        ids = [hay.ids[i] for i in numbers]
        ends = ends[: whole + 1].tolist()
        for line in filler:
            ids.append(self._encoder.line_ids(line + "\n")[0])
            ends.append(ends[-1] + len(ids[-1]))
        slots = (
            [int(np.abs(np.asarray(ends) - depth * ends[-1]).argmin()) for depth in draft.depths]
            if slots is None
            else slots
        )
        slots = [min(slot, len(lines)) for slot in slots]
        placed = sorted(range(len(slots)), key=lambda j: (slots[j], draft.depths[j], j))
        places = [0] * len(slots)
        for before, j in enumerate(placed):
            places[j] = 1 + slots[j] + before  # 1: the announcement
        lines.insert(0, parts.announce)
        ids.insert(0, encoded.announce)
        for j in placed:
            lines.insert(places[j], parts.needles[j].text)
            ids.insert(places[j], encoded.needles[j].ids)
        first_filler = 1 + whole + sum(slot <= whole for slot in slots)
        special = sorted({0, *places, *range(first_filler, len(lines)), len(lines)})
        return _Layout([*lines, parts.question.text], [*ids, encoded.question.ids], slots, places, special)

    def _whole_and_filler(
        self, order: np.ndarray, ends: np.ndarray, budget: int, drop: int
    ) -> tuple[int, tuple[str, ...]]:
        most = min(int(np.searchsorted(ends, budget, side="right")) - 1, len(order) - 1)
        most = max(0, most - drop)
        for whole in range(most, max(-1, most - DROPS), -1):
            left = budget - int(ends[whole])
            filler = () if left == 0 else self._filler.lines(self._haystack.lines[order[whole]], left)
            if filler is not None:
                return whole, filler
        raise NoFiller(
            f"length {self._length} cannot be reached exactly: no filler of this tokenizer adds what is left of a "
            f"haystack of {budget} tokens (tried {DROPS} line ends); ask for a length a few tokens longer or shorter"
        )

    def _joints_hold(self, layout: _Layout) -> bool:
        """Encode each special line together with its neighbours: the ids must be those of the lines one by one."""
        last = len(layout.lines) - 1
        start = 0
        while start <= last:
            group = [s for s in layout.special if s >= start]
            if not group:
                return True
            low = high = group[0]
            for s in group:  # special lines at most one line apart are checked in one go
                if s <= high + 2:
                    high = s
            low, high = max(low - 1, 0), min(high + 1, last)
            text = "\n".join(layout.lines[low : high + 1]) + ("\n" if high < last else "")
            ids, clean = (np.asarray(self._encoder.encode(text)), True) if low == 0 else self._encoder.line_ids(text)
            if not clean or not np.array_equal(ids, np.concatenate(layout.ids[low : high + 1])):
                return False
            start = high + 1
        return True

    def _assembled(
        self, index: int, draft: Draft, parts: Parts, encoded: _Encoded, layout: _Layout, ids: np.ndarray
    ) -> NIAHSample:
        starts = np.cumsum([0, *map(len, layout.ids)]) + len(self._bos)
        values, keys = [], []
        for needle, piece, place in zip(parts.needles, encoded.needles, layout.places, strict=True):
            values.append(shift(token_span(piece.offsets, *needle.values[0]), int(starts[place])))
            keys.append(shift(token_span(piece.offsets, *needle.key), int(starts[place])))
        offsets, at = encoded.question.offsets, int(starts[-2])
        answers = [shift(token_span(offsets, *span), at) for span in parts.question.values]
        digits = digits_held(offsets, parts.question.values)
        return self._finish(index, draft, ids, values, keys, answers, digits)

    def _encoded_whole(
        self,
        index: int,
        rng: np.random.Generator,
        draft: Draft,
        parts: Parts,
        encoded: _Encoded,
        order: np.ndarray,
        budget: int,
    ) -> NIAHSample:
        """Encode the text, correct the haystack by what is missing, again until exact; then search nearby sizes.

        Correcting alone can swing between two sizes, as a needle that moves by a line changes the tokens at its ends:
        the search leaves the needles where they are.
        """
        target, size, slots, best = self._length - len(self._bos), budget, None, (self._length, budget)
        for attempt in range(ATTEMPTS):
            drop, step = divmod(max(0, attempt - CORRECTIONS), 2 * NEARBY + 1)
            if attempt >= CORRECTIONS:
                size = max(1, best[1] + (step + 1) // 2 * (1 if step % 2 else -1))
            if int(self._haystack.counts[order].sum()) < size:
                order = self._haystack.order(rng, 2 * size)
            try:
                layout = self._lay_out(order, size, drop, draft, parts, encoded, slots)
            except NoFiller:
                size += 1
                continue
            missing = target - len(self._encoder.encode("\n".join(layout.lines)))
            if missing == 0:
                return self._located(index, draft, parts, layout)
            best = min(best, (abs(missing), size))
            size = max(1, size + missing)
            slots = layout.slots if attempt >= CORRECTIONS - 1 else None
        raise ValueError(
            f"sample {index}: length {self._length} was not reached exactly in {ATTEMPTS} attempts (closest one off by "
            f"{best[0]}): the tokens at line ends of this tokenizer change with their neighbours; ask for another "
            "length or haystack"
        )

    def _located(self, index: int, draft: Draft, parts: Parts, layout: _Layout) -> NIAHSample:
        """The sample of a whole text: spans by the character offsets of that text."""
        starts = np.cumsum([0, *(len(line) + 1 for line in layout.lines)])
        places = [int(starts[p]) for p in layout.places]
        groups = (
            [shift(n.values[0], at) for n, at in zip(parts.needles, places, strict=True)],
            [shift(n.key, at) for n, at in zip(parts.needles, places, strict=True)],
            [shift(span, int(starts[-2])) for span in parts.question.values],
        )
        ids, offsets = self._encoder.with_offsets("\n".join(layout.lines), [span for group in groups for span in group])
        digits = digits_held(offsets, groups[2])
        values, keys, answers = (
            [shift(token_span(offsets, *span), len(self._bos)) for span in group] for group in groups
        )
        return self._finish(index, draft, np.asarray(ids, np.int32), values, keys, answers, digits)

    def _finish(
        self,
        index: int,
        draft: Draft,
        ids: np.ndarray,
        values: list[Span],
        keys: list[Span],
        answers: list[Span],
        digits: tuple[int, ...],
    ) -> NIAHSample:
        """Join BOS and ids."""
        ids = np.concatenate([np.asarray(self._bos, np.int32), ids.astype(np.int32, copy=False)])
        self._check(index, draft, ids, values, answers)
        return NIAHSample(
            input_ids=ids,
            value_span=values[0],
            answer_span=(answers[0][0], answers[-1][1]),
            key_span=keys[0],
            depth=values[0][0] / len(ids),
            depth_requested=draft.depths[0],
            key=draft.needles[0][0],
            value=draft.needles[0][1],
            label=draft.label,
            index=index,
            values=tuple(draft.needles[i][1] for i in draft.asked),
            value_spans=tuple(values[i] for i in draft.asked),
            answer_spans=tuple(answers),
            answer_digits=digits,
            distractors=tuple(n for i, n in enumerate(draft.needles) if i not in draft.asked),
            probe=answers[draft.asked.index(0)][0] - 1 + self._given,
        )

    def _check(self, index: int, draft: Draft, ids: np.ndarray, values: list[Span], answers: list[Span]) -> None:
        """Hold what every sample promises: length, BOS, values spelled by their tokens, nothing behind the answer."""
        assert len(ids) == self._length
        bos_id = self._encoder.bos_id
        if bos_id is not None and int((ids == bos_id).sum()) != len(self._bos):
            raise ValueError(
                f"sample {index} holds the BOS id {bos_id} inside its text; remove it from keys, values or template"
            )
        spans = [*values, *answers]
        spoken = [*(value for _, value in draft.needles), *(draft.needles[i][1] for i in draft.asked)]
        for span, value in zip(spans, spoken, strict=True):
            self._encoder.require_value(ids[slice(*span)].tolist(), value)
        if answers[-1][1] != len(ids):
            raise ValueError(
                f"sample {index}: {len(ids) - answers[-1][1]} tokens follow the answer; expected none. encode() must "
                "add no special tokens at the end"
            )
