"""Features: the streams they claim to be, whatever the batch, with prefixes shared or not, native or Hugging Face."""

import importlib.util
import json
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from analyses import features
from analyses.features import TOLERANCE, extract, mean_embedding
from analyses.shared_prefixes import common_prefixes, schedule
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
    ids[:, :24] = 5
    assert extract(model, ids, share_prefix=True).computed == 24 + 6 * 56


@pytest.mark.parametrize("launch", [0, 7, 300])
def test_batches_are_cut_where_they_cost_least(launch):
    """Against all ways to cut nine prompts: rows x longest rest + launch, within the budget."""
    rng = np.random.default_rng(5)
    hay = rng.integers(1000, size=60)
    for budget in (1, 90, 10**6):
        ids = np.stack([np.r_[hay[:place], 1000 + i, hay[place:]] for i, place in enumerate(rng.integers(60, size=9))])
        found = schedule(ids, 60, budget, launch / 2)
        _, shared = common_prefixes(ids)
        rest = 61 - np.sort(np.minimum(shared, 60))
        costs = []
        for cut in range(2**8):
            bounds = [0, *(i + 1 for i in range(8) if cut >> i & 1), 9]
            sizes = [(b - a, rest[a]) for a, b in pairwise(bounds)]
            if all(rows == 1 or rows * tokens <= budget for rows, tokens in sizes):
                costs.append(sum(rows * tokens + launch for rows, tokens in sizes))
        if found.trunk is None:
            assert min(costs) + 60 > 0.9 * (9 * 61 + launch / 2 * len(found.batches))
            continue
        chosen = sum((last - first) * (61 - start) + launch for first, last, start in found.batches)
        assert chosen == min(costs)
        assert sorted(found.order) == list(range(9))
        assert [start for *_, start in found.batches] == [61 - rest[first] for first, *_ in found.batches]
    assert found.trunk is not None or launch == 300


@pytest.fixture(scope="module")
def llama():
    path = Path(__file__).parents[1] / "probes" / "conftest.py"
    spec = importlib.util.spec_from_file_location("probes_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return HuggingFaceLM(module._tiny_llama(len(GOLDEN["characters"]), 24, 2.417, 0.8))


def peer_ids():
    return [np.array([GOLDEN["characters"].index(c) for c in text])[None] for text in GOLDEN["texts"]]


def between_layers(found):
    """The stream before the first layer and after each, whatever else a model's hook points name."""
    ends = ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    return found.values[:, :, [found.names.index(name) for name in ends]]


def test_huggingface_features_are_transformers_hidden_states(llama):
    ids = np.concatenate([row[:, :40] for row in peer_ids()[:3]])
    values = between_layers(extract(llama, ids, (-1, 11), share_prefix=True))
    states = llama.hf(torch.from_numpy(ids), output_hidden_states=True).hidden_states
    expected = torch.stack([state[:, [-1, 11]] for state in states], 2).detach().numpy()
    close(values[:, :, :2], expected[:, :, :2])
    normed = llama.hf.base_model.norm(torch.from_numpy(values[:, :, 2])).detach().numpy()
    np.testing.assert_allclose(normed, expected[:, :, 2], atol=2e-5)
    assert np.abs(values[:, :, 2] - expected[:, :, 2]).max() > 0.1, "transformers' last state is normed, ours not"
    hooked = [len(layer.block._forward_hooks) + len(layer.block._forward_pre_hooks) for layer in llama.layers]
    extract(llama, ids)
    left = [len(layer.block._forward_hooks) + len(layer.block._forward_pre_hooks) for layer in llama.layers]
    assert left == hooked, "hooks were left behind"


def test_features_and_accuracies_equal_the_released_scripts(llama):
    """Their last layer is read after the final norm: compared after our norm, and its delta mixes the two streams."""
    found = np.concatenate([between_layers(extract(llama, ids))[:, 0] for ids in peer_ids()])
    before, first, last = found.transpose(1, 0, 2)
    last = llama.hf.base_model.norm(torch.from_numpy(last)).detach().numpy()
    for name, ours in (("layer_0", first), ("layer_1", last)):
        np.testing.assert_allclose(ours[:3], GOLDEN["features"][name], rtol=2e-5, atol=2e-6)
    kinds = {"residual": {"0": first, "1": last}, "delta": {"0": first - before, "1": last - first}}
    for impl in ("torch", "sklearn"):
        for kind, layers in kinds.items():
            result = layerwise.fit(layers, GOLDEN["labels"], classifier="one-vs-rest", C=0.1, max_iter=1000, impl=impl)
            np.testing.assert_allclose(result.accuracy, GOLDEN["accuracies"][kind], atol=5e-5)  # printed to 4 digits


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_features_are_those_of_the_cpu(tiny, needles, dtype, monkeypatch):
    """Every mixer; whole and shared, many batches or one, at odd lengths."""
    monkeypatch.setattr(features, "GPU_LAUNCH", 0.0)
    monkeypatch.setattr(features, "GPU_ALIGN", 1)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny.model(*KINDS, n_kv_heads=2, efficient="gdn")
    expected = extract(model, needles, (-1, 60)).values
    model = model.to("cuda", dtype)
    scale = np.abs(expected).max((0, 1, 3))[:, None]
    near = 1e-4 if dtype == torch.float32 else 0.2
    for share in (False, True):
        for budget in (300, 10**6):
            found = extract(model, needles, (-1, 60), share_prefix=share, tokens_per_batch=budget)
            assert (np.abs(found.values - expected) <= near * scale).all(), (share, budget)
            assert found.values.dtype == np.float32


@pytest.mark.gpu
@pytest.mark.parametrize("share", [False, True])
def test_a_gpu_is_waited_for_at_the_ends_alone(tiny, needles, share, monkeypatch):
    """As many waits for two batches as for twenty: between the first forward and the last there is none."""
    monkeypatch.setattr(features, "GPU_LAUNCH", 0.0)
    model = tiny.model("swa", "full", "gdn").cuda()
    counted = []
    for budget in (130 * 12, 130):
        extract(model, needles, share_prefix=share, tokens_per_batch=budget)  # kernels are compiled
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                extract(model, needles, share_prefix=share, tokens_per_batch=budget)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counted.append(sum("synchronizing CUDA operation" in str(w.message) for w in caught))
    assert counted[0] == counted[1] <= 6, counted


@pytest.mark.gpu
def test_shared_prefixes_need_hardly_more_memory_than_whole_prompts(tiny):
    """Branches share the trunk's keys; a copy for each would take 24 times as much."""
    model = tiny.model(*["full"] * 12, d_model=64, n_heads=4, n_kv_heads=4, d_head=64, d_ffn=64).bfloat16().cuda()
    rng = np.random.default_rng(0)
    ids = np.repeat(rng.integers(96, size=(1, 6000)), 24, 0)
    ids[:, -200:] = rng.integers(96, size=(24, 200))
    peaks = {}
    for share in (True, False):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        found = extract(model, ids, share_prefix=share, tokens_per_batch=6000)
        peaks[share] = torch.cuda.max_memory_allocated() - held
        assert (found.computed < 0.3 * ids.size) == share
    trunk = 12 * 6000 * 2 * 4 * 64 * 2  # layers, tokens, keys and values, heads, width, bytes
    assert peaks[True] < peaks[False] + 3 * trunk
