"""Token mixers, one per file, built from a layer's kind."""

from __future__ import annotations

from kernels.operands import Impl
from models.config import HybridConfig
from models.mixers.attention import FullAttention
from models.mixers.gdn import GatedDeltaNet
from models.mixers.headwise import HeadwiseMixer
from models.mixers.lightning import Lightning
from models.mixers.mamba2 import Mamba2
from models.mixers.mixer import Mixer
from models.mixers.sliding_window import SlidingWindowAttention

MIXERS: dict[str, type[FullAttention | Lightning | Mamba2 | GatedDeltaNet]] = {
    mixer.kind: mixer for mixer in (FullAttention, SlidingWindowAttention, Lightning, Mamba2, GatedDeltaNet)
}


def build_mixer(config: HybridConfig, layer: int, impl: Impl) -> Mixer | HeadwiseMixer:
    kind = config.layer_kinds[layer]
    if kind in ("lightning", "gdn"):
        return MIXERS[kind](config, config.key_heads, config.n_kv_heads, layer, impl)
    if kind != "headwise":
        return MIXERS[kind](config, config.n_heads, config.n_kv_heads, layer, impl)
    heads, kv_heads = config.n_heads // 2, max(1, config.n_kv_heads // 2)
    return HeadwiseMixer(
        FullAttention(config, heads, kv_heads, layer, impl),
        MIXERS[config.efficient](config, heads, kv_heads, layer, impl),
    )


def paths_of(mixer: Mixer | HeadwiseMixer) -> tuple[Mixer, ...]:
    """The parallel mixers of a layer: one, or (full, efficient) when head-wise."""
    return (mixer.full, mixer.efficient) if isinstance(mixer, HeadwiseMixer) else (mixer,)
