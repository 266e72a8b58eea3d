"""Recording named activations: exactly the tensors asked for, at the positions asked for, off the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hooks.points import resolve

HALF = (torch.bfloat16, torch.float16)


@contextmanager
def record(
    model: Any,
    names: str | Iterable[str] | Callable[[str], bool],
    positions: int | slice | Sequence[int] | Tensor | None = None,
) -> Iterator[dict[str, Tensor]]:
    """A dict, filled by the one forward pass run inside, of copies on the CPU; bf16 and fp16 become fp32.

    `names`: one hook name, several, or a predicate over names. `positions` index the time axis (queries of a pattern);
    None keeps all. Raises ValueError for an unknown name or position before anything runs, and at the end if a point
    did not fire exactly once. The caller's own hooks stay, and see the same tensors.
    """
    wanted = resolve(model, names)
    index = _index(positions)
    recorded: dict[str, Tensor] = {}
    fired = dict.fromkeys(wanted, 0)

    def keep(module: Any, args: Any, value: Tensor, name: str) -> None:
        fired[name] += 1
        recorded[name] = _copy(value, name, index)

    handles = []
    try:
        for name in wanted:
            handles.append(model.hook_dict[name].register_forward_hook(partial(keep, name=name)))
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
    for name, count in fired.items():
        if count != 1:
            raise ValueError(f"{name} fired {count} times while recording; expected one forward pass that reaches it.")


def _index(positions: int | slice | Sequence[int] | Tensor | None) -> slice | Tensor | None:
    if positions is None or isinstance(positions, slice):
        return positions
    return torch.as_tensor([positions] if isinstance(positions, int) else positions, dtype=torch.long).reshape(-1)


def _copy(value: Tensor, name: str, index: slice | Tensor | None) -> Tensor:
    if index is not None:
        axis = 2 if name.endswith("hook_pattern") else 1
        if value.ndim <= axis:
            raise ValueError(
                f"{name} has shape {list(value.shape)}, without a time axis; record it with positions=None."
            )
        value = _take(value, name, index, axis)
    value = value.detach()
    return value.to("cpu", torch.float32 if value.dtype in HALF else value.dtype, copy=True)


def _take(value: Tensor, name: str, index: slice | Tensor, axis: int) -> Tensor:
    length = value.shape[axis]
    if isinstance(index, slice):
        index = torch.arange(length)[index]
    if index.numel() and (int(index.max()) >= length or int(index.min()) < -length):
        raise ValueError(f"{name} has {length} positions; position {int(index.abs().max())} does not exist.")
    return value.index_select(axis, (index % length).to(value.device))
