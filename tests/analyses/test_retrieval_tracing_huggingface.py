"""Hugging Face directories are traced and ablated as native ones are: the same weights give the same numbers."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from analyses import retrieval_tracing
from analyses.retrieval_tracing import Config
from analyses.retrieval_tracing_table import table

LENGTH = 330
NAMES = {
    "blocks.": "model.layers.", ".attn.": ".self_attn.", ".ln1.": ".input_layernorm.",
    ".ln2.": ".post_attention_layernorm.", "embed.weight": "model.embed_tokens.weight", "ln_final": "model.norm",
}  # fmt: skip


def save_tokenizer(tiny, folder):
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer().backend, unk_token="~").save_pretrained(folder)


def save_llama(tiny, model, folder, **training):
    """The native all-full model as transformers' Llama."""
    from transformers import LlamaConfig

    shape = model.config
    LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.d_model, intermediate_size=shape.d_ffn,
        num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_heads, num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.d_head, rms_norm_eps=shape.rms_eps, max_position_embeddings=shape.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base}, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"], dtype="float32",
    ).save_pretrained(folder)  # fmt: skip
    tensors = {}
    for name, tensor in model.state_dict().items():
        renamed = "lm_head.weight" if name == "unembed.weight" else name
        for ours, theirs in NAMES.items():
            renamed = renamed.replace(ours, theirs)
        tensors[renamed] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tiny, folder)
    if training:
        (folder / "training.json").write_text(json.dumps(training))


def traced(run, out, **changes):
    settings = dict(choosing=2, tracing=3, haystack="noise", length=LENGTH, draws=1, top=2)
    return retrieval_tracing.retrieval_tracing(Config(paths=(run,), out=out, **{**settings, **changes}))


def test_a_run_of_llamas_gives_what_the_same_native_run_gives(tiny, tmp_path):
    for step, tokens in enumerate((1000, 2000)):
        model = tiny.model("full", "full", seed=step, n_heads=4, n_kv_heads=2, context_length=400)
        models.save(model, tmp_path / "native" / f"step_{step}", training={"step": step, "tokens": tokens})
        save_llama(tiny, model, tmp_path / "llama" / f"step_{step}", step=step, tokens=tokens)
    ours, theirs = (traced(tmp_path / name, tmp_path / f"{name}.h5") for name in ("native", "llama"))
    for group in ("", "/heads", "/prompts", "/ablation"):
        native, foreign = ours.groups[f"native{group}"], theirs.groups[f"llama{group}"]
        assert set(native.variables) == set(foreign.variables)
        for name, variable in native.variables.items():
            if variable.values.dtype.kind == "f":
                np.testing.assert_allclose(foreign[name], variable.values, rtol=2e-4, atol=1e-5, err_msg=name)
            else:
                np.testing.assert_array_equal(foreign[name], variable.values, err_msg=name)
    changes = theirs["llama/ablation/loss_change"]
    assert (np.abs(changes[1:]) > 1e-4).all(), "every ablation acted"


def test_a_hybrid_is_traced_by_absolute_layers_and_its_recurrent_heads_are_ablated(tiny, tmp_path):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=len(tiny.characters), hidden_size=20, intermediate_size=28, num_hidden_layers=4, head_dim=10,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=400, linear_num_key_heads=2,
        linear_num_value_heads=6, linear_key_head_dim=6, linear_value_head_dim=8, num_experts=3, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=20, initializer_range=0.3,
    )  # fmt: skip
    Qwen3NextForCausalLM(config).save_pretrained(tmp_path / "hybrid")
    save_tokenizer(tiny, tmp_path / "hybrid")
    found = traced(tmp_path / "hybrid", tmp_path / "r.h5")
    heads, group = found.groups["hybrid/heads"], found.groups["hybrid"]
    assert heads["kind"][3].tolist() == ["full"] * 4 + [""] * 2
    assert heads["kind"][0].tolist() == ["gdn"] * 6
    assert np.isfinite(heads["mass"][0, 3, :4]).all()
    assert np.isnan(heads["mass"][0, :3]).all()
    assert np.isfinite(heads["recurrent_mass"][0, :3]).all()
    assert {layer for layer, _ in group["followed"].tolist()} == {3}
    assert heads["kv_group_of_head"][3].tolist() == [0, 0, 1, 1, -1, -1]
    labels = [label for label in found["hybrid/ablation/ablation"] if "+" not in label]
    recurrent = [f"{layer}.{head}" for layer in range(3) for head in range(6)]
    assert labels == ["none", *recurrent, "3.0", "3.1", "3.2", "3.3"]
    assert (found["hybrid/ablation/loss_change"][1:23] != 0).all()
    assert str(group["distance_refusal"]) == ""
    assert np.isfinite(heads["distance"][0, 3, :4]).all()
    said = table(found)
    assert "n = 3 prompts of 330 tokens" in said
    assert "kv groups, layer.group (mean and maximum over their query heads): 3." in said


def test_fused_projections_leave_the_distance_out_and_say_why(tiny, tmp_path):
    from transformers import Phi3Config

    save_llama(tiny, tiny.model("full", n_heads=4, n_kv_heads=2, context_length=400), tmp_path / "llama")
    weights = load_file(tmp_path / "llama" / "model.safetensors")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    prefix = "model.layers.0."
    parts = [weights.pop(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv"]
    weights[f"{prefix}self_attn.qkv_proj.weight"] = torch.cat(parts)
    gates = [weights.pop(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]
    weights[f"{prefix}mlp.gate_up_proj.weight"] = torch.cat(gates)
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "head_dim")  # fmt: skip
    Phi3Config(
        **{key: config[key] for key in kept}, pad_token_id=0, rope_parameters=config["rope_parameters"],
        architectures=["Phi3ForCausalLM"], tie_word_embeddings=False, dtype="float32",
    ).save_pretrained(tmp_path / "phi")  # fmt: skip
    save_file(weights, tmp_path / "phi" / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tiny, tmp_path / "phi")
    found = traced(tmp_path / "phi", tmp_path / "r.h5", no_ablation=True)
    assert "joins query and key rows in one matrix" in str(found["phi/distance_refusal"])
    assert np.isnan(found["phi/heads/distance"]).all()
    assert np.isfinite(found["phi/heads/mass"]).all()
    assert "Q/K distance: n/a: model.layers.0.self_attn.qkv_proj.weight joins" in table(found)


@pytest.mark.parametrize(("changes", "words"), [
    (dict(impl="torch"), "--impl is 'torch', but .*llama is no native checkpoint"),
    (dict(length=None, prompts=None, haystack="noise"), "length 160 is too short"),
])  # fmt: skip
def test_refusals(tiny, tmp_path, changes, words):
    save_llama(tiny, tiny.model("full", n_heads=4, n_kv_heads=2), tmp_path / "llama")
    with pytest.raises(ValueError, match=words):
        traced(tmp_path / "llama", tmp_path / "r.h5", **changes)
