"""Putting one prompt together: which haystack lines, where the needles go between them, and the ids of the whole."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from probes.niah.crossing import Crossing
from probes.niah.filler import Filler
from probes.niah.haystack import Haystack
from probes.niah.planning import Plan, Planner
from probes.niah.sample import NIAHSample, Span
from probes.niah.tokens import Encoder, Piece, digits_held, shift, token_span
from probes.niah.wording import Draft, Parts, Template


class _Encoded(NamedTuple):
    """Parts as pieces; needles end in a line break, the question does not."""

    announce: np.ndarray
    needles: tuple[Piece, ...]
    question: Piece

    @property
    def tokens(self) -> int:
        return len(self.announce) + sum(len(p.ids) for p in self.needles) + len(self.question.ids)


class _Layout(NamedTuple):
    """Lines of a prompt in order with their ids. `places[j]` is the line number of needle j; `special` are all lines
    not of the haystack.
    """

    lines: list[str]
    ids: list[np.ndarray]
    places: list[int]
    special: list[int]


class Composer:
    """Builds prompts of one length for one tokenizer and haystack; `given`: answer tokens before the probed place."""

    def __init__(
        self, encoder: Encoder, haystack: Haystack, filler: Filler, template: Template, bos: bool | None, length: int,
        given: int,
    ) -> None:  # fmt: skip
        self._encoder, self._haystack, self._template = encoder, haystack, template
        self._bos = encoder.bos(bos)
        self._length, self._given = length, given
        self._planner = Planner(encoder, haystack, filler, length)
        self._crossing: Crossing | None = None
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
            ends = np.concatenate([[0], np.cumsum(self._haystack.counts[order])])
            plan = self._planner.plan(order, ends, budget, draft.depths)
            if plan is None:
                raise self._planner.no_filler(budget)
            layout = self._lay_out(plan, parts, encoded)
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
        return self._fitted(index, rng, draft, parts, order, budget, verify=verify, fall_back=fall_back)

    def _lay_out(self, plan: Plan, parts: Parts, encoded: _Encoded) -> _Layout:
        ids = [encoded.announce, *(self._haystack.ids[i] for i in plan.order[: plan.whole].tolist()), *plan.filler_ids]
        places = plan.places
        for j in plan.placed:
            ids.insert(places[j], encoded.needles[j].ids)
        lines = self._planner.lines(plan, parts)
        first_filler = 1 + plan.whole + sum(slot <= plan.whole for slot in plan.slots)
        special = sorted({0, *places, *range(first_filler, len(lines))})
        return _Layout(lines, [*ids, encoded.question.ids], places, special)

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

    def _fitted(
        self,
        index: int,
        rng: np.random.Generator,
        draft: Draft,
        parts: Parts,
        order: np.ndarray,
        budget: int,
        *,
        verify: bool,
        fall_back: bool,
    ) -> NIAHSample:
        """The prompt of a tokenizer whose tokens cross line ends."""
        if self._crossing is None:
            self._crossing = Crossing(self._encoder, self._haystack, self._planner, self._length - len(self._bos))
        order, stretch = self._crossing.stretch(rng, order)
        found, text = self._crossing.fit(index, rng, draft, parts, order, stretch, budget)
        if verify and self._encoder.encode(text()) != found.ids.tolist():
            if not fall_back:
                raise ValueError(
                    f"sample {index}: ids spliced from known stretches differ from encode(text), although they agree "
                    "where they meet: the tokenizer looks further; pass verify=1 to encode every prompt as a whole"
                )
            found, _ = self._crossing.fit(index, rng, draft, parts, order, stretch, budget, splice=False)
        values, keys, answers = (
            [shift(span, len(self._bos)) for span in spans] for spans in (found.values, found.keys, found.answers)
        )
        return self._finish(index, draft, found.ids, values, keys, answers, found.digits)

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
