"""Softmax layers of Hugging Face models, through transformers' AttentionInterface: exact bands, sinks, hook points.

The function registered here is transformers' sanctioned door (no code of the family is replaced): it receives the
operands of the softmax, rotated already, and computes them with kernels.attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from kernels.attention import Band, attention
from kernels.attention.bands import binding
from kernels.operands import Impl
from models.huggingface.scores import softcapped_attention, without_padding
from models.huggingface.swaps import running
from models.mixers.mixer import Mixer, listened
from models.softmax_rows import mixed, out_without, pattern_without, weights

NAME = "hybridscope"
ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_emb", "apply_rotary_pos_emb_interleave")


class SoftmaxMixer(Mixer):
    """Full or sliding-window attention of one layer. hook_q and hook_k are before the rotation, hook_rot_* after it.

    Points that a family's code does not pass through do not exist: without a rotation no hook_rot_*, and where the
    rotation is no module-level function no hook_q and hook_k (models.huggingface.probe finds out).
    """

    hook_q: HookPoint
    hook_k: HookPoint
    hook_v: HookPoint
    hook_rot_q: HookPoint
    hook_rot_k: HookPoint
    hook_pattern: HookPoint
    hook_z: HookPoint

    def __init__(self, kind: str, n_heads: int, n_kv_heads: int, window: int | None, impl: Impl):
        super().__init__(n_heads, n_kv_heads, impl)
        self.kind, self.window, self.layer = kind, window, -1
        self.scale: float | None = None
        self.softcap: float | None = None
        self.rope_base: float | None = None
        """Not None: the operands of the softmax are hook_rot_q and hook_rot_k."""
        self.rotation_axis = 2  # of time in the operands of the family's rotation
        self.hidden = 0  # keys that a sliding cache has dropped
        self.seen = 0
        for name in ("q", "k", "v", "rot_q", "rot_k", "pattern", "z"):
            setattr(self, f"hook_{name}", HookPoint())

    @property
    def sink_logits(self) -> Float[Tensor, " H"] | None:
        """Learned sinks (GPT-OSS), None without."""
        return getattr(self.site, "sinks", None)

    @property
    def site(self) -> nn.Module | None:
        """The family's attention module; None as long as it is not known (on the meta device)."""
        return self.__dict__.get("site")

    def bind(self, site: nn.Module) -> None:
        """`site` is the family's attention module; it stays a child of the family's model only."""
        self.__dict__["site"] = site

    def bands(self) -> tuple[Band, ...]:
        """Which keys are visible: the layer's own window and every restriction in force, intersected."""
        own = () if self.window is None else (Band(window=self.window),)
        return (*own, *(Band(window=r.window, sinks=r.sinks) for r in self.restrictions))

    def replacements(self) -> Mapping[str, Callable[..., Any]]:
        """The rotation is watched only while somebody listens before it."""
        if self.rope_base is None or not hasattr(self, "hook_q"):
            return {}
        wanted = listened(self.hook_q) or listened(self.hook_k)
        return dict.fromkeys(ROTATIONS, self._rotation) if wanted else {}

    def entered(self, arguments: Mapping[str, Any]) -> None:
        cache = arguments.get("cache", arguments.get("past_key_values"))
        index = getattr(self.__dict__["site"], "layer_idx", None)
        self.seen = int(cache.get_seq_length(index)) if cache is not None and index is not None and index >= 0 else 0

    def _rotation(self, original: Callable[..., Any], query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        def fired(point: HookPoint, x: Tensor) -> Tensor:
            return point(x.transpose(1, 2)).transpose(1, 2) if self.rotation_axis == 2 else point(x)

        return original(fired(self.hook_q, query), fired(self.hook_k, key), *args, **kwargs)

    def attend(
        self, query: Float[Tensor, "B T H K"], key: Float[Tensor, "B S G K"], value: Float[Tensor, "B S G V"],
        pads: list[int] | None,
    ) -> Float[Tensor, "B T H V"]:  # fmt: skip
        """`pads`: tokens before the first real one, by sample; None without padding."""
        before = "q" if self.rope_base is None else "rot_q"
        query = _passed(self, before, query)
        key = _passed(self, before.replace("q", "k"), key)
        value = _passed(self, "v", value)
        hidden = max(0, self.seen + query.shape[1] - key.shape[1])
        if pads is not None and hidden:
            raise ValueError("a padded batch continues a sliding cache; expected padding only in a first forward.")
        if self.knockouts and (pads is not None or self.seen):
            raise ValueError("a padded or cached batch under a knockout; expected whole sequences of one length.")
        bands = tuple(Band(band.window, max(0, band.sinks - hidden)) for band in self.bands())

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._computed(q, k, v, bands, hidden)

        return run(query, key, value) if pads is None else without_padding(run, query, key, value, pads)

    def _computed(self, query: Tensor, key: Tensor, value: Tensor, bands: tuple[Band, ...], hidden: int) -> Tensor:
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        sinks = self.sink_logits
        settings: dict[str, Any] = {"bands": bands, "scale": scale, "softcap": self.softcap, "sink_logits": sinks}
        if listened(self.hook_pattern):
            at = torch.arange(key.shape[1], device=query.device)
            p = weights(query, key, at[key.shape[1] - query.shape[1] :], at, **settings)
            p = pattern_without(p, self.knockouts, query, key, **settings) if self.knockouts else p
            return mixed(self.hook_pattern(nn.functional.pad(p, (hidden, 0)))[..., hidden:], value)
        if self.softcap is not None:
            out = softcapped_attention(query, key, value, bands=bands, scale=scale, softcap=self.softcap)
        else:
            impl = self.impl
            if impl == "triton" and sinks is None and has_fused_form(query, key, value, bands):
                impl = "torch"
            out = attention(query=query, key=key, value=value, bands=bands, scale=scale, sink_logits=sinks, impl=impl)
        return out_without(out, value, self.knockouts, query, key, **settings) if self.knockouts else out


def has_fused_form(query: Tensor, key: Tensor, value: Tensor, bands: tuple[Band, ...]) -> bool:
    """Whether nothing is hidden and torch's fused attention takes the operands: on Hopper, faster than any of ours.

    In float32 it may round to TF32, and of unequal widths it would build the T x S matrix.
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    whole = query.shape[1] == key.shape[1] and not binding(bands, key.shape[1])
    return half and whole and query.is_cuda and query.shape[3] == value.shape[3] <= 256


def register() -> str:
    """Our attention and mask functions in transformers' registries, under the name that is returned."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, padding_mask)
    return NAME


def padding_mask(*, kv_length: int, attention_mask: Tensor | None = None, use_vmap: bool = False, **_: Any) -> Any:
    """The padding as a [B, S] mask, None without any: causality and windows are the layers' own bands.

    ValueError for a family that changes causality (a mask function of its own), which bands cannot express.
    """
    if use_vmap:
        raise ValueError("the family adds a mask function of its own to its causal attention; expected none.")
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:]
    return None if bool(attention_mask.all()) else attention_mask


observers: list[Callable[..., None]] = []
"""Called with (module, query, key, arguments) of every softmax: how models.huggingface.probe sees a family."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """The attention function of the registry: operands [B, heads, time, width], result [B, T, H, V]."""
    for observer in observers:
        observer(module, query, key, value, arguments)
    if arguments.get("dropout"):
        raise ValueError(f"attention dropout is {arguments['dropout']}; expected 0. Call model.eval() first.")
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    pads = None if attention_mask is None else leading_padding(attention_mask, key.shape[1])
    mixer = running(module)
    if mixer is not None:
        return mixer.attend(query, key, value, pads), None
    plain = SoftmaxMixer("full", query.shape[2], key.shape[2], arguments.get("sliding_window"), "torch")
    plain.__dict__["site"] = module
    plain.scale, plain.softcap = arguments.get("scaling"), arguments.get("softcap")
    return plain.attend(query, key, value, pads), None


def leading_padding(mask: Bool[Tensor, "B S"] | Tensor, length: int) -> list[int] | None:
    """Pads before the first real token of each sample; those behind the last one are harmless to a causal model."""
    if mask.ndim != 2 or mask.shape[1] != length:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)} for {length} keys; expected [B, {length}], 1 for real tokens."
        )
    real = mask.bool()
    first = real.long().argmax(1)
    last = real.shape[1] - real.flip(1).long().argmax(1)
    if not bool(real.any(1).all()) or not bool((real.sum(1) == last - first).all()):
        raise ValueError("attention_mask has a row with gaps or without a real token; expected pads at the ends only.")
    found: list[int] = first.tolist()
    return found if any(found) else None


def _passed(mixer: SoftmaxMixer, name: str, value: Tensor) -> Tensor:
    point = getattr(mixer, f"hook_{name}", None)
    return point(value) if point is not None and listened(point) else value
