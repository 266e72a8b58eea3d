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

_second_run: list[int] = []
CACHES = ("cache", "past_key_values", "cache_params")


@contextmanager
def mixer_effect(
    model: Any, layers: str | Sequence[int], window: int, sinks: int = 0
) -> Iterator[dict[int, list[float]]]:
    """A dict {layer: one ratio per sample}, filled by the forward passes run inside; the model's output is unchanged.

    Each chosen layer's mixer runs a second time with the restriction, on the input it just had (so hook points inside
    it fire twice). Norms in fp32 over time and features, of parallel mixers in separate modules together; 0 where
    nothing changed. Raises ValueError as `restrict` does.
    """
    indices = sorted({layer.index for layer, _ in select(model, layers)})
    with restrict(model, layers, window=window, sinks=sinks):
        pass  # refuses what cannot be restricted before anything runs
    effects: dict[int, list[float]] = {index: [] for index in indices}
    parts: dict[int, list[tuple[Tensor, Tensor]]] = {index: [] for index in indices}
    handles: list[Any] = []

    def compare(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, index: int) -> None:
        if _second_run:
            return  # of this or of another mixer_effect
        _refuse_cache(index, args, kwargs)
        with _counted(index), torch.no_grad(), restrict(model, layers, window=window, sinks=sinks):
            limited = _output(module(*args, **kwargs))
        parts[index].append((_output(output).detach().float(), limited.float()))
        if len(parts[index]) == len(model.layers[index].sites):
            effects[index].extend(_ratios(parts[index]))
            parts[index].clear()

    try:
        for index in indices:
            for site in model.layers[index].sites:
                handles.append(site.register_forward_hook(partial(compare, index=index), with_kwargs=True))
        yield effects
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _counted(index: int) -> Iterator[None]:
    _second_run.append(index)
    try:
        yield
    finally:
        _second_run.clear()


def _refuse_cache(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(args) > 2 or any(kwargs.get(name) is not None for name in CACHES):
        raise ValueError(
            f"layers.{index} continues a cache while its restriction's effect is measured; expected a forward over "
            "whole sequences, because a cache made without the restriction does not hold what it needs."
        )


def _ratios(parts: list[tuple[Tensor, Tensor]]) -> list[float]:
    """||o - o_w|| / ||o|| of each sample, over all modules of a layer together."""
    whole, limited = (torch.cat([x.flatten(1) for x in values], 1) for values in zip(*parts, strict=True))
    difference = (whole - limited).norm(dim=1)
    found: list[float] = torch.where(difference == 0, 0.0, difference / whole.norm(dim=1)).tolist()
    return found


def _output(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]
