"""What surrounds a backward: parameters frozen, blocks recomputed, gradients stopped at points or watched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
def recomputed(blocks: Iterable[Any], keep_hooks: bool) -> Iterator[None]:
    """Inside, each block keeps its input only and runs again in backward, in eval mode too.

    transformers' own switch does nothing outside training. `keep_hooks`: hooks inside the blocks act, so recomputation
    must not stop before the last of them.
    """
    changed = []
    try:
        for block in blocks:
            if "forward" in vars(block):
                raise ValueError(
                    f"{type(block).__name__} has a forward of its own already; expected an unwrapped block. "
                    "Leave the other context first, or pass recompute=False."
                )
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            changed.append(block)
        with set_checkpoint_early_stop(not keep_hooks):
            yield
    finally:
        for block in changed:
            del block.forward


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
