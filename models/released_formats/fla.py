"""Model directories of flash-linear-attention (read at commit bc3b101): transformer, gated_deltanet, mamba2.

Hybrids say `attn = {layers, num_heads, num_kv_heads, window_size, ...}`, one such or a list. A window of w means the w
most recent keys, self included, as here; rotary positions turn halves of a head, as here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from models.config import HybridConfig
from models.released_formats.config_file import ConfigFile
from models.released_formats.conversion import Reading, Rule, simple
from models.released_formats.hypenet import conv_rule
from models.released_formats.llama import ends

QK_NORM_EPS = 1e-5  # fla's RMSNorm default: Attention passes none
ENDS = {"embed.weight": "model.embeddings.weight", "ln_final.weight": "model.norm.weight"}
BLOCK = {
    "ln1.weight": "attn_norm.weight",
    "ln2.weight": "mlp_norm.weight",
    **{f"mlp.{name}_proj.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}
ATTENTION = {f"attn.{name}_proj.weight": f"attn.{name}_proj.weight" for name in "qkvo"}
BIASES = {f"attn.{name}_proj.bias": f"attn.{name}_proj.bias" for name in "qkv"}
QK_NORMS = {f"attn.{name}_norm.weight": f"attn.{name}_norm.weight" for name in "qk"}
GDN = {
    **{f"attn.{name}_proj.weight": f"attn.{name}_proj.weight" for name in "qkvabgo"},
    "attn.A_log": "attn.A_log",
    "attn.dt_bias": "attn.dt_bias",
    "attn.norm.weight": "attn.o_norm.weight",
}
MAMBA2_ENDS = {"embed.weight": "backbone.embeddings.weight", "ln_final.weight": "backbone.norm_f.weight"}
MAMBA2 = {
    "ln1.weight": "norm.weight",
    "attn.in_proj.weight": "mixer.in_proj.weight",
    "attn.A_log": "mixer.A_log",
    "attn.dt_bias": "mixer.dt_bias",
    "attn.D": "mixer.D",
    "attn.norm.weight": "mixer.norm.weight",
    "attn.o_proj.weight": "mixer.out_proj.weight",
}
UNREAD = ("attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")
OTHERS = (
    "abc", "bitnet", "comba", "delta_net", "deltaformer", "forgetting_transformer", "gated_deltaproduct", "gla", "gsa",
    "hgrn", "hgrn2", "kda", "lightnet", "linear_attn", "log_linear_mamba2", "mamba3", "mesa_net", "moba", "mom", "nsa",
    "parallax", "path_attn", "precond_gated_deltanet", "precond_kda", "raven", "retnet", "rodimus", "rwkv6", "rwkv7",
    "samba", "wall_transformer", "yoco",
)  # fmt: skip
"""Model types of fla that are refused by name: their mixers are not built here."""


def recognises(values: dict[str, Any]) -> bool:
    kind = values.get("model_type")
    if kind == "mamba2":  # transformers has a model of this type too, with other keys
        return "norm_eps" in values and "layer_norm_epsilon" not in values
    return kind in (*READERS, *OTHERS)


def read(file: ConfigFile, tensors: Collection[str]) -> Reading:
    kind = file.values["model_type"]
    if kind in OTHERS:
        raise file.error("model_type", f"one of {', '.join(READERS)}: other models of fla are not built")
    file.ignore(*UNREAD)
    return READERS[kind](file)


def _transformer(file: ConfigFile) -> Reading:
    window, heads = file.integer("window_size", None), file.integer("num_heads")
    norms, bias = file.flag("qk_norm", False), file.flag("qkv_bias", False)
    file.ignore("elementwise_affine")
    shape = _shape(file)
    kinds = ("full" if window is None else "swa",) * shape["n_layers"]
    config = HybridConfig(
        **shape, layer_kinds=kinds, window=window, n_heads=heads, n_kv_heads=file.integer("num_kv_heads", heads),
        d_head=_head_width(file, shape["d_model"], heads), rope_base=file.number("rope_theta"), attention_bias=bias,
        qk_norm_eps=QK_NORM_EPS if norms else None,
    )  # fmt: skip
    table = BLOCK | ATTENTION | (BIASES if bias else {}) | (QK_NORMS if norms else {})
    rules, tied = ends(file, ENDS)
    for layer in range(config.n_layers):
        rules += simple(table, f"blocks.{layer}.", f"model.layers.{layer}.")
    return Reading("flash-linear-attention transformer directory", config, rules, tied)


def _gated_deltanet(file: ConfigFile) -> Reading:
    for name in ("use_gate", "use_short_conv"):
        file.expect(name, True, because="Gated DeltaNet without it is not built")
    heads, width = file.integer("num_heads"), file.integer("head_dim")
    shape = _shape(file)
    kinds, attention = _hybrid(file, ("gdn",) * shape["n_layers"], shape["d_model"])
    if not attention:
        attention = {"n_heads": heads, "n_kv_heads": heads, "d_head": width}
    values = width * file.number("expand_v")
    if values != int(values):
        raise file.error("expand_v", f"a factor that makes head_dim = {width} a whole number")
    config = HybridConfig(
        **shape, **attention, layer_kinds=kinds, recurrent_heads=heads, recurrent_d_head=width,
        gdn_value_heads=file.integer("num_v_heads", heads), gdn_d_value=int(values),
        conv_width=file.integer("conv_size"), gdn_beta_scale=2.0 if file.flag("allow_neg_eigval", False) else 1.0,
    )  # fmt: skip
    rules, tied = ends(file, ENDS)
    for layer, kind in enumerate(kinds):
        native, released = f"blocks.{layer}.", f"model.layers.{layer}."
        own = GDN if kind == "gdn" else ATTENTION | (BIASES if config.attention_bias else {})
        rules += simple(BLOCK | own, native, released)
        if kind == "gdn":
            rules += (conv_rule(config, native, f"{released}attn."),)
    return Reading("flash-linear-attention gated_deltanet directory", config, rules, tied)


def _mamba2(file: ConfigFile) -> Reading:
    because = "the native Mamba-2 has one group, one D a head, no projection biases, and its norm behind the gate"
    for name, value in (("n_groups", 1), ("use_bias", False), ("D_has_hdim", False), ("norm_before_gate", False),
                        ("rmsnorm", True)):  # fmt: skip
        file.expect(name, value, because=because)
    file.expect("hidden_act", "silu", "swish", because="the native convolution is followed by SiLU")
    limits = file.plain("dt_limit", None)
    if limits is not None and [str(_number(x)) for x in limits] not in (["0.0", "inf"], ["0", "inf"]):
        raise file.error("dt_limit", "[0.0, Infinity]: clamped steps are not built")
    file.ignore("A_init_range", "conv_init", "dt_min", "dt_max", "dt_init_floor", "rescale_prenorm_residual",
                "residual_in_fp32", "chunk_size", "num_heads")  # fmt: skip
    width, head, expand = file.integer("hidden_size"), file.integer("head_dim"), file.integer("expand")
    layers = file.integer("num_hidden_layers")
    if expand * width % head:
        raise file.error("head_dim", f"a divisor of expand * hidden_size = {expand * width}")
    config = HybridConfig(
        d_model=width, n_layers=layers, n_heads=expand * width // head, n_kv_heads=1, d_head=head, d_ffn=0,
        vocab_size=file.integer("vocab_size"), layer_kinds=("mamba2",) * layers,
        context_length=file.integer("max_position_embeddings", None), rms_eps=file.number("norm_eps"),
        mamba2_state=file.integer("state_size"), mamba2_expand=expand, conv_width=file.integer("conv_kernel"),
    )  # fmt: skip
    rules, tied = ends(file, MAMBA2_ENDS)
    has_bias = file.flag("use_conv_bias", True)
    for layer in range(layers):
        native, released = f"blocks.{layer}.", f"backbone.layers.{layer}."
        rules += simple(MAMBA2, native, released)
        rules += (Rule(f"{native}attn.conv_weight", (f"{released}mixer.conv1d.weight",), is_kernel=True),)
        bias = (f"{released}mixer.conv1d.bias",) if has_bias else ()
        rules += (Rule(f"{native}attn.conv_bias", bias, constant=None if has_bias else 0.0),)
    return Reading("flash-linear-attention mamba2 directory", config, rules, tied)


READERS: dict[str, Callable[[ConfigFile], Reading]] = {
    "transformer": _transformer, "gated_deltanet": _gated_deltanet, "mamba2": _mamba2,
}  # fmt: skip


def _shape(file: ConfigFile) -> dict[str, Any]:
    file.expect("hidden_act", "swish", "silu", because="the native MLP is SwiGLU")
    file.expect("attnres_block_size", None, because="attention over residuals is not built")
    width = file.integer("hidden_size")
    ffn = file.integer("intermediate_size", None)
    ratio = file.number("hidden_ratio", 4)
    return {
        "d_model": width, "n_layers": file.integer("num_hidden_layers"), "vocab_size": file.integer("vocab_size"),
        "d_ffn": ffn or 256 * -(-int(width * ratio * 2 / 3) // 256), "rms_eps": file.number("norm_eps"),
        "context_length": file.integer("max_position_embeddings"),
    }  # fmt: skip


def _hybrid(file: ConfigFile, kinds: tuple[str, ...], width: int) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Kinds of all layers, and the shape of the softmax ones, which all specifications must share."""
    specs, mixed = file.plain("attn", None), list(kinds)
    found: dict[str, Any] = {}
    for spec in [specs] if isinstance(specs, dict) else specs or []:
        own = {**spec}
        layers, heads, window = own.pop("layers", []), own.pop("num_heads", None), own.pop("window_size", None)
        shape = {
            "n_heads": heads, "n_kv_heads": own.pop("num_kv_heads", None) or heads,
            "attention_bias": own.pop("qkv_bias", False), "rope_base": own.pop("rope_theta", 10000.0),
        }  # fmt: skip
        if own or not isinstance(heads, int) or not set(layers) <= set(range(len(kinds))):
            raise file.error("attn", "layers, num_heads, num_kv_heads, qkv_bias, window_size, rope_theta and no others")
        shape["d_head"] = _head_width(file, width, heads)
        shape |= {} if window is None else {"window": window}
        if any(found.get(name, value) != value for name, value in shape.items()):
            raise file.error("attn", "one window, number of heads, bias and rotary base for all softmax layers")
        found |= shape
        for layer in layers:
            mixed[layer] = "full" if window is None else "swa"
    return tuple(mixed), found


def _head_width(file: ConfigFile, width: int, heads: int) -> int:
    if width % heads:
        raise file.error("hidden_size", f"a multiple of the {heads} heads")
    return width // heads


def _number(value: Any) -> Any:
    """transformers may write infinity as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if isinstance(value, dict) and "__float__" in value else value
