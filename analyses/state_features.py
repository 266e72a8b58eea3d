"""What a recurrent layer remembers, as features: its state S_t at chosen tokens, and the streams at the last token.

S_t is made on demand (models.mixers, `states`) from the operands that the hook points show: one sweep a layer, of which
only the chosen states are kept. A state of H K V numbers is sketched to `width`: signs and groups of equal size drawn
from a seed, one sum a group (a count sketch, Charikar et al. 2002, with balanced buckets, so that sums have one order).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooks.streams import record_streams, stream_names

OPERANDS = {
    "lightning": ("k", "v", "log_decay"),
    "mamba2": ("k", "v", "beta", "log_decay"),
    "gdn": ("k", "v", "beta", "log_decay"),
}
"""Kinds whose states can be made, and the hook points they are made of; the last one fires last."""


@dataclass(frozen=True, eq=False)
class StateFeatures:
    """`states[n, l, p]` is the sketch of layer `layers[l]`'s state at the p-th position asked for of prompt n, fp32."""

    layers: tuple[int, ...]
    states: Float[np.ndarray, "N L P W"]
    names: tuple[str, ...]
    streams: Float[np.ndarray, "N F D"]
    """hooks.stream_names at the last token."""


def state_layers(layers: Sequence[Any]) -> tuple[int, ...]:
    """Absolute ids of layers with a recurrent path whose state can be made."""
    return tuple(layer.index for layer in layers if _path(layer) is not None)


@torch.no_grad()
def extract_states(
    model: Any, ids: Int[np.ndarray, "N T"], positions: Int[np.ndarray, "N P"], *, width: int, seed: int, batch: int
) -> StateFeatures:
    """States and streams of every prompt in one forward; width 0: states as they are, flattened.

    Raises ValueError for positions outside the prompt or not ascending.
    """
    _check(positions, ids.shape[1])
    layers, names = state_layers(model.layers), stream_names(model)

    def sketched(layer: int, states: Tensor) -> Tensor:
        return sketch(states.flatten(2), width, seed + layer)

    states, streams = [], []
    for first in range(0, len(ids), batch):
        rows = slice(first, first + batch)
        with _reading(model, positions[rows], sketched) as seen, record_streams(model, [-1]) as stream:
            model.final_hidden(torch.from_numpy(ids[rows]).to(model.device))
        if layers:
            states.append(_stacked([seen[layer] for layer in layers]).cpu().numpy())
        streams.append(torch.stack([stream[name][:, 0].to(model.device) for name in names], 1).cpu().numpy())
    kept = np.concatenate(states) if states else np.zeros((len(ids), 0, positions.shape[1], max(width, 1)), np.float32)
    return StateFeatures(layers, kept, names, np.concatenate(streams))


@torch.no_grad()
def state_differences(
    model: Any, clean: Int[np.ndarray, "N T"], corrupt: Int[np.ndarray, "N T"], positions: Int[np.ndarray, "N P"],
    *, batch: int,
) -> Float[np.ndarray, "N L P"]:  # fmt: skip
    """||S_t - S'_t|| / ||S_t|| of two prompts, fp32, for each of `state_layers`: what is left of their difference in a
    state, whether or not a probe finds it. NaN for a state of zeros."""
    _check(positions, clean.shape[1])
    layers, found = state_layers(model.layers), []

    def relative(layer: int, states: Tensor) -> Tensor:
        first, second = states.flatten(2).chunk(2)
        norm = first.norm(dim=-1)
        return torch.where(norm > 0, (first - second).norm(dim=-1) / norm, torch.nan)

    for first in range(0, len(clean) if layers else 0, batch):
        rows = slice(first, first + batch)
        both = torch.from_numpy(np.concatenate([clean[rows], corrupt[rows]])).to(model.device)
        with _reading(model, np.concatenate([positions[rows]] * 2), relative) as seen:
            model.final_hidden(both)
        found.append(torch.stack([seen[layer] for layer in layers], 1).cpu().numpy())
    return np.concatenate(found) if found else np.zeros((len(clean), 0, positions.shape[1]), np.float32)


def sketch(x: Float[Tensor, "*rows F"], width: int, seed: int) -> Float[Tensor, "*rows W"]:
    """`width` signed sums over groups of entries, so that inner products are kept in the mean; x itself if short."""
    size = x.shape[-1]
    if not width or size <= width:
        return x
    generator = torch.Generator().manual_seed(seed)
    padded = -(-size // width) * width
    order = torch.randperm(padded, generator=generator)
    sign = torch.randint(2, (size,), generator=generator) * 2 - 1
    x = torch.nn.functional.pad(x * sign.to(x), (0, padded - size))
    return x[..., order.to(x.device)].unflatten(-1, (width, -1)).sum(-1)


def _stacked(states: Sequence[Float[Tensor, "B P W"]]) -> Float[Tensor, "B L P W"]:
    """Layers whose states are smaller than `width` get zeros behind them."""
    width = max(x.shape[-1] for x in states)
    return torch.stack([torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in states], 1)


def _check(positions: Int[np.ndarray, "N P"], length: int) -> None:
    if (np.diff(positions) < 0).any() or positions.min() < 0 or positions.max() >= length:
        raise ValueError(f"positions reach to {positions.max()} of {length} tokens; expected ascending ones there.")


def _path(layer: Any) -> int | None:
    return next((i for i, path in enumerate(layer.paths) if path.kind in OPERANDS and _open(layer.mixers[i])), None)


def _open(mixer: Any) -> bool:
    return not hasattr(mixer, "refusal")


@contextmanager
def _reading(
    model: Any, positions: Int[np.ndarray, "B P"], reduce: Callable[[int, Tensor], Tensor]
) -> Iterator[dict[int, Tensor]]:
    """{layer: reduce(layer, states [B, P, H, K, V])}, each made as soon as the layer's last operand is there, so that
    one layer's states are held at a time."""
    found: dict[int, Tensor] = {}
    together = np.unique(positions)
    places = torch.from_numpy(np.searchsorted(together, positions)).to(model.device)
    handles = []

    def done(layer: int, mixer: Any, seen: dict[str, Tensor]) -> None:
        states = mixer.states(torch.from_numpy(together), **seen)
        own = states[torch.arange(len(places), device=places.device)[:, None], places]
        found[layer] = reduce(layer, own.float())
        seen.clear()

    for index in state_layers(model.layers):
        layer = model.layers[index]
        path = _path(layer)
        assert path is not None
        mixer, seen = layer.mixers[path], {}  # type: Any, dict[str, Tensor]
        names = OPERANDS[layer.paths[path].kind]
        for name in names:
            finish: Callable[..., None] | None = partial(done, index, mixer, seen) if name == names[-1] else None
            point = getattr(mixer, f"hook_{name}")
            handles.append(point.register_forward_hook(partial(_keep, name=name, seen=seen, finish=finish)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _keep(module: Any, args: Any, value: Tensor, *, name: str, seen: dict[str, Tensor], finish: Any) -> None:
    seen[name] = value.detach()
    if finish is not None:
        finish()
