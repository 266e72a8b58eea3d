"""Several architectures: which terms they share is recognised when it is planted."""

import numpy as np
import pytest

from probes import scaling
from probes.scaling.joint import SHARED
from probes.scaling.law import predict

FIRST = {"a": 90.0, "b": 3500.0, "alpha": 0.24, "beta": 0.36}
KINDS = {
    "one": {},
    "shared N": {"b": 1500.0, "beta": 0.345},
    "shared D": {"a": 60.0, "alpha": 0.225},
    "free": {"a": 60.0, "alpha": 0.225, "b": 1500.0, "beta": 0.345},
}


def planted(kind, noise=0.004, seed=0, constant=0.0):
    """Two architectures of 5 sizes and 4 budgets; the second differs from the first as KINDS says."""
    sizes, ratios = np.meshgrid([1.5e7, 3.2e7, 6.5e7, 1.04e8, 4.8e8], [60.0, 130.0, 300.0, 700.0])
    n, d = sizes.ravel(), (sizes * ratios).ravel()
    rng, losses = np.random.default_rng(seed), []
    for parameters in (FIRST, {**FIRST, **KINDS[kind]}):
        losses.append(predict({**parameters, "c": constant}, n, d) * np.exp(noise * rng.standard_normal(len(n))))
    labels = ["swa-128"] * len(n) + ["full"] * len(n)
    return np.tile(n, 2), np.tile(d, 2), np.concatenate(losses), labels


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("one", "one law fits all architectures"),
        ("shared N", "speed, not ceiling"),
        ("shared D", "ceiling, not speed"),
        ("free", "both differ"),
    ],
)
def test_what_is_planted_is_recognised(kind, verdict):
    found = scaling.fit_joint(*planted(kind), resamples=39)
    assert found.verdict.startswith(verdict), {name: law.p_value for name, law in found.laws.items()}
    if kind != "free":
        others = [law.bic for name, law in found.laws.items() if law.n_parameters > found.laws[kind].n_parameters]
        assert found.laws[kind].bic < min(others)


def test_without_noise_the_true_law_loses_nothing_and_its_parameters_come_back():
    found = scaling.fit_joint(*planted("shared N", noise=1e-6), resamples=3)
    law = found.laws["shared N"]
    assert found.architectures == ("swa-128", "full")
    assert found.names == ("a", "b", "alpha", "beta")
    for row, own in zip(law.parameters, ({}, KINDS["shared N"]), strict=True):
        assert dict(zip(found.names, row, strict=True)) == pytest.approx({**FIRST, **own}, rel=0.01)
    assert found.laws["shared D"].statistic > 100
    np.testing.assert_allclose(law.predicted, planted("shared N", noise=0)[2], rtol=1e-4)


def test_laws_are_nested_and_count_their_parameters():
    found = scaling.fit_joint(*planted("free", constant=0.3), constant=True, resamples=3)
    counts = {name: law.n_parameters for name, law in found.laws.items()}
    assert counts == {"free": 10, "shared N": 7, "shared D": 8, "one": 5}
    assert found.names == ("a", "b", "alpha", "beta", "c")
    free = found.laws["free"]
    for name, law in found.laws.items():
        assert free.objective <= law.objective + 1e-12
        assert found.laws["one"].objective >= law.objective - 1e-12
        assert len(law.null) == (0 if name == "free" else 3)
        assert (law.null >= 0).all()
        for parameter in SHARED[name]:
            column = law.parameters[:, found.names.index(parameter)]
            assert column[0] == pytest.approx(column[1], rel=1e-9)
    assert free.statistic == 0
    assert np.isnan(free.p_value)


def test_the_free_law_is_the_separate_fits():
    n, d, loss, labels = planted("free", noise=0.01)
    found = scaling.fit_joint(n, d, loss, labels, resamples=2)
    total = 0.0
    for row, name in enumerate(found.architectures):
        chosen = np.array(labels) == name
        alone = scaling.fit(n[chosen], d[chosen], loss[chosen])
        total += alone.objective
        np.testing.assert_allclose(found.laws["free"].parameters[row], list(alone.parameters.values()), rtol=0.02)
    assert found.laws["free"].objective == pytest.approx(total, rel=1e-4)


def test_the_same_seed_gives_the_same_null():
    one, again = (scaling.fit_joint(*planted("one", noise=0.01), resamples=5, seed=3) for _ in range(2))
    np.testing.assert_array_equal(one.laws["shared N"].null, again.laws["shared N"].null)


def test_architectures_that_cannot_be_compared():
    n, d, loss, labels = planted("one")
    with pytest.raises(ValueError, match="1 architectures"):
        scaling.fit_joint(n, d, loss, ["swa"] * len(n))
    with pytest.raises(ValueError, match="39 labels, 40 points"):
        scaling.fit_joint(n, d, loss, labels[1:])
    few = [*labels[:36], *["gdn"] * 4]
    with pytest.raises(ValueError, match="architecture 'gdn' has 4 points; expected 5 or more"):
        scaling.fit_joint(n, d, loss, few)
    one_size = np.where(np.array(labels) == "full", 1.5e7, n)
    warned = scaling.fit_joint(one_size, d, loss, labels, resamples=2).warnings
    assert any(line.startswith("full: 1 distinct N") for line in warned)
