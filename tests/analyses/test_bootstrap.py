"""Paired percentile bootstrap: a naive loop, an analytic case, exact zeros, what was not measured, coverage."""

import math

import numpy as np
import pytest

from analyses.bootstrap import interval, resampled_ratios


def naive(numerator, weight, seed, resamples):
    """One resample at a time, sample by sample: the same draws, written as indices."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(resamples):
        counts = generator.multinomial(len(weight), np.full(len(weight), 1 / len(weight)))
        chosen = [i for i, count in enumerate(counts) for _ in range(count)]
        assert len(chosen) == len(weight)
        total = sum(weight[i] for i in chosen)
        rows.append([sum(row[i] for i in chosen) / total if total else math.nan for row in numerator])
    return np.array(rows)


def test_equals_a_naive_loop():
    rng = np.random.default_rng(3)
    numerator, weight = rng.normal(size=(3, 7)), rng.integers(0, 9, 7).astype(float)
    ratio, draws = resampled_ratios(numerator, weight, seed=11, resamples=200)
    expected = naive(numerator, weight, 11, 200)
    np.testing.assert_allclose(draws, expected, rtol=1e-12)
    np.testing.assert_allclose(ratio, [sum(row) / sum(weight) for row in numerator.tolist()], rtol=1e-12)
    for column, (low, high) in enumerate(interval(draws, 0.9)):
        values = sorted(expected[:, column])
        np.testing.assert_allclose([low, high], np.quantile(values, [0.05, 0.95]), rtol=1e-12)


def test_bounds_of_a_share_are_those_of_the_binomial():
    """A mean of zeros and ones resamples as Binomial(N, p) / N: quantiles known exactly."""
    from scipy.stats import binom

    n, ones = 40, 13
    values = np.r_[np.ones(ones), np.zeros(n - ones)][None]
    ratio, draws = resampled_ratios(values, np.ones(n), seed=5, resamples=40_000)
    assert ratio[0] == ones / n
    expected = binom.ppf([0.025, 0.975], n, ones / n) / n
    np.testing.assert_allclose(interval(draws)[0], expected, atol=1.01 / n)
    assert abs(draws.std() - math.sqrt(ones / n * (1 - ones / n) / n)) < 1e-3


def test_documents_weigh_by_their_tokens_and_together():
    """Two documents: resamples are AA, AB or BB with chances 1/4, 1/2, 1/4, and AB is the token-weighted mean."""
    ratio, draws = resampled_ratios(np.array([[10.0, 90.0]]), np.array([10.0, 30.0]), seed=0, resamples=20_000)
    assert ratio[0] == 100 / 40
    values, counts = np.unique(draws, return_counts=True)
    assert values.tolist() == [1.0, 2.5, 3.0]
    np.testing.assert_allclose(counts / 20_000, [0.25, 0.5, 0.25], atol=0.02)


def test_equal_conditions_change_by_exactly_zero():
    rng = np.random.default_rng(0)
    row = rng.lognormal(size=9)
    numerator = np.stack([row, row, row + 1e-3, *[row] * 40])  # many columns: blocks of a matrix product differ
    ratio, draws = resampled_ratios(numerator - numerator[:1], rng.integers(1, 9, 9).astype(float), seed=2)
    bounds = interval(draws)
    same = np.arange(len(numerator)) != 2
    assert (ratio[same] == 0).all()
    assert (bounds[same] == 0).all()
    assert ratio[2] > 0
    assert (bounds[2] > 0).all()


def test_pairing_removes_what_conditions_share():
    """Documents differ by 100, the restriction adds 1 +- 0.01 to each: the change is known far better than either."""
    rng = np.random.default_rng(1)
    base = rng.normal(0, 100, 30)
    numerator = np.stack([base, base + 1 + 0.01 * rng.normal(size=30)])
    low, high = interval(resampled_ratios(numerator - numerator[:1], np.ones(30), 0)[1])[1]
    assert 0.98 < low < 1 < high < 1.02
    alone = interval(resampled_ratios(numerator, np.ones(30), 0)[1])
    assert (alone[:, 1] - alone[:, 0] > 30).all()


def test_what_was_not_measured_stays_nan_and_harms_nobody():
    numerator = np.array([[1.0, 2.0, 3.0], [np.nan] * 3, [3.0, 2.0, 1.0]])
    ratio, draws = resampled_ratios(numerator, np.ones(3), seed=0)
    alone = resampled_ratios(numerator[[0, 2]], np.ones(3), seed=0)
    assert np.isnan(ratio[1])
    assert np.isnan(interval(draws)[1]).all()
    np.testing.assert_array_equal(ratio[[0, 2]], alone[0])
    np.testing.assert_array_equal(interval(draws)[[0, 2]], interval(alone[1]))


def test_resamples_without_any_weight_are_left_out():
    """A third of the resamples of (0, 0, 4, 6) hold no key token at all or one of two documents only."""
    ratio, draws = resampled_ratios(np.array([[0.0, 0.0, 8.0, 18.0]]), np.array([0.0, 0.0, 4.0, 6.0]), seed=0)
    assert ratio[0] == 2.6
    empty = np.isnan(draws[:, 0])
    assert abs(empty.mean() - 1 / 16) < 0.01
    assert interval(draws)[0].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("weight", [[5.0], [5.0, 0.0, 0.0]])
def test_one_sample_has_no_interval(weight):
    numerator = np.zeros((2, len(weight)))
    numerator[:, 0] = 10.0, 15.0
    ratio, draws = resampled_ratios(numerator, np.array(weight), seed=0)
    assert ratio.tolist() == [2.0, 3.0]
    assert np.isnan(interval(draws)).all()


def test_the_seed_alone_decides():
    numerator, weight = np.random.default_rng(4).normal(size=(2, 12)), np.ones(12)
    first, again, other = (interval(resampled_ratios(numerator, weight, seed)[1]) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(("n", "low", "high"), [(4, 0.74, 0.86), (24, 0.90, 0.96)])
def test_coverage_is_what_the_module_says(n, low, high):
    hits = 0
    for trial in range(400):
        values = np.random.default_rng(trial).normal(size=(1, n))
        bounds = interval(resampled_ratios(values, np.ones(n), trial, resamples=500)[1])[0]
        hits += bounds[0] <= 0 <= bounds[1]
    assert low <= hits / 400 <= high
