"""Features: the streams they claim to be, whatever the batch, with prefixes shared or not, native or Hugging Face."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from analyses.features import TOLERANCE, common_prefixes, extract, mean_embedding
from hooks.streams import stream_names
from models.huggingface import HuggingFaceLM
from probes import layerwise

KINDS = ("swa", "full", "lightning", "mamba2", "gdn", "headwise")
GOLDEN = json.loads((Path(__file__).parent / "golden" / "probing_peer.json").read_text())


def close(found, expected):
    """Within the stated tolerance, feature by feature."""
    for f in range(expected.shape[2]):
        scale = np.abs(expected[:, :, f]).max()
        assert np.abs(found[:, :, f] - expected[:, :, f]).max() <= TOLERANCE * scale, f


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.model(*KINDS, n_kv_heads=2, efficient="gdn")


@pytest.fixture(scope="module")
def needles():
    """One haystack, a needle of 5 tokens at a place of its own in each prompt, a question of 4."""
    rng = np.random.default_rng(1)
    hay, question = rng.integers(96, size=120), rng.integers(96, size=4)
    rows = []
    for place in rng.permutation(np.linspace(3, 117, 23).astype(int)):
        rows.append(np.concatenate([hay[:place], rng.integers(96, size=5), hay[place:], question]))
    return np.stack(rows)


@pytest.mark.parametrize("positions", [(-1,), (120, 40, -1)])
def test_features_are_the_streams_at_the_hook_points(model, needles, positions):
    ids = needles[:3]
    found = extract(model, ids, positions)
    assert found.names == stream_names(model)
    assert found.names[:4] == (
        "blocks.0.hook_resid_pre", "blocks.0.hook_resid_mid", "blocks.0.hook_resid_post", "blocks.1.hook_resid_mid",
    )  # fmt: skip
    for row in range(3):
        _, cache = model.run_with_cache(torch.from_numpy(ids[row][None]))
        expected = np.stack([cache[name][0, list(positions)].numpy() for name in found.names], 1)
        close(found.values[row : row + 1], expected[None])
        layer = 4  # the mixer's and the MLP's outputs are differences
        pre, mid, post = found.values[row, -1, 2 * layer : 2 * layer + 3]
        np.testing.assert_allclose(mid - pre, cache[f"blocks.{layer}.hook_attn_out"][0, -1], atol=2e-5)
        np.testing.assert_allclose(post - mid, cache[f"blocks.{layer}.hook_mlp_out"][0, -1], atol=2e-5)


def test_batching_changes_nothing(model, needles):
    one = extract(model, needles, (-1, 60), tokens_per_batch=1)
    for budget in (300, 1000, 10**6):
        many = extract(model, needles, (-1, 60), tokens_per_batch=budget)
        close(many.values, one.values)
        assert many.computed == one.computed == needles.size


@pytest.mark.parametrize("budget", [1, 500, 10**6])
@pytest.mark.parametrize("positions", [(-1,), (-1, -4)])
def test_shared_prefixes_change_nothing_and_save_tokens(model, needles, budget, positions):
    whole = extract(model, needles, positions)
    shared = extract(model, needles, positions, share_prefix=True, tokens_per_batch=budget)
    close(shared.values, whole.values)
    assert whole.computed == needles.size
    if budget == 1:  # every prompt leaves the trunk where it departs from it: its own rest, and the trunk once
        _, lengths = common_prefixes(needles)
        lengths = np.minimum(lengths, needles.shape[1] + min(positions))
        assert shared.computed == (needles.shape[1] - lengths).sum() + lengths.max()
        assert shared.computed < 0.6 * whole.computed
    assert shared.computed < whole.computed or budget == 10**6


def test_what_lies_behind_the_last_position_is_not_computed(model, needles):
    found = extract(model, needles, (50,))
    assert found.computed == len(needles) * 51
    changed = needles.copy()
    changed[:, 51:] = 7
    np.testing.assert_array_equal(extract(model, changed, (50,)).values, found.values)


def test_common_prefixes_are_those_of_the_best_row():
    rng = np.random.default_rng(0)
    for trial in range(30):
        ids = rng.integers(2, size=(int(rng.integers(1, 9)), 6))
        by_hand = [[next((i for i in range(6) if a[i] != b[i]), 6) for b in ids] for a in ids]
        trunk, lengths = common_prefixes(ids)
        assert lengths.tolist() == by_hand[trunk], trial
        assert lengths.sum() == max(map(sum, by_hand)), trial


def test_mean_embedding_is_that_of_the_ids(model, needles):
    np.testing.assert_allclose(
        mean_embedding(model, needles[:2]), model.embed.weight[needles[:2]].mean(1).numpy(), rtol=1e-5, atol=1e-7
    )


def test_bad_positions_are_refused(model, needles):
    for positions in ((), (129,), (-1, 128)):
        with pytest.raises(ValueError, match="expected prompts and different positions inside them"):
            extract(model, needles, positions)


def test_prompts_with_little_in_common_are_computed_whole(model):
    ids = np.random.default_rng(0).integers(96, size=(6, 80))
    ids[:, :7] = 5  # less than a tenth
    found = extract(model, ids, share_prefix=True)
    assert found.computed == ids.size
    np.testing.assert_array_equal(found.values, extract(model, ids).values)
    ids[:, :12] = 5
    assert extract(model, ids, share_prefix=True).computed == 12 + 6 * 68


@pytest.fixture(scope="module")
def llama():
    path = Path(__file__).parents[1] / "probes" / "conftest.py"
    spec = importlib.util.spec_from_file_location("probes_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return HuggingFaceLM(module._tiny_llama(len(GOLDEN["characters"]), 24, 2.417, 0.8))


def peer_ids():
    return [np.array([GOLDEN["characters"].index(c) for c in text])[None] for text in GOLDEN["texts"]]


def test_huggingface_features_are_transformers_hidden_states(llama):
    ids = np.concatenate([row[:, :40] for row in peer_ids()[:3]])
    found = extract(llama, ids, (-1, 11), share_prefix=True)
    assert found.names == ("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post")
    states = llama.hf(torch.from_numpy(ids), output_hidden_states=True).hidden_states
    expected = torch.stack([state[:, [-1, 11]] for state in states], 2).detach().numpy()
    close(found.values[:, :, :2], expected[:, :, :2])
    normed = llama.hf.base_model.norm(torch.from_numpy(found.values[:, :, 2])).detach().numpy()
    np.testing.assert_allclose(normed, expected[:, :, 2], atol=2e-5)
    assert np.abs(found.values[:, :, 2] - expected[:, :, 2]).max() > 0.1, "transformers' last state is normed, ours not"
    hooked = [len(layer.block._forward_hooks) + len(layer.block._forward_pre_hooks) for layer in llama.layers]
    extract(llama, ids)
    left = [len(layer.block._forward_hooks) + len(layer.block._forward_pre_hooks) for layer in llama.layers]
    assert left == hooked, "hooks were left behind"


def test_features_and_accuracies_equal_the_released_scripts(llama):
    """Their last layer is read after the final norm: compared after our norm, and its delta mixes the two streams."""
    found = np.concatenate([extract(llama, ids).values[:, 0] for ids in peer_ids()])
    before, first, last = found.transpose(1, 0, 2)
    last = llama.hf.base_model.norm(torch.from_numpy(last)).detach().numpy()
    for name, ours in (("layer_0", first), ("layer_1", last)):
        np.testing.assert_allclose(ours[:3], GOLDEN["features"][name], rtol=2e-5, atol=2e-6)
    kinds = {"residual": {"0": first, "1": last}, "delta": {"0": first - before, "1": last - first}}
    for impl in ("torch", "sklearn"):
        for kind, layers in kinds.items():
            result = layerwise.fit(layers, GOLDEN["labels"], classifier="one-vs-rest", C=0.1, max_iter=1000, impl=impl)
            np.testing.assert_allclose(result.accuracy, GOLDEN["accuracies"][kind], atol=5e-5)  # printed to 4 digits
