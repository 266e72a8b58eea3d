"""How a receptive-field study is cut into units: checkpoint x condition x batch of samples, at each length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from analyses.checkpoints import batches
from analyses.conditions import Condition

DOCUMENT_BATCH = {"cpu": 8, "cuda": 32}
PROMPT_BATCH, EFFECT_DOCUMENTS = 64, 4
GROUPS = ("full", "efficient")


@dataclass(frozen=True)
class Unit:
    """One piece of work. `part` is "documents", "prompts" or "effect"; rows are first .. last - 1 of its samples.

    `stretch`: at so many times the training length.
    """

    checkpoint: str
    part: str
    condition: Condition
    first: int = 0
    last: int = 0
    stretch: int = 1

    @property
    def id(self) -> str:
        longer = f" x{self.stretch}" if self.stretch > 1 else ""
        return f"{self.checkpoint}/{self.condition.label}/{self.part}{longer} {self.first}-{self.last}"


def units_of(plan: Any, name: str) -> list[Unit]:
    """Of one checkpoint: samples under every condition, at longer lengths under some, then the effects on layers."""
    found = [unit for condition in plan.measured(name) for unit in _samples(plan, name, condition, 1)]
    for stretch in plan.lengths[1:]:
        for condition in filter(_stretched, plan.measured(name)):
            found += _samples(plan, name, condition, stretch)
    effect_documents = min(len(plan.documents), EFFECT_DOCUMENTS) if plan.config.grid else 1
    for window in plan.effect_windows(name):
        found.append(Unit(name, "effect", Condition("full", window=window), 0, effect_documents))
    return found


def _stretched(condition: Condition) -> bool:
    """What is measured at longer lengths too: none, and groups with a window, without sinks."""
    return condition.group == "none" or (condition.group in GROUPS and condition.window > 0 and not condition.sinks)


def _samples(plan: Any, name: str, condition: Condition, stretch: int) -> list[Unit]:
    documents = batches(len(plan.documents), DOCUMENT_BATCH[plan.device.type])
    return [
        Unit(name, part, condition, *rows, stretch=stretch)
        for part, all_rows in (("documents", documents), ("prompts", batches(plan.n_prompts, PROMPT_BATCH)))
        for rows in all_rows
    ]
