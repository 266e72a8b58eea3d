"""What each layer of a Hugging Face model is, read from its config: the view models.layers gives of native models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from models.layers import Path
from models.safetensors_files import CheckpointError

# `linear_attention` by model type: path kind, config attributes with the numbers of heads and of key heads (None: one)
_RECURRENT: dict[str, tuple[str, str | None, str | None]] = {
    "qwen3_next": ("gdn", "linear_num_value_heads", "linear_num_key_heads"),
    "qwen3_5": ("gdn", "linear_num_value_heads", "linear_num_key_heads"),
    "qwen3_5_text": ("gdn", "linear_num_value_heads", "linear_num_key_heads"),
    "qwen3_5_moe": ("gdn", "linear_num_value_heads", "linear_num_key_heads"),
    "qwen3_5_moe_text": ("gdn", "linear_num_value_heads", "linear_num_key_heads"),
    "olmo_hybrid": ("gdn", "linear_num_value_heads", "linear_num_key_heads"),
    "bamba": ("mamba2", "mamba_n_heads", "mamba_n_groups"),
    "falcon_h1": ("mamba2", "mamba_n_heads", "mamba_n_groups"),
    "granitemoehybrid": ("mamba2", "mamba_n_heads", "mamba_n_groups"),
    "nemotron_h": ("mamba2", "mamba_num_heads", "n_groups"),
    "zamba2": ("mamba2", "n_mamba_heads", "mamba_ngroups"),
    "mamba2": ("mamba2", "num_heads", "n_groups"),
    "jamba": ("mamba1", None, None),
    "zamba": ("mamba1", None, None),
    "mamba": ("mamba1", None, None),
    "falcon_mamba": ("mamba1", None, None),
    "minimax": ("lightning", "num_attention_heads", "num_attention_heads"),
    "kimi_linear": ("kda", "linear_num_heads", "linear_num_heads"),
    "recurrent_gemma": ("rglru", "num_attention_heads", "num_attention_heads"),
}
_MLP_ONLY = ("mlp", "moe", "dense", "sparse")


@dataclass(frozen=True)
class HuggingFaceLayer:
    """Layer `index` (absolute, from 0) of a Hugging Face model; `type` is the name its config uses."""

    index: int
    type: str
    kind: str
    paths: tuple[Path, ...]
    n_kv_heads: int
    block: nn.Module

    @property
    def window(self) -> int | None:
        """The window of the layer's sliding path; None if it has none."""
        return next((path.window for path in self.paths if path.window is not None), None)

    @property
    def mixers(self) -> tuple[nn.Module, ...]:
        raise ValueError(
            f"layer {self.index} ({self.type}) of a Hugging Face model has no mixers that can be edited here; "
            "restricting a receptive field needs a native checkpoint, a directory written by models.save"
        )

    @property
    def n_heads(self) -> int:
        return sum(path.heads for path in self.paths)


def layer_views(config: Any, blocks: nn.ModuleList) -> tuple[HuggingFaceLayer, ...]:
    """One view per block. CheckpointError for a layer type that has no kind here."""
    types = layer_types(config, len(blocks))
    return tuple(
        _view(config, index, kind, block) for index, (kind, block) in enumerate(zip(types, blocks, strict=True))
    )


def layer_types(config: Any, n_layers: int) -> list[str]:
    """`config.layer_types`; a family without has one type: recurrent, sliding if it has a window, else full."""
    types = getattr(config, "layer_types", None)
    if types is None:
        if config.model_type in ("mamba", "mamba2", "falcon_mamba"):
            types = ["linear_attention"] * n_layers
        else:
            types = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"] * n_layers
    if len(types) != n_layers:
        raise CheckpointError(f"config.layer_types names {len(types)} layers; the model has {n_layers} blocks.")
    return list(types)


def _view(config: Any, index: int, name: str, block: nn.Module) -> HuggingFaceLayer:
    routes = _routes(config, index, name)
    paths = tuple(path for path, _ in routes)
    kind = "mlp" if not paths else paths[0].kind if len(paths) == 1 else "parallel"
    return HuggingFaceLayer(index, name, kind, paths, sum(kv_heads for _, kv_heads in routes), block)


def _routes(config: Any, index: int, name: str) -> list[tuple[Path, int]]:
    if name == "full_attention":
        return [_attention(config, "full", None)]
    if name == "sliding_attention":
        return [_attention(config, "swa", int(config.sliding_window))]
    if name == "linear_attention":
        return [_recurrent(config, index)]
    if name == "hybrid":
        return [_attention(config, "full", None), _recurrent(config, index)]
    if name == "hybrid_sliding":
        return [_attention(config, "swa", int(config.sliding_window)), _recurrent(config, index)]
    if name == "conv":
        return [(Path("conv", 1, None), 1)]
    if name in _MLP_ONLY:
        return []
    raise CheckpointError(
        f"layer {index} of model type {config.model_type!r} is {name!r}; layer types with a kind here: full_attention, "
        "sliding_attention, linear_attention, hybrid, hybrid_sliding, conv, mlp, moe. Scoring works without them."
    )


def _attention(config: Any, kind: str, window: int | None) -> tuple[Path, int]:
    heads = int(config.num_attention_heads)
    return Path(kind, heads, window), int(getattr(config, "num_key_value_heads", None) or heads)


def _recurrent(config: Any, index: int) -> tuple[Path, int]:
    if config.model_type not in _RECURRENT:
        raise CheckpointError(
            f"layer {index} is linear_attention of model type {config.model_type!r}, which is not known here; "
            f"known: {', '.join(sorted(_RECURRENT))}."
        )
    kind, heads, key_heads = _RECURRENT[config.model_type]
    n_heads = 1 if heads is None else int(getattr(config, heads))
    return Path(kind, n_heads, None), 1 if key_heads is None else int(getattr(config, key_heads))
