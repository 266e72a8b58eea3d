"""Planted curves: the baseline, where a curve meets it, shares and intervals are those that were put in."""

import numpy as np
import pytest

from analyses.influence_curve import (
    baseline,
    bin_means,
    excess,
    log_bins,
    mean_interval,
    meeting,
    shares,
    slopes,
)

T = 2048
D = np.arange(T)


def noisy(curve, n=24, scatter=0.3, seed=0):
    """`n` texts: a level of their own, and token noise that is skewed, with the mean of the curve."""
    rng = np.random.default_rng(seed)
    own, tokens = rng.lognormal(0, 0.2, (n, 1)), rng.lognormal(-(scatter**2) / 2, scatter, (n, len(curve)))
    return (curve * own / own.mean() * tokens).astype(np.float32)


def met(norm, seed=0):
    edges, base = log_bins(norm.shape[1]), baseline(norm, seed)
    return meeting(norm, edges, base, seed)


@pytest.mark.parametrize("count", [1, 2, 3, 9, 64, 100, 2047, 4095, 4097, 8192])
def test_bins_cover_every_distance_once_and_grow_by_a_quarter_octave(count):
    edges = log_bins(count)
    assert edges[0] == 0
    assert edges[-1] == count
    width = np.diff(edges)
    assert (width >= 1).all()
    assert edges[: min(count, 8) + 1].tolist() == list(range(min(count, 8) + 1))
    wide = edges[1:-2] >= 64
    np.testing.assert_allclose((edges[2:-1] / edges[1:-2])[wide], 2**0.25, rtol=0.02)
    values = np.random.default_rng(0).random((3, count))
    np.testing.assert_allclose((bin_means(values, edges) * width).sum(-1), values.sum(-1))
    assert bin_means(values, edges)[1, 0] == values[1, 0]


def test_baseline_is_the_level_put_in_and_sinks_do_not_move_it():
    curve = 5.0 * np.exp(-D / 40) + 0.7
    norm = noisy(curve)
    plain = baseline(norm, seed=0)
    assert plain.first == 3 * T // 4
    assert abs(plain.value - 0.7) < 0.02
    low, high = np.percentile(plain.draws, [2.5, 97.5])
    assert low < 0.7 < high
    assert high - low < 0.2
    assert abs(plain.drift - 1) < 0.05
    assert plain.block == T / 4 / 16
    expected = 0.7 * 0.3 / np.sqrt(24 * plain.block)
    assert expected / 2 < plain.spread < 2 * expected, "what a block's mean scatters, not what the texts do"
    norm[:, -3:] *= 1000  # the first tokens of a text
    spiked = baseline(norm, seed=0)
    assert abs(spiked.value - plain.value) < 0.005
    assert norm[:, plain.first :].mean() > 2 * plain.value


@pytest.mark.parametrize("scale", [20, 60, 150])
def test_a_decay_meets_its_baseline_where_it_sinks_into_the_noise(scale):
    """5 exp(-d / scale) over 0.7: it is a tenth of the baseline at 4.3 scales, a hundredth at 6.6."""
    found = met(noisy(5.0 * np.exp(-D / scale) + 0.7))
    assert 3.5 * scale < found < 8 * scale


def test_a_step_is_met_where_it_ends_whatever_its_height():
    """The bins are wider than the step is exact: by a quarter octave."""
    for height in (0.5, 3.0, 100.0):
        found = met(noisy(np.where(D < 512, 1 + height, 1.0)))
        assert 512 <= found <= 512 * 2**0.25 + 1


def test_a_single_distance_that_stands_out_counts():
    spike = np.ones(T)
    spike[700] = 50.0
    assert 700 < met(noisy(spike)) <= 700 * 2**0.25 + 1


def test_a_slope_too_small_for_any_bin_is_seen_in_the_whole():
    """Half a baseline more on the first 1000 distances, in few and noisy texts."""
    norm = noisy(np.where(D < 1000, 1.5, 1.0), n=8, scatter=2.0)
    edges, base = log_bins(T), baseline(norm, 0)
    low = excess(norm, edges, base, 0)[1][:, 0]
    assert (low[edges[:-1] < 500] < 0).mean() > 0.6, "most bins do not stand out"
    assert met(norm) > 500


def test_skewed_tokens_do_not_lift_a_flat_curve_above_its_baseline():
    """Heavy-tailed tokens: the median over distances would lie below the mean curve everywhere."""
    norm = noisy(np.ones(T), n=16, scatter=1.5)
    base = baseline(norm, 0)
    assert abs(base.value / norm.mean() - 1) < 0.05
    assert np.median(norm.mean(0)[base.first :]) < 0.95 * base.value
    assert met(norm) < 64
    low, high = shares(norm, [512], base, 0).band[1][0]
    assert low < 0.1
    assert high > -0.1


def test_a_second_rise_counts_and_flat_or_falling_curves_are_told_apart():
    bump = np.where((D >= 900) & (D < 1100), 3.0, 1.0) + 5 * np.exp(-D / 20)
    assert 1050 < met(noisy(bump)) < 1350, "sustained: a gap before the bump is not the meeting"
    assert met(noisy(np.ones(T), scatter=0.01)) < 16
    falling = noisy(100.0 / (D + 1))
    assert np.isnan(met(falling)), "a power law has no flat end within the text"
    base = baseline(falling, 0)
    assert np.percentile(base.drift_draws, 2.5) > 1.05
    assert abs(base.drift - 1.14) < 0.05, "1/d: 15/16 of the text over 13/16"


@pytest.mark.parametrize("power", [0.0, -0.5, -1.0])
def test_slopes_are_the_powers_put_in_and_first_tokens_do_not_bend_them(power):
    norm = noisy((D + 1.0) ** power)
    norm[:, -4:] *= 1000
    found, bounds = slopes(norm, log_bins(T), [64, 512, 1024, 2000], 0)
    np.testing.assert_allclose(found[:3], power, atol=0.05)
    assert ((bounds[:3, 0] < power + 0.01) & (bounds[:3, 1] > power - 0.01)).all()
    assert (np.diff(bounds[:3]) < 0.2).all()
    assert np.isnan(found[3]), "two bins tell no slope"


def test_slope_tells_a_floor_from_a_decay_that_goes_on():
    floor = slopes(noisy(50.0 / (D + 1) ** 1.5 + 1), log_bins(T), [16, 512], 0)
    decay = slopes(noisy(50.0 / (D + 1)), log_bins(T), [16, 512], 0)
    assert floor[1][1, 1] > 0 > floor[1][0, 1], "flat from 512 on, not from 16 on"
    assert decay[1][1, 1] < -0.8


def test_a_curve_that_ends_has_no_slope():
    assert np.isnan(slopes(np.tile(np.where(D < 900, 1.0, 0.0), (4, 1)), log_bins(T), [512], 0)[0])


def test_one_text_has_no_interval_and_no_meeting():
    norm = noisy(np.ones(T), n=1)
    mean, bounds = mean_interval(norm, seed=0)
    np.testing.assert_allclose(mean, norm[0])
    assert np.isnan(bounds).all()
    assert np.isnan(met(norm))
    found = shares(norm, [32, 512], baseline(norm, 0), 0)
    assert np.isfinite(found.raw[0]).all()
    assert np.isnan(found.raw[1]).all()


def test_shares_are_the_sums_put_in():
    """Mass 8 on distances 100..107 and 2 beyond 600, none elsewhere; then a baseline under all of it."""
    curve = np.zeros(T)
    curve[100:108], curve[600:602] = 1.0, 1.0
    exact = np.tile(curve, (5, 1))
    found = shares(exact, [64, 128, 512, 1024], baseline(exact, 0), 0)
    np.testing.assert_allclose(found.raw[0], [1, 0.2, 0.2, 0])
    np.testing.assert_array_equal(found.raw[1], np.repeat(found.raw[0][:, None], 2, 1))
    np.testing.assert_allclose(found.subtracted[0], found.raw[0], err_msg="a baseline of 0 takes nothing away")
    level = 0.004
    lifted = shares(exact + level, [64, 128, 512, 1024], baseline(exact + level, 0), 0)
    total = 10 + level * T
    beyond = np.array([10, 2, 2, 0]) + level * (T - np.array([64, 128, 512, 1024]))
    np.testing.assert_allclose(lifted.raw[0], beyond / total)
    np.testing.assert_allclose(lifted.subtracted[0], [1, 0.2, 0.2, 0], atol=1e-12)
    np.testing.assert_allclose(lifted.band[0], np.array([8 / 64, 0, 2 / 512, 0]) / level, atol=1e-9)


def test_intervals_are_paired_and_cover():
    """The share of one curve at many levels has no spread, and that of independent texts covers the truth."""
    level = np.random.default_rng(1).lognormal(0, 1, (12, 1))
    curve = 3 * np.exp(-D / 50) + 0.1
    same = level * curve
    found = shares(same, [128], baseline(same, 0), 0)
    np.testing.assert_allclose(found.raw[1][0], found.raw[0][0], rtol=1e-9)
    np.testing.assert_allclose(found.subtracted[1][0], found.subtracted[0][0], rtol=1e-6)
    curve = curve[:400]
    truth = curve[128:].sum() / curve.sum()
    inside = 0
    for seed in range(20):
        norm = noisy(curve, n=24, scatter=1.0, seed=seed)
        low, high = shares(norm, [128], baseline(norm, 0), 0).raw[1][0]
        inside += low <= truth <= high
    assert inside >= 16


def test_mean_interval_over_many_distances_is_that_of_each_alone():
    norm = noisy(np.ones(1300), n=9)
    mean, bounds = mean_interval(norm, seed=3)
    for d in (0, 511, 512, 1299):
        alone = mean_interval(norm[:, d : d + 1], seed=3)
        np.testing.assert_allclose(mean[d], alone[0][0])
        np.testing.assert_allclose(bounds[d], alone[1][0])
