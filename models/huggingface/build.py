"""The layers of a Hugging Face model with their mixers, and the hook points that its code turns out to have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from models.huggingface.attention import SoftmaxMixer
from models.huggingface.block import HuggingFaceBlock
from models.huggingface.channel_decay import ChannelDecay
from models.huggingface.diagonal import GatedRecurrence, SelectiveScan, ShortConvolution
from models.huggingface.layers import Unreachable, kind_of, layer_types, routes
from models.huggingface.layout import Layout, Term
from models.huggingface.lightning import FixedDecay
from models.huggingface.probe import Observed, observe, settle_output, settle_softmax
from models.huggingface.recurrent import Bound, DeltaRule, SelectiveDecay
from models.huggingface.swaps import attach
from models.layers import Layer, Path
from models.safetensors_files import CheckpointError

MECHANISMS: dict[str, type[Bound]] = {
    mechanism.kind: mechanism
    for mechanism in (
        DeltaRule, SelectiveDecay, FixedDecay, SelectiveScan, GatedRecurrence, ShortConvolution, ChannelDecay,
    )
}  # fmt: skip


def blocks_of(hf: Any) -> nn.ModuleList:
    """The list of blocks of the text model: its one ModuleList with as many entries as the config has layers."""
    n_layers = hf.config.get_text_config().num_hidden_layers
    found = [
        child for child in hf.get_decoder().children() if isinstance(child, nn.ModuleList) and len(child) == n_layers
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"model type {hf.config.model_type!r} has {len(found)} lists of {n_layers} blocks; expected exactly one."
        )
    return found[0]


def described(hf: Any) -> list[Layer]:
    """Layers with mixers that are bound to nothing yet: what the config alone tells, no weight is read."""
    config, blocks = hf.config.get_text_config(), blocks_of(hf)
    found = []
    for index, (name, block) in enumerate(zip(layer_types(config, len(blocks)), blocks, strict=True)):
        own = routes(config, index, name)
        paths = tuple(path for path, _ in own)
        mixers = tuple(_mixer(path, kv_heads, index, block, config.model_type) for path, kv_heads in own)
        found.append(Layer(index, kind_of(paths), paths, mixers, block, in_series=_in_series(block, mixers)))
    return found


def _in_series(block: nn.Module, mixers: Sequence[Any]) -> bool:
    """Two mixers of which one lies deeper than beside the other (Zamba2): they are taken to read one another."""
    children = {id(child) for child in block.children()}
    return len(mixers) > 1 and any(isinstance(mixer, Bound) and id(mixer.site) not in children for mixer in mixers)


def bound(hf: Any, layers: Sequence[Layer]) -> tuple[list[HuggingFaceBlock], list[Layer]]:
    """Hook points in place, found out by one forward; layers again, with the sites of their mixers."""
    seen = observe(hf, [layer.block for layer in layers], [m.site for m in _mixers(layers) if isinstance(m, Bound)])
    settled = [_settled(hf.config.model_type, layer, seen) for layer in layers]
    blocks = [HuggingFaceBlock(layer.block, layer.mixers) for layer in settled]
    for block, layer, layout in zip(blocks, settled, seen.layouts, strict=True):
        block.settle(layout if layout.attn or layout.mlp else _output_only(layer), layout.in_tuple)
    return blocks, settled


def _output_only(layer: Layer) -> Layout:
    """Where the residual is another sum (MiniMax): hook_attn_out is the output of the one mixer as it is."""
    names = [name for name, child in layer.block.named_children() if any(child is site for site in layer.sites)]
    return Layout(attn=(Term(names[0], 1.0),)) if len(names) == 1 else Layout()


def _mixers(layers: Sequence[Layer]) -> list[Any]:
    return [mixer for layer in layers for mixer in layer.mixers]


def _mixer(path: Path, kv_heads: int, index: int, block: nn.Module, family: str) -> Any:
    if path.kind in ("full", "swa"):
        softmax = SoftmaxMixer(path.kind, path.heads, kv_heads, path.window, "torch")
        softmax.layer = index
        return softmax
    mechanism = MECHANISMS[path.kind]
    site = mechanism.site_in(block)
    if site is None:
        return _unreachable(path, kv_heads, index, family, "no module of a known mechanism")
    mixer = mechanism(path.heads, kv_heads, "torch")
    mixer.layer, mixer.window = index, path.window
    mixer.bind(site)
    return mixer


def _unreachable(path: Path, kv_heads: int, index: int, family: str, found: str) -> Unreachable:
    return Unreachable(
        path.kind, path.heads, kv_heads, path.window,
        f"layers.{index} ({path.kind}) of model type {family!r} cannot be read or edited inside: {found} was found in "
        "its block. Its residual stream can be recorded, and the model scored.",
    )  # fmt: skip


def _settled(family: str, layer: Layer, seen: Observed) -> Layer:
    calls, mixers, sites = seen.softmax[layer.index], [], []
    for path, mixer in zip(layer.paths, layer.mixers, strict=True):
        if isinstance(mixer, SoftmaxMixer):
            if len(calls) != 1:
                found = f"{len(calls)} calls of transformers' attention function"
                mixer = _unreachable(path, mixer.n_kv_heads, layer.index, family, found)
            else:
                mixer.bind(calls[0].module)
                settle_softmax(mixer, calls[0], layer.index)
        if not isinstance(mixer, Unreachable):
            site = mixer.__dict__["site"]
            attach(site, mixer)
            settle_output(mixer, site, seen.projections.get(id(site)))
            sites.append(site)
        mixers.append(mixer)
    return replace(layer, mixers=tuple(mixers), sites=tuple(sites))
