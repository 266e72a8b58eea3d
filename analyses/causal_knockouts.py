"""What the model still says of the needle when layers or heads cannot see it: sets of knockouts, and their measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import hooks
from hooks.knockout import Head
from models.errors import InputError
from probes.patching import ValueSwaps, logit_difference, reading

GROUPS = ("full", "efficient", "all")
ANSWER, LATER = "answer", "later"
"""Who cannot see the span: the tokens that predict the value, or every token behind the span (no detour is left)."""
NEEDLE, ELSEWHERE = "needle", "elsewhere"
"""The span that is hidden: the value's tokens, or as many of the text, far from them (the control)."""
SPANS = (NEEDLE, ELSEWHERE)


@dataclass(frozen=True)
class Set:
    """One knockout: of layers (all their heads), of a group's paths, or of one head."""

    kind: str
    label: str
    queries: str = ANSWER
    group: str = ""
    layers: tuple[int, ...] = ()
    head: Head | None = None

    def asked(self, described: Sequence[Any]) -> list[dict[str, Any]]:
        """Arguments of hooks.knockout, one each; none where there is nothing to hide."""
        if self.head is not None:
            return [{"heads": [self.head]}]
        if self.layers:
            return [{"layers": list(self.layers)}]
        full = {path.kind == "full" for layer in described for path in layer.paths}
        names = [("full", True), ("efficient", False)] if self.group == "all" else [(self.group, self.group == "full")]
        return [{"layers": name} for name, is_full in names if is_full in full]


def knockout_sets(layers: Sequence[Any], window: int, heads: bool) -> list[Set]:
    """None, groups for both kinds of queries, every layer, windows of consecutive layers, every head."""
    mixing = [layer.index for layer in layers if layer.paths]
    found = [Set("none", "none")]
    found += [Set("group", f"{g}, {q}", q, group=g) for q in (ANSWER, LATER) for g in GROUPS]
    found += [Set("layer", str(index), layers=(index,)) for index in mixing]
    windows = [tuple(mixing[i : i + window]) for i in range(len(mixing) - window + 1)] if window > 1 else []
    found += [Set("window", f"{run[0]} to {run[-1]}", layers=run) for run in windows]
    if heads:
        found += [Set("head", f"{i.index}.{h}", head=(i.index, h)) for i in layers for h in range(i.n_heads)]
    return found


def elsewhere(needle: Int[np.ndarray, "N 2"], length: int) -> Int[np.ndarray, "N 2"]:
    """Spans as long, half-way between the value and the end of the prompt that is farther from it."""
    first, stop = needle.T
    before = first > length - stop
    start = np.where(before, first // 2, (stop + length) // 2)
    return np.stack([start, start + stop - first], 1)


@torch.no_grad()
def measure(
    model: Any, swaps: ValueSwaps, sets: Sequence[Set], batch_size: int
) -> dict[str, Float[np.ndarray, "sets spans N"]]:
    """log_p (sum over the answer's tokens, nats), correct (all digits are the argmax), logit_difference; NaN: n/a.

    The clean prompts with their answer (teacher forcing). Layers below a knockout are computed once for all of them.
    """
    parts = []
    for first in range(0, len(swaps), batch_size):
        parts.append(_Batch(model, swaps.select(first, first + batch_size)).measured(sets))
    return {name: np.concatenate([part[name] for part in parts], -1) for name in parts[0]}


MEASURED = ("log_p", "correct", "logit_difference")


class _Batch:
    def __init__(self, model: Any, swaps: ValueSwaps) -> None:
        self.model, self.swaps = model, swaps
        self.ids = torch.from_numpy(swaps.whole[:, :-1]).to(model.device)
        names = [f"blocks.{layer.index}.hook_resid_pre" for layer in model.layers]
        with reading(model, names) as self.streams:
            self.plain = self._scored(model.final_hidden(self.ids))
        far = elsewhere(swaps.needle, swaps.clean.shape[1])
        self.spans = {NEEDLE: torch.from_numpy(swaps.needle), ELSEWHERE: torch.from_numpy(far)}

    def measured(self, sets: Sequence[Set]) -> dict[str, np.ndarray]:
        rows = [[self._under(one, self.spans[span]) for span in SPANS] for one in sets]
        table = np.array(rows)  # sets spans measures N
        return {name: table[:, :, i] for i, name in enumerate(MEASURED)}

    def _under(self, one: Set, spans: Tensor) -> np.ndarray:
        if one.kind == "none":
            return self.plain
        asked = one.asked(self.model.layers)
        if not asked or not all(_possible(self.model, **each) for each in asked):
            return np.full_like(self.plain, np.nan)
        queries = None if one.queries == LATER else range(self.swaps.answer - 1, self.ids.shape[1])
        lowest = min(index for each in asked for index in _layers_of(self.model, **each))
        return self._scored(self._run(asked, spans, queries, lowest))

    def _run(self, asked: Sequence[dict[str, Any]], spans: Tensor, queries: Any, lowest: int) -> Tensor:
        if not asked:
            stream = self.streams[f"blocks.{lowest}.hook_resid_pre"]
            found: Tensor = self.model.final_hidden_from(self.ids, lowest, stream)
            return found
        with hooks.knockout(self.model, spans, queries=queries, **asked[0]):
            return self._run(asked[1:], spans, queries, lowest)

    def _scored(self, hidden: Float[Tensor, "B T D"]) -> np.ndarray:
        """MEASURED of every prompt, [measures, B]."""
        swaps, first = self.swaps, self.swaps.answer
        expected = torch.from_numpy(swaps.whole[:, first:]).to(hidden.device)
        log_p = self.model.unembed(hidden[:, first - 1 :]).float().log_softmax(-1)
        if not bool(log_p.isfinite().all()):
            raise InputError("a log probability is not finite; check the checkpoint's weights and --dtype")
        digits = torch.from_numpy(swaps.digits).to(hidden.device) > 0
        right = ((log_p.argmax(-1) == expected) | ~digits).all(1)
        total = log_p.gather(2, expected[..., None]).squeeze(-1).sum(1)
        tokens = (torch.from_numpy(ids).to(hidden.device) for ids in (swaps.right, swaps.wrong))
        difference = logit_difference(self.model, hidden[:, swaps.clean.shape[1] - 1], *tokens)
        return torch.stack([total.double(), right.double(), difference.double()]).cpu().numpy()


def _possible(model: Any, **asked: Any) -> bool:
    """Whether the mixers can be reached: some Hugging Face families hide one."""
    mixers = [mixer for index in _layers_of(model, **asked) for mixer in model.layers[index].mixers]
    return not any(hasattr(mixer, "refusal") for mixer in mixers)


def _layers_of(model: Any, layers: Any = None, heads: Any = None) -> list[int]:
    if heads:
        return [layer for layer, _ in heads]
    if isinstance(layers, str):
        return [
            layer.index for layer in model.layers if any((p.kind == "full") == (layers == "full") for p in layer.paths)
        ]
    return list(layers)
