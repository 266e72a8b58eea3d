"""A release of flash-linear-attention in the analyses: description, untrained twin, distances, a command line."""

import importlib
import json

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from analyses import checkpoints
from analyses.random_weights import untrained
from analyses.retrieval_tracing_measures import distances
from models import command_line, released_formats

CONFIG = dict(
    model_type="gated_deltanet", vocab_size=96, hidden_size=32, intermediate_size=44, num_hidden_layers=3,
    hidden_act="swish", norm_eps=1e-6, max_position_embeddings=200, num_heads=2, num_v_heads=4, head_dim=6, expand_v=2,
    conv_size=4, use_gate=True, use_short_conv=True, tie_word_embeddings=False,
    attn={"layers": [1], "num_heads": 4, "num_kv_heads": 2},
)  # fmt: skip


def released(path, tiny, seed=0):
    """Random weights, large enough to matter, under the release's names."""
    from transformers import PreTrainedTokenizerFast

    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    reading = released_formats.read(path / "config.json", CONFIG, ())
    torch.manual_seed(seed)
    native = {
        name: 5 * tensor if tensor.ndim == 2 else tensor
        for name, tensor in models.HybridLM(reading.config).state_dict().items()
    }
    save_file(released_formats.released_tensors(reading, native), path / "model.safetensors")
    PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer().backend).save_pretrained(path)
    return path


def test_described_without_weights_and_with_an_untrained_twin(tiny, tmp_path):
    path = released(tmp_path / "fla", tiny)
    found = checkpoints.describe(path)
    assert (found.native, found.context, found.stored_dtype) == (True, 200, "float32")
    assert [layer.kind for layer in found.layers] == ["gdn", "full", "gdn"]
    assert not checkpoints.is_native(path)
    twin = untrained(path, seed=1, device=torch.device("cpu"), dtype=None)
    assert twin.config == models.load(path, device="cpu").config


def test_distances_take_the_heads_of_each_kind_of_layer(tiny, tmp_path):
    """Four heads of 8 in the full layer; two key heads of 6, each for two value heads, in the others."""
    last = released(tmp_path / "last", tiny)
    earlier = released(tmp_path / "earlier", tiny)
    tensors = load_file(earlier / "model.safetensors")
    tensors["model.layers.1.attn.q_proj.weight"][16:24] *= 1.5  # head 2
    tensors["model.layers.2.attn.k_proj.weight"][6:12] *= 3.0  # key head 1: value heads 2 and 3
    save_file(tensors, earlier / "model.safetensors")
    query, key, why = distances(earlier, last, 3, 4)
    assert why == ""
    assert np.allclose(query, [[0, 0, 0, 0], [0, 0, 0.5, 0], [0, 0, 0, 0]])
    assert np.allclose(key, [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 2.0, 2.0]])


def test_gradient_influence_of_a_release(tiny, tmp_path):
    path = released(tmp_path / "fla", tiny)
    texts = tmp_path / "texts"
    texts.mkdir()
    rng = np.random.default_rng(0)
    for index in range(2):
        (texts / f"{index}.txt").write_text("".join(rng.choice(list(tiny.characters[:90]), 90)))
    out = tmp_path / "g.h5"
    module = importlib.import_module("analyses.gradient_influence")
    arguments = [path, "--out", out, "--texts", texts, "--length", "64", "--impl", "naive", "--device", "cpu"]
    with pytest.raises(SystemExit) as stop:
        command_line.run(module.main, module.Config, arguments=[str(argument) for argument in arguments])
    assert stop.value.code == 0
    with h5py.File(out) as file:
        assert json.loads(file.attrs["layer_kinds"]) == {"fla": ["gdn", "full", "gdn"]}
        assert file.attrs["kernel_impl"] == "naive"
