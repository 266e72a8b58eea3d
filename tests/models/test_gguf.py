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
