"""MiniCPM-SALA: HypeNet's Lightning beside softmax layers (`minicpm4`) without query and key norms, and muP factors.

Embeddings are multiplied by scale_emb, what a mixer or MLP adds by scale_depth / sqrt(L), the final norm's output by
dim_model_base / D. From sparse_config.dense_len tokens on the released minicpm4 layers attend sparsely (InfLLM v2),
which is not built: such inputs are refused. Its own modelling code comes with the weights; this follows the two public
re-implementations for serving, in vLLM and SGLang, which agree.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from models.config import HybridConfig
from models.released_formats.config_file import ConfigFile
from models.released_formats.conversion import Reading, simple
from models.released_formats.hypenet import LIGHTNING, OUTPUT_GATE, QK_NORMS, lightning_options, mixer_kinds
from models.released_formats.llama import BLOCK, QKV, ends, llama_shape

NAME = "MiniCPM-SALA directory"
KINDS = {"minicpm4": "full", "lightning-attn": "lightning", "lightning_attn": "lightning", "lightning": "lightning"}


def recognises(values: dict[str, Any]) -> bool:
    names = values.get("mixer_types")
    return values.get("model_type") == "minicpm_sala" or (isinstance(names, list) and "minicpm4" in names)


def read(file: ConfigFile, tensors: Collection[str]) -> Reading:
    shape = llama_shape(file)
    kinds = mixer_kinds(file, KINDS)
    file.expect("attention_bias", False, because="the native projections have no such biases")
    gate = file.flag("attn_use_output_gate", False)
    limit = _dense_length(file)
    context = shape["context_length"] if limit is None else min(shape["context_length"], limit - 1)
    options: dict[str, Any] = {}
    if "lightning" in kinds:
        options = lightning_options(
            file, shape, {"qk_norm": "qk_norm", "gate": "use_output_gate", "norm": "use_output_norm"}
        )
    file.ignore("mup_denominator", "rand_init")
    config = HybridConfig(
        **{**shape, "context_length": context}, layer_kinds=kinds, rope_base=file.rotary(),
        rope_on_full=file.flag("attn_use_rope", True), attention_gate=gate, dense_below=limit,
        embed_scale=file.number("scale_emb"), residual_scale=file.number("scale_depth") / shape["n_layers"] ** 0.5,
        output_scale=file.number("dim_model_base") / shape["d_model"], **options,
    )  # fmt: skip
    tables = {"full": BLOCK | QKV | (OUTPUT_GATE if gate else {})}
    tables["lightning"] = BLOCK | QKV | LIGHTNING | (QK_NORMS if config.lightning_qk_norm else {})
    rules, tied = ends(file)
    for layer, kind in enumerate(kinds):
        rules += simple(tables[kind], f"blocks.{layer}.", f"model.layers.{layer}.")
    return Reading(NAME, config, rules, tied)


def _dense_length(file: ConfigFile) -> int | None:
    sparse = file.plain("sparse_config", None)
    if not sparse:
        return None
    limit = sparse.get("dense_len")
    if not isinstance(limit, int) or limit < 2:
        raise file.error("sparse_config", "a dense_len of 2 or more tokens: sparse attention is not built")
    return limit
