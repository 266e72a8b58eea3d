"""Likelihoods, profiles, bootstrap: against integrals, brute force and their own definitions."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import f as f_distribution

from probes import scaling
from probes.scaling import likelihood
from probes.scaling.law import predict

PLANTED = {"a": 90.0, "b": 3500.0, "alpha": 0.24, "beta": 0.36}


def points(noise=0.02, seed=0):
    n, ratio = np.meshgrid([1.5e7, 3.2e7, 6.5e7, 1.04e8], [60.0, 130.0, 300.0, 500.0, 1000.0], indexing="ij")
    n, d = n.ravel(), (n * ratio).ravel()
    return n, d, predict(PLANTED, n, d) * np.exp(noise * np.random.default_rng(seed).standard_normal(len(n)))


@pytest.fixture(scope="module")
def found():
    return scaling.fit(*points())


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 0.02, 1.0])
def test_hubers_density_is_normalised(scale):
    delta = 1e-3

    def density(r):
        small = min(abs(r), delta)
        return np.exp(-small * (abs(r) - small / 2) / (delta * scale))

    far = 60 * max(scale, np.sqrt(delta * scale))
    integral = 2 * quad(density, 0, far, points=[delta], limit=500)[0]
    assert likelihood._log_normaliser(scale, delta) == pytest.approx(np.log(integral), abs=1e-8)


def test_the_scale_is_that_of_laplace_and_of_normal_residuals():
    rng, delta = np.random.default_rng(0), 1e-3
    laplace, normal = rng.laplace(scale=0.05, size=4000), 1e-5 * rng.standard_normal(4000)
    loss = scaling.solver.huber
    assert likelihood.scale(float(loss(laplace, delta).sum()), 4000, delta) == pytest.approx(0.05, rel=0.05)
    variance = likelihood.scale(float(loss(normal, delta).sum()), 4000, delta) * delta
    assert np.sqrt(variance) == pytest.approx(1e-5, rel=0.05)


def test_the_likelihood_falls_smoothly_with_the_objective():
    values = [likelihood.log_likelihood(objective, 17, 1e-3) for objective in np.geomspace(1e-9, 1, 500)]
    assert (np.diff(values) < 0).all()
    assert likelihood.log_likelihood(0.0, 17, 1e-3) == np.inf
    assert likelihood.statistic(np.array([2e-4, 1e-4]), 1e-4, 17, 1e-3).tolist()[1] == 0


def test_threshold_and_criteria():
    expected = np.pi / 2 * 17 * np.log(1 + f_distribution.ppf(0.95, 1, 13) / 13)
    assert likelihood.threshold(0.95, 17, 4) == pytest.approx(expected)
    assert np.isnan(likelihood.threshold(0.95, 4, 4))
    assert likelihood.aicc(-10.0, 4, 17) == pytest.approx(20 + 10 + 60 / 11)
    assert np.isnan(likelihood.aicc(-10.0, 4, 6))
    assert likelihood.bic(-10.0, 4, 17) == pytest.approx(20 + 5 * np.log(17))


@pytest.mark.parametrize("parameter", ["a", "b", "alpha", "beta"])
def test_a_profile_ends_where_its_statistic_crosses_the_threshold(found, parameter):
    profile = scaling.profile(found, parameter)
    low, high = profile.interval
    assert low < profile.best < high
    assert profile.best == pytest.approx(found.parameters[parameter], rel=1e-6)
    assert profile.statistic.min() == pytest.approx(0, abs=1e-6)
    assert (np.diff(profile.value) > 0).all()
    for end in (low, high):
        assert np.interp(end, profile.value, profile.statistic) == pytest.approx(profile.threshold, rel=0.1)
    assert low < PLANTED[parameter] < high


def test_a_profile_is_the_best_of_all_other_parameters(found):
    """Brute force: random parameters with alpha held never do better."""
    profile = scaling.profile(found, "alpha")
    rng, index = np.random.default_rng(1), 4
    held = profile.value[index]
    log_n, log_d, target = np.log(found.n), np.log(found.d), np.log(found.loss)
    best = np.inf
    for beta in np.linspace(0.1, 0.8, 36):
        for split in np.linspace(0.05, 0.95, 46):
            a = target.mean() + np.log(split) + held * log_n.mean()
            b = target.mean() + np.log(1 - split) + beta * log_d.mean()
            for shift in rng.uniform(-0.1, 0.1, 8):
                residual = np.logaddexp(a - held * log_n, b - beta * log_d) + shift - target
                best = min(best, scaling.solver.huber(residual, found.delta).sum())
    brute = likelihood.statistic(np.array([best]), found.objective, len(found.n), found.delta)[0]
    assert profile.statistic[index] <= brute + 1e-9


def test_a_profile_stops_at_the_bound_and_says_when_the_fit_is_no_optimum(found):
    bounded = scaling.fit(*points(), bounds={"alpha": (0.22, 0.26)})
    assert scaling.profile(bounded, "alpha").interval[1] == pytest.approx(0.26)
    held_back = replace(scaling.fit(*points(), bounds={"alpha": (0.2, 0.21)}), bounds={})
    assert "the fit is no optimum" in scaling.profile(held_back, "beta").warning
    assert "no optimum" not in scaling.profile(found, "beta").warning
    with pytest.raises(ValueError, match="parameter is 'c'; the fit has a, b, alpha, beta"):
        scaling.profile(found, "c")


def test_a_wider_level_is_wider(found):
    narrow, wide = (scaling.profile(found, "beta", level=level).interval for level in (0.68, 0.99))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_bootstrap_is_reproducible_and_brackets_the_fit(found):
    one, again, other = (scaling.bootstrap(found, resamples=60, seed=seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one.samples, again.samples)
    assert (one.samples != other.samples).any()
    assert one.names == ("a", "b", "alpha", "beta")
    assert one.over == "points within each model size"
    low, high = one.interval()[one.names.index("alpha")]
    assert low < found.parameters["alpha"] < high
    inner = one.interval(0.5)
    assert (inner[:, 0] >= one.interval()[:, 0]).all()
    assert (inner[:, 1] <= one.interval()[:, 1]).all()


def test_a_resample_is_the_fit_to_those_points(found):
    drawn = scaling.bootstrap(found, resamples=3, seed=2, over="points")
    weight, _ = scaling.resampling._weights(found, 3, np.random.default_rng(2), "points")
    rows = np.repeat(np.arange(len(found.n)), weight[1].astype(int))
    alone = scaling.fit(found.n[rows], found.d[rows], found.loss[rows])
    refit = dict(zip(drawn.names, drawn.samples[1], strict=True))
    residual = np.log(predict(refit, found.n[rows], found.d[rows])) - np.log(found.loss[rows])
    assert scaling.solver.huber(residual, found.delta).sum() == pytest.approx(alone.objective, rel=0.02)


def test_what_is_drawn(found):
    sizes = np.unique(found.n)
    weight, _ = scaling.resampling._weights(found, 40, np.random.default_rng(0), "within_n")
    for size in sizes:
        assert (weight[:, found.n == size].sum(1) == 5).all()
    weight, over = scaling.resampling._weights(found, 40, np.random.default_rng(0), list(found.n))
    assert over == "4 groups of points"
    for size in sizes:
        assert (np.ptp(weight[:, found.n == size], axis=1) == 0).all()
    assert (weight.sum(1) == 20).all()
    weight, _ = scaling.resampling._weights(found, 40, np.random.default_rng(0), "points")
    assert (weight.sum(1) == 20).all()
    with pytest.raises(ValueError, match="over has 3 labels for 20 points"):
        scaling.bootstrap(found, over=[1, 2, 3])
    with pytest.raises(ValueError, match="resamples is 0"):
        scaling.bootstrap(found, resamples=0)


def test_a_constant_can_come_back_in_a_resample_of_a_fit_that_has_none():
    n, d, loss = points(noise=0.03, seed=4)
    found = scaling.fit(n, d, loss, constant=True)
    samples = scaling.bootstrap(found, resamples=40).samples[:, -1]
    assert (samples > 0.05).any()
