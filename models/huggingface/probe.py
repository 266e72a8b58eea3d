"""One short forward that shows how a family's code is built: its softmax operands, rotations, output projections.

What is learned here is what the hook points rest on; a point whose place was not seen does not exist.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.huggingface import attention
from models.huggingface.attention import ROTATIONS, SoftmaxMixer
from models.huggingface.layout import Layout, answering_noise, layout_of
from models.huggingface.swaps import running
from models.mixers.mixer import Mixer, listened
from models.safetensors_files import CheckpointError

TOKENS = 11


@dataclass
class Softmax:
    """What one attention function call was given, and the rotation that came before it."""

    module: nn.Module
    heads: tuple[int, int]
    width: int
    arguments: dict[str, Any]
    rotation_axis: int | None = None
    """2 for [B, H, T, K], 1 for [B, T, H, K]; None if no rotation of the whole operands was seen."""
    rotated: bool = False


@dataclass
class Observed:
    softmax: list[list[Softmax]] = field(default_factory=list)
    projections: dict[int, str] = field(default_factory=dict)
    """id of a mixer module -> name of the child whose output is the mixer's."""
    layouts: list[Layout] = field(default_factory=list)


@torch.no_grad()
def observe(hf: Any, blocks: Sequence[nn.Module], recurrent: Sequence[nn.Module]) -> Observed:
    """A forward over a few tokens, in which children of blocks answer with noise; nothing is left behind.

    `recurrent`: the modules of recurrent mixers; those of softmax mixers show themselves.
    """
    found = Observed([[] for _ in blocks])
    vocabulary, device = hf.config.get_text_config().vocab_size, hf.get_input_embeddings().weight.device
    with ExitStack() as stack:
        stack.enter_context(_projections(blocks, found))
        stack.enter_context(_softmaxes(blocks, found))
        seen = stack.enter_context(answering_noise(blocks))
        hf.base_model(input_ids=torch.arange(TOKENS, device=device)[None] % vocabulary, use_cache=False)
    mixing = {id(site) for site in recurrent} | {id(call.module) for calls in found.softmax for call in calls}
    for block, own in zip(blocks, seen, strict=True):
        holds = {
            name: any(id(module) in mixing for module in child.modules()) for name, child in block.named_children()
        }
        found.layouts.append(layout_of(block, own, holds.__getitem__))
    return found


@contextmanager
def _softmaxes(blocks: Sequence[nn.Module], found: Observed) -> Iterator[None]:
    """Attention calls by block, and whether the operands were rotated by a module-level function."""
    current, rotations = [0], []  # type: list[int], list[tuple[Tensor, Tensor]]
    homes = {sys.modules[type(module).__module__] for block in blocks for module in block.modules()}
    replaced = [(home, name, getattr(home, name)) for home in homes for name in ROTATIONS if hasattr(home, name)]

    def enter(module: nn.Module, args: Any, index: int) -> None:
        current[0] = index

    def rotate(original: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        rotations.append((query, key))
        return original(query, key, *args, **kwargs)

    def call(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> None:
        own = Softmax(module, (query.shape[1], key.shape[1]), query.shape[3], arguments)
        whole = [q for q, k in rotations if q.shape[-1] == query.shape[-1] and q.numel() == query.numel()]
        own.rotated = bool(rotations)
        if len(rotations) == 1 and len(whole) == 1:
            own.rotation_axis = 2 if whole[0].shape[2] == query.shape[2] else 1
        rotations.clear()
        found.softmax[current[0]].append(own)

    handles = [block.register_forward_pre_hook(partial(enter, index=i)) for i, block in enumerate(blocks)]
    attention.observers.append(call)
    try:
        for home, name, original in replaced:
            setattr(home, name, partial(rotate, original))
        yield
    finally:
        attention.observers.remove(call)
        for home, name, original in replaced:
            setattr(home, name, original)
        for handle in handles:
            handle.remove()


@contextmanager
def _projections(blocks: Sequence[nn.Module], found: Observed) -> Iterator[None]:
    """Which linear child makes a module's output: a mixer's input there is what its heads say, hook_z."""
    handles, last = [], {}  # type: list[Any], dict[int, tuple[str, Tensor]]

    def keep(module: nn.Module, args: Any, output: Any, site: int, name: str) -> None:
        last[site] = (name, output)

    def compare(module: nn.Module, args: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        name, made = last.pop(id(module), ("", None))
        if made is not None and made.shape == value.shape and torch.equal(made, value):
            found.projections[id(module)] = name

    for site in {id(module): module for block in blocks for module in block.modules()}.values():
        linear = [(name, child) for name, child in site.named_children() if isinstance(child, nn.Linear)]
        for name, child in linear:
            handles.append(child.register_forward_hook(partial(keep, site=id(site), name=name)))
        if linear:
            handles.append(site.register_forward_hook(compare))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def settle_softmax(mixer: SoftmaxMixer, seen: Softmax, layer: int) -> None:
    """Scale, cap and points of a softmax mixer as its family calls it; CheckpointError if the config says otherwise."""
    heads, kv_heads = seen.heads
    window = seen.arguments.get("sliding_window")
    if heads != mixer.n_heads or (window is not None and window != mixer.window):
        raise CheckpointError(
            f"layer {layer}: the attention function gets {heads} heads and window {window}; config.json says "
            f"{mixer.n_heads} and {mixer.window}."
        )
    mixer.n_kv_heads = kv_heads
    scale = seen.arguments.get("scaling")
    mixer.scale = None if scale is None else float(scale)
    mixer.softcap = seen.arguments.get("softcap")
    if not seen.rotated:
        del mixer.hook_rot_q, mixer.hook_rot_k
        return
    mixer.rope_base = 1.0
    if seen.rotation_axis is None:
        del mixer.hook_q, mixer.hook_k
    else:
        mixer.rotation_axis = seen.rotation_axis


def settle_output(mixer: Mixer, site: nn.Module, name: str | None) -> None:
    """hook_z on the way into the output projection; without one there is no hook_z."""
    if name is None:
        del mixer.hook_z
        return

    def pass_through(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if running(site) is not mixer or not listened(mixer.hook_z):
            return None
        return (mixer.hook_z(args[0].unflatten(-1, (mixer.n_heads, -1))).flatten(2), *args[1:])

    getattr(site, name).register_forward_pre_hook(pass_through)
