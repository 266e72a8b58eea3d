"""State dicts of released checkpoints against native ones: a table of rules, read in both directions.

A rule names a native tensor and the released tensors whose rows it joins. Every released tensor belongs to a rule, and
every rule finds its tensors, with their shapes; else the first that does not is named and nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from models.config import HybridConfig
from models.safetensors_files import CheckpointError, WeightFiles


class Rule(NamedTuple):
    """Native tensor `native` = the released tensors one below the other."""

    native: str
    released: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    """Rows of each released tensor, where there are several."""
    is_kernel: bool = False
    """A depthwise convolution: [C, 1, W] in the release, [C, W] here."""
    constant: float | None = None
    """Without released tensors: what all numbers are."""


@dataclass(frozen=True)
class Reading:
    """What a released directory is as a native model."""

    format: str
    """Whose code wrote it, for people: recorded as the model's `source_format`."""
    config: HybridConfig
    rules: tuple[Rule, ...]
    tied: tuple[str, str] | None = None
    """(a, b): tensor a may be there too and must then equal b (an unembedding tied to the embedding)."""
    _places: dict[str, Rule] = field(init=False, repr=False, compare=False, default_factory=dict)


def simple(pairs: Mapping[str, str], native: str = "", released: str = "") -> tuple[Rule, ...]:
    """Rules of one tensor each from {native: released}, under two prefixes."""
    return tuple(Rule(native + here, (released + there,)) for here, there in pairs.items())


def check_tensors(reading: Reading, weights: WeightFiles, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Names and shapes of the released tensors against the native `shapes`; CheckpointError for the first fault."""
    known: set[str] = set() if reading.tied is None else {reading.tied[0]}
    for rule in reading.rules:
        for name, expected in _expected(rule, shapes[rule.native]):
            known.add(name)
            if name not in weights.shapes:
                raise CheckpointError(
                    f"{where}: tensor {name!r} {list(expected)} is missing; expected by {reading.format}. "
                    "Check config.json, or copy the weights again."
                )
            if weights.shapes[name] != expected:
                raise CheckpointError(
                    f"{weights.files[name]}: tensor {name!r} has shape {list(weights.shapes[name])}; config.json asks "
                    f"for {list(expected)}."
                )
    if unknown := sorted(set(weights.shapes) - known):
        raise CheckpointError(
            f"{weights.files[unknown[0]]}: tensor {unknown[0]!r} is not understood ({len(unknown)} such in all); "
            f"expected none beside those of {reading.format} under its config.json."
        )
    if missing := sorted(set(shapes) - {rule.native for rule in reading.rules}):
        raise AssertionError(f"no rule for the native tensor {missing[0]}")


def native_tensors(
    reading: Reading, released: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """The native state dict. CheckpointError if a tied tensor is there and differs."""
    if reading.tied is not None and reading.tied[0] in released:
        first, second = reading.tied
        if not torch.equal(released[first], released[second]):
            raise CheckpointError(
                f"tensor {first!r} differs from {second!r}, but config.json has tie_word_embeddings true; expected "
                "equal tensors. Set it to false if they are two."
            )
    native: dict[str, Tensor] = {}
    used: set[str] = set()
    for rule in reading.rules:
        if rule.constant is not None:
            native[rule.native] = torch.full(shapes[rule.native], rule.constant)
            continue
        parts = [released[name].clone() if name in used else released[name] for name in rule.released]
        used.update(rule.released)  # tied tensors are two here, so that an edit of one leaves the other
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        native[rule.native] = joined.squeeze(1) if rule.is_kernel else joined
    return native


def released_tensors(reading: Reading, native: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `native_tensors`: a native state dict under the released names."""
    released: dict[str, Tensor] = {}
    for rule in reading.rules:
        if rule.constant is not None:
            continue
        tensor = native[rule.native].unsqueeze(1) if rule.is_kernel else native[rule.native]
        parts = tensor.split(rule.rows) if len(rule.released) > 1 else (tensor,)
        released.update(zip(rule.released, parts, strict=True))
    return {name: tensor.contiguous() for name, tensor in released.items()}


def _expected(rule: Rule, shape: tuple[int, ...]) -> Iterable[tuple[str, tuple[int, ...]]]:
    shape = (shape[0], 1, *shape[1:]) if rule.is_kernel else shape
    rows = rule.rows or (shape[0],) * len(rule.released)
    return [(name, (count, *shape[1:])) for name, count in zip(rule.released, rows, strict=True)]
