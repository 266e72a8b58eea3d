"""How far the query and key weights of each head are from those of a reference checkpoint.

    d = sum over W in {W_Q, W_K} of ||W - W_ref||_F / ||W_ref||_F        per query head, with its kv group's rows of W_K

(Qiao et al., arXiv:2606.15378, retrieval-head tracing.) Zero against itself by construction: compare heads of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_PROJECTION = re.compile(
    r"(?:^|\.)(?:layers|blocks)\.(\d+)\.(attn|self_attn|attn\.full|attn\.efficient)\.(q|k)_proj\.weight$"
)
_FUSED = re.compile(
    r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\..*(qkv_proj|query_key_value|Wqkv|c_attn|W_pack|q_a_proj)\.weight$"
)
_NORM = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:q|k)_(?:norm|layernorm)\.weight$")
GATED = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families whose q_proj holds, head by head, the query's rows and then as many of an output gate."""


class QKDistance(NamedTuple):
    """[L, H], float64; NaN for layers without a q_proj and k_proj of their own (Mamba-2, convolutions, MLP)."""

    distance: Float[Tensor, "L H"]
    query: Float[Tensor, "L H"]
    key: Float[Tensor, "L H"]
    unfolded_norms: tuple[int, ...]
    """Layers that normalise q or k after the projection: a scaled W_Q or W_K changes the distance, not the model."""


def qk_distance(
    current: Mapping[str, Tensor], reference: Mapping[str, Tensor], config: Mapping[str, Any]
) -> QKDistance:
    """Relative Frobenius distances of every head's rows, from the tensors of two checkpoints and their config.json.

    The mappings go from the names in the safetensors files to tensors and may be lazy: only q and k projections are
    read. Head width is config's (d_head, head_dim, or hidden size over heads; recurrent_d_head in a native model's
    recurrent layers); heads of parallel paths are counted in their order. Raises ValueError, naming tensors, for fused
    projections, widths that do not divide, and checkpoints whose names or shapes differ.
    """
    config = config.get("text_config", config)
    _refuse_fused(reference)
    gated = config.get("model_type") in GATED
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for q_name, k_name, layer in _pairs(reference):
        rows, (width, served) = [], _heads_of(config, layer)
        for name in (q_name, k_name):
            if name not in current or current[name].shape != reference[name].shape:
                shape = list(current[name].shape) if name in current else "nothing"
                raise ValueError(
                    f"{name} is {shape} in one checkpoint and {list(reference[name].shape)} in the other; "
                    "expected two checkpoints of one model."
                )
            split = 2 * width if gated and name == q_name else width
            rows.append(_relative(*(_heads(w[name], name, split, width) for w in (current, reference))))
        q, k = rows
        if len(q) % len(k):
            raise ValueError(
                f"{q_name} has {len(q)} heads of {width} rows and {k_name} {len(k)}; expected a multiple. "
                "Check the head width and gates in config.json."
            )
        q, k = q.repeat_interleave(served), k.repeat_interleave(served * len(q) // len(k))
        found.setdefault(layer, []).append((q, k))
    if not found:
        raise ValueError("the checkpoint has no q_proj.weight and k_proj.weight; expected at least one such layer.")
    return _table(found, reference)


def _table(found: dict[int, list[tuple[Tensor, Tensor]]], reference: Mapping[str, Tensor]) -> QKDistance:
    layers = 1 + max(int(n) for name in reference for n in re.findall(r"(?:layers|blocks)\.(\d+)\.", name))
    heads = max(sum(len(q) for q, _ in paths) for paths in found.values())
    query, key = (torch.full((layers, heads), torch.nan, dtype=torch.float64) for _ in range(2))
    for layer, paths in found.items():
        for table, values in ((query, [q for q, _ in paths]), (key, [k for _, k in paths])):
            joined = torch.cat(values)
            table[layer, : len(joined)] = joined
    norms = sorted({int(match[1]) for name in reference if (match := _NORM.search(name))})
    return QKDistance(query + key, query, key, tuple(norms))


def _pairs(names: Mapping[str, Tensor]) -> list[tuple[str, str, int]]:
    """(q, k, layer) of every path; "full" before "efficient", as layers count their heads."""
    pairs = []
    for name in names:
        match = _PROJECTION.search(name)
        if match and match[3] == "q":
            k_name = name.removesuffix("q_proj.weight") + "k_proj.weight"
            if k_name not in names:
                raise ValueError(f"{name} has no {k_name} beside it; expected both. Shared keys are not supported.")
            pairs.append((int(match[1]), match[2] == "attn.efficient", name, k_name))
    return [(q, k, layer) for layer, _, q, k in sorted(pairs)]


def _refuse_fused(names: Mapping[str, Tensor]) -> None:
    for name in names:
        if _FUSED.search(name):
            raise ValueError(
                f"{name} joins query and key rows in one matrix whose order is the family's own; expected q_proj and "
                "k_proj. Split it into the two and pass those."
            )


def _heads_of(config: Mapping[str, Any], layer: int) -> tuple[int, int]:
    """Width of a layer's query and key heads, and heads of the layer that each query head counts for (the value heads
    of a native Gated DeltaNet)."""
    kinds = config.get("layer_kinds")
    if not kinds or kinds[layer] not in ("lightning", "gdn"):
        return _head_width(config), 1
    own = config.get("recurrent_heads") or config["n_heads"]
    served = (config.get("gdn_value_heads") or own) // own if kinds[layer] == "gdn" else 1
    return config.get("recurrent_d_head") or _head_width(config), served


def _head_width(config: Mapping[str, Any]) -> int:
    width = config.get("d_head") or config.get("head_dim")
    if width is None:
        width = int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(width)


def _heads(weight: Tensor, name: str, split: int, width: int) -> Float[Tensor, "H K D"]:
    if weight.shape[0] % split:
        raise ValueError(
            f"{name} has {weight.shape[0]} rows; expected a multiple of {split}, the rows of a head. "
            "Check the head width in config.json."
        )
    return weight.double().unflatten(0, (-1, split))[:, :width]


def _relative(current: Tensor, reference: Tensor) -> Float[Tensor, " H"]:
    return (current - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)
