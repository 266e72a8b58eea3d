"""Planted answers: models in which one layer, and no other, writes the needle's class into the last token.

Every token is one character and carries itself; layer k attends uniformly and adds the mean of what it sees (in one
model all characters, in the other digits alone), so that from there on, and not before, the digits of the needle can be
read. All other layers put out nothing.
"""

import json
import math

import numpy as np
import pytest

from analyses import store
from analyses.layerwise_probing import Config, layerwise_probing
from analyses.layerwise_probing_plan import Plan
from analyses.layerwise_probing_results import probe_result
from analyses.layerwise_probing_table import table
from analyses.probing_share import share_difference
from probes.layerwise import gain_over, layer_gains, share_of_gain

V, LENGTH, N, SEED = 96, 340, 96, 7
SHARED = {"samples": N, "length": LENGTH, "test_size": 0.5, "seed": SEED}


def planted(tiny, kinds, layer, seen=V):
    model = tiny.model(
        *kinds, d_model=2 * V, n_heads=1, d_head=V, d_ffn=3, context_length=LENGTH, window=LENGTH, rope_on_full=False
    )
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if "ln" in name or name.endswith("norm.weight") else 0.0)
    model.embed.weight[:, :V].fill_diagonal_(1.0)
    attn = model.blocks[layer].attn
    attn.v_proj.weight[:seen, :seen].fill_diagonal_(1.0)
    attn.o_proj.weight[V:].fill_diagonal_(1.0)
    return model


# digits are the tokenizer's first ten characters, and stand in needles alone: nothing else varies
PLANTED = {"in-full": (("swa", "full", "full", "swa"), 2, 10), "in-swa": (("swa", "full", "swa", "full"), 2, V)}
HAYSTACK = {"in-full": "repeat", "in-swa": "noise"}


@pytest.fixture(scope="module")
def studies(tiny, tmp_path_factory):
    """{name: (result, its file)}: one planted model in each haystack, with all controls."""
    folder, found = tmp_path_factory.mktemp("planted"), {}
    for name, settings in PLANTED.items():
        tiny.save(planted(tiny, *settings), folder / "ckpt" / name)
        out = folder / f"{name}.h5"
        found[name] = (
            layerwise_probing(Config(paths=(folder / "ckpt" / name,), out=out, haystack=(HAYSTACK[name],), **SHARED)),
            out,
        )
    return found


def group_of(studies, name):
    return studies[name][0].groups[f"{name}/{HAYSTACK[name]}"]


@pytest.mark.parametrize("name", PLANTED)
def test_the_layer_is_found_exactly(studies, name):
    group, (_, layer, seen) = group_of(studies, name), PLANTED[name]
    features = list(group["feature"])
    before, after = (features.index(f"blocks.{layer}.hook_resid_{part}") for part in ("mid", "post"))
    accuracy, chance = group["accuracy"][0], group["chance"][0]
    assert chance == 1 / 8
    assert (accuracy[:before] == chance).all(), "constant features: the probe can only say one class"
    assert (accuracy[before : features.index("mean embedding")] == accuracy[after]).all()
    assert accuracy[after] == 1 if seen == 10 else accuracy[after] > 0.8
    total, mixer, mlp = group["gain"][0]
    expected = np.where(np.arange(4) == layer, accuracy[after] - chance, 0)
    for found, wanted in ((total, expected), (mixer, expected), (mlp, 0 * expected)):
        np.testing.assert_allclose(found, wanted, atol=1e-12)
    low, high = group["gain_interval"][0, 0, layer]
    assert 0.5 < low < accuracy[after] - chance < high
    assert (group["log_loss_gain"][0, 0] > 0.5).tolist() == (np.arange(4) == layer).tolist()
    assert group["tokens_of_prompts"] == N * LENGTH
    assert (group["tokens_computed"] < 0.75 * N * LENGTH) == (HAYSTACK[name] == "repeat")


@pytest.mark.parametrize("name", PLANTED)
def test_the_share_of_the_gain_is_all_or_nothing_and_its_p_is_known(studies, name):
    group, full = group_of(studies, name), name == "in-full"
    assert group["share"][0].tolist() == [float(full)] * 2
    assert group["share_interval"][0, 0].tolist() == [float(full)] * 2
    # one layer of four gains, two are full: half of the assignments mark it
    assert group["share_p"][0].tolist() == [0.5 if full else 1.0] * 2
    assert group["share_expected"][0].tolist() == [0.5, 0.5]
    assert str(group["share_status"]) == ""


def inside(group, control, features=slice(None)):
    """Whether chance lies in the interval of all these features, at 95 % for all of them together."""
    result = probe_result(group, control)
    low, high = result.accuracy_interval(1 - 0.05 / len(result.names))[features].T
    return ((low <= result.chance) & (result.chance <= high)).all()


@pytest.mark.parametrize("name", PLANTED)
def test_without_needle_or_with_shuffled_labels_every_layer_is_at_chance(studies, name):
    null, group = studies[name][0].groups[f"{name}/null"], group_of(studies, name)
    assert list(null["control"]) == ["trained"]
    assert inside(null, "trained"), "the needle is gone, and so is every trace of its class"
    assert list(group["control"]) == ["trained", "shuffled labels", "random weights"]
    assert inside(group, "shuffled labels")
    features = list(group["feature"])
    assert inside(group, "trained", [features.index("blocks.0.hook_resid_pre"), features.index("needle depth")])


def test_what_uniform_attention_could_pass_on_is_a_control(studies):
    """In the planted model that sees all characters layer k is uniform attention: their mean alone knows as much."""
    group = group_of(studies, "in-swa")
    features = list(group["feature"])
    mean, after = (group["accuracy"][0, features.index(n)] for n in ("mean embedding", "blocks.2.hook_resid_post"))
    assert mean == pytest.approx(after, abs=0.05)


def test_random_weights_are_those_of_the_architecture_and_seed(studies, tiny, tmp_path):
    """A checkpoint trained otherwise, built alike, has the same untrained twin; two of them share its features."""
    for name, scale in (("half", 0.5), ("double", 2.0)):
        other = planted(tiny, *PLANTED["in-full"])
        other.blocks[2].attn.o_proj.weight.mul_(scale)
        tiny.save(other, tmp_path / "c" / name)
    config = Config(
        paths=(tmp_path / "c",), out=tmp_path / "r.h5", haystack=("repeat",), controls=("random",), **SHARED
    )
    assert sum("random weights" in unit for unit in Plan(config, "cpu").stages[0].units) == math.ceil(N / 64)
    again, first = layerwise_probing(config), group_of(studies, "in-full")
    assert list(again.groups) == ["double", "double/repeat", "half", "half/repeat"]
    for name in ("half", "double"):
        group = again.groups[f"{name}/repeat"]
        np.testing.assert_array_equal(group["log_p_true"][1], first["log_p_true"][2])
        assert list(group["control"]) == ["trained", "random weights"]
    over, bounds = first["over_random"], first["over_random_interval"]
    row = list(first["feature"]).index("blocks.3.hook_resid_post")
    assert over[row] == pytest.approx(first["accuracy"][0, row] - first["accuracy"][2, row])
    assert 0 < bounds[row, 0] < over[row] < bounds[row, 1]


def test_stored_predictions_give_every_number_again(studies):
    """The file holds what its summary was made from."""
    result, out = studies["in-swa"]
    read = store.read(out)
    assert read.digest() == result.digest()
    group, full = group_of({"in-swa": (read, out)}, "in-swa"), read.groups["in-swa"]["kind"] == "full"
    results = {control: probe_result(group, control) for control in group["control"]}
    for row, found in enumerate(results.values()):
        np.testing.assert_array_equal(found.accuracy, group["accuracy"][row])
        np.testing.assert_array_equal(found.correct, group["correct"][row])
        np.testing.assert_array_equal(found.log_loss, group["log_loss"][row])
        np.testing.assert_array_equal(layer_gains(found, "log_loss").total.value, group["log_loss_gain"][row, 0])
        share = share_of_gain(found, full, "log_loss", seed=SEED)
        np.testing.assert_equal(share.p_value, group["share_p"][row, 1])
        np.testing.assert_array_equal(share.interval, group["share_interval"][row, 1])
    over = gain_over(results["trained"], results["random weights"])
    np.testing.assert_array_equal(over.interval, group["over_random_interval"])
    assert results["shuffled labels"].settings["shuffled"]
    assert sorted(results["shuffled labels"].label) == sorted(results["trained"].label)


def test_share_differences_are_paired(studies):
    group, full = group_of(studies, "in-full"), studies["in-full"][0].groups["in-full"]["kind"] == "full"
    trained, random = (probe_result(group, control) for control in ("trained", "random weights"))
    same = share_difference(trained, trained, full, "accuracy", 0)
    assert same.value == 0
    assert same.interval.tolist() == [0, 0], "the same prompts are drawn for both"
    found = share_difference(trained, random, full, "accuracy", SEED)
    assert found.value == pytest.approx(group["share"][0, 0] - group["share"][2, 0], abs=1e-12)
    assert found.interval[0] <= found.value <= found.interval[1]
    np.testing.assert_array_equal(found.interval, group["share_over_random_interval"][0])


def test_a_model_without_both_kinds_has_no_share(tiny, tmp_path):
    tiny.save(tiny.model("full", "full", context_length=LENGTH), tmp_path / "c" / "full")
    config = Config(paths=(tmp_path / "c",), out=tmp_path / "r.h5", haystack=("repeat",), controls=(), **SHARED)
    result = layerwise_probing(config)
    group = result.groups["full/repeat"]
    assert str(group["share_status"]) == "n/a: all of the 2 layers are full attention"
    assert np.isnan(group["share"]).all()
    assert "over_random" not in group.variables
    assert "share of the gain in full layers: n/a: all of the 2 layers" in table(result)


def test_hard_values_are_probed_behind_what_they_share(tiny, tmp_path):
    """Single characters: 3141592 is given, and the planted layer holds the last digit there."""
    tiny.save(planted(tiny, *PLANTED["in-full"]), tmp_path / "c" / "in-full")
    result = layerwise_probing(
        Config(
            paths=(tmp_path / "c",),
            out=tmp_path / "r.h5",
            preset="paper",
            samples=N,
            length=LENGTH,
            seed=SEED,
            controls=("null",),
        )
    )
    settings = json.loads(result.attributes["config"])
    assert (settings["resolved_classifier"], settings["resolved_C"], settings["resolved_test_size"]) == (
        "one-vs-rest", 0.1, 0.2,
    )  # fmt: skip
    assert settings["haystacks"] == ["repeat"]
    assert settings["answer_tokens_given"] == {"in-full": 7}
    group = result.groups["in-full/repeat"]
    assert list(group["class"]) == [str(31415920 + i) for i in range(8)]
    assert group["accuracy"][0, list(group["feature"]).index("blocks.2.hook_resid_mid")] == 1
    assert np.argmax(group["gain"][0, 0]) == 2
    assert inside(result.groups["in-full/null"], "trained")
    assert "7 answer tokens given" in table(result)


def test_the_table_is_aligned_and_says_how_many(studies):
    blocks = table(studies["in-full"][0]).split("\n\n")
    assert len(blocks) == 2 + 1
    for block in blocks[:-1]:
        assert f"n = {N // 2} held-out of {N} prompts of {LENGTH} tokens, 8 classes, chance 0.125" in block
    lines = blocks[0].splitlines()
    assert blocks[0].startswith("in-full, repeat")
    assert len({len(line) for line in lines[1:6]}) == 1, "columns are aligned"
    assert lines[4].split()[:3] == ["2", "full", "1.00"]
    assert "layers 0, 3: the window holds the whole prompt" in blocks[0]
    assert "share of the accuracy gain in full layers: trained 1.00 [1.00, 1.00] p = 0.500; random weights" in blocks[0]
    assert "chance is inside the interval of 11 of 11 features, 11 of 11 at 95 % for all together" in blocks[1]


def test_layers_and_settings_are_recorded(studies):
    result = studies["in-full"][0]
    layers = result.groups["in-full"]
    assert layers["kind"].tolist() == ["swa", "full", "full", "swa"]
    assert layers["window"].tolist()[0] == LENGTH
    assert math.isnan(layers["window"][1])
    assert (layers["length"], layers["given"], layers["extrapolation"]) == (LENGTH, 0, 0)
    config = json.loads(result.attributes["config"])
    assert config["samples"] == N
    assert config["needle_values"][0] == "1234567"
    group = group_of(studies, "in-full")
    assert group["converged"].all()
    assert (group["correct"][0] == (group["predicted"][0] == group["label"][0])).all()
    assert len(set(group["needle"])) > 20, "needles stand at depths of their own"
    assert ((group["needle"] > 60) & (group["needle"] < LENGTH - 60)).all(), "between announcement and question"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PLANTED)
def test_the_layer_is_found_on_a_gpu(tiny, tmp_path, name, dtype):
    """Prompts of two units, prefixes shared, probes fitted there too."""
    kinds, layer, seen = PLANTED[name]
    tiny.save(planted(tiny, kinds, layer, seen), tmp_path / "c" / name)
    settings = {**SHARED, "samples": 2 * N, "device": "cuda", "dtype": dtype, "haystack": (HAYSTACK[name],)}
    result = layerwise_probing(Config(paths=(tmp_path / "c",), out=tmp_path / "r.h5", **settings))
    group = result.groups[f"{name}/{HAYSTACK[name]}"]
    assert np.argmax(group["gain"][0, 0]) == layer
    assert group["gain_interval"][0, 0, layer, 0] > 0.5
    assert inside(group, "shuffled labels")
    assert inside(result.groups[f"{name}/null"], "trained")
