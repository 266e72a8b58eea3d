"""How much a restriction changes each mixer's output on the same input: ||o - o_w|| / ||o||.

Where this is zero the restriction could not have mattered (a window that is wider already, an erased state), whatever
the decay suggests: the measured form of "vacuous".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hooks.restrict import restrict, select


@contextmanager
def mixer_effect(
    model: Any, layers: str | Sequence[int], window: int, sinks: int = 0
) -> Iterator[dict[int, list[float]]]:
    """A dict {layer: one ratio per sample}, filled by the forward passes run inside; the model's output is unchanged.

    Each chosen layer's mixer runs a second time with the restriction, on the input it just had (so hook points inside
    it fire twice). Norms in fp32 over time and features; 0 where nothing changed. Raises ValueError as `restrict` does.
    """
    indices = sorted({layer.index for layer, _ in select(model, layers)})
    with restrict(model, layers, window=window, sinks=sinks):
        pass  # refuses what cannot be restricted before anything runs
    effects: dict[int, list[float]] = {index: [] for index in indices}
    handles = []

    def compare(module: Any, args: tuple[Any, ...], output: Tensor, index: int) -> None:
        if len(args) > 2:
            raise ValueError(
                f"layers.{index} continues a cache while its restriction's effect is measured; expected a forward over "
                "whole sequences, because a cache made without the restriction does not hold what it needs."
            )
        with torch.no_grad(), restrict(model, layers, window=window, sinks=sinks):
            limited = module.forward(*args)
        difference = (output.detach().float() - limited.float()).flatten(1).norm(dim=1)
        norm = output.detach().float().flatten(1).norm(dim=1)
        effects[index].extend(torch.where(difference == 0, 0.0, difference / norm).tolist())

    try:
        for index in indices:
            attn = model.layers[index].block.attn
            handles.append(attn.register_forward_hook(partial(compare, index=index)))
        yield effects
    finally:
        for handle in handles:
            handle.remove()
