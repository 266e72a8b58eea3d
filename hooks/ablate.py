"""Ablation of mixer heads: their output z, before the output projection, becomes zero or its mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooks.points import edited
from hooks.restrict import select

Head = tuple[int, int]
"""(layer, head): absolute layer id, head counted over the layer's paths in their order."""


@contextmanager
def ablate(
    model: Any,
    heads: Iterable[Head] | None = None,
    layers: str | Sequence[int] | None = None,
    how: str = "mean",
    means: Mapping[Head, Float[Tensor, " V"]] | None = None,
) -> Iterator[dict[str, int]]:
    """Inside, the outputs of these heads carry nothing about the input: `how="zero"`, or "mean" with `head_means`.

    Give `heads`, or `layers` ("full", "efficient" or layer ids) for all heads of those paths. Zero is off-distribution,
    the mean over reference prompts is what the field prefers; it must be given, because a mean over the ablated batch
    itself would leak it. Any mixer has heads, recurrent ones too. Yields how often each point has fired. Raises
    ValueError for unknown heads, for means that are missing, and if nothing ran inside.
    """
    chosen = _by_point(model, heads, layers)
    if how not in ("mean", "zero"):
        raise ValueError(f"how is {how!r}; expected 'mean' or 'zero'.")
    if how == "mean":
        missing = [head for point in chosen.values() for head, _ in point if means is None or head not in means]
        if missing:
            raise ValueError(
                f"heads {missing[:4]} have no mean; expected one for every ablated head. "
                "Pass means=hooks.head_means(model, batches), or how='zero'."
            )

    def edit(name: str) -> Any:
        def replace(z: Tensor) -> Tensor:
            z = z.clone()
            for head, column in chosen[name]:
                z[:, :, column] = means[head].to(z) if how == "mean" and means is not None else 0.0
            return z

        return replace

    with edited(model, {name: edit(name) for name in chosen}) as fired:
        yield fired


@torch.no_grad()
def head_means(
    model: Any, batches: Iterable[Any], layers: str | Sequence[int] | None = None
) -> dict[Head, Float[Tensor, " V"]]:
    """The mean output z of every head, or of those that `layers` names, over all tokens of the batches of input ids.

    Sums are float64 on the model's device; one forward per batch, without logits. Raises ValueError if there is none.
    """
    points = _by_point(model, None, range(len(model.layers)) if layers is None else layers)
    sums: dict[str, Tensor] = {}
    tokens = 0

    def add(name: str) -> Any:
        def keep(z: Tensor) -> Tensor:
            sums[name] = sums.get(name, 0) + z.double().sum((0, 1))
            return z

        return keep

    for batch in batches:
        with edited(model, {name: add(name) for name in points}):
            model.final_hidden(batch)
        tokens += batch.shape[0] * batch.shape[1]
    if not tokens:
        raise ValueError("batches is empty; expected at least one batch of input ids to take means over.")
    return {head: sums[name][column] / tokens for name, heads in points.items() for head, column in heads}


def _by_point(
    model: Any, heads: Iterable[Head] | None, layers: str | Sequence[int] | None
) -> dict[str, list[tuple[Head, int]]]:
    """For each hook_z involved, its heads: ((layer, head), column in the point's tensor)."""
    if (heads is None) == (layers is None):
        raise ValueError("ablation needs either heads or layers; expected exactly one of the two.")
    names = {id(point): name for name, point in model.hook_dict.items()}
    every: dict[Head, tuple[str, int]] = {}
    for layer in model.layers:
        first = 0
        for path, mixer in zip(layer.paths, layer.mixers, strict=True):
            if (name := _output_point(mixer, names)) is not None:
                every.update({(layer.index, first + column): (name, column) for column in range(path.heads)})
            first += path.heads
    if layers is not None:
        paths = {_output_point(layer.mixers[path], names) for layer, path in select(model, layers)}
        wanted = [head for head, (name, _) in every.items() if name in paths]
    else:
        wanted = list(dict.fromkeys((int(layer), int(head)) for layer, head in heads or ()))
    if not wanted:
        raise ValueError("heads is empty; expected at least one (layer, head).")
    points: dict[str, list[tuple[Head, int]]] = {}
    for head in wanted:
        if head not in every:
            counts = ", ".join(f"{layer.index}: {layer.n_heads}" for layer in model.layers)
            raise ValueError(f"the model has no head {head}; expected (layer, head) with heads per layer {{{counts}}}.")
        name, column = every[head]
        points.setdefault(name, []).append((head, column))
    return points


def _output_point(mixer: Any, names: Mapping[int, str]) -> str | None:
    """The name of a mixer's hook_z; None for one whose heads cannot be reached (some Hugging Face families)."""
    return None if hasattr(mixer, "refusal") or not hasattr(mixer, "hook_z") else names[id(mixer.hook_z)]
