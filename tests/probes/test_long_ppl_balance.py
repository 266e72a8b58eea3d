"""Matched controls: a planted confound vanishes between partners, position is balanced, differences by hand."""

import numpy as np
import pytest

from probes import long_ppl

N, SHORT = 400, 40


def document(rng, key_share=0.15):
    """A text of single characters; key tokens are well predicted with a long context and lie late."""
    text = "".join(rng.choice(list("abcdefghijklmnop"), N))
    late = rng.random(N) < key_share * np.linspace(0, 2, N)
    late[: SHORT + 1] = False
    long = -rng.exponential(1.2, N)
    long[late] = -rng.exponential(0.4, late.sum()).clip(0, 1.9)
    short = long.copy()
    short[late] = long[late] - 4.0
    offsets = np.stack([np.arange(N), np.arange(N) + 1], axis=1)
    found = long_ppl.KeyTokens(
        evaluator="by hand", context=SHORT, stride=8, alpha=2.0, beta=-2.0, bos=False, token_ids_sha256="0" * 64,
        text_sha256=long_ppl.text_sha256(text), n_characters=N, offsets=offsets, log_p_long=long, log_p_short=short,
    )  # fmt: skip
    ids = [ord(character) for character in text]
    return text, ids, offsets.tolist(), found


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(11)
    return [document(rng) for _ in range(6)]


def matched(one, **options):
    text, ids, offsets, found = one
    return long_ppl.matched_tokens(ids, offsets, found, text, **options)


def test_a_harm_that_depends_on_the_evaluators_log_p_alone_is_no_excess_between_partners(documents):
    """A fake model loses 3 exp(log p) nats on every token: key tokens seem to be hurt more, and are not."""
    plain, between = [], []
    for one in documents:
        harm = 3 * np.exp(one[3].log_p_long)
        pairs = matched(one)
        between.append(harm[pairs.key] - harm[pairs.matched])
        others = np.flatnonzero(~one[3].is_key & (np.arange(N) >= SHORT))
        plain.append(harm[pairs.key].mean() - harm[others].mean())
    assert np.mean(plain) > 0.5
    assert abs(np.concatenate(between).mean()) < 0.02
    assert np.abs(np.concatenate(between)).max() < 3 * np.expm1(0.5), "no pair beyond its caliper"


def test_a_harm_that_grows_with_position_is_no_excess_once_position_is_matched(documents):
    harm = np.linspace(0, 2, N)
    apart = {}
    for scale in (None, N / 8):
        pairs = [matched(one, position_scale=scale) for one in documents]
        apart[scale] = np.mean(np.concatenate([harm[found.key] - harm[found.matched] for found in pairs]))
        assert sum(found.n_unmatched for found in pairs) == 0, "position never costs a partner"
    assert apart[None] > 0.15
    assert abs(apart[N / 8]) < 0.05


def test_the_balance_reported_is_that_of_the_pairs(documents):
    keys, partners, everyone = [], [], []
    for text, ids, offsets, found in documents:
        pairs = long_ppl.matched_tokens(ids, offsets, found, text, position_scale=N / 8)
        values, candidates = long_ppl.covariates(ids, offsets, found, text)
        np.testing.assert_array_equal(values[:, 0], found.log_p_long)
        np.testing.assert_array_equal(values[:, 1], np.log([text.count(character) for character in text]))
        np.testing.assert_allclose(values[:, 2], np.arange(N) / N)
        assert not (candidates & found.is_key).any()
        assert not candidates[:SHORT].any()
        keys.append(values[pairs.key])
        partners.append(values[pairs.matched])
        everyone.append(values[candidates])
    key, partner, others = map(np.concatenate, (keys, partners, everyone))
    before = long_ppl.standardised_differences(key, others, others)
    after = long_ppl.standardised_differences(key, partner, others)
    assert before[0] > 0.5
    assert before[2] > 0.3
    assert (np.abs(after) < 0.1).all()


def test_standardised_differences_by_hand():
    key, other = np.array([[1.0, 5.0], [3.0, 5.0]]), np.array([[0.0, 5.0], [4.0, 5.0]])
    found = long_ppl.standardised_differences(key, np.array([[1.0, 5.0]]), other)
    np.testing.assert_allclose(found, [1.0 / np.sqrt((1.0 + 4.0) / 2), 0.0])
    assert np.isnan(long_ppl.standardised_differences(key[:0], other, other)).all()


def test_the_first_token_of_every_key_interval():
    text = "one two three four five six"
    offsets = [(0, 3), (3, 7), (7, 13), (13, 18), (18, 23), (23, 27)]
    found = long_ppl.KeyTokens(
        evaluator="by hand", context=1, stride=1, alpha=2.0, beta=-2.0, bos=False, token_ids_sha256="0" * 64,
        text_sha256=long_ppl.text_sha256(text), n_characters=len(text), offsets=np.array(offsets),
        log_p_long=np.full(6, -0.5), log_p_short=np.array([np.nan, -5.0, -5.0, -0.5, -5.0, -0.5]),
    )  # fmt: skip
    assert found.intervals == ((3, 13), (18, 23))
    ours = [(0, 3), (3, 5), (5, 7), (7, 10), (10, 13), (13, 18), (18, 20), (20, 23), (23, 27)]
    assert long_ppl.key_positions(ours, found, text).tolist() == [1, 2, 3, 4, 6, 7]
    assert long_ppl.first_positions(ours, found, text).tolist() == [1, 6]
    assert long_ppl.first_positions([(0, 27)], found, text).tolist() == []


def test_a_scale_of_position_must_be_positive(documents):
    with pytest.raises(ValueError, match="position_scale is 0"):
        matched(documents[0], position_scale=0)
