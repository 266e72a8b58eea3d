"""What each layer of a Hugging Face model is, read from its config: kind, heads and window of its paths."""

from __future__ import annotations

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


class Unreachable(nn.Module):
    """A mixer whose inside is not reached here: it can be named and scored, not read, restricted or ablated."""

    def __init__(self, kind: str, n_heads: int, n_kv_heads: int, window: int | None, refusal: str):
        super().__init__()
        self.kind, self.n_heads, self.n_kv_heads, self.window = kind, n_heads, n_kv_heads, window
        self.refusal = refusal

    def __getattr__(self, name: str) -> Any:
        if name.startswith("hook_") or name in ("bands", "effective_rows"):
            raise ValueError(self.refusal)
        return super().__getattr__(name)


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


def kind_of(paths: tuple[Path, ...]) -> str:
    return "mlp" if not paths else paths[0].kind if len(paths) == 1 else "parallel"


def routes(config: Any, index: int, name: str) -> list[tuple[Path, int]]:
    """(path, kv or key heads) of layer `index`, whose type is `name`. CheckpointError for one without a kind here."""
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
        return [(Path("conv", 1, int(config.conv_L_cache)), 1)]
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
