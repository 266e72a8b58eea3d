"""The fit itself: planted parameters come back, the released numbers are reproduced, what is not determined is said."""

import csv
from pathlib import Path

import numpy as np
import pytest

from probes import scaling
from probes.scaling.fitting import starting_points
from probes.scaling.law import Layout, predict
from probes.scaling.solver import Problem, _derivatives, huber, minimise

TABLE = Path(__file__).parents[2] / "analyses" / "data" / "scaling_swa128.tsv"
PLANTED = {"a": 90.0, "b": 3500.0, "alpha": 0.24, "beta": 0.36}
SIZES = np.array([1.5e7, 3.2e7, 6.5e7, 1.04e8, 4.8e8])
RATIOS = np.array([60.0, 130.0, 300.0, 700.0])


def grid(sizes=SIZES, ratios=RATIOS):
    n, ratio = np.meshgrid(sizes, ratios, indexing="ij")
    return n.ravel(), (n * ratio).ravel()


def planted(noise=0.0, seed=0, sizes=SIZES, ratios=RATIOS, **changes):
    """n, d and losses of the planted law with normal noise of its log."""
    n, d = grid(sizes, ratios)
    loss = predict({**PLANTED, **changes}, n, d)
    return n, d, loss * np.exp(noise * np.random.default_rng(seed).standard_normal(len(n)))


@pytest.fixture(scope="module")
def released():
    """The 23 released points: (n, d, log LongPPL) of S1-S3, and of S4."""
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines, delimiter="\t"))
    n, ratio, longppl = (np.array([float(row[key]) for row in rows]) for key in ("n", "d_over_n", "longppl"))
    largest = np.array([row["scale"] == "S4" for row in rows])
    points = (n, n * ratio, np.log(longppl))
    return tuple(x[~largest] for x in points), tuple(x[largest] for x in points)


@pytest.mark.parametrize("constant", [0.0, 0.4])
def test_planted_parameters_come_back_exactly_without_noise(constant):
    n, d, loss = planted(c=constant)
    found = scaling.fit(n, d, loss, constant=constant > 0)
    expected = {**PLANTED, **({"c": constant} if constant else {})}
    assert found.parameters == pytest.approx(expected, rel=1e-3)
    assert found.converged
    assert found.r2() == pytest.approx(1, abs=1e-9)
    assert not found.warnings


def test_a_constant_that_is_not_there_is_found_to_be_nothing():
    found = scaling.fit(*planted(), constant=True)
    assert found.parameters["c"] < 1e-3
    assert {name: found.parameters[name] for name in PLANTED} == pytest.approx(PLANTED, rel=0.02)


@pytest.mark.parametrize("constant", [0.0, 0.4])
def test_planted_parameters_come_back_within_their_intervals(constant):
    found = scaling.fit(*planted(noise=0.004, seed=3, c=constant), constant=constant > 0)
    for name in ("alpha", "beta"):
        low, high = scaling.profile(found, name).interval
        assert low < PLANTED[name] < high
        assert found.parameters[name] == pytest.approx(PLANTED[name], rel=0.25)


def test_outliers_hardly_move_it():
    n, d, loss = planted(noise=0.002)
    loss[[3, 11]] *= 1.3
    found = scaling.fit(n, d, loss)
    assert found.parameters["alpha"] == pytest.approx(PLANTED["alpha"], rel=0.1)
    assert found.parameters["beta"] == pytest.approx(PLANTED["beta"], rel=0.1)


def test_the_released_fit_is_reproduced(released):
    points, largest = released
    found = scaling.fit_released(*points)
    assert found.parameters == pytest.approx({"a": 104.85, "b": 2951, "alpha": 0.2475, "beta": 0.3551}, rel=0.01)
    assert found.r2() == pytest.approx(0.984, abs=5e-4)
    assert found.r2(*largest) == pytest.approx(0.963, abs=5e-4)
    assert any("stopped early" in line for line in found.warnings)
    assert found.objective > scaling.fit(*points, bounds=scaling.RELEASED_BOUNDS).objective


def test_the_tight_optimum_under_the_released_bounds(released):
    points, largest = released
    found = scaling.fit(*points, bounds=scaling.RELEASED_BOUNDS)
    assert found.parameters == pytest.approx({"a": 222, "b": 480, "alpha": 0.3, "beta": 0.267}, rel=0.01)
    assert found.r2() == pytest.approx(0.987, abs=5e-4)
    assert found.r2(*largest) == pytest.approx(0.955, abs=5e-4)
    assert found.agreeing == 1
    assert "alpha = 0.3 lies on its bound: the bound decides it, not the points" in found.warnings


def test_the_optimum_without_bounds(released):
    points, largest = released
    found = scaling.fit(*points)
    assert found.parameters["alpha"] == pytest.approx(0.474, abs=1e-3)
    assert found.parameters["beta"] == pytest.approx(0.175, abs=1e-3)
    assert found.r2() == pytest.approx(0.988, abs=5e-4)
    assert found.r2(*largest) == pytest.approx(0.979, abs=5e-4)
    assert found.agreeing == 1
    bounded = scaling.fit(*points, bounds=scaling.RELEASED_BOUNDS)
    assert found.objective < bounded.objective


def test_no_other_optimiser_finds_a_lower_loss(released):
    from scipy.optimize import minimize

    points, _ = released
    found = scaling.fit(*points)
    design, target = found.layout.design(points[0], points[1]), np.log(points[2])

    def objective(theta):
        return huber(np.logaddexp(design[0] @ theta, design[1] @ theta) - target, found.delta).sum()

    rng = np.random.default_rng(0)
    for _ in range(6):
        start = found.theta + 0.2 * rng.standard_normal(4)
        other = minimize(
            objective, start, method="Nelder-Mead", options={"maxiter": 4000, "xatol": 1e-10, "fatol": 1e-14}
        )
        assert other.fun >= found.objective * (1 - 1e-6)


@pytest.mark.parametrize("delta", [1e-3, 0.05])
def test_derivatives_are_those_of_the_objective(delta):
    n, d, loss = planted(noise=0.02, c=0.3)
    layout = Layout.of(n, d, constant=True)
    theta = starting_points(layout, loss)[[7, 40]]
    ones, wide = np.ones((2, len(n))), np.full((2, 5), 50.0)
    problem = Problem(layout.design(n, d), np.tile(np.log(loss), (2, 1)), 1.5 * ones, -wide, wide, delta)
    gradient, hessian = _derivatives(problem, theta, delta)
    for column in range(5):
        step = np.zeros(5)
        step[column] = 1e-6
        slope = (problem.objective(theta + step) - problem.objective(theta - step)) / 2e-6
        np.testing.assert_allclose(gradient[:, column], slope, rtol=1e-4, atol=1e-7)
        bend = (_derivatives(problem, theta + step, delta)[0] - _derivatives(problem, theta - step, delta)[0]) / 2e-6
        np.testing.assert_allclose(hessian[:, column], bend, rtol=1e-3, atol=1e-6 + 1e-2 * delta)


def test_weights_are_repetitions_and_problems_do_not_mix():
    n, d, loss = planted(noise=0.02)
    layout = Layout.of(n, d, constant=False)
    design, low, high = layout.design(n, d), *(np.tile(edge, (2, 1)) for edge in layout.limits())
    weight = np.ones((2, len(n)))
    weight[1, ::3] = 2
    start = np.tile(starting_points(layout, loss)[37], (2, 1))
    both = minimise(Problem(design, np.tile(np.log(loss), (2, 1)), weight, low, high, 1e-3), start)
    repeated = np.concatenate([np.arange(len(n)), np.arange(len(n))[::3]])
    for row, rows in ((0, np.arange(len(n))), (1, repeated)):
        one = np.ones((1, len(rows)))
        alone = Problem(design[:, rows], np.log(loss)[None, rows], one, low[:1], high[:1], 1e-3)
        np.testing.assert_allclose(minimise(alone, start[:1]).theta[0], both.theta[row], rtol=1e-4)


def test_units_of_n_and_d_change_a_and_b_only():
    n, d, loss = planted(noise=0.01)
    one, other = scaling.fit(n, d, loss), scaling.fit(n / 1e6, d / 1e9, loss)
    for name, size, exponent in (("a", 1e6, "alpha"), ("b", 1e9, "beta")):
        assert other.parameters[exponent] == pytest.approx(one.parameters[exponent], rel=1e-4)
        expected = one.parameters[name] * size ** -one.parameters[exponent]
        assert other.parameters[name] == pytest.approx(expected, rel=1e-2)


def test_bounds_hold_and_are_said_to_decide():
    found = scaling.fit(*planted(noise=0.005), bounds={"beta": (0.4, 0.5)})
    assert found.parameters["beta"] == pytest.approx(0.4)
    assert any(line.startswith("beta = 0.4 lies on its bound") for line in found.warnings)
    inside = scaling.fit(*planted(noise=0.005), bounds={"alpha": (0.0, 1.0), "beta": (0.0, np.inf)})
    assert not any("bound" in line for line in inside.warnings)
    constant = scaling.fit(*planted(c=0.4), constant=True, bounds={"c": (0.0, 0.2)})
    assert constant.parameters["c"] == pytest.approx(0.2)


def test_one_size_does_not_determine_alpha():
    found = scaling.fit(*planted(noise=0.005, sizes=SIZES[:1], ratios=np.geomspace(50, 2000, 8)))
    assert any("1 distinct N, 2 needed: alpha is not determined" in line for line in found.warnings)
    assert any(line.startswith("flat direction") or "do not determine" in line for line in found.warnings)
    assert not scaling.profile(found, "alpha").closed


def test_one_budget_does_not_determine_beta():
    n = np.geomspace(1e7, 1e9, 8)
    loss = predict(PLANTED, n, np.full(8, 2e10)) * np.exp(0.005 * np.random.default_rng(0).standard_normal(8))
    found = scaling.fit(n, np.full(8, 2e10), loss)
    assert any("1 distinct D, 2 needed: beta is not determined" in line for line in found.warnings)


@pytest.mark.parametrize("seed", range(3))
def test_without_any_dependence_on_d_beta_is_not_claimed(seed):
    n, d = grid()
    loss = (60 * n**-0.25 + 0.8) * np.exp(0.01 * np.random.default_rng(seed).standard_normal(len(n)))
    found = scaling.fit(n, d, loss)
    told = [*found.warnings, scaling.profile(found, "beta").warning]
    assert any("beta" in line for line in told)
    assert "beta = 0 is compatible with the points: no dependence on D is shown" in told


def test_a_dependence_on_d_is_not_warned_away():
    found = scaling.fit(*planted(noise=0.01))
    for name in ("alpha", "beta"):
        assert "compatible" not in scaling.profile(found, name).warning


def test_a_loss_that_grows_with_tokens_is_said():
    found = scaling.fit(*planted(b=0.02, beta=-0.15))
    assert found.parameters["beta"] == pytest.approx(-0.15, abs=0.01)
    assert any("beta = -0.15 < 0: the loss would grow with D" in line for line in found.warnings)


def test_r2_is_of_the_loss_about_the_mean_of_the_points_asked_for():
    n, d, loss = planted(noise=0.05)
    found = scaling.fit(n, d, loss)
    chosen = slice(3, 9)
    residual = loss[chosen] - found.predict(n[chosen], d[chosen])
    expected = 1 - (residual**2).sum() / ((loss[chosen] - loss[chosen].mean()) ** 2).sum()
    assert found.r2(n[chosen], d[chosen], loss[chosen]) == pytest.approx(expected)
    assert np.isnan(found.r2(n[:1], d[:1], loss[:1]))
    np.testing.assert_allclose(found.residual, np.log(loss / found.predict(n, d)))


BAD = [
    ({"loss": -1.0}, r"loss\[2\] is -1\.0; expected a positive, finite number"),
    ({"n": np.nan}, r"n\[2\] is nan"),
    ({"d": 0.0}, r"d\[2\] is 0\.0"),
    ({"d": np.inf}, r"d\[2\] is inf"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_points_are_named(change, message):
    points = dict(zip(("n", "d", "loss"), planted(), strict=True))
    ((name, value),) = change.items()
    points[name] = points[name].copy()
    points[name][2] = value
    with pytest.raises(ValueError, match=message):
        scaling.fit(**points)


def test_bad_arguments_are_named():
    n, d, loss = planted()
    with pytest.raises(ValueError, match="4 points for 4 parameters; expected 5 points or more"):
        scaling.fit(n[:4], d[:4], loss[:4])
    with pytest.raises(ValueError, match="5 points for 5 parameters; expected 6"):
        scaling.fit(n[:5], d[:5], loss[:5], constant=True)
    with pytest.raises(ValueError, match="n, d and loss have shapes"):
        scaling.fit(n[:7], d, loss)
    with pytest.raises(ValueError, match="bounds name 'a'; expected alpha, beta"):
        scaling.fit(n, d, loss, bounds={"a": (0, 1)})
    with pytest.raises(ValueError, match=r"bounds of alpha are \(0\.3, 0\.2\)"):
        scaling.fit(n, d, loss, bounds={"alpha": (0.3, 0.2)})
    with pytest.raises(ValueError, match="bounds of c"):
        scaling.fit(n, d, loss, constant=True, bounds={"c": (-2.0, -1.0)})
    with pytest.raises(ValueError, match="delta is 0"):
        scaling.fit(n, d, loss, delta=0)
