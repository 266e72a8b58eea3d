"""Which heads count as retrieval heads: ranked by mean attention mass on the needle's value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from probes.retrieval import by_kv_group

Head = tuple[int, int]
SOFTMAX = ("full", "swa")


def ranked(mass: Float[np.ndarray, "L H"]) -> list[Head]:
    """All heads with a mass, largest first; equal ones in order of layer and head."""
    heads = [(int(layer), int(head)) for layer, head in np.argwhere(np.isfinite(mass))]
    return sorted(heads, key=lambda head: (-mass[head], head))


def chosen(mass: Float[np.ndarray, "L H"], top: int | None, threshold: float | None) -> list[Head]:
    """The `top` heads, or all with at least `threshold`; possibly none."""
    heads = ranked(mass)
    return heads[:top] if threshold is None else [head for head in heads if mass[head] >= threshold]


def heads_of(layers: Sequence[Any], kinds: Sequence[str] | None = SOFTMAX) -> list[Head]:
    """(layer, head) of all paths of these kinds (None: any); heads are counted over a layer's paths in their order."""
    found = []
    for layer in layers:
        first = 0
        for path in layer.paths:
            if kinds is None or path.kind in kinds:
                found += [(layer.index, first + head) for head in range(path.heads)]
            first += path.heads
    return found


def kinds_of(layers: Sequence[Any], n_heads: int) -> np.ndarray:
    """Path kind of every head [L, H], as text; "" beyond a layer's heads."""
    table = [[path.kind for path in layer.paths for _ in range(path.heads)] for layer in layers]
    return np.array([row + [""] * (n_heads - len(row)) for row in table])


def kv_groups(layers: Sequence[Any], n_heads: int) -> Int[np.ndarray, "L H"]:
    """The kv group of every softmax head, counted over the layer's softmax paths; -1 for other heads."""
    groups = np.full((len(layers), n_heads), -1)
    for layer in layers:
        first = counted = 0
        for path, mixer in zip(layer.paths, layer.mixers, strict=True):
            if path.kind in SOFTMAX:
                share = path.heads // mixer.n_kv_heads
                groups[layer.index, first : first + path.heads] = counted + np.arange(path.heads) // share
                counted += mixer.n_kv_heads
            first += path.heads
    return groups


def by_kv_groups(values: Float[np.ndarray, "*C L H"], layers: Sequence[Any], how: str) -> Float[np.ndarray, "*C L G"]:
    """Query heads reduced to their kv groups by "mean" or "max"; NaN where a layer has no such group."""
    groups = kv_groups(layers, values.shape[-1])
    reduced = np.full((*values.shape[:-1], max(int(groups.max()) + 1, 1)), np.nan)
    for layer in layers:
        first = counted = 0
        for path, mixer in zip(layer.paths, layer.mixers, strict=True):
            if path.kind in SOFTMAX:
                columns = torch.from_numpy(values[..., layer.index, first : first + path.heads])
                found = by_kv_group(columns, mixer.n_kv_heads, path.heads, how).numpy()
                reduced[..., layer.index, counted : counted + mixer.n_kv_heads] = found
                counted += mixer.n_kv_heads
            first += path.heads
    return reduced
