"""Released checkpoints as native models: the releases' own numbers, round trips, and every refusal by name.

golden/released_formats.json holds logits of the releases' own modelling code (its `source` says which) on the weights
that `filled` makes anew from names and shapes. Where that code is not public the reference is written out below.
"""

import json
import math
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hooks
import models
from models import command_line, released_formats, selfcheck

GOLDEN = json.loads((Path(__file__).parent / "golden/released_formats.json").read_text())


GDN, MAMBA2 = "fla gated_deltanet, hybrid", "fla mamba2"


def filled(name, shape):
    """Weights large enough to matter, the same everywhere: RandomState's stream is frozen."""
    draws = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith(("A_log", "dt_bias")):
        draws = 0.5 * draws - 1
    elif "norm" in name or name.endswith(".D"):
        draws = 1 + 0.3 * draws
    elif name.endswith(("bias", "sinks")):
        draws = 0.3 * draws
    elif "conv1d" in name:
        draws = 0.5 * draws
    elif "embed" not in name:
        draws = 2 * draws / shape[-1] ** 0.5
    return torch.tensor(draws, dtype=torch.float32)


def written(path, config, tensors):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def golden(path, name, **changes):
    case = GOLDEN[name]
    tensors = {tensor: filled(tensor, tuple(shape)) for tensor, shape in case["shapes"].items()}
    return written(path, {**case["config"], **changes}, tensors)


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_are_those_of_the_releases_own_code(name, tmp_path):
    case = GOLDEN[name]
    model = models.load(golden(tmp_path, name), device="cpu")
    length = case["length"]
    ids = torch.tensor(np.random.RandomState(case["seed"]).randint(0, 53, (2, length)))
    found, expected = model(ids)[1, [length // 2, length - 1]], torch.tensor(case["logits"])
    assert (found - expected).abs().max() < 3e-5 * expected.std()
    assert isinstance(model, models.HybridLM)
    assert model.source_format.split()[0].lower() in ("hypenet", "flash-linear-attention")


# Formats whose own code is not public: written out in float64

RETHINKING = dict(
    architectures=["LlamaForCausalLM"], model_type="rethinking", vocab_size=53, hidden_size=24, intermediate_size=40,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
    rope_theta=5e3, hidden_act="silu", attention_bias=False, tie_word_embeddings=False, eval_sliding_window=None,
    eval_attention_sink_size=0, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2,
)  # fmt: skip
SALA = dict(
    model_type="minicpm_sala", vocab_size=53, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5,
    rope_theta=1e4, hidden_act="silu", attention_bias=False, tie_word_embeddings=False, scale_emb=3,
    dim_model_base=8, scale_depth=1.4, mup_denominator=32, mixer_types=["minicpm4", "lightning-attn", "minicpm4"],
    attn_use_rope=False, attn_use_output_gate=True, lightning_nh=3, lightning_nkv=3, lightning_head_dim=8,
    lightning_use_rope=True, lightning_scale="1/sqrt(d)", qk_norm=True, use_output_gate=True, use_output_norm=True,
    sparse_config={"dense_len": 40, "block_size": 64, "topk": 64},
)  # fmt: skip


def shapes_of(config, sinks=()):
    """Names and shapes as the two formats document them; `sinks`: layers with a sink logit per head."""
    width, ffn, head = config["hidden_size"], config["intermediate_size"], config.get("head_dim", 6)
    found = {"model.embed_tokens.weight": (53, width), "model.norm.weight": (width,), "lm_head.weight": (53, width)}
    for layer in range(config["num_hidden_layers"]):
        lightning = config.get("mixer_types", [""] * 4)[layer] == "lightning-attn"
        heads, kv = (3, 3) if lightning else (4, 2)
        own = {"q_proj": (heads * head, width), "k_proj": (kv * head, width), "v_proj": (kv * head, width)}
        own |= {"o_proj": (width, heads * head)}
        if lightning:
            own |= {"z_proj": (heads * head, width), "o_norm": (heads * head,), "q_norm": (head,), "k_norm": (head,)}
        elif config.get("attn_use_output_gate"):
            own["o_gate"] = (heads * head, width)
        block = f"model.layers.{layer}."
        found |= {f"{block}self_attn.{name}.weight": shape for name, shape in own.items()}
        found |= {f"{block}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        found |= {f"{block}mlp.{name}_proj.weight": (ffn, width) for name in ("gate", "up")}
        found[f"{block}mlp.down_proj.weight"] = (width, ffn)
        found |= {f"{block}self_attn.sinks": (heads,)} if layer in sinks else {}
    return found


def directory(path, config, sinks=(), **changes):
    tensors = {name: filled(name, shape) for name, shape in shapes_of(config, sinks).items()}
    return written(path, {**config, **changes}, tensors)


def norm(x, weight, eps):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotated(x, base):
    """x [T, H, K]: pairs (i, i + K/2) turned by t base^(-2i/K)."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x)).double()[:, None, None] * base ** (-torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def softmax_layer(x, w, config, layer):
    head = config.get("head_dim", 6)
    q, k, v = ((x @ w(f"self_attn.{n}_proj.weight").T).unflatten(-1, (-1, head)) for n in "qkv")
    if config.get("attn_use_rope", True):
        q, k = rotated(q, config["rope_theta"]), rotated(k, config["rope_theta"])
    window = config.get("sliding_window") if "sliding" in config.get("layer_types", [""] * 4)[layer] else None
    sinks, out = w("self_attn.sinks"), torch.zeros_like(q)
    for t in range(len(x)):
        first = 0 if window is None else max(0, t - window + 1)
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            scores = k[first : t + 1, g] @ q[t, h] / math.sqrt(head)
            scores = scores if sinks is None else torch.cat([scores, sinks[h : h + 1]])
            p = scores.softmax(0)[: t + 1 - first]
            out[t, h] = p @ v[first : t + 1, g]
    gate = w("self_attn.o_gate.weight")
    return out.flatten(1) * (1.0 if gate is None else torch.sigmoid(x @ gate.T)) @ w("self_attn.o_proj.weight").T


def lightning_layer(x, w, config):
    eps, heads = config["rms_norm_eps"], config["lightning_nh"]
    q, k, v = ((x @ w(f"self_attn.{n}_proj.weight").T).unflatten(-1, (heads, -1)) for n in "qkv")
    q, k = (norm(z, w(f"self_attn.{n}_norm.weight"), eps) for n, z in (("q", q), ("k", k)))
    q, k = rotated(q, config["rope_theta"]), rotated(k, config["rope_theta"])
    slopes = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2]).double()  # of 2 heads, then the first of 4 heads' (Press et al.)
    state, out = torch.zeros(heads, 8, 8).double(), torch.zeros_like(v)
    for t in range(len(x)):
        state = (-slopes).exp()[:, None, None] * state + torch.einsum("hk,hv->hkv", k[t], v[t])
        out[t] = torch.einsum("hk,hkv->hv", q[t], state) / math.sqrt(8)
    normed = norm(out.flatten(1), w("self_attn.o_norm.weight"), eps)
    return normed * torch.sigmoid(x @ w("self_attn.z_proj.weight").T) @ w("self_attn.o_proj.weight").T


def reference(path, ids):
    """[T, vocab] of one sequence, from the files, in float64."""
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    eps, layers = config["rms_norm_eps"], config["num_hidden_layers"]
    add = config["scale_depth"] / math.sqrt(layers) if "scale_depth" in config else 1.0
    x = config.get("scale_emb", 1) * tensors["model.embed_tokens.weight"][ids]
    for layer in range(layers):
        w = lambda name, layer=layer: tensors.get(f"model.layers.{layer}.{name}")  # noqa: E731
        normed = norm(x, w("input_layernorm.weight"), eps)
        lightning = config.get("mixer_types", [""] * layers)[layer] == "lightning-attn"
        mixed = lightning_layer(normed, w, config) if lightning else softmax_layer(normed, w, config, layer)
        x = x + add * mixed
        normed = norm(x, w("post_attention_layernorm.weight"), eps)
        gate, up = (normed @ w(f"mlp.{n}_proj.weight").T for n in ("gate", "up"))
        x = x + add * (torch.nn.functional.silu(gate) * up) @ w("mlp.down_proj.weight").T
    scale = config["dim_model_base"] / config["hidden_size"] if "dim_model_base" in config else 1.0
    return scale * norm(x, tensors["model.norm.weight"], eps) @ tensors["lm_head.weight"].T


@pytest.mark.parametrize(
    ("config", "sinks"),
    [(RETHINKING, ()), (RETHINKING, (0, 2)), (RETHINKING, (0, 1, 2, 3)), (SALA, ())],
    ids=["windows", "windows with learned sinks", "learned sinks everywhere", "minicpm-sala"],
)
def test_logits_are_those_of_the_written_out_model(config, sinks, tmp_path):
    path = directory(tmp_path / "released", config, sinks)
    ids = torch.tensor(np.random.RandomState(3).randint(0, 53, (2, 19)))
    model = models.load(path, device="cpu", dtype=torch.float64, impl="naive")
    for row, found in zip(ids, model(ids), strict=True):
        expected = reference(path, row)
        assert (found - expected).abs().max() < 1e-5 * expected.std()
    assert model.impl == "naive"


def test_a_llama_without_windows_is_transformers_llama(tmp_path, tiny_model):
    llama = tiny_model("llama")
    config = {**RETHINKING, "sliding_window": None, "layer_types": None}
    names = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "max_position_embeddings")
    config |= {name: getattr(llama.config, name) for name in names}
    config["rope_theta"] = llama.config.rope_parameters["rope_theta"]
    model = models.load(written(tmp_path / "llama", config, llama.state_dict()), device="cpu")
    ids = torch.tensor(np.random.RandomState(4).randint(0, 97, (2, 21)))
    expected = llama(ids).logits
    assert (model(ids) - expected).abs().max() < 1e-5 * expected.std()


# What a native model does with them


def released_cases():
    return [*GOLDEN, "rethinking", "minicpm-sala"]


def any_case(path, name):
    if name in GOLDEN:
        return golden(path, name)
    return directory(path, SALA) if name == "minicpm-sala" else directory(path, RETHINKING, (0, 2))


@pytest.mark.parametrize("name", released_cases())
def test_round_trip_is_exact_and_native_checkpoints_keep_it(name, tmp_path):
    path = any_case(tmp_path / "released", name)
    stored = load_file(path / "model.safetensors")
    fields = json.loads((path / "config.json").read_text())
    reading = released_formats.read(path / "config.json", fields, set(stored))
    model = models.load(path, device="cpu")
    back = released_formats.released_tensors(reading, model.state_dict())
    assert set(back) == set(stored)
    assert all(torch.equal(back[tensor], stored[tensor]) for tensor in stored)
    again = models.load(models.save(model, tmp_path / "native"), device="cpu")
    ids = torch.arange(17)[None] % 53
    assert again.config == model.config
    assert torch.equal(again(ids), model(ids))


@pytest.mark.parametrize("name", released_cases())
def test_every_release_passes_the_selfcheck(name, tmp_path):
    model = models.load(any_case(tmp_path / "released", name), device="cpu")
    found = {check.name: (check.verdict, check.detail) for check in selfcheck.selfcheck(model)}
    assert not {check: detail for check, (verdict, detail) in found.items() if verdict == "fail"}
    for needed in ("logits with and without hook points", "decode equals prefill, restricted"):
        assert found[needed][0] == "pass"


def test_patterns_and_gates_make_the_heads_outputs(tmp_path):
    """With learned sinks rows sum to less than one; hook_z is what the output projection reads, gate included."""
    ids = torch.arange(13)[None]
    for path, layer in ((directory(tmp_path / "a", RETHINKING, (0, 2)), 0), (directory(tmp_path / "b", SALA), 2)):
        model = models.load(path, device="cpu", dtype=torch.float64)
        _, cache = model.run_with_cache(ids)
        point = f"blocks.{layer}.attn.hook_"
        pattern, value = cache[point + "pattern"], cache[point + "v"].repeat_interleave(2, 2)
        heads = torch.einsum("bhts,bshv->bthv", pattern, value)
        if layer == 0:
            assert pattern.sum(-1).min() < 0.7
            assert pattern.sum(-1).max() < 1
        else:
            assert (pattern.sum(-1) - 1).abs().max() < 1e-12
            heads = heads * torch.sigmoid(cache[point + "gate_input"])
        assert (heads - cache[point + "z"]).abs().max() < 1e-9
        out = cache[point + "z"].flatten(2) @ model.blocks[layer].attn.o_proj.weight.T
        assert (model.config.residual_scale * out - cache[f"blocks.{layer}.hook_attn_out"]).abs().max() < 1e-9


def test_restrictions_and_embeddings_act_as_in_any_native_model(tmp_path):
    model = models.load(directory(tmp_path / "released", SALA), device="cpu")
    ids = torch.arange(20)[None]
    expected = model(ids)
    assert torch.equal(model(model.embed(ids)), expected)
    assert torch.equal(model.embed(ids), 3 * model.embed.weight[ids])
    with hooks.restrict(model, [0, 1, 2], window=1):
        alone = model(ids[:, -1:])
        assert not torch.allclose(model(ids)[:, -1], expected[:, -1], atol=1e-3)
    with hooks.restrict(model, [0, 2], window=4), hooks.restrict(model, [1], window=4):
        assert torch.allclose(model(ids)[:, :4], expected[:, :4], atol=1e-4)
    assert alone.shape == (1, 1, 53)


def test_lengths_at_which_the_release_attends_sparsely_are_refused(tmp_path):
    model = models.load(directory(tmp_path / "released", SALA), device="cpu")
    assert model.config.context_length == 39
    ids = torch.arange(40)[None]
    cache = models.Cache()
    model(ids[:, :39], cache=cache)
    for inputs, given in ((ids, None), (ids[:, 39:], cache)):
        with pytest.raises(ValueError, match="the input has 40 tokens; expected fewer than 40"):
            model(inputs, cache=given)


def test_a_block_without_mlp_has_no_points_for_it(tmp_path):
    model = models.load(golden(tmp_path, "fla mamba2"), device="cpu")
    points = {name.split(".", 2)[2] for name in model.hook_dict if name.startswith("blocks.0.hook")} - {""}
    assert points == {"hook_resid_pre", "hook_attn_out", "hook_resid_post"}
    assert model.config.context_length is None
    assert model.num_parameters(embeddings=False) == sum(
        math.prod(shape)
        for name, shape in GOLDEN["fla mamba2"]["shapes"].items()
        if "emb" not in name and "lm" not in name
    )


def test_half_precision_with_fp32_norms_becomes_one_dtype(tmp_path):
    """fla keeps norms and decays in fp32 beside bf16 weights."""
    case = GOLDEN["fla gated_deltanet, hybrid"]
    tensors = {name: filled(name, tuple(shape)) for name, shape in case["shapes"].items()}
    mixed = {
        name: tensor if "norm" in name or "A_log" in name else tensor.bfloat16() for name, tensor in tensors.items()
    }
    path = written(tmp_path / "mixed", case["config"], mixed)
    assert {p.dtype for p in models.load(path, device="cpu").parameters()} == {torch.float32}
    half = models.load(path, device="cpu", dtype=torch.bfloat16)
    assert half(torch.arange(9)[None]).isfinite().all()
    described = models.load(path, device="meta")
    assert described.dtype == torch.bfloat16
    assert [layer.kind for layer in described.layers] == ["gdn", "swa", "gdn", "full"]
    assert [layer.n_kv_heads for layer in described.layers] == [2, 2, 2, 2]


def test_wide_values_are_computed_in_parts(tmp_path, monkeypatch):
    """fla's default value heads are 512 wide; the Triton kernels take 256 features at a time."""
    from models.mixers import delta_rule

    model = models.load(golden(tmp_path, GDN), device="cpu", dtype=torch.float64, impl="naive")
    ids = torch.arange(23)[None]
    points = ["blocks.0.attn.hook_ssm_state", "blocks.0.attn.hook_recurrence_out"]
    with hooks.record(model, points) as whole:
        expected = model(ids)
    monkeypatch.setattr(delta_rule, "WIDEST", 5)  # 16 features in parts of 5, 5, 5 and 1
    with hooks.record(model, points) as parts:
        assert torch.allclose(model(ids), expected, atol=1e-9)
    assert all(torch.allclose(parts[name], whole[name], atol=1e-9) for name in points)
    cache = models.Cache()
    found = [model(ids[:, :11], cache=cache), model(ids[:, 11:], cache=cache)]
    assert torch.allclose(torch.cat(found, 1), expected, atol=1e-9)


# Refusals


def renamed(old, new):
    def change(path):
        tensors = load_file(path / "model.safetensors")
        tensors[new] = tensors.pop(old)
        save_file(tensors, path / "model.safetensors")

    return change


def reshaped(name, *shape):
    def change(path):
        tensors = load_file(path / "model.safetensors")
        save_file({**tensors, name: torch.zeros(shape)}, path / "model.safetensors")

    return change


def dropped(name):
    def change(path):
        tensors = load_file(path / "model.safetensors")
        del tensors[name]
        save_file(tensors, path / "model.safetensors")

    return change


def config(**changes):
    def change(path):
        fields = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**fields, **changes}))

    return change


SPEC = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 5}
REFUSED = {
    "missing": ("hypenet", dropped("model.layers.1.self_attn.o_gate.weight"), r"o_gate.weight' \[32, 24\] is missing"),
    "unknown": ("hypenet", renamed("model.norm.weight", "model.norm.bias"), "model.norm.weight.*missing"),
    "extra": (MAMBA2, reshaped("backbone.layers.1.mixer.x_proj.weight", 2, 2), "x_proj.weight' is not understood"),
    "kernel": (GDN, reshaped("model.layers.0.attn.k_conv1d.weight", 16, 1, 3), r"k_conv1d.*\[16, 1, 3\].*\[16, 1, 4\]"),
    "joined rows": (GDN, reshaped("model.layers.0.attn.v_conv1d.weight", 16, 1, 4), r"v_conv1d.*\[64, 1, 4\]"),
    "tied": ("fla transformer, tied", reshaped("lm_head.weight", 53, 24), "'lm_head.weight' differs from 'model.emb"),
    "partial sinks": (
        "rethinking",
        dropped("model.layers.2.self_attn.sinks"),
        r"layers.2.self_attn.sinks' \[4\] is miss",
    ),
    "sinks under another name": (
        "rethinking",
        renamed("model.layers.0.self_attn.sinks", "x.sinks"),
        "layers.0.self_attn.sinks.*missing",
    ),
    "evaluation window": (
        "rethinking",
        config(eval_sliding_window=2048),
        "eval_sliding_window' is 2048.*hooks.restrict",
    ),
    "window of no layer": ("rethinking", config(layer_types=None), "'sliding_window' is 5; expected null without"),
    "layer type": ("rethinking", config(layer_types=["mamba"] * 4), "'layer_types' is .*sliding_attention"),
    "unknown key": ("rethinking", config(sandwich_norm=True), "'sandwich_norm' is True, a key that this format"),
    "scaled positions": ("hypenet", config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope_scaling.*scaled"),
    "mixer": ("hypenet", config(mixer_types=["kda", "attn"] * 2), "'kda' is not built"),
    "mixers": ("hypenet", config(mixer_types=["attn"]), "expected a list of 4 names"),
    "grouped lightning": ("hypenet", config(lightning_nkv=1), "'lightning_nkv' is 1; expected 3"),
    "ungated lightning": ("hypenet", config(lightning_use_output_gate=False), "output gate is not built"),
    "lightning option": ("hypenet", config(lightning_new=1), "'lightning_new' is 1, a key that this format"),
    "logit scaling": ("hypenet", config(attn_logits_scaling="log 362"), "attn_logits_scaling' is 'log 362'"),
    "activation": ("hypenet", config(hidden_act="gelu"), "'hidden_act' is 'gelu'; expected 'silu'"),
    "no convolution": ("hypenet, gdn", config(gdn_use_short_conv=False), "gdn_use_short_conv' is False; expected true"),
    "groups": (MAMBA2, config(n_groups=2), "'n_groups' is 2; expected 1"),
    "clamped steps": (MAMBA2, config(dt_limit=[0.0, 1.0]), r"'dt_limit' is \[0.0, 1.0\]"),
    "norm before gate": (MAMBA2, config(norm_before_gate=True), "'norm_before_gate' is True"),
    "ungated delta rule": (GDN, config(use_gate=False), "'use_gate' is False; expected True"),
    "two windows": (GDN, config(attn=[SPEC, {**SPEC, "layers": [3], "window_size": 7}]), "'attn' is.*one window"),
    "attention option": (GDN, config(attn={**SPEC, "softcap": 3.0}), "'attn' is.*and no others"),
    "residuals": (GDN, config(attnres_block_size=1), "'attnres_block_size' is 1; expected None"),
    "value width": (GDN, config(expand_v=1.3), "'expand_v' is 1.3"),
    "a number as text": (GDN, config(head_dim="8"), "'head_dim' is '8'; expected a positive integer"),
    "absent": ("fla transformer, windows", config(num_heads=None), "'num_heads' is None; expected a value"),
    "other model of fla": (GDN, config(model_type="retnet"), "'model_type' is 'retnet'.*gated_deltanet"),
    "dense length": ("minicpm-sala", config(sparse_config={"topk": 64}), "'sparse_config' is.*dense_len"),
    "odd head": ("minicpm-sala", config(head_dim=7, lightning_head_dim=7), "d_head is 7; rotary"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_not_understood_is_refused_in_one_line(fault, tmp_path):
    name, change, says = REFUSED[fault]
    path = any_case(tmp_path / "released", name)
    change(path)
    with pytest.raises(models.CheckpointError, match=says) as caught:
        models.load(path, device="cpu")
    assert "\n" not in str(caught.value)


SHAPE = dict(
    d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, d_head=6, d_ffn=40, vocab_size=53, context_length=64,
    layer_kinds=("gdn", "full"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(d_ffn=-1), "config.d_ffn is -1; expected an integer >= 1, or 0"),
        (dict(recurrent_heads=2, gdn_value_heads=3), "gdn_value_heads is 3, no multiple of the 2 key heads"),
        (dict(recurrent_d_head=0), "recurrent_d_head is 0; expected an integer >= 1, or null"),
        (dict(recurrent_heads=2, layer_kinds=("headwise", "full"), efficient="gdn"), "head-wise layers share n_heads"),
        (dict(learned_sinks=("gdn",)), "learned_sinks names 'gdn'; expected softmax kinds: full, swa"),
        (dict(lightning_rope=True, recurrent_d_head=5), "recurrent_d_head is 5; rotary"),
        (dict(lightning_slopes="press"), "lightning_slopes is 'press'"),
    ],
)
def test_native_shapes_that_cannot_be_are_refused(changes, says):
    with pytest.raises(models.ConfigError, match=says):
        models.HybridConfig(**{**SHAPE, **changes})


def test_transformers_own_mamba2_is_not_taken_for_flas():
    assert not released_formats.is_released({"model_type": "mamba2", "layer_norm_epsilon": 1e-5, "num_heads": 8})
    assert not released_formats.is_released({"model_type": "llama", "hidden_size": 8})
    assert not released_formats.is_released({"model_type": "minimax", "layer_types": ["linear_attention"]})


def test_the_tokenizer_of_a_release_stays_and_its_code_never_runs(tmp_path):
    import tokenizers

    path = golden(tmp_path / "released", "hypenet", auto_map={"AutoConfig": "configuration_hypenet.HypeNetConfig"})
    (path / "configuration_hypenet.py").write_text("raise SystemExit('remote code ran')")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(53)}, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(path / "tokenizer.json"))
    model = models.load(path, device="cpu")
    assert model.tokenizer.encode("w3 w17") == [3, 17]
    native = models.load(models.save(model, tmp_path / "native"), device="cpu")
    assert native.tokenizer.encode("w3 w17") == [3, 17]


# Command lines


def test_selfcheck_says_what_it_read(tmp_path, capsys):
    path = golden(tmp_path / "released", "hypenet")
    with pytest.raises(SystemExit) as stop:
        command_line.run(selfcheck.main, selfcheck.Config, arguments=[str(path), "--device", "cpu", "--quick"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("read as: HypeNet directory\nlayer  kind")
