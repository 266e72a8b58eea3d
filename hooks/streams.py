"""The residual stream of every layer at chosen positions, of native and of Hugging Face models under the same names.

This is the one place that knows where a model keeps its stream: at its hook points, or, in a model without any, at the
inputs and outputs of its blocks. There the stream between mixer and MLP has no place common to all families: no
resid_mid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

EMBEDDING = "blocks.0.hook_resid_pre"


def stream_names(model: Any) -> tuple[str, ...]:
    """resid_pre of layer 0 (what the embedding puts in), then resid_mid, where there is one, and resid_post of each."""
    points = getattr(model, "hook_dict", None)
    names = [EMBEDDING]
    for layer in range(len(model.layers)):
        mid, post = (f"blocks.{layer}.hook_resid_{part}" for part in ("mid", "post"))
        names += [post] if points is None or mid not in points else [mid, post]
    return tuple(names)


@contextmanager
def record_streams(model: Any, positions: Sequence[int]) -> Iterator[dict[str, Float[Tensor, "B P D"]]]:
    """A dict filled by the one forward run inside: fp32 copies at `positions` of the tokens of that forward.

    They stay on the model's device, and nothing waits for it, so that kernels queue up; the last layer's is the stream
    before the final norm. Raises ValueError for a position that does not exist, and at the end for a point that did not
    fire exactly once.
    """
    found: dict[str, Tensor] = {}
    fired = dict.fromkeys(stream_names(model), 0)
    places: dict[tuple[torch.device, int], Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        fired[name] += 1
        _check(value, positions, name)
        at = (value.device, value.shape[1])
        if at not in places:
            places[at] = _index(positions, *at)
        found[name] = value.detach().index_select(1, places[at]).float()

    handles: list[Any] = []
    try:
        attach = _at_blocks if getattr(model, "hook_dict", None) is None else _at_points
        attach(model, tuple(fired), keep, handles)
        yield found
    finally:
        for handle in handles:
            handle.remove()
    for name, count in fired.items():
        if count != 1:
            raise ValueError(f"{name} fired {count} times while recording; expected one forward pass that reaches it.")


Keep = Callable[[str, Tensor], None]


def _at_points(model: Any, names: Sequence[str], keep: Keep, handles: list[Any]) -> None:
    def act(module: Any, args: Any, value: Tensor, name: str) -> None:
        keep(name, value)

    handles += [model.hook_dict[name].register_forward_hook(partial(act, name=name)) for name in names]


def _at_blocks(model: Any, names: Sequence[str], keep: Keep, handles: list[Any]) -> None:
    def enter(module: Any, args: Any, kwargs: Any) -> None:
        keep(EMBEDDING, args[0] if args else kwargs["hidden_states"])

    def leave(module: Any, args: Any, value: Any, name: str) -> None:
        keep(name, value if isinstance(value, Tensor) else value[0])

    handles.append(model.layers[0].block.register_forward_pre_hook(enter, with_kwargs=True))
    for layer, name in zip(model.layers, names[1:], strict=True):
        handles.append(layer.block.register_forward_hook(partial(leave, name=name)))


def _check(value: Tensor, positions: Sequence[int], name: str) -> None:
    if value.ndim != 3:
        raise ValueError(f"{name} has shape {list(value.shape)}; expected one residual stream [batch, time, width].")
    length = value.shape[1]
    if any(not -length <= position < length for position in positions):
        raise ValueError(f"{name} has {length} positions; {max(positions, key=abs)} does not exist.")


def _index(positions: Sequence[int], device: torch.device, length: int) -> Tensor:
    """Made once a forward; from pinned memory, since any other copy to a GPU waits for the kernels before it."""
    index = torch.tensor([position % length for position in positions])
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)
