"""A needle planted in a recurrent state: readable for ever without decay, with decay gamma as far as theory says."""

import math

import numpy as np
import pytest
import torch

from analyses.state_features import extract_states, sketch, state_differences, state_layers
from models.config import HybridConfig
from models.hybrid_lm import HybridLM
from probes import layerwise

WIDTH, TIME, NEEDLE = 4, 72, 5
SIGNAL, NOISE = 3.0, 0.1
DISTANCES = (0, 10, 25, 32, 60)


def planted(log_decay):
    """One Lightning layer: every token writes into one slot, class tokens SIGNAL and others NOISE, at value 0 or 1.

    Tokens 0 and 1 are the classes, 2 and 3 the text. A large constant keeps the norm before the layer from mattering.
    """
    model = HybridLM(
        HybridConfig(
            d_model=8, n_layers=1, n_heads=1, n_kv_heads=1, d_head=WIDTH, d_ffn=3, vocab_size=4, context_length=128,
            layer_kinds=("lightning",), rope_base=1e4,
        )
    ).eval().requires_grad_(False)  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.zero_()
    model.embed.weight[:, 7] = 1e4
    for token, (place, size) in enumerate([(0, SIGNAL), (1, SIGNAL), (0, NOISE), (1, NOISE)]):
        model.embed.weight[token, place] = size
    mixer = model.blocks[0].attn
    mixer.k_proj.weight[0, 7] = 40 / math.sqrt(8)  # SiLU(40) = 40: the slot
    scale = 1e4 / math.sqrt(8)  # what the norm divides by
    for place in (0, 1):
        mixer.v_proj.weight[place, place] = 1e3 * scale  # so large that SiLU is the identity
    mixer.log_decay.fill_(log_decay)
    return model


def prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(2, 4, (count, TIME))
    label = np.arange(count) % 2
    ids[:, NEEDLE] = label
    return ids, label


def theory(log_decay, distance):
    """Phi(d'): the difference of the two places is +-SIGNAL gamma^d in noise of independent signs, decayed alike."""
    text = np.delete(np.arange(NEEDLE + distance + 1), NEEDLE)
    deviation = NOISE * math.sqrt((np.exp(2 * log_decay * (NEEDLE + distance - text))).sum())
    return 0.5 * (1 + math.erf(SIGNAL * math.exp(log_decay * distance) / deviation / math.sqrt(2)))


def accuracies(log_decay, shuffled=False, count=900):
    ids, label = prompts(count)
    positions = np.tile(NEEDLE + np.array(DISTANCES), (count, 1))
    found = extract_states(planted(log_decay), ids, positions, width=0, seed=0, batch=300)
    assert found.layers == (0,)
    assert found.states.shape == (count, 1, len(DISTANCES), WIDTH * WIDTH)
    features = {str(d): found.states[:, 0, i] for i, d in enumerate(DISTANCES)}
    return layerwise.fit(features, label, test_size=0.5, seed=0, shuffled=shuffled).accuracy


def test_without_decay_it_is_readable_at_every_distance():
    assert min(theory(0.0, d) for d in DISTANCES) > 0.99
    np.testing.assert_allclose(accuracies(0.0), 1, atol=0.01)


def test_with_decay_it_is_readable_as_far_as_theory_says():
    expected = [theory(-0.1, d) for d in DISTANCES]
    assert expected[1] > 0.99
    assert 0.75 < expected[2] < 0.9
    assert expected[-1] < 0.53
    np.testing.assert_allclose(accuracies(-0.1), expected, atol=0.075)  # 450 held-out prompts: 3 standard errors


def test_shuffled_labels_are_at_chance():
    np.testing.assert_allclose(accuracies(0.0, shuffled=True), 0.5, atol=0.08)


@pytest.mark.parametrize("log_decay", [0.0, -0.1])
def test_differences_of_states_are_those_of_the_needle_alone(log_decay):
    model = planted(log_decay)
    clean, _ = prompts(4)
    corrupt = clean.copy()
    corrupt[:, NEEDLE] = 1 - clean[:, NEEDLE]
    at = NEEDLE + np.array(DISTANCES)
    found = state_differences(model, clean, corrupt, np.tile(at, (4, 1)), batch=3)
    written = np.array([SIGNAL, SIGNAL, NOISE, NOISE])[clean]  # N T
    for n in range(4):
        for column, t in enumerate(at):
            decay = np.exp(log_decay * (t - np.arange(t + 1)))
            state = [(decay * written[n, : t + 1] * (clean[n, : t + 1] % 2 == place)).sum() for place in (0, 1)]
            expected = math.sqrt(2) * SIGNAL * decay[NEEDLE] / np.hypot(*state)
            assert found[n, 0, column] == pytest.approx(expected, rel=2e-3)
    before = state_differences(model, clean, corrupt, np.full((4, 1), NEEDLE - 1), batch=4)
    assert (before == 0).all()


def test_positions_of_their_own_and_batches_change_nothing(tiny):
    torch.manual_seed(0)
    model = tiny.model("gdn", "full", "mamba2", "headwise", efficient="lightning")
    assert state_layers(model.layers) == (0, 2, 3)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 96, (5, 40))
    positions = np.sort(rng.integers(0, 40, (5, 3)), 1)
    one = extract_states(model, ids, positions, width=33, seed=2, batch=1)
    all_at_once = extract_states(model, ids, positions, width=33, seed=2, batch=5)
    assert one.states.shape == (5, 3, 3, 33)
    np.testing.assert_allclose(one.states, all_at_once.states, atol=2e-5)
    np.testing.assert_allclose(one.streams, all_at_once.streams, atol=2e-5)
    for name, mixer in (("blocks.0.attn", 0), ("blocks.3.attn.efficient", 2)):
        _, cache = model.run_with_cache(torch.from_numpy(ids), names_filter=f"{name}.hook_ssm_state")
        state = cache[f"{name}.hook_ssm_state"][torch.arange(5)[:, None], torch.from_numpy(positions)]
        expected = sketch(state.flatten(2), 33, 2 + (0, 2, 3)[mixer])
        np.testing.assert_allclose(one.states[:, mixer], expected, atol=2e-4)
    with pytest.raises(ValueError, match="ascending"):
        extract_states(model, ids, positions[:, ::-1] + np.arange(3)[::-1], width=8, seed=0, batch=5)
    with pytest.raises(ValueError, match="of 40 tokens"):
        extract_states(model, ids, positions + 40, width=8, seed=0, batch=5)


def test_a_sketch_keeps_inner_products_in_the_mean():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 500, generator=generator, dtype=torch.float64)
    sketched = [sketch(torch.stack([x, y]), 60, seed) for seed in range(400)]
    products = torch.stack([s[0] @ s[1] for s in sketched])
    assert abs(products.mean() - x @ y) < 3 * products.std() / 20
    norms = torch.stack([s[0] @ s[0] for s in sketched])
    assert abs(norms.mean() / (x @ x) - 1) < 0.03
    assert torch.equal(sketch(x, 500, 0), x)
    assert torch.equal(sketch(x, 0, 0), x)
    assert torch.equal(sketch(x, 60, 3), sketch(x, 60, 3))
    assert not torch.equal(sketch(x, 60, 3), sketch(x, 60, 4))
