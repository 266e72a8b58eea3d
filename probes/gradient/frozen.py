"""What surrounds a backward: parameters frozen, blocks recomputed, gradients stopped at points or watched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """Inside, no parameter records a gradient: backward computes those of the activations only."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def recomputed(blocks: Iterable[Any], keep_hooks: bool, keep_bytes: float = 0.0) -> Iterator[None]:
    """Inside, blocks keep their input only and run again in backward, in eval mode too.

    transformers' own switch does nothing outside training. The first blocks keep all that backward needs until that
    is `keep_bytes` on a device; a block that would not fit runs again (the first one is always tried, if keep_bytes is
    not 0). The first rather than the last, since their size is known before the next one runs. `keep_hooks`: hooks
    inside the blocks act, so recomputation must not stop before the last of them.
    """
    changed, memory = [], _Kept(keep_bytes)
    try:
        for block in blocks:
            if "forward" in vars(block):
                raise ValueError(
                    f"{type(block).__name__} has a forward of its own already; expected an unwrapped block. "
                    "Leave the other context first, or pass keep_bytes=math.inf."
                )
            block.forward = partial(_forward, memory, block, block.forward)
            changed.append(block)
        with set_checkpoint_early_stop(not keep_hooks):
            yield
    finally:
        for block in changed:
            del block.forward


class _Kept:
    """Bytes that backward still may keep, by device; what one block took so far at most."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.used: dict[torch.device, int] = {}
        self.largest: dict[torch.device, int] = {}

    def fits(self, device: torch.device) -> bool:
        return self.limit > 0 and self.used.get(device, 0) + self.largest.get(device, 0) <= self.limit

    def add(self, device: torch.device, count: int) -> None:
        self.used[device] = self.used.get(device, 0) + count
        self.largest[device] = max(self.largest.get(device, 0), count)


def _forward(memory: _Kept, block: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    device = next((x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), torch.device("cpu"))
    if not memory.fits(device):
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
    counted = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    total = 0

    def count(x: Tensor) -> Tensor:
        nonlocal total
        storage = x.untyped_storage()
        if storage.data_ptr() not in counted:  # views of one tensor share its memory
            counted.add(storage.data_ptr())
            total += storage.nbytes()
        # a node that holds its own output would hold itself, and where gradients are stopped no backward lets it go
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        result = forward(*args, **kwargs)
    memory.add(device, total)
    return result


@contextmanager
def stopped(model: Any, names: Iterable[str]) -> Iterator[None]:
    """Inside, no gradient passes these hook points; values are unchanged. ValueError for an unknown or silent point."""
    names = list(names)
    unknown = [name for name in names if name not in model.hook_dict]
    if unknown:
        raise ValueError(f"the model has no hook point {unknown[0]!r}; expected names of model.hook_dict.")
    fired = set()

    def stop(module: Any, args: Any, value: Tensor, name: str) -> Tensor:
        fired.add(name)
        return value.detach()

    handles = []
    try:
        for name in names:
            handles.append(model.hook_dict[name].register_forward_hook(partial(stop, name=name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
    if silent := [name for name in names if name not in fired]:
        raise ValueError(f"{', '.join(silent)} never fired, so its gradient was not stopped.")


@contextmanager
def watched(blocks: Iterable[Any]) -> Iterator[list[Tensor | None]]:
    """A list that backward fills with || ds / d(input of block l) ||_2 [B, T], fp32, one entry per block."""
    blocks = list(blocks)
    norms: list[Tensor | None] = [None] * len(blocks)

    def watch(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        if not x.requires_grad:
            raise ValueError(f"the input of block {index} does not depend on the embeddings; expected a causal stack.")

        def keep(gradient: Tensor) -> None:
            norms[index] = norm_over_features(gradient)

        x.register_hook(keep)

    handles = []
    try:
        for index, block in enumerate(blocks):
            handles.append(block.register_forward_pre_hook(partial(watch, index=index), with_kwargs=True))
        yield norms
    finally:
        for handle in handles:
            handle.remove()


def norm_over_features(gradient: Tensor) -> Tensor:
    """[B, T, D] -> [B, T] in fp32 (fp64 stays); a bf16 sum of squares would lose three digits."""
    return torch.linalg.vector_norm(wide(gradient), dim=-1)


def wide(x: Tensor) -> Tensor:
    """float32, or float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()
