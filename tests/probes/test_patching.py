"""Patching on planted circuits: the head that moves the value brings all of it back, and nothing else does."""

import numpy as np
import pytest
import torch

from models.config import HybridConfig
from models.hybrid_lm import HybridLM
from probes import niah, patching
from probes.patching import COMPONENTS, POSITIONS, ValueSwaps

VOCAB, LENGTH, KEY, CLASSES = 14, 30, 0, (1, 2, 3)
MOVER = (1, 1)
NEEDLE, BETWEEN, LAST = range(3)
ATTN, MLP, PRE, MID, POST = (
    COMPONENTS.index(c) for c in ("attn_out", "mlp_out", "resid_pre", "resid_mid", "resid_post")
)


def moving(strength=60.0):
    """Layer 0 head 0 writes a token and the one before; layer 1 head 1 copies the token behind KEY to the last one.

    The stream holds [token now | token before | copied]; layer 2 and all MLPs do nothing.
    """
    n = VOCAB
    model = HybridLM(
        HybridConfig(
            d_model=3 * n, n_layers=3, n_heads=2, n_kv_heads=2, d_head=n, d_ffn=4, vocab_size=n, window=2,
            context_length=64, layer_kinds=("swa", "full", "swa"), rope_base=1e4, rope_on_full=False,
        )
    ).eval().requires_grad_(False)  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.zero_()
    eye = torch.eye(n)
    model.embed.weight[:, :n] = eye
    first, second = model.blocks[0].attn, model.blocks[1].attn
    first.q_proj.weight[:n, KEY], first.k_proj.weight[:n, KEY] = 0, 0
    first.v_proj.weight[:n, :n] = eye
    first.o_proj.weight[n : 2 * n, :n] = eye
    second.q_proj.weight[n, :n] = strength  # any token asks head 1 for the one behind KEY
    second.k_proj.weight[n, n + KEY] = 1
    second.k_proj.weight[n, KEY] = -1  # not KEY itself
    second.v_proj.weight[n:, :n] = eye
    second.o_proj.weight[2 * n :, n:] = eye
    model.unembed.weight[:, 2 * n :] = 8 * eye
    return model


def swaps(count=6, seed=0):
    """KEY, a class token behind it, noise elsewhere; the corrupted prompt has the next class."""
    rng = np.random.default_rng(seed)
    clean = rng.integers(len(CLASSES) + 1, VOCAB, (count, LENGTH))
    start = rng.integers(2, LENGTH - 8, count)
    label = np.arange(count) % len(CLASSES)
    right, wrong = np.array(CLASSES)[label], np.array(CLASSES)[(label + 1) % len(CLASSES)]
    rows = np.arange(count)
    clean[rows, start] = KEY
    clean[rows, start + 1] = right
    corrupt = clean.copy()
    corrupt[rows, start + 1] = wrong
    whole = np.concatenate([clean, right[:, None]], 1)
    needle = np.stack([start + 1, start + 2], 1)
    return ValueSwaps(clean, corrupt, needle, right, wrong, whole, LENGTH, np.ones((count, 1), int), label)


@pytest.fixture(scope="module")
def found():
    model, pairs = moving(), swaps()
    return {way: patching.activation_patching(model, pairs, way) for way in patching.DIRECTIONS}


def shares(found, way, table="layers"):
    one = found[way]
    return patching.recovered(getattr(one, table), one.clean, one.corrupt)


def test_the_planted_runs_prefer_their_own_value(found):
    one = found["denoising"]
    assert (one.clean > 2).all()
    assert (one.corrupt < -2).all()
    np.testing.assert_allclose(one.clean, -one.corrupt, rtol=1e-4)


def test_the_moving_head_brings_all_back_and_no_other_head_anything(found):
    share = shares(found, "denoising", "heads").mean(0)  # L H P
    assert share[*MOVER, LAST] == pytest.approx(1, abs=1e-5)
    share[*MOVER, LAST] = 0
    np.testing.assert_allclose(share, 0, atol=1e-5)


def test_the_value_is_at_the_needle_until_its_mover_and_then_at_the_last_token(found):
    share = shares(found, "denoising").mean(0)  # L C P
    np.testing.assert_allclose(share[:, POST, NEEDLE], [1, 0, 0], atol=1e-5)
    np.testing.assert_allclose(share[:, POST, LAST], [0, 1, 1], atol=1e-5)
    np.testing.assert_allclose(share[:, PRE, NEEDLE], [1, 1, 0], atol=1e-5)
    np.testing.assert_allclose(share[:, MID, LAST], [0, 1, 1], atol=1e-5)
    np.testing.assert_allclose(share[:, ATTN, LAST], [0, 1, 0], atol=1e-5)
    np.testing.assert_allclose(share[:, ATTN, NEEDLE], 0, atol=1e-5)
    np.testing.assert_allclose(share[:, MLP], 0, atol=1e-5)
    np.testing.assert_allclose(share[:, :, BETWEEN], 0, atol=1e-5)


def test_noising_is_its_mirror_where_one_path_carries_everything(found):
    clean, noised = shares(found, "denoising"), shares(found, "noising")
    np.testing.assert_allclose(clean + noised, 1, atol=1e-4)


def test_batches_and_heads_left_out_change_nothing(found):
    model, pairs = moving(), swaps()
    alone = patching.activation_patching(model, pairs, "denoising", heads=False, batch_size=1)
    np.testing.assert_allclose(alone.layers, found["denoising"].layers, atol=1e-5)
    assert np.isnan(alone.heads).all()
    clean, corrupt = patching.logit_differences(model, pairs, batch_size=4)
    np.testing.assert_allclose(clean, found["denoising"].clean, atol=1e-5)
    np.testing.assert_allclose(corrupt, found["denoising"].corrupt, atol=1e-5)
    assert not any(point._forward_hooks for point in model.hook_dict.values())


def test_patching_is_what_hooks_patch_does_by_hand():
    """Random weights, a layer of every kind: the same numbers by whole forwards with an explicit edit."""
    import hooks

    torch.manual_seed(3)
    kinds = ("gdn", "headwise", "mamba2", "full", "lightning")
    model = HybridLM(
        HybridConfig(
            d_model=24, n_layers=5, n_heads=4, n_kv_heads=2, d_head=6, d_ffn=20, vocab_size=VOCAB, context_length=64,
            layer_kinds=kinds, window=4, efficient="swa", rope_base=1e4, mamba2_state=5,
        )
    ).eval().requires_grad_(False).double()  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, 0.3)
    pairs = swaps(3)
    found = patching.activation_patching(model, pairs, "denoising")
    clean, corrupt = torch.from_numpy(pairs.clean), torch.from_numpy(pairs.corrupt)
    places = torch.from_numpy(pairs.positions())
    points = {(1, 3): ("blocks.1.attn.efficient.hook_z", 1), (2, 5): ("blocks.2.attn.hook_z", 5)}
    for (layer, head), (name, column) in points.items():
        with hooks.record(model, name) as donor:
            model(clean)
        for position in (NEEDLE, LAST):
            here = places[position][..., None]

            def edit(z, here=here, column=column, donor=donor[name]):
                z[:, :, column] = torch.where(here, donor[:, :, column], z[:, :, column])
                return z

            with hooks.patch(model, {name: edit}):
                logits = model(corrupt)[:, -1]
            expected = logits[range(3), pairs.right] - logits[range(3), pairs.wrong]
            np.testing.assert_allclose(found.heads[:, layer, head, position], expected, atol=1e-9)
    with hooks.record(model, "blocks.3.hook_mlp_out") as donor:
        model(clean)
    there, given = places[BETWEEN][..., None], donor["blocks.3.hook_mlp_out"]
    with hooks.patch(model, {"blocks.3.hook_mlp_out": lambda x: torch.where(there, given, x)}):
        logits = model(corrupt)[:, -1]
    expected = logits[range(3), pairs.right] - logits[range(3), pairs.wrong]
    np.testing.assert_allclose(found.layers[:, 3, MLP, BETWEEN], expected, atol=1e-9)
    assert np.abs(found.heads[:, 2, 5, LAST] - found.corrupt).min() > 1e-9, "the patch acts"


def test_an_untrained_model_separates_no_pair_and_recovers_nothing_that_is_a_number():
    torch.manual_seed(0)
    config = moving().config
    found = patching.activation_patching(HybridLM(config).eval(), swaps(), "denoising")
    assert not patching.separated(found.clean, found.corrupt).any()
    assert np.isnan(patching.recovered(found.layers, found.clean, found.corrupt)).all()


def test_recovered_counts_only_pairs_that_separate():
    clean, corrupt = np.array([3.0, 1.2, -2.0]), np.array([-1.0, 1.1, 2.0])
    share = patching.recovered(np.array([[1.0], [1.15], [0.0]]), clean, corrupt)
    np.testing.assert_allclose(share[:, 0], [0.5, np.nan, np.nan])
    assert patching.separated(clean, corrupt, 0.05).tolist() == [True, True, False]
    with pytest.raises(ValueError, match="least is 0"):
        patching.separated(clean, corrupt, 0)


@pytest.mark.parametrize(("values", "given"), [("easy", 0), ("hard", 7)])
def test_real_prompts_differ_in_the_value_only(tokenizer, values, given):
    pairs = patching.value_swaps(tokenizer, length=420, n=9, seed=4, values=values, after_shared=bool(given))
    digits = len(niah.VALUE_SETS[values][0])
    assert pairs.clean.shape == (9, 420 - digits + given)
    needle, between, last = pairs.positions()
    apart = pairs.clean != pairs.corrupt
    assert apart.any(1).all()
    assert not (apart & ~needle).any()
    assert (pairs.whole[:, : pairs.clean.shape[1]] == pairs.clean).all()
    assert pairs.answer + given == pairs.clean.shape[1]
    assert (pairs.whole[:, pairs.clean.shape[1]] == pairs.right).all()
    assert (pairs.right != pairs.wrong).all()
    assert (needle.sum(1) == digits).all()
    assert (last.sum(1) == 1).all()
    assert not (between & (needle | last)).any()
    some = pairs.select(2, 5)
    assert len(some) == 3
    assert some.sha256 != pairs.sha256


@pytest.fixture(scope="module")
def tokenizer():
    import string

    import tokenizers

    from models.tokenizer import Tokenizer

    vocab = {character: index for index, character in enumerate([*string.printable[:96], "\n"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="~"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend)


def test_pairs_that_differ_elsewhere_are_refused(tokenizer):
    settings = dict(length=400, n=3, haystack="essay")
    one = list(niah.build(tokenizer, seed=1, **settings))
    other_text = list(niah.build(tokenizer, seed=2, **settings))
    with pytest.raises(ValueError, match=r"sample 0: .* expected (the same tokens|a difference there)"):
        patching.pair(one, other_text)
    with pytest.raises(ValueError, match="nowhere in its value"):
        patching.pair(one, one)
    with pytest.raises(ValueError, match="3 clean and 2 corrupted"):
        patching.pair(one, one[:2])
    longer = list(niah.build(tokenizer, seed=1, values=["12345678", "23456789"], **settings))
    with pytest.raises(ValueError, match="expected the same tokens"):
        patching.pair(one, longer)


@pytest.mark.parametrize(("values", "message"), [
    ("numbers", "random for every prompt"), (["1234567"], "at least two values"), ("odd", "at least two values"),
    (["123", "45678"], "expected the same tokens"),
])  # fmt: skip
def test_value_sets_that_cannot_be_swapped_are_refused(tokenizer, values, message):
    with pytest.raises(ValueError, match=message):
        patching.value_swaps(tokenizer, length=400, n=2, seed=0, values=values)


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="direction is 'up'"):
        patching.activation_patching(moving(), swaps(1), "up")
    with pytest.raises(ValueError, match="batch_size is 0"):
        patching.activation_patching(moving(), swaps(1), batch_size=0)
    assert POSITIONS == ("needle", "between", "last")
