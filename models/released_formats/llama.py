"""Llama-style directories of thunlp/rethinking-hybrid-attention (arXiv:2606.15378): full attention and windows.

Known of this format are the tensor names and the attributes eval_sliding_window and eval_attention_sink_size, which its
released scripts read and set; the modelling code itself comes with the checkpoints and is never run. So which layers
have a window must be said by transformers' own `layer_types` and `sliding_window`, and what else a config.json holds
stops the load. A learned sink logit per head, [H] under one of SINKS, is accepted on all layers of a kind.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from models.config import HybridConfig
from models.released_formats.config_file import ConfigFile
from models.released_formats.conversion import Reading, Rule, simple

NAME = "Llama-style directory of rethinking-hybrid-attention"
MARKS = ("eval_sliding_window", "eval_attention_sink_size")
SINKS = ("sinks", "sink", "learnable_sink")
KINDS = {"full_attention": "full", "sliding_attention": "swa"}
ENDS = {"embed.weight": "model.embed_tokens.weight", "ln_final.weight": "model.norm.weight"}
BLOCK = {
    "ln1.weight": "input_layernorm.weight",
    "ln2.weight": "post_attention_layernorm.weight",
    "attn.o_proj.weight": "self_attn.o_proj.weight",
    "mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "mlp.up_proj.weight": "mlp.up_proj.weight",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
}
QKV = {f"attn.{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkv"}


def recognises(values: dict[str, Any]) -> bool:
    return "mixer_types" not in values and any(mark in values for mark in MARKS)


def read(file: ConfigFile, tensors: Collection[str]) -> Reading:
    """CheckpointError for what is not known to be in this format, and for a window that is set for evaluation."""
    kinds, window = _kinds(file)
    if file.plain("eval_sliding_window", None) is not None:
        raise file.error(
            "eval_sliding_window",
            "null: it is a restriction at inference, not the model. Set it to null, as the released scripts do, and "
            "use hooks.restrict(model, 'full', window=W, sinks=S)",
        )
    file.ignore("eval_attention_sink_size")  # acts with eval_sliding_window only
    for name in ("attention_bias", "mlp_bias"):
        file.expect(name, False, because="no biases are known in this format")
    sinks = {
        kind: name for layer, kind in enumerate(kinds) for name in SINKS
        if f"model.layers.{layer}.self_attn.{name}" in tensors
    }  # fmt: skip
    config = HybridConfig(
        **llama_shape(file), layer_kinds=kinds, window=window, learned_sinks=tuple(sinks), rope_base=file.rotary()
    )
    rules, tied = ends(file)
    for layer, kind in enumerate(kinds):
        native, released = f"blocks.{layer}.", f"model.layers.{layer}."
        rules += simple(BLOCK | QKV, native, released)
        if kind in sinks:
            rules += simple({"attn.sink_logits": f"self_attn.{sinks[kind]}"}, native, released)
    return Reading(NAME, config, rules, tied)


def llama_shape(file: ConfigFile) -> dict[str, Any]:
    """What every Llama-style config.json says of widths, heads, norms and vocabulary."""
    file.expect("hidden_act", "silu", because="the native MLP is SwiGLU")
    width, heads = file.integer("hidden_size"), file.integer("num_attention_heads")
    return {
        "d_model": width, "n_layers": file.integer("num_hidden_layers"), "n_heads": heads,
        "n_kv_heads": file.integer("num_key_value_heads", heads), "d_head": file.integer("head_dim", width // heads),
        "d_ffn": file.integer("intermediate_size"), "vocab_size": file.integer("vocab_size"),
        "context_length": file.integer("max_position_embeddings"), "rms_eps": file.number("rms_norm_eps"),
    }  # fmt: skip


def ends(file: ConfigFile, names: dict[str, str] = ENDS) -> tuple[tuple[Rule, ...], tuple[str, str] | None]:
    """Rules of embedding, final norm and unembedding, and which tensors are tied."""
    embedding, tied = names["embed.weight"], file.flag("tie_word_embeddings", False)
    last = embedding if tied else "lm_head.weight"
    return simple({**names, "unembed.weight": last}), (("lm_head.weight", embedding) if tied else None)


def _kinds(file: ConfigFile) -> tuple[tuple[str, ...], int | None]:
    names, window = file.plain("layer_types", None), file.integer("sliding_window", None)
    file.ignore("use_sliding_window", "max_window_layers")
    count = file.integer("num_hidden_layers")
    if names is None:
        if window is not None:
            raise file.error("sliding_window", "null without 'layer_types', which says what layers have the window")
        return ("full",) * count, None
    if not isinstance(names, list) or len(names) != count or not set(names) <= set(KINDS):
        raise file.error("layer_types", f"{count} names out of {', '.join(KINDS)}")
    kinds = tuple(KINDS[name] for name in names)
    if "swa" in kinds and window is None:
        raise file.error("sliding_window", "the tokens that 'sliding_attention' layers see")
    return kinds, window
