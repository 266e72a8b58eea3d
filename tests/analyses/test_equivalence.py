"""Verdicts against a margin: the three of them by hand, and how often "equivalent" is said when it is not so."""

import math

import numpy as np
import pytest

from analyses.bootstrap import resampled_ratios
from analyses.equivalence import expanded_interval, verdicts

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "interval", "expected"),
    [
        (0.5, (0.2, 0.8), "matters"),
        (-0.5, (-0.8, -0.2), "matters"),
        (0.05, (0.01, 0.09), "equivalent"),  # not zero, but too small to matter
        (0.0, (0.0, 0.0), "equivalent"),
        (0.05, (-0.2, 0.3), "undecided"),  # a missing difference is no equivalence
        (0.3, (0.05, 0.6), "undecided"),  # nor is a difference beyond doubt one that matters
        (0.1, (0.1, 0.1), "undecided"),
        (0.5, (NAN, NAN), "undecided"),
        (NAN, (NAN, NAN), ""),
    ],
)
def test_three_verdicts(value, interval, expected):
    assert verdicts(np.array([value]), np.array([interval]), 0.1) == [expected]


def test_the_expanded_interval_of_a_mean_is_nearly_students():
    rng = np.random.default_rng(0)
    for n in (8, 24):
        sample = rng.normal(size=n)
        _, draws = resampled_ratios(sample[None], np.ones(n), seed=1)
        t = {8: 2.3646, 24: 2.0687}[n]
        half = t * sample.std(ddof=1) / math.sqrt(n)
        np.testing.assert_allclose(
            expanded_interval(draws, n)[0], [sample.mean() - half, sample.mean() + half], atol=0.13 * half * 2
        )


def test_few_documents_seldom_make_a_harm_at_the_margin_equivalent():
    """The true harm is the margin: "equivalent" is wrong, and may be said in 2.5 % of studies (here 5 % at most)."""
    rng, said, naive = np.random.default_rng(2), 0, 0
    for study in range(300):
        sample = rng.normal(0.1, 0.1, size=6)
        _, draws = resampled_ratios(sample[None], np.ones(6), seed=study, resamples=1000)
        said += verdicts(draws.mean(0), expanded_interval(draws, 6), 0.1) == ["equivalent"]
        low, high = np.percentile(draws, [2.5, 97.5])
        naive += low > -0.1 and high < 0.1
    assert said / 300 < 0.05 < naive / 300, "the plain percentile interval says it too often"


def test_one_sample_has_no_interval():
    assert np.isnan(expanded_interval(np.zeros((10, 2)), 1)).all()
    assert np.isnan(expanded_interval(np.full((10, 1), np.nan), 5)).all()
