"""Prompts of tokenizers whose tokens cross line ends: lengths are corrected until exact, each time on true numbers.

A prompt is a few stretches of haystack whose tokens are known, with the announcement, the needles and the question
welded in (`seams`). Where a weld does not hold, the same text is encoded whole: the prompt is the same, later.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from probes.niah.drawn import DrawnRuns
from probes.niah.haystack import Haystack
from probes.niah.planning import Plan, Planner
from probes.niah.runs import CyclicRuns, Stretch
from probes.niah.sample import Span
from probes.niah.seams import AGREE, Weld, weld
from probes.niah.tokens import Encoder, digits_held, shift, token_span
from probes.niah.wording import Draft, Parts

CORRECTIONS = 6  # encodings per prompt that follow what was missing;
NEARBY = 6  # then haystack sizes up to this much smaller or larger are tried,
# with other fillers: (fits passed over, whole lines given up)
FILLERS = ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (3, 0), (1, 1), (2, 1))
ATTEMPTS = CORRECTIONS + len(FILLERS) * (2 * NEARBY + 1)
GAP = 3  # fewer haystack lines than this between two inserted texts are encoded with them
QUESTION = -1
ROOM = 256  # tokens of haystack beyond the length that a search may ask for


class Found(NamedTuple):
    """A prompt without its BOS; spans in tokens."""

    ids: np.ndarray
    values: list[Span]
    keys: list[Span]
    answers: list[Span]
    digits: tuple[int, ...]


class _Patch(NamedTuple):
    """A text that replaces nothing: it stands between haystack lines `low` and `high` (it holds those between)."""

    low: int
    high: int
    text: str
    marks: tuple[tuple[int, int], ...]  # (needle or QUESTION, the character it begins at)


class _Spliced(NamedTuple):
    """A prompt as arrays to be joined; `starts[p]` is the token at which weld p begins."""

    patches: list[_Patch]
    welds: list[Weld]
    arrays: list[np.ndarray]
    starts: list[int]
    tokens: int


class Crossing:
    """Fits prompts of `target` tokens, BOS not counted."""

    def __init__(self, encoder: Encoder, haystack: Haystack, planner: Planner, target: int) -> None:
        self._encoder, self._haystack, self._planner, self._target = encoder, haystack, planner, target
        self._runs: CyclicRuns | DrawnRuns | None = None
        if not haystack.additive:
            drawn = haystack.kind == "noise"
            tokens = target + ROOM
            self._runs = DrawnRuns.of(encoder, haystack) if drawn else CyclicRuns.of(encoder, haystack, tokens)

    def stretch(self, rng: np.random.Generator, order: np.ndarray) -> tuple[np.ndarray, Stretch | None]:
        """The order, run on if it holds too little, and its stretch; None if lines do not splice."""
        if self._runs is None:
            return order, None
        needed = self._target + ROOM
        stretch = self._runs.stretch(order, needed)
        while stretch is not None and stretch.ends[-1] < needed:
            more = (order[-1] + 1 + np.arange(len(order))) % len(self._haystack.lines)
            if self._haystack.kind == "noise":
                more = self._haystack.order(rng, needed)
            order = np.concatenate([order, more])
            stretch = self._runs.stretch(order, needed)
        return order, stretch

    def fit(
        self,
        index: int,
        rng: np.random.Generator,
        draft: Draft,
        parts: Parts,
        order: np.ndarray,
        stretch: Stretch | None,
        budget: int,
        *,
        splice: bool = True,
    ) -> tuple[Found, Callable[[], str]]:
        """Plan, see what is missing, correct the haystack by it, again until exact; then search nearby sizes.

        Correcting alone can swing between two sizes, as a needle that moves by a line changes the tokens at its ends:
        the search leaves the needles where they are. Returns the prompt and its text, on demand. `splice` False encodes
        whole texts. ValueError if no attempt is exact.
        """
        size, slots, best = budget, None, (self._target, budget)
        memo: dict[_Patch, Weld | None] = {}
        for attempt in range(ATTEMPTS):
            kind, step = divmod(max(0, attempt - CORRECTIONS), 2 * NEARBY + 1)
            if attempt >= CORRECTIONS:
                size = max(1, best[1] + (step + 1) // 2 * (1 if step % 2 else -1))
            order, ends = self._ends(rng, order, stretch, size)
            plan = self._planner.plan(order, ends, size, draft.depths, slots, *FILLERS[kind])
            if plan is None:
                size += 1
                continue
            spliced = self._splice(plan, parts, stretch, memo) if stretch and splice else None
            missing = self._target - (spliced.tokens if spliced else len(self._encoder.encode(self._text(plan, parts))))
            if missing == 0:
                return _spans(parts, spliced) if spliced else self._whole(parts, plan), partial(self._text, plan, parts)
            best = min(best, (abs(missing), size))
            size = max(1, size + missing)
            slots = plan.slots if attempt >= CORRECTIONS - 1 else None
        raise ValueError(
            f"sample {index}: length {self._planner.length} was not reached exactly in {ATTEMPTS} attempts (closest: "
            f"{best[0]} off): tokens at this tokenizer's line ends change with their neighbours; ask for another one"
        )

    def _ends(
        self, rng: np.random.Generator, order: np.ndarray, stretch: Stretch | None, size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The order and its line ends in tokens; without a stretch estimates, of an order drawn anew if too short."""
        if stretch:
            return order, stretch.ends
        if int(self._haystack.counts[order].sum()) < size:
            order = self._haystack.order(rng, 2 * size)
        return order, np.concatenate([[0], np.cumsum(self._haystack.counts[order])])

    def _text(self, plan: Plan, parts: Parts) -> str:
        return "\n".join(self._planner.lines(plan, parts))

    def _patches(self, plan: Plan, parts: Parts) -> list[_Patch]:
        """What is not haystack, in the order of the text; the first patch opens the prompt, the last one closes it."""
        entries: list[tuple[int, int, str]] = [(0, QUESTION - 1, parts.announce)]
        entries += [(plan.slots[j], j, parts.needles[j].text) for j in plan.placed]
        entries += [(plan.whole + f + 1, QUESTION - 1, line) for f, line in enumerate(plan.filler)]
        # a needle in slot s follows the s-th line: filler f is line whole + f + 1, and needles follow it there
        entries.sort(key=lambda entry: (entry[0], entry[1] >= 0))
        patches: list[_Patch] = []
        for slot, who, text in [*entries, (plan.whole, QUESTION, parts.question.text)]:
            slot = min(slot, plan.whole)
            if patches and slot - patches[-1].high < GAP:
                low, high, so_far, marks = patches.pop()
                so_far += "".join(self._haystack.lines[i] + "\n" for i in plan.order[high:slot].tolist())
            else:
                low, so_far, marks = slot, "", ()
            marks = (*marks, (who, len(so_far)))
            patches.append(_Patch(low, slot, so_far + text + ("" if who == QUESTION else "\n"), marks))
        return patches

    def _splice(self, plan: Plan, parts: Parts, stretch: Stretch, memo: dict[_Patch, Weld | None]) -> _Spliced | None:
        """Weld the patches into the haystack; None if one does not hold."""
        patches = self._patches(plan, parts)
        welds: list[Weld] = []
        arrays: list[np.ndarray] = []
        starts, at, begin = [], 0, 0
        for patch in patches:
            left = stretch.left(patch.low) if patch.low else None
            right = stretch.right(patch.high) if patch is not patches[-1] else None
            if patch not in memo:
                memo[patch] = weld(self._encoder, left and left[0], patch.text, right and right[0])
            seam = memo[patch]
            if seam is None:
                return None
            if left is not None:
                keep = left[1] + seam.keep
                if keep - begin < AGREE:
                    return None
                arrays.append(stretch.ids[begin:keep])
                at += keep - begin
            welds.append(seam)
            starts.append(at)
            arrays.append(np.asarray(seam.ids, np.int32))
            at += len(seam.ids)
            begin = right[1] + seam.skip if right is not None else 0
        return _Spliced(patches, welds, arrays, starts, at)

    def _whole(self, parts: Parts, plan: Plan) -> Found:
        """Spans by the character offsets of the whole text."""
        lines = self._planner.lines(plan, parts)
        starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
        places = [int(starts[p]) for p in plan.places]
        groups = (
            [shift(n.values[0], at) for n, at in zip(parts.needles, places, strict=True)],
            [shift(n.key, at) for n, at in zip(parts.needles, places, strict=True)],
            [shift(span, int(starts[-2])) for span in parts.question.values],
        )
        ids, offsets = self._encoder.with_offsets("\n".join(lines), [span for group in groups for span in group])
        values, keys, answers = ([token_span(offsets, *span) for span in group] for group in groups)
        return Found(np.asarray(ids, np.int32), values, keys, answers, digits_held(offsets, groups[2]))


def _spans(parts: Parts, found: _Spliced) -> Found:
    """Spans by the character offsets of the welds: every token of an inserted text is one of a weld's own."""
    spans: dict[int, list[Span]] = {}
    digits: tuple[int, ...] = ()
    for patch, seam, start in zip(found.patches, found.welds, found.starts, strict=True):
        for who, at in patch.marks:
            if who < QUESTION:
                continue
            filled = parts.question if who == QUESTION else parts.needles[who]
            wanted = [*filled.values] if who == QUESTION else [filled.values[0], filled.key]
            places = [shift(span, at) for span in wanted]
            spans[who] = [shift(token_span(seam.offsets, *place), start) for place in places]
            digits = digits_held(seam.offsets, places) if who == QUESTION else digits
    needles = [spans[j] for j in range(len(parts.needles))]
    return Found(
        np.concatenate(found.arrays), [n[0] for n in needles], [n[1] for n in needles], spans[QUESTION], digits
    )
