"""Crossings by hand: sustained ones only, placed in log tokens; what cannot be placed says why."""

import numpy as np
import pytest

from analyses.crossings import EARLIER, NEVER, SINGLE, UNDEFINED, crossing, crossing_tokens, log_mean

TOKENS = np.array([1e6, 1e7, 1e8, 1e9])


def test_a_crossing_is_placed_in_log_tokens():
    found = crossing(np.array([0.0, 0.2, 0.6, 0.9]), TOKENS, 0.4, True)
    assert found.tokens == pytest.approx(10**7.5)
    assert (found.after, found.by, found.status) == (1e7, 1e8, "")


def test_only_a_crossing_that_lasts_counts():
    found = crossing(np.array([0.0, 0.8, 0.3, 0.5]), TOKENS, 0.4, True)
    assert found.tokens == pytest.approx(10**8.5)
    assert (found.after, found.by) == (1e8, 1e9)
    assert crossing(np.array([0.0, 0.8, 0.9, 0.3]), TOKENS, 0.4, True).status == NEVER


def test_downwards():
    found = crossing(np.array([1.0, 0.9, 0.4, 0.0]), TOKENS, 0.5, False)
    assert found.tokens == pytest.approx(10 ** (7 + 0.4 / 0.5))
    assert crossing(np.array([1.0, 0.9, 0.4, 0.6]), TOKENS, 0.5, False).status == NEVER


def test_a_value_on_the_mark_is_beyond_it():
    assert crossing(np.array([0.0, 0.0, 0.5, 0.5]), TOKENS, 0.5, True).tokens == pytest.approx(1e8)


@pytest.mark.parametrize(
    ("values", "status", "by"),
    [
        ([0.1, 0.1, 0.1, 0.1], NEVER, np.nan),
        ([0.6, 0.7, 0.8, 0.9], EARLIER, 1e6),
        ([np.nan, np.nan, 0.8, 0.9], UNDEFINED, 1e8),
        ([0.1, 0.9, 0.9, np.nan], NEVER, np.nan),
    ],
)
def test_what_cannot_be_placed_says_why(values, status, by):
    found = crossing(np.array(values), TOKENS, 0.5, True)
    assert found.status == status
    assert np.isnan(found.tokens)
    np.testing.assert_equal(found.by, by)


def test_one_checkpoint_has_no_crossing():
    assert crossing(np.array([0.9]), TOKENS[:1], 0.5, True).status == SINGLE
    assert np.isnan(log_mean(np.array([0.9]), TOKENS[:1]))


def test_many_curves_at_once_are_each_like_one():
    rng = np.random.default_rng(0)
    values = rng.random((200, 4)).cumsum(1) * 0.6
    found = crossing_tokens(values, TOKENS, 0.5, True)
    for row, place in zip(values, found, strict=True):
        one = crossing(row, TOKENS, 0.5, True)
        expected = {NEVER: np.inf, EARLIER: 1e6, "": one.tokens}[one.status]
        assert place == expected
    assert np.isinf(found).any()
    assert (found == 1e6).any()


def test_area_is_the_mean_over_log_tokens():
    assert log_mean(np.array([0.0, 1.0, 1.0, 1.0]), TOKENS) == pytest.approx((0.5 + 1 + 1) / 3)
    uneven = np.array([1e6, 1e7, 1e9])
    assert log_mean(np.array([0.0, 1.0, 0.0]), uneven) == pytest.approx(0.5)
    assert np.isnan(log_mean(np.array([np.nan, 1.0, 1.0, 1.0]), TOKENS))
