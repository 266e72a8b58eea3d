"""The door to Hugging Face: transformers' numbers, layers by kind, offline, bad directories refused by name."""

import json
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hooks
import models
from kernels.attention import attention
from models.huggingface import HuggingFaceLM, load_huggingface
from models.huggingface.tokenizer import HuggingFaceTokenizer
from models.safetensors_files import CheckpointError


@pytest.fixture
def llama(tmp_path, tiny_model) -> Path:
    path = tmp_path / "llama"
    tiny_model("llama").save_pretrained(path)
    return path


def test_a_directory_gives_transformers_logits(llama, tiny_model):
    model = load_huggingface(llama, "cpu")
    ids = torch.tensor(np.random.default_rng(0).integers(3, 97, (2, 19)))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), tiny_model("llama")(ids).logits, rtol=1e-5, atol=1e-5)
    assert model.tokenizer is None
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_families_that_change_their_logits_would_fail_without_it(wrapped):
    """A negative twin: the bare output matrix is not enough for these."""
    ids = torch.tensor(np.random.default_rng(0).integers(3, 97, (1, 9)))
    for name in ("gemma2", "gemma3_text", "granite", "cohere2", "falcon_h1"):
        model = wrapped(name)
        with torch.no_grad():
            raw = model.hf.get_output_embeddings()(model.final_hidden(ids))
            assert (raw - model(ids)).abs().max() > 0.02, name


def test_a_family_with_unknown_logits_is_refused(tiny_model):
    hf = tiny_model("llama")
    forward = hf.forward
    hf.forward = lambda **inputs: type("Out", (), {"logits": forward(**inputs).logits + torch.arange(97.0)})()
    with pytest.raises(CheckpointError, match="no known scaling or soft-capping"):
        HuggingFaceLM(hf)


def test_on_the_meta_device_layers_are_known_without_weights(llama):
    found = models.load(llama, device="meta")
    assert found.device.type == "meta"
    assert [(layer.index, layer.kind, layer.n_heads, layer.n_kv_heads) for layer in found.layers] == [
        (index, "full", 4, 2) for index in range(4)
    ]


def test_final_hidden_computes_no_logits(llama):
    model = load_huggingface(llama, "cpu")
    model.hf.lm_head.register_forward_hook(lambda *_: pytest.fail("logits were computed"))
    model.final_hidden(torch.arange(3, 20)[None])


def test_dtype_device_impl_and_parameter_count(llama, tiny_model):
    stored = tiny_model("llama").to(torch.bfloat16)
    stored.save_pretrained(llama)
    assert load_huggingface(llama, "cpu").dtype == torch.float32  # fp32 on the CPU whatever is stored
    model = load_huggingface(llama, "cpu", torch.bfloat16)
    assert (model.dtype, model.device.type, model.impl) == (torch.bfloat16, "cpu", "torch")
    assert model.num_parameters() - model.num_parameters(embeddings=False) == 2 * 97 * 32
    tied = HuggingFaceLM(tiny_model("llama", tie_word_embeddings=True))
    assert tied.num_parameters() - tied.num_parameters(embeddings=False) == 97 * 32


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "whole"), [(torch.bfloat16, "torch"), (torch.float32, "triton")])
def test_who_computes_attention_on_a_gpu(llama, monkeypatch, dtype, whole):
    """torch's fused form where nothing is hidden in 16 bits; the kernels wherever something is."""
    model = load_huggingface(llama, "cuda", dtype)
    assert model.impl == "triton"
    ids = torch.tensor(np.random.default_rng(0).integers(3, 97, (2, 19)), device="cuda")
    used = []

    def watched(**operands):
        used.append(operands["impl"])
        return attention(**operands)

    monkeypatch.setattr("models.huggingface.attention.attention", watched)
    logits = {}
    for window in (None, 19, 18, 5):
        used.clear()
        with torch.no_grad(), hooks.restrict(model, "full", window=window) if window else nullcontext():
            logits[window] = model(ids)
        assert set(used) == {whole if window in (None, 19) else "triton"}, window
    assert torch.equal(logits[19], logits[None])
    torch.testing.assert_close(logits[18][:, :18], logits[None][:, :18], rtol=2e-2, atol=2e-2)
    assert not torch.equal(logits[5], logits[None])


def test_tied_weights_are_not_missing(tmp_path, tiny_model):
    hf = tiny_model("llama", tie_word_embeddings=True)
    hf.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(load_huggingface(tmp_path, "cpu")(ids), hf(ids).logits)


@pytest.mark.parametrize("folder", ["plain", "v1.0 with dots and spaces", "trailing/"])
def test_loads_offline_without_a_socket(llama, tmp_path, monkeypatch, folder):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("a name was looked up"))
    shutil.copytree(llama, tmp_path / folder)
    save_tokenizer(tmp_path / folder)
    assert load_huggingface(f"{tmp_path}/{folder}", "cpu").tokenizer.vocab_size == 97


# Directories that must be refused, each by one error that names the file or the tensor.


def rewrite(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_tensor_is_refused(llama):
    """transformers itself loads this directory and leaves the tensor random."""
    rewrite(llama, lambda tensors: tensors.pop("model.layers.2.self_attn.q_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight.*random"):
        load_huggingface(llama, "cpu")


def test_an_extra_tensor_is_refused(llama):
    rewrite(llama, lambda tensors: tensors.update({"model.layers.3.extra.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.extra\.weight"):
        load_huggingface(llama, "cpu")


def test_a_tensor_of_another_shape_is_refused(llama):
    rewrite(llama, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(CheckpointError, match=str(llama)):
        load_huggingface(llama, "cpu")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "empty"),
        (b"\x01\x02\x03\x04\x05", "model.safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
        ("half", "truncated"),
        ("longer", "model.safetensors"),
    ],
)
def test_damaged_weights_are_refused_by_name(llama, content, cause):
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    contents = {"half": whole[: len(whole) // 2], "longer": whole + b"x"}
    file.write_bytes(contents[content] if isinstance(content, str) else content)
    with pytest.raises(CheckpointError, match=cause) as error:
        load_huggingface(llama, "cpu")
    assert str(file) in str(error.value)


def test_a_missing_shard_is_named(llama, tiny_model):
    shutil.rmtree(llama)
    tiny_model("llama").save_pretrained(llama, max_shard_size="40KB")
    shards = sorted(llama.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        load_huggingface(llama, "cpu")


def test_absent_files_are_named(llama, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        load_huggingface(tmp_path / "nowhere", "cpu")
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_huggingface(llama, "cpu")
    (llama / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_huggingface(llama, "cpu")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": "no_such_family"}', '{"hidden_size": 32}'])
def test_a_bad_config_is_refused(llama, content):
    (llama / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=str(llama)):
        load_huggingface(llama, "cpu")


def test_a_layer_type_without_a_kind_is_named(tiny_model):
    hf = tiny_model("llama")
    hf.config.layer_types = ["full_attention", "chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(CheckpointError, match="layer 1 of model type 'llama' is 'chunked_attention'"):
        HuggingFaceLM(hf)
    hf.config.layer_types = ["full_attention", "full_attention", "linear_attention", "full_attention"]
    with pytest.raises(CheckpointError, match="layer 2 is linear_attention of model type 'llama'"):
        HuggingFaceLM(hf)


def test_a_model_is_wrapped_once(tiny_model, families):
    hf = tiny_model("qwen3_next", **families["qwen3_next"][0])
    ids = torch.arange(9)[None]
    first = HuggingFaceLM(hf)
    expected = first(ids)
    with pytest.raises(ValueError, match="belongs to a HuggingFaceLM already.*load the model again"):
        HuggingFaceLM(hf)
    assert torch.equal(first(ids), expected)


# Tokenizers


def byte_level(*, bos: bool = False, trim: bool = False, zero_width: bool = False):
    """A byte-level BPE of 97 tokens; options: a BOS in front, trimmed offsets, zero-width offsets as in Llama 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    kept = [c for c in alphabet if c == "<s>" or c in "abcdefghijklmnopqrstuvwxyzĠĊ.,:0123456789ðŁ¤Ķ"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(kept))}
    merges = [("a", "b"), ("Ġ", "ab"), ("c", "d"), ("Ċ", "Ġ"), ("Ġ", "c")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    vocab.update({f"<unused{i}>": i for i in range(len(vocab), 97)})
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if trim:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    return ZeroWidth(fast) if zero_width else fast


class ZeroWidth:
    """The fault of some Llama 3 tokenizers: every offset is (start, start)."""

    def __init__(self, fast):
        self.fast = fast

    def __getattr__(self, name):
        return getattr(self.fast, name)

    def __call__(self, text, **settings):
        encoding = self.fast(text, **settings)
        if "offset_mapping" in encoding:
            encoding["offset_mapping"] = [(start, start) for start, _ in encoding["offset_mapping"]]
        return encoding


def save_tokenizer(path: Path) -> None:
    byte_level(bos=True).save_pretrained(path)


SAMPLE = "ab cd ab\n  x: \N{THINKING FACE} ab."


def test_encode_adds_no_special_token_and_decode_restores_the_text():
    tokenizer = HuggingFaceTokenizer(byte_level(bos=True))
    ids, offsets = tokenizer.encode_with_offsets(SAMPLE)
    assert ids == tokenizer.encode(SAMPLE)
    assert tokenizer.bos_id == 0
    assert 0 not in ids
    assert tokenizer.decode(ids) == SAMPLE
    assert [SAMPLE[start:end] for start, end in offsets[:4]] == ["ab", " ", "cd", " ab"]
    assert offsets.count((14, 15)) == 4  # the four bytes of the emoji share its interval


def test_a_bos_that_the_tokenizer_does_not_use_is_none():
    assert HuggingFaceTokenizer(byte_level()).bos_id is None


@pytest.mark.parametrize("fault", ["zero_width", "trim"])
def test_offsets_without_width_are_found_by_decoding(fault):
    expected = HuggingFaceTokenizer(byte_level()).encode_with_offsets(SAMPLE)
    tokenizer = HuggingFaceTokenizer(byte_level(**{fault: True}))
    raw = tokenizer.backend(SAMPLE, return_offsets_mapping=True)["offset_mapping"]
    assert any(start == end for start, end in raw)
    assert tokenizer.encode_with_offsets(SAMPLE) == expected


def test_offsets_that_cannot_be_found_are_refused():
    tokenizer = HuggingFaceTokenizer(byte_level(zero_width=True))
    tokenizer.backend.fast.backend_tokenizer.decoder = None  # decoding no longer gives the text
    with pytest.raises(ValueError, match=r"gives token 0 \('ab'\) offsets \(0, 0\)"):
        tokenizer.encode_with_offsets(SAMPLE)


def test_a_slow_tokenizer_has_no_offsets():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="tokenizer Slow is a slow one and has no character offsets"):
        HuggingFaceTokenizer(Slow()).encode_with_offsets("ab")


def test_tokenizer_of_a_directory(llama):
    assert load_huggingface(llama, "cpu").tokenizer is None
    save_tokenizer(llama)
    tokenizer = load_huggingface(llama, "cpu").tokenizer
    assert tokenizer.encode_with_offsets(SAMPLE) == HuggingFaceTokenizer(byte_level()).encode_with_offsets(SAMPLE)
    assert tokenizer.bos_id == 0
    assert len(tokenizer.sha256) == 64
    (llama / "tokenizer.json").write_text("<html>")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_huggingface(llama, "cpu")
    (llama / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is there without a vocabulary"):
        load_huggingface(llama, "cpu")


def test_native_loader_opens_the_door(llama):
    assert isinstance(models.load(llama, device="cpu"), HuggingFaceLM)
    assert json.loads((llama / "config.json").read_text())["model_type"] == "llama"
