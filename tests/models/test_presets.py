"""Preset shapes: the released parameter counts to the parameter, layer patterns, and names that are refused."""

import pytest
import torch

from models.config import ConfigError, HybridConfig
from models.hybrid_lm import HybridLM
from models.presets import preset, preset_from_name

RELEASED_N = {"S1": 14_999_424, "S2": 31_470_080, "S3": 64_901_760, "S4": 104_427_264, "S5": 476_852_480}


def meta(config: HybridConfig) -> HybridLM:
    with torch.device("meta"):
        return HybridLM(config)


@pytest.mark.parametrize("scale", RELEASED_N)
def test_swa128_has_the_released_parameter_count(scale):
    assert meta(preset(scale, "swa-128")).num_parameters(embeddings=False) == RELEASED_N[scale]


def test_s1_total_is_71_million():
    model = meta(preset("S1", "swa-128"))
    assert model.num_parameters() == RELEASED_N["S1"] + 2 * 73_448 * 384
    assert round(model.num_parameters() / 1e6) == 71


@pytest.mark.parametrize("architecture", ["full", "swa-512", "swa-2048-nope", "swa-128-1to3", "full-nope"])
def test_softmax_variants_share_the_count(architecture):
    assert meta(preset("S1", architecture)).num_parameters(embeddings=False) == RELEASED_N["S1"]


def test_nano_is_about_four_megabytes_in_bf16():
    assert 3.9e6 < 2 * meta(preset("nano", "swa-32")).num_parameters() < 4.4e6


@pytest.mark.parametrize("kind", ["swa-128", "lightning", "mamba2", "gdn"])
def test_alternates_efficient_even_full_odd(kind):
    layers = meta(preset("S1", kind)).layers
    assert [layer.kind for layer in layers] == [kind.split("-")[0], "full"] * 5
    assert [layer.index for layer in layers] == list(range(10))


def test_one_to_three_puts_full_where_layer_mod_4_is_3():
    kinds = [layer.kind for layer in meta(preset("mini", "gdn-1to3")).layers]
    assert kinds == ["gdn", "gdn", "gdn", "full"] * 2


def test_headwise_halves_the_heads_of_every_layer():
    for layer in meta(preset("S1", "swa-128-headwise")).layers:
        assert layer.kind == "headwise"
        assert [tuple(path) for path in layer.paths] == [("full", 3, None), ("swa", 3, 128)]
        assert (layer.n_heads, layer.n_kv_heads, layer.window) == (6, 2, 128)
    assert [p.kind for p in meta(preset("nano", "gdn-headwise")).layers[0].paths] == ["full", "gdn"]


def test_layers_say_their_windows_and_heads():
    model = meta(preset("mini", "swa-32-nope"))
    assert [layer.window for layer in model.layers] == [32, None] * 4
    assert {(layer.n_heads, layer.n_kv_heads) for layer in model.layers} == {(3, 1)}
    assert model.layers[1].mixers[0].rope_base is None
    assert model.layers[0].mixers[0].rope_base == 1e4


@pytest.mark.parametrize(
    ("scale", "architecture", "says"),
    [
        ("S9", "full", "S1, S2"),
        ("S1", "swa-0", "swa-0"),
        ("S1", "swa", "swa-W"),
        ("S1", "rwkv", "rwkv"),
        ("mini", "swa-32-headwise", "even number"),
        ("S1", "full-1to3", "no efficient layers"),
        ("S1", "gdn-1to3-headwise", "exclude each other"),
    ],
)
def test_unknown_names_are_refused(scale, architecture, says):
    with pytest.raises(ConfigError, match=says):
        preset(scale, architecture)


def test_one_word_presets():
    assert preset_from_name("mini/swa-32") == preset("mini", "swa-32")
    with pytest.raises(ConfigError, match="SCALE/ARCHITECTURE"):
        preset_from_name("mini-swa-32")


def test_config_survives_json_and_refuses_typos():
    config = preset("nano", "mamba2-1to3")
    assert HybridConfig.from_json(config.to_json()) == config
    with pytest.raises(ConfigError, match="windw"):
        HybridConfig.from_json({**config.to_json(), "windw": 3})
    fields = config.to_json()
    del fields["d_model"]
    with pytest.raises(ConfigError, match="d_model"):
        HybridConfig.from_json(fields)
