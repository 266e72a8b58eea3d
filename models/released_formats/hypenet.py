"""HypeNet (thunlp/hybrid-linear-attention, arXiv:2601.22156; read at commit 229e301): attn beside lightning-attn.

Softmax layers: RMSNorm of query and key heads, no positions unless attn_use_rope, an output gate o_gate. Lightning
layers (fla's simple_gla with a fixed decay per head): the same norms, rotary positions, scale 1/sqrt(K), o_norm over
all heads, times sigmoid(z_proj x). The Gated DeltaNet of its gdn.py (beta = 2 sigmoid) is read too, though its own
decoder builds none.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from models.config import HybridConfig
from models.released_formats.config_file import ConfigFile
from models.released_formats.conversion import Reading, Rule, simple
from models.released_formats.llama import BLOCK, QKV, ends, llama_shape

NAME = "HypeNet directory"
KINDS = {"attn": "full", "lightning-attn": "lightning", "lightning_attn": "lightning", "gdn": "gdn"}
SLOPES = "alibi-interleaved"
CONV_WIDTH = 4
QK_NORMS = {f"attn.{name}_norm.weight": f"self_attn.{name}_norm.weight" for name in "qk"}
OUTPUT_GATE = {"attn.g_proj.weight": "self_attn.o_gate.weight"}
LIGHTNING = {"attn.g_proj.weight": "self_attn.z_proj.weight", "attn.norm.weight": "self_attn.o_norm.weight"}
GDN = {
    **{f"attn.{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "abg"},
    "attn.A_log": "self_attn.A_log",
    "attn.dt_bias": "self_attn.dt_bias",
    "attn.norm.weight": "self_attn.o_norm.weight",
}


def recognises(values: dict[str, Any]) -> bool:
    return values.get("model_type") == "hypenet" or ("mixer_types" in values and "sparse_config" not in values)


def read(file: ConfigFile, tensors: Collection[str]) -> Reading:
    """CheckpointError for mixers and options that no native mixer has."""
    shape = llama_shape(file)
    kinds = mixer_kinds(file, KINDS)
    file.expect("attention_bias", False, because="the native projections have no such biases")
    file.expect("attn_logits_scaling", None, because="position-dependent scores are not built")
    for name in ("sliding_window", "use_sliding_window"):
        file.expect(name, None, False, because="the released model has no windows")
    gate = file.flag("attn_use_output_gate", False)
    options = {**_lightning(file, kinds, shape), **_gdn(file, kinds, shape)}
    _ignore_the_rest(file, kinds)
    config = HybridConfig(
        **shape, layer_kinds=kinds, rope_base=file.rotary(), rope_on_full=file.flag("attn_use_rope", True),
        qk_norm_eps=shape["rms_eps"], attention_gate=gate, **options,
    )  # fmt: skip
    tables = {"full": BLOCK | QKV | QK_NORMS | (OUTPUT_GATE if gate else {}), "gdn": BLOCK | QKV | GDN}
    tables["lightning"] = BLOCK | QKV | LIGHTNING | (QK_NORMS if config.lightning_qk_norm else {})
    rules, tied = ends(file)
    for layer, kind in enumerate(kinds):
        rules += simple(tables[kind], f"blocks.{layer}.", f"model.layers.{layer}.")
        if kind == "gdn":
            rules += (conv_rule(config, f"blocks.{layer}.", f"model.layers.{layer}.self_attn."),)
    return Reading(NAME, config, rules, tied)


def mixer_kinds(file: ConfigFile, known: dict[str, str]) -> tuple[str, ...]:
    names, count = (
        file.plain("mixer_types", ["attn"] * file.integer("num_hidden_layers")),
        file.values["num_hidden_layers"],
    )
    if not isinstance(names, list) or len(names) != count:
        raise file.error("mixer_types", f"a list of {count} names")
    if unknown := [name for name in names if name not in known]:
        raise file.error("mixer_types", f"names out of {', '.join(known)}; {unknown[0]!r} is not built")
    return tuple(known[name] for name in names)


def lightning_options(file: ConfigFile, shape: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Fields of HybridConfig; `names`: how this format calls qk_norm, gate and norm."""
    heads, width = file.integer("lightning_nh", shape["n_heads"]), file.integer("lightning_head_dim", shape["d_head"])
    if (found := file.integer("lightning_nkv", shape["n_kv_heads"])) != heads:
        raise file.error(
            "lightning_nkv", f"{heads}, the number of heads: grouped Lightning heads ({found}) are not built"
        )
    if width != shape["d_head"]:
        raise file.error("lightning_head_dim", f"{shape['d_head']}, the head width for which positions are made")
    for part in ("gate", "norm"):
        if not file.flag(names[part], False):
            raise file.error(names[part], f"true: Lightning without its output {part} is not built")
    scale = {"1/sqrt(d)": width**-0.5, "1/d": 1 / width}.get(file.plain("lightning_scale", "1/sqrt(d)"), 1.0)
    return {
        "recurrent_heads": heads, "lightning_slopes": SLOPES, "lightning_silu": False, "lightning_scale": scale,
        "lightning_qk_norm": file.flag(names["qk_norm"], False),
        "lightning_rope": file.flag("lightning_use_rope", True),
    }  # fmt: skip


def conv_rule(config: HybridConfig, native: str, released: str) -> Rule:
    """The short convolutions of q, k and v, joined."""
    keys, values = config.key_heads * config.key_width, config.value_heads * config.value_width
    names = tuple(f"{released}{name}_conv1d.weight" for name in "qkv")
    return Rule(f"{native}attn.conv_weight", names, (keys, keys, values), is_kernel=True)


def _lightning(file: ConfigFile, kinds: tuple[str, ...], shape: dict[str, Any]) -> dict[str, Any]:
    if "lightning" not in kinds:
        return {}
    file.expect("lightning_use_short_conv", False, because="Lightning with a convolution is not built")
    file.expect("lightning_rope_scaling", None, False, because="scaled rotary positions are not built")
    prefix = "lightning_use_"
    names = {"qk_norm": f"{prefix}qk_norm", "gate": f"{prefix}output_gate", "norm": f"{prefix}output_norm"}
    return lightning_options(file, shape, names)


def _gdn(file: ConfigFile, kinds: tuple[str, ...], shape: dict[str, Any]) -> dict[str, Any]:
    if "gdn" not in kinds:
        return {}
    heads = file.integer("gdn_nh", shape["n_heads"])
    if (found := file.integer("gdn_nkv", shape["n_kv_heads"])) != heads:
        raise file.error("gdn_nkv", f"{heads}, the number of heads: repeated values ({found}) are not built")
    for name in ("gdn_use_short_conv", "gdn_use_gate"):
        if not file.flag(name, False):
            raise file.error(name, "true: Gated DeltaNet without it is not built")
    for name in ("gdn_use_qk_norm", "gdn_use_rope"):
        file.expect(name, False, because="Gated DeltaNet has neither here")
    lightning = file.integer("lightning_nh", shape["n_heads"]) if "lightning" in kinds else heads
    if lightning != heads:
        raise file.error("gdn_nh", f"{lightning}, as many as Lightning layers have")
    return {"recurrent_heads": heads, "gdn_beta_scale": 2.0, "conv_width": CONV_WIDTH}


def _ignore_the_rest(file: ConfigFile, kinds: tuple[str, ...]) -> None:
    """Training, distillation, and mixers that are not there."""
    file.ignore("expand_kv_proj", "loss_fn", "fused_ce_loss", "shift_labels", "rand_init", "lightning_conv_size")
    file.ignore("gdn_attn_mode", "gdn_fuse_cross_entropy", "gdn_activation", "gdn_expand_v")  # unused with convolutions
    absent = ["kda_", "mamba2_", *(f"{kind}_" for kind in ("lightning", "gdn") if kind not in kinds)]
    file.ignore(*(name for name in file.values if name.startswith(tuple(absent))))
