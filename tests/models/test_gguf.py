"""One GGUF file as a checkpoint directory: transformers' own loader, the weights that were written, clear refusals."""

import pytest
import torch

import models
from models.gguf_files import gguf_file, gguf_source

D, HEADS, KV, FFN, VOCAB, LAYERS = 32, 4, 2, 44, 20, 2


def rotated(weight, heads):
    """GGUF keeps rotary rows in pairs; transformers keeps them in halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(path, state) -> None:
    """A Llama of these weights with a word tokenizer, fp32."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(97 + i) for i in range(VOCAB - 1)), "ab"])
    writer.add_token_merges(["a b"])
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    whole = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
        **{f"blk.{i}.{n}": f"model.layers.{i}.{o}" for i in range(LAYERS) for o, n in names.items()},
    }  # fmt: skip
    for name, ours in whole.items():
        weight = state[f"{ours}.weight"].numpy()
        if name.endswith("attn_q"):
            weight = rotated(weight, HEADS)
        if name.endswith("attn_k"):
            weight = rotated(weight, KV)
        writer.add_tensor(f"{name}.weight", weight.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_directory_gives_the_logits_of_its_weights(tmp_path):
    pytest.importorskip("gguf")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV, vocab_size=VOCAB,
        intermediate_size=FFN, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    hf = LlamaForCausalLM(config).eval()
    folder = tmp_path / "one.gguf folder"
    folder.mkdir()
    write(folder / "tiny.gguf", hf.state_dict())
    model = models.load(folder, device="cpu")
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids), hf(ids).logits, rtol=1e-5, atol=1e-5)
    assert [layer.kind for layer in models.load(folder, device="meta").layers] == ["full"] * LAYERS
    assert model.tokenizer.decode(model.tokenizer.encode("abc")) == "abc"
    assert models.find_checkpoints(tmp_path) == [folder]


def write_gemma(path, config, state) -> None:
    """A Gemma 3 of these weights, fp32. GGUF holds 1 + the weight of every norm, and no list of layer types."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(VOCAB)
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(chr(97 + i) for i in range(VOCAB - 4))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(VOCAB)])
    writer.add_token_types([3, 3, 3, 2, *[1] * (VOCAB - 4)])
    for name, index in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_add_bos_token(True)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    }  # fmt: skip
    blocks = range(config.num_hidden_layers)
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    whole |= {f"blk.{i}.{theirs}": f"model.layers.{i}.{ours}" for i in blocks for ours, theirs in names.items()}
    for name, ours in whole.items():
        writer.add_tensor(f"{name}.weight", (state[f"{ours}.weight"] + ("norm" in name)).numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_of_a_hybrid_keeps_windows_and_rotary_bases(tmp_path):
    pytest.importorskip("gguf")
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=24, num_hidden_layers=7, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        vocab_size=VOCAB, intermediate_size=44, max_position_embeddings=64, sliding_window=5, query_pre_attn_scalar=256,
    )  # fmt: skip
    hf = Gemma3ForCausalLM(config).eval()
    for parameter in hf.parameters():
        parameter.data.normal_(0, 0.5 if parameter.ndim == 2 else 0.1)
    write_gemma(tmp_path / "tiny.gguf", config, hf.state_dict())
    model = models.load(tmp_path, device="cpu")
    kinds = ["full" if index % 6 == 5 else "swa" for index in range(7)]
    assert [layer.kind for layer in model.layers] == kinds
    assert [layer.window for layer in model.layers] == [None if kind == "full" else 5 for kind in kinds]
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids), hf(ids).logits, rtol=1e-4, atol=1e-4)
    assert model.tokenizer.bos_id == 2
    assert model.tokenizer.decode(model.tokenizer.encode("abc")) == "abc"


def test_what_is_no_gguf_directory_is_said(tmp_path):
    assert gguf_file(tmp_path) is None
    assert gguf_source(tmp_path) == {}
    (tmp_path / "a.gguf").write_bytes(b"<html>")
    with pytest.raises(models.CheckpointError, match=r"a\.gguf \(6 bytes\) is no GGUF file"):
        models.load(tmp_path, device="cpu")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(models.CheckpointError, match=r"2 GGUF files \(a\.gguf, b\.gguf\); expected one"):
        models.load(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text("{}")
    assert gguf_file(tmp_path) is None  # a directory with a config.json is read from its safetensors


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(models.CheckpointError, match="needs gguf and accelerate; pip install gguf accelerate"):
        models.load(tmp_path, device="cpu")
