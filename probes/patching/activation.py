"""Activation patching over every layer, component, head and group of positions, with nothing computed twice.

A patch in layer l leaves everything below l as it is, so each run starts from the recorded stream that enters l. The
points are the model's hook points; what a family does not have (resid_mid of a parallel block) stays NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from probes.patching.metric import logit_difference
from probes.patching.swaps import POSITIONS, ValueSwaps

Direction = Literal["denoising", "noising"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
COMPONENTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
"""attn_out is the mixer's output, whatever the mixer."""
Streams = dict[str, Tensor]


class Patched(NamedTuple):
    """Logit differences in nats, float32 on the CPU; C of COMPONENTS, P of POSITIONS; NaN where there is no point."""

    clean: Float[np.ndarray, " N"]
    corrupt: Float[np.ndarray, " N"]
    layers: Float[np.ndarray, "N L C P"]
    heads: Float[np.ndarray, "N L H P"]
    """Of each head's output z; heads are counted over a layer's paths, recurrent ones too."""


@torch.no_grad()
def activation_patching(
    model: Any, swaps: ValueSwaps, direction: Direction = "denoising", *, heads: bool = True, batch_size: int = 8
) -> Patched:
    """Patches every component of every layer, and every head, at each group of positions, one at a time.

    Cost: L (3 C' + 3 H) forwards of half the layers on average, C' = 4; memory: the recorded activations of 2
    `batch_size` prompts. Results do not depend on batch_size. Raises ValueError for an unknown direction, and for a
    point that did not fire exactly once, since a patch that never acted must not be scored.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; expected {' or '.join(map(repr, DIRECTIONS))}.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected 1 or more pairs at a time.")
    parts = [
        _Batch(model, swaps.select(first, first + batch_size), direction).patched(heads)
        for first in range(0, len(swaps), batch_size)
    ]
    return Patched(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@torch.no_grad()
def logit_differences(
    model: Any, swaps: ValueSwaps, *, batch_size: int = 8
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Of the clean and of the corrupted prompts, in nats, without any patch."""
    parts = []
    for first in range(0, len(swaps), batch_size):
        some = swaps.select(first, first + batch_size)
        right, wrong = (torch.from_numpy(ids).to(model.device) for ids in (some.right, some.wrong))
        both = (torch.from_numpy(ids).to(model.device) for ids in (some.clean, some.corrupt))
        parts.append([logit_difference(model, model.final_hidden(ids)[:, -1], right, wrong) for ids in both])
    clean, corrupt = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    return clean, corrupt


class _Batch:
    """The pairs that go through the model together: their base run, the donor's activations, and the patches."""

    def __init__(self, model: Any, swaps: ValueSwaps, direction: Direction) -> None:
        self.model, device = model, model.device
        self.places = torch.from_numpy(swaps.positions()).to(device)[..., None]  # P B T 1
        self.right, self.wrong = (torch.from_numpy(ids).to(device) for ids in (swaps.right, swaps.wrong))
        clean, corrupt = (torch.from_numpy(ids).to(device) for ids in (swaps.clean, swaps.corrupt))
        self.heads = _head_columns(model)
        names = self._names()
        with reading(model, names) as streams:
            hidden = model.final_hidden(torch.cat([clean, corrupt]))[:, -1]
        self.clean, self.corrupt = (self._difference(part) for part in hidden.chunk(2))
        first, second = ({name: x.chunk(2)[i] for name, x in streams.items()} for i in (0, 1))
        denoising = direction == "denoising"
        self.ids = corrupt if denoising else clean
        self.base, self.donor = (second, first) if denoising else (first, second)

    def _names(self) -> list[str]:
        known, found = self.model.hook_dict, []
        for layer in range(len(self.model.layers)):
            found += [f"blocks.{layer}.hook_{part}" for part in COMPONENTS]
        return [name for name in dict.fromkeys([*found, *self.heads.values()]) if name in known]

    def _difference(self, hidden: Float[Tensor, "B D"]) -> Float[Tensor, " B"]:
        return logit_difference(self.model, hidden, self.right, self.wrong)

    def patched(self, heads: bool) -> Patched:
        n_layers, size = len(self.model.layers), len(self.ids)
        found = torch.full((n_layers, len(COMPONENTS), len(POSITIONS), size), torch.nan)
        most = max((layer.n_heads for layer in self.model.layers), default=0)
        per_head = torch.full((n_layers, most, len(POSITIONS), size), torch.nan)
        for layer in range(n_layers):
            for row, part in enumerate(COMPONENTS):
                name = f"blocks.{layer}.hook_{part}"
                if part == "resid_pre" and layer:  # the stream between two blocks has two names
                    found[layer, row] = found[layer - 1, COMPONENTS.index("resid_post")]
                elif name in self.donor:
                    found[layer, row] = self._at_all_positions(layer, name)
        for (layer, head, column), name in self.heads.items() if heads else ():
            if name in self.donor:
                per_head[layer, head] = self._at_all_positions(layer, name, column)
        layers, z = (x.movedim(-1, 0).cpu().numpy() for x in (found, per_head))
        return Patched(self.clean.cpu().numpy(), self.corrupt.cpu().numpy(), layers, z)

    def _at_all_positions(self, layer: int, name: str, column: int | None = None) -> Float[Tensor, "P B"]:
        return torch.stack([self._run(layer, name, places, column) for places in self.places]).cpu()

    def _run(self, layer: int, name: str, places: Bool[Tensor, "B T 1"], column: int | None) -> Float[Tensor, " B"]:
        """The logit difference with the donor's values of this point at these positions (and head)."""
        donor, fired = self.donor[name], []

        def replace(value: Tensor) -> Tensor:
            fired.append(name)
            if column is None:
                return torch.where(places, donor, value)
            value = value.clone()
            value[:, :, column] = torch.where(places, donor[:, :, column], value[:, :, column])
            return value

        with _edited(self.model, name, replace):
            hidden = self.model.final_hidden_from(self.ids, layer, self.base[f"blocks.{layer}.hook_resid_pre"])
        _check_fired(name, len(fired))
        return self._difference(hidden[:, -1])


def _head_columns(model: Any) -> dict[tuple[int, int, int], str]:
    """(layer, head, column in the point's tensor) -> hook_z of the head's path, where the path has one."""
    names = {id(point): name for name, point in model.hook_dict.items()}
    found: dict[tuple[int, int, int], str] = {}
    for layer in model.layers:
        first = 0
        for path, mixer in zip(layer.paths, layer.mixers, strict=True):
            if not hasattr(mixer, "refusal") and hasattr(mixer, "hook_z"):
                found |= {(layer.index, first + c, c): names[id(mixer.hook_z)] for c in range(path.heads)}
            first += path.heads
    return found


@contextmanager
def reading(model: Any, names: Sequence[str]) -> Iterator[Streams]:
    """What these points hold in the one forward run inside; it stays on the model's device."""
    seen: Streams = {}
    counts = dict.fromkeys(names, 0)

    def keep(module: Any, args: Any, value: Tensor, name: str) -> None:
        counts[name] += 1
        seen[name] = value.detach()

    handles = [model.hook_dict[name].register_forward_hook(partial(keep, name=name)) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
    for name, count in counts.items():
        _check_fired(name, count)


@contextmanager
def _edited(model: Any, name: str, edit: Any) -> Iterator[None]:
    handle = model.hook_dict[name].register_forward_hook(lambda module, args, value: edit(value).to(value))
    try:
        yield
    finally:
        handle.remove()


def _check_fired(name: str, count: int) -> None:
    if count != 1:
        raise ValueError(f"{name} fired {count} times in one forward; expected once: a patch there cannot be scored.")
