"""Which haystack lines a prompt holds, what fills the rest, and between which lines the needles go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from probes.niah.filler import Filler
from probes.niah.haystack import Haystack
from probes.niah.tokens import Encoder
from probes.niah.wording import Parts

DROPS = 8  # whole lines given up in search of a filler that fits


class Plan(NamedTuple):
    """`whole` lines of the haystack's `order`, then the filler; needle j stands behind slots[j] of these lines.
    `placed`: the needles in the order of the text.
    """

    order: np.ndarray
    whole: int
    filler: tuple[str, ...]
    filler_ids: tuple[np.ndarray, ...]
    slots: list[int]
    placed: list[int]

    @property
    def places(self) -> list[int]:
        """The line number of each needle, the announcement being line 0."""
        places = [0] * len(self.slots)
        for before, j in enumerate(self.placed):
            places[j] = 1 + self.slots[j] + before
        return places


class Planner:
    """Makes plans for prompts of `length` tokens (named in errors only) and spells them out."""

    def __init__(self, encoder: Encoder, haystack: Haystack, filler: Filler, length: int) -> None:
        self._encoder, self._haystack, self._filler, self.length = encoder, haystack, filler, length

    def plan(
        self,
        order: np.ndarray,
        ends: np.ndarray,
        budget: int,
        depths: Sequence[float],
        slots: Sequence[int] | None = None,
        variant: int = 0,
        drop: int = 0,
    ) -> Plan | None:
        """Whole lines, then filler, to `budget` tokens; needles at `slots`, or at the line ends nearest their depth.

        ends[n]: tokens of the first n lines of `order`. `variant`: fitting fillers
        passed over; `drop`: whole lines given up beforehand. None if no filler fits.
        """
        whole, filler = self._whole_and_filler(order, ends, budget, variant, drop)
        if filler is None:
            return None
        filler_ids = tuple(self._encoder.line_ids(line + "\n")[0] for line in filler)
        ends = np.concatenate([ends[: whole + 1], ends[whole] + np.cumsum([len(ids) for ids in filler_ids], dtype=int)])
        if slots is None:
            slots = [int(np.abs(ends - depth * ends[-1]).argmin()) for depth in depths]
        slots = [min(slot, whole + len(filler)) for slot in slots]
        placed = sorted(range(len(slots)), key=lambda j: (slots[j], depths[j], j))
        return Plan(order, whole, filler, filler_ids, slots, placed)

    def _whole_and_filler(
        self, order: np.ndarray, ends: np.ndarray, budget: int, variant: int, drop: int
    ) -> tuple[int, tuple[str, ...] | None]:
        most = min(int(np.searchsorted(ends, budget, side="right")) - 1, len(order) - 1)
        most = max(0, most - drop)
        for whole in range(most, max(-1, most - DROPS), -1):
            left = budget - int(ends[whole])
            filler = () if left == 0 else self._filler.lines(self._haystack.lines[order[whole]], left, variant)
            if filler is not None:
                return whole, filler
        return most, None

    def no_filler(self, budget: int) -> ValueError:
        """The error of a length that no filler completes."""
        return ValueError(
            f"length {self.length} cannot be reached exactly: no filler of this tokenizer adds what is left of a "
            f"haystack of {budget} tokens (tried {DROPS} line ends); ask for a length a few tokens longer or shorter"
        )

    def lines(self, plan: Plan, parts: Parts) -> list[str]:
        """All lines of the prompt, the question last."""
        texts = self._haystack.lines
        lines = [parts.announce, *(texts[i] for i in plan.order[: plan.whole].tolist()), *plan.filler]
        for j, place in zip(plan.placed, (plan.places[j] for j in plan.placed), strict=True):
            lines.insert(place, parts.needles[j].text)
        return [*lines, parts.question.text]
