"""Gains, their intervals and the share in full layers: planted answers, nulls, values worked out by hand."""

from __future__ import annotations

import json
import math
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import norm, ttest_1samp

from probes import layerwise
from probes.layerwise import resampling
from probes.layerwise.intervals import paired_shares, wilson

pytestmark = pytest.mark.filterwarnings("error")


def residual_stream(layers, at, n=1600, width=24, classes=8, seed=0, strength=0.75):
    """[N, L, D] after each layer. Every layer writes noise into the second half of the stream; layer `at` (None: no
    layer) writes the class into the first half, so that the other layers neither add to it nor hide it.
    """
    rng = np.random.default_rng(seed)
    label = rng.permutation(np.arange(n) % classes)
    half = width // 2
    added = np.zeros((n, layers, width))
    added[:, :, half:] = rng.normal(size=(n, layers, half)) * 0.3
    if at is not None:
        added[:, at, :half] = strength * rng.normal(size=(classes, half))[label]
    return rng.normal(size=(n, 1, width)) + added.cumsum(1), label


def result_of(correct, *, prompt=None, names=None, log_p=None):
    """A result with the given held-out outcomes [F, M]; NaN rows are features that could not be fitted."""
    correct = np.asarray(correct, float)
    count, rows = correct.shape
    failed = np.isnan(correct).any(1)
    label = np.zeros(rows, int)
    predicted = np.where(failed[:, None], -1, np.where(correct == 1, 0, 1))
    log_p = np.full((count, rows), -1.0) if log_p is None else np.asarray(log_p, float)
    return layerwise.LayerwiseResult(
        names=tuple(names or map(str, range(count))),
        classes=("a", "b"),
        row=np.arange(rows),
        prompt=np.arange(rows) if prompt is None else np.asarray(prompt),
        label=label,
        frequencies=np.array([0.25, 0.75]),  # chance answers "b", which is never right
        predicted=predicted,
        log_p_true=np.where(failed[:, None], np.nan, log_p),
        converged=~failed,
        n_iter=np.ones(count, int),
        gradient=np.zeros(count),
        objective=np.zeros(count),
        n_constant=np.zeros(count, int),
        reason=tuple("bad" if f else "" for f in failed),
        settings={"seed": 1},
    )


def outcomes(accuracies, rows=20):
    """Rows of outcomes with these accuracies; better features are right wherever worse ones are."""
    return (np.arange(rows)[None] < np.round(np.asarray(accuracies) * rows)[:, None]).astype(float)


# ------------------------------------------------------------------------------------------------------ planted answers


@pytest.mark.parametrize("classifier", ["multinomial", "one-vs-rest"])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_the_class_is_found_at_exactly_its_layer(classifier, at):
    features, label = residual_stream(6, at, seed=20 + at)  # 95 % intervals: one seed in a few has a miss
    found = layerwise.fit(features, label, layer_axis=1, classifier=classifier)
    elsewhere = np.arange(6) != at
    for metric in ("accuracy", "log_loss"):
        gain = layerwise.layer_gains(found, metric).total
        assert int(gain.value.argmax()) == at
        assert gain.interval[at, 0] > 0.2
    low, high = layerwise.layer_gains(found).total.interval.T
    assert ((low <= 0) & (high >= 0)).tolist() == elsewhere.tolist()
    low, high = found.accuracy_interval().T
    assert ((low <= found.chance) & (found.chance <= high)).tolist() == (np.arange(6) < at).tolist()


@pytest.mark.parametrize("shuffled", [False, True])
def test_null_is_at_chance_at_every_layer(shuffled):
    """Noise features, or features full of the class with shuffled labels: intervals hold chance, gains hold 0."""
    features, label = residual_stream(6, 1 if shuffled else None, seed=11, strength=3.0)
    found = layerwise.fit(features, label, layer_axis=1, shuffled=shuffled)
    low, high = found.accuracy_interval().T
    assert ((low <= found.chance) & (found.chance <= high)).all()
    low, high = layerwise.layer_gains(found).total.interval.T
    assert ((low <= 0) & (high >= 0)).all()
    assert (found.log_loss > found.chance_log_loss).all()  # a fitted probe is worse than knowing nothing


def test_gain_over_random_weights_is_the_layers_that_learnt():
    trained, label = residual_stream(5, 2, seed=3)
    untrained, _ = residual_stream(5, None, seed=4)
    result, control = (layerwise.fit(x, label, layer_axis=1) for x in (trained, untrained))
    gain = layerwise.gain_over(result, control)
    np.testing.assert_allclose(gain.value, result.accuracy - control.accuracy, atol=1e-12)
    assert (gain.interval[:, 0] > 0).tolist() == [False, False, True, True, True]
    embedding = layerwise.fit({"embedding": untrained[:, 0]}, label)
    over_embedding = layerwise.gain_over(result, embedding, "log_loss")
    np.testing.assert_allclose(over_embedding.value, embedding.log_loss - result.log_loss, atol=1e-12)


def test_position_is_a_baseline_on_the_same_split():
    features, label = residual_stream(3, 1)
    position = np.eye(8)[label]  # a needle whose place gives its class away
    baseline = layerwise.fit({"position": position}, label)
    assert baseline.accuracy[0] == 1.0
    gain = layerwise.gain_over(layerwise.fit(features, label, layer_axis=1), baseline)
    assert (gain.interval[:, 1] < 0).all()


# ------------------------------------------------------------------------------------------------------------ the chain


def hook(layer, part):
    return f"blocks.{layer}.hook_resid_{part}"


def test_gain_splits_into_mixer_and_mlp():
    names = [hook(n, part) for n in range(2) for part in ("pre", "mid", "post")]
    found = result_of(outcomes([0.1, 0.4, 0.5, 0.5, 0.45, 0.8]), names=names)
    gains = layerwise.layer_gains(found)
    assert gains.layers == (0, 1)
    assert (gains.before, gains.after) == ((names[0], names[3]), (names[2], names[5]))
    np.testing.assert_allclose(gains.total.value, [0.4, 0.3])
    np.testing.assert_allclose(gains.mixer.value, [0.3, -0.05])
    np.testing.assert_allclose(gains.mlp.value, [0.1, 0.35])
    np.testing.assert_allclose(gains.mixer.prompt_sum + gains.mlp.prompt_sum, gains.total.prompt_sum)


CHAINS = {
    "posts": ([hook(0, "post"), hook(1, "post")], (0, 1), ("chance", hook(0, "post"))),
    "posts in another order": ([hook(10, "post"), hook(9, "post")], (9, 10), ("chance", hook(9, "post"))),
    "embedding": ([hook(0, "post"), "hook_embed", hook(1, "post")], (0, 1), ("hook_embed", hook(0, "post"))),
    "first pre": ([hook(0, "pre"), hook(0, "post")], (0,), (hook(0, "pre"),)),
    "pres": ([hook(0, "pre"), hook(1, "pre"), hook(2, "pre")], (0, 1), (hook(0, "pre"), hook(1, "pre"))),
    "left out": ([hook(1, "post"), hook(5, "post")], (1, 5), ("chance", hook(1, "post"))),
    "others beside": (["blocks.0.hook_attn_out", hook(0, "post"), "blocks.0.hook_mlp_out"], (0,), ("chance",)),
    "own names": (["x", "y", "z"], (0, 1, 2), ("chance", "x", "y")),
}


@pytest.mark.parametrize("case", CHAINS)
def test_what_a_layer_is_compared_with(case):
    names, layers, before = CHAINS[case]
    rng = np.random.default_rng(0)
    found = result_of(rng.integers(2, size=(len(names), 30)), names=names)
    gains = layerwise.layer_gains(found)
    assert (gains.layers, gains.before) == (layers, before)
    accuracy = dict(zip(found.names, found.accuracy, strict=True)) | {"chance": 0.0}
    expected = [accuracy[a] - accuracy[b] for a, b in zip(gains.after, gains.before, strict=True)]
    np.testing.assert_allclose(gains.total.value, expected, atol=1e-12)
    assert np.isnan(gains.mixer.value).all()
    assert np.isnan(gains.mlp.interval).all()


def test_the_first_layer_is_compared_with_chance():
    found = result_of(outcomes([0.5]), log_p=np.full((1, 20), -0.3))
    assert (found.chance, found.chance_log_loss) == (0.0, -math.log(0.25))
    np.testing.assert_allclose(layerwise.layer_gains(found).total.value, 0.5)
    np.testing.assert_allclose(layerwise.layer_gains(found, "log_loss").total.value, -math.log(0.25) - 0.3)


def test_gain_over_refuses_other_rows_and_other_features():
    found = result_of(outcomes([0.5, 0.6]))
    with pytest.raises(ValueError, match="held out on different rows"):
        layerwise.gain_over(found, result_of(outcomes([0.5, 0.6], rows=10)))
    with pytest.raises(ValueError, match="held out on different rows"):
        layerwise.gain_over(found, result_of(outcomes([0.5, 0.6]), prompt=np.arange(20) // 2))
    with pytest.raises(ValueError, match="expected the same names"):
        layerwise.gain_over(found, result_of(outcomes([0.5, 0.6]), names=["a", "b"]))
    with pytest.raises(ValueError, match="metric is 'f1'"):
        layerwise.layer_gains(found, "f1")


# ------------------------------------------------------------------------------------------------------------ intervals


def test_wilson_by_hand():
    np.testing.assert_allclose(wilson(np.array([0.8]), 10, 0.95)[0], [0.490162, 0.943318], atol=1e-6)
    np.testing.assert_allclose(wilson(np.array([0.0, 1.0]), 10, 0.95), [[0, 0.277533], [0.722467, 1]], atol=1e-6)
    assert np.isnan(wilson(np.array([np.nan]), 10, 0.95)).all()
    with pytest.raises(ValueError, match="level is 95"):
        wilson(np.array([0.5]), 10, 95)


def test_rows_of_one_prompt_count_once():
    correct = np.repeat(outcomes([0.6], rows=25), 4, axis=1)
    grouped = result_of(correct, prompt=np.repeat(np.arange(25), 4))
    single = result_of(outcomes([0.6, 0.8], rows=25))
    np.testing.assert_allclose(grouped.accuracy_interval()[0], single.accuracy_interval()[0])
    better = result_of(np.repeat(outcomes([0.6, 0.8], rows=25), 4, axis=1), prompt=np.repeat(np.arange(25), 4))
    for metric in ("accuracy", "log_loss"):
        np.testing.assert_allclose(
            layerwise.layer_gains(better, metric).total.interval, layerwise.layer_gains(single, metric).total.interval
        )


def test_paired_interval_by_hand():
    """Bonett & Price: (n01 + 1, n10 + 1) of n + 2."""
    better, worse, rows = 7, 2, 50
    difference = np.array([1.0] * better + [-1.0] * worse + [0.0] * (rows - better - worse))
    p, q, n = (better + 1) / (rows + 2), (worse + 1) / (rows + 2), rows + 2
    half = norm.ppf(0.975) * math.sqrt((p + q - (p - q) ** 2) / n)
    np.testing.assert_allclose(paired_shares(difference[None], 0.95)[0], [p - q - half, p - q + half], atol=1e-12)
    low, high = paired_shares(np.zeros((1, 50)), 0.95)[0]
    assert -0.06 < low < 0 < high < 0.06


def test_paired_interval_covers():
    """Coverage over repeated draws of prompts, at a small number of prompts and discordant pairs."""
    rng = np.random.default_rng(0)
    for up, down in ((0.05, 0.02), (0.3, 0.1), (0.5, 0.0)):
        draws = rng.choice([1.0, -1.0, 0.0], p=[up, down, 1 - up - down], size=(4000, 60))
        low, high = paired_shares(draws, 0.95).T
        covered = ((low <= up - down) & (up - down <= high)).mean()
        assert 0.93 <= covered <= 0.995, (up, down)


def test_log_loss_gain_has_students_interval():
    rng = np.random.default_rng(1)
    log_p = -rng.exponential(size=(2, 30))
    gain = layerwise.layer_gains(result_of(outcomes([0.5, 0.5], rows=30), log_p=log_p), "log_loss").total
    expected = ttest_1samp(log_p[1] - log_p[0], 0).confidence_interval(0.95)
    np.testing.assert_allclose(gain.interval[1], expected)


# -------------------------------------------------------------------------------------------- the share in full layers


def test_share_by_hand_and_every_assignment():
    """Gains 0.1, 0.4, -0.2, 0.3 with layers 1 and 3 full: 0.7 / 0.8; the best of the 6 ways to choose two layers."""
    found = result_of(outcomes([0.1, 0.5, 0.3, 0.6]))
    share = layerwise.share_of_gain(found, [False, True, False, True])
    assert share.share == pytest.approx(0.7 / 0.8)
    assert (share.exact, share.assignments, share.p_value) == (True, 6, pytest.approx(1 / 6))
    assert share.expected == pytest.approx(0.5)
    assert (share.layers, share.full) == ((0, 1, 2, 3), (1, 3))
    worst = layerwise.share_of_gain(found, [True, False, True, False])
    assert (worst.share, worst.p_value) == (pytest.approx(0.1 / 0.8), 1.0)


def test_p_value_equals_a_plain_enumeration_and_counts_ties():
    rng = np.random.default_rng(5)
    accuracies = np.round(rng.random(9), 1)
    found = result_of(outcomes(accuracies))
    gained = np.maximum(np.diff(accuracies, prepend=0.0), 0)
    for full in ((1, 4, 7), (0, 2), (3,), (0, 1, 2, 3, 5, 6, 7, 8)):
        marks = np.isin(np.arange(9), full)
        shares = [gained[list(c)].sum() / gained.sum() for c in combinations(range(9), len(full))]
        expected = np.mean(np.array(shares) >= gained[list(full)].sum() / gained.sum() - 1e-9)
        share = layerwise.share_of_gain(found, marks, resamples=10)
        assert share.p_value == pytest.approx(expected)
        assert share.assignments == math.comb(9, len(full))


def test_sampled_assignments_agree_with_all_of_them():
    rng = np.random.default_rng(6)
    found = result_of(rng.random((12, 40)) < np.linspace(0.1, 0.9, 12)[:, None])
    marks = np.arange(12) % 3 == 1
    exact = layerwise.share_of_gain(found, marks, resamples=10)
    sampled = layerwise.share_of_gain(found, marks, resamples=10, permutations=490)
    assert (exact.exact, exact.assignments) == (True, 495)
    assert (sampled.exact, sampled.assignments) == (False, 491)
    assert sampled.p_value == pytest.approx(exact.p_value, abs=4 * math.sqrt(0.25 / 490))
    assert sampled.p_value >= 1 / 491
    again = layerwise.share_of_gain(found, marks, resamples=10, permutations=490)
    assert (again.p_value, again.interval.tolist()) == (sampled.p_value, sampled.interval.tolist())


def test_p_values_keep_their_level_when_kinds_are_drawn_at_random():
    rng = np.random.default_rng(7)
    small = [
        layerwise.share_of_gain(
            result_of(rng.random((8, 50)) < 0.5), rng.permutation(np.arange(8) % 2 == 1), resamples=1
        ).p_value
        <= 0.2
        for _ in range(300)
    ]
    assert 0.13 < np.mean(small) < 0.26


def test_share_of_a_planted_layer():
    features, label = residual_stream(6, 3, seed=3)
    found = layerwise.fit(features, label, layer_axis=1)
    share = layerwise.share_of_gain(found, np.arange(6) == 3)
    assert share.share > 0.85
    assert 0.75 < share.interval[0] <= share.share <= share.interval[1] <= 1
    assert share.p_value == pytest.approx(1 / 6)
    log_loss = layerwise.share_of_gain(found, np.arange(6) == 3, "log_loss")
    assert log_loss.share > 0.85
    assert log_loss.metric == "log_loss"


def test_bootstrap_resamples_prompts_not_rows():
    rng = np.random.default_rng(8)
    correct = (rng.random((5, 40)) < np.linspace(0.2, 0.9, 5)[:, None]).astype(float)
    marks = [False, True, False, True, False]
    once = layerwise.share_of_gain(result_of(correct), marks)
    rows = result_of(np.repeat(correct, 3, axis=1), prompt=np.repeat(np.arange(40), 3))
    repeated = layerwise.share_of_gain(rows, marks)
    np.testing.assert_allclose(repeated.interval, once.interval, atol=1e-12)
    assert once.interval[1] - once.interval[0] > 0.1


def test_layers_that_could_not_be_fitted_are_left_out():
    correct = outcomes([0.1, 0.5, 0.5, 0.6, 0.9])
    correct[1] = np.nan
    share = layerwise.share_of_gain(result_of(correct), [False, True, True, False, True])
    assert share.layers == (0, 3, 4)  # layer 2 has no known gain either: what it starts from is unknown
    assert share.full == (4,)
    assert share.share == pytest.approx(0.3 / 0.5)


def test_no_gain_has_no_share():
    share = layerwise.share_of_gain(result_of(np.zeros((3, 20))), [True, False, True])
    assert math.isnan(share.share)
    assert math.isnan(share.p_value)
    assert np.isnan(share.interval).all()


def test_share_refuses_marks_that_cannot_be_compared():
    found = result_of(outcomes([0.1, 0.5, 0.6]))
    for marks in ([True] * 3, [False] * 3):
        with pytest.raises(ValueError, match="expected at least one full and one other layer"):
            layerwise.share_of_gain(found, marks)
    for marks in ([True, False], [1, 3, 1]):
        with pytest.raises(ValueError, match="expected 3 booleans"):
            layerwise.share_of_gain(found, marks)


# -------------------------------------------------------------------------------------------------------------- storage


def test_stored_results_are_the_same_results(tmp_path):
    features, label = residual_stream(4, 1, n=240)
    features[0, 2] = np.nan
    found = layerwise.fit(features, [("class", int(i)) for i in label], layer_axis=1, groups=np.arange(240) // 2)
    arrays, metadata = found.to_arrays()
    np.savez(tmp_path / "probe.npz", **arrays)
    with np.load(tmp_path / "probe.npz") as stored:
        back = layerwise.LayerwiseResult.from_arrays(stored, json.loads(json.dumps(metadata)))
    assert (back.names, back.reason, dict(back.settings)) == (found.names, found.reason, dict(found.settings))
    assert back.classes[3] == "('class', 3)"
    for name in ("accuracy", "log_loss", "correct", "converged", "prompt", "n_iter", "chance"):
        np.testing.assert_array_equal(getattr(back, name), getattr(found, name))
    np.testing.assert_array_equal(back.accuracy_interval(), found.accuracy_interval())
    share, again = (layerwise.share_of_gain(r, [False, True, False, False]) for r in (found, back))
    assert (share.share, share.p_value) == (again.share, again.p_value)
    gain = layerwise.gain_over(found, back)
    np.testing.assert_array_equal(gain.value[[0, 1, 3]], 0)
    del arrays["predicted"]
    with pytest.raises(ValueError, match="lacks predicted"):
        layerwise.LayerwiseResult.from_arrays(arrays, metadata)


def test_draws_are_the_same_for_every_statistic_of_a_seed(monkeypatch):
    """Kept or drawn anew, and those of numpy's multinomial; each resample has as many prompts as there are."""
    kept = np.concatenate([*resampling.resampled(7, 1100, 3)])
    assert kept.shape == (1100, 7)
    assert (kept.sum(1) == 7).all()
    assert kept.mean(0) == pytest.approx(np.ones(7), abs=0.15)
    first = np.random.default_rng(3).multinomial(7, np.full(7, 1 / 7), size=512)
    np.testing.assert_array_equal(kept[:512], first)
    monkeypatch.setattr(resampling, "_KEPT", 0)
    np.testing.assert_array_equal(np.concatenate([*resampling.resampled(7, 1100, 3)]), kept)
    assert not np.array_equal(np.concatenate([*resampling.resampled(7, 1100, 4)]), kept)
