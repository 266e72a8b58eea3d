"""Native checkpoints: round trip, and one clear error for every broken directory, naming file and tensor."""

import json
import shutil

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import models
from models.config import HybridConfig
from models.tokenizer import Tokenizer

KINDS = ("swa", "full", "gdn", "mamba2", "lightning", "headwise")


def tiny_config(**changes) -> HybridConfig:
    fields = dict(
        d_model=24, n_layers=6, n_heads=2, n_kv_heads=1, d_head=12, d_ffn=40, vocab_size=53, context_length=64,
        layer_kinds=KINDS, window=5, efficient="gdn", rope_base=1e4, mamba2_state=8,
    )  # fmt: skip
    return HybridConfig(**{**fields, **changes})


def tiny_tokenizer(words: int = 50) -> Tokenizer:
    vocabulary = {f"w{i}": i for i in range(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = models.HybridLM(tiny_config())
    model.tokenizer = tiny_tokenizer()
    return models.save(model, tmp_path / "ckpt with.dots", training={"step": 3, "tokens": 99}), model


def test_round_trip_is_exact(saved):
    path, model = saved
    loaded = models.load(f"{path}/", device="cpu")
    ids = torch.randint(53, (2, 33))
    assert torch.equal(loaded(ids), model(ids))
    assert loaded.config == model.config
    assert [layer.kind for layer in loaded.layers] == list(KINDS)
    assert loaded.tokenizer.encode("w3 w7") == [3, 7]
    assert loaded.impl == "torch"
    assert not loaded.training
    assert json.loads((path / "training.json").read_text()) == {"step": 3, "tokens": 99}


def test_stored_half_precision_becomes_fp32_on_cpu(saved, tmp_path):
    _, model = saved
    path = models.save(model, tmp_path / "half", dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(path / "model.safetensors").values()} == {torch.bfloat16}
    assert models.load(path, device="cpu").dtype == torch.float32
    assert models.load(path, device="cpu", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_without_tokenizer_the_attribute_is_none(saved):
    path, _ = saved
    (path / "tokenizer.json").unlink()
    assert models.load(path, device="cpu").tokenizer is None


def test_save_never_overwrites(saved):
    path, model = saved
    with pytest.raises(models.CheckpointError, match="exists already"):
        models.save(model, path)
    assert sorted(child.name for child in path.parent.iterdir()) == [path.name]


def shard(path):
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, path / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "model.safetensors").unlink()
    return weight_map


def test_shards_load_like_one_file(saved):
    path, model = saved
    shard(path)
    ids = torch.randint(53, (1, 20))
    assert torch.equal(models.load(path, device="cpu")(ids), model(ids))


def edit_config(path, **changes):
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, **changes}))


def drop_tensor(path):
    tensors = load_file(path / "model.safetensors")
    del tensors["blocks.1.attn.q_proj.weight"]
    save_file(tensors, path / "model.safetensors")


def add_tensor(path):
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "blocks.9.extra": torch.zeros(2)}, path / "model.safetensors")


def misshape_tensor(path):
    tensors = load_file(path / "model.safetensors")
    tensors["ln_final.weight"] = torch.zeros(25)
    save_file(tensors, path / "model.safetensors")


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def stale_index(path):
    weight_map = shard(path)
    weight_map["embed.weight"] = next(f for f in weight_map.values() if f != weight_map["embed.weight"])
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def missing_shard(path):
    shard(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def unlisted_tensor(path):
    weight_map = shard(path)
    del weight_map["embed.weight"]
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


BROKEN = {
    "missing tensor": (drop_tensor, "blocks.1.attn.q_proj.weight.*missing"),
    "extra tensor": (add_tensor, "blocks.9.extra"),
    "misshapen tensor": (misshape_tensor, r"ln_final.weight.*\[25\].*\[24\]"),
    "truncated": (truncate, r"model.safetensors \(\d+ bytes\).*truncated"),
    "empty": (lambda p: (p / "model.safetensors").write_bytes(b""), "the file is empty"),
    "lfs": (
        lambda p: (p / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "Git LFS pointer",
    ),
    "html": (lambda p: (p / "model.safetensors").write_text("<!DOCTYPE html><html>no</html>"), "HTML page"),
    "html config": (lambda p: (p / "config.json").write_text("<html>no</html>"), "config.json.*HTML page"),
    "bad json": (lambda p: (p / "config.json").write_text("{"), "config.json is not valid JSON"),
    "json list": (lambda p: (p / "config.json").write_text("[]"), "expected an object"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "stale index": (stale_index, "index is stale"),
    "unlisted": (unlisted_tensor, "does not list"),
    "missing shard": (missing_shard, "model-00002-of-00002.safetensors: this shard is missing"),
    "both": (lambda p: shutil.copy(p / "config.json", p / "model.safetensors.index.json"), "has both"),
    "unknown mixer": (lambda p: edit_config(p, layer_kinds=["rwkv", *KINDS[1:]]), r"layer_kinds\[0\].*'rwkv'"),
    "unknown field": (lambda p: edit_config(p, n_layer=3), "unknown field.*n_layer"),
    "wrong type": (lambda p: edit_config(p, d_model="24"), "d_model is '24'"),
    "version": (lambda p: edit_config(p, format_version=9), "format_version is 9"),
    "small vocabulary": (
        lambda p: tiny_tokenizer(60).save(p / "tokenizer.json"),
        "tokenizer.json has 60 tokens.*has 53",
    ),
    "bad tokenizer": (lambda p: (p / "tokenizer.json").write_text("{}"), "is not a tokenizer.json"),
    "no config": (lambda p: (p / "config.json").unlink(), "no config.json"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_directories_are_refused_in_one_line(saved, fault):
    path, _ = saved
    breaking, says = BROKEN[fault]
    breaking(path)
    with pytest.raises(ValueError, match=says) as caught:
        models.load(path, device="cpu")
    assert str(path) in str(caught.value)


def test_missing_and_file_paths(tmp_path):
    with pytest.raises(models.CheckpointError, match="does not exist"):
        models.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(models.CheckpointError, match="is a file"):
        models.load(tmp_path / "file")


def test_find_checkpoints_in_natural_order(saved, tmp_path):
    path, model = saved
    for name in ("step_10", "step_9"):
        models.save(model, tmp_path / "run" / name)
    (tmp_path / "run" / "log.jsonl").write_text("")
    assert [p.name for p in models.find_checkpoints(tmp_path / "run")] == ["step_9", "step_10"]
    assert models.find_checkpoints(path) == [path]
    (tmp_path / "empty").mkdir()
    with pytest.raises(models.CheckpointError, match="holds no checkpoint"):
        models.find_checkpoints(tmp_path / "empty")
    with pytest.raises(models.CheckpointError, match="no such directory"):
        models.find_checkpoints(tmp_path / "nowhere")
