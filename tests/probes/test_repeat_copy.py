"""Repeated n-grams: which tokens are scored, at which gap, and what a model that copies within its reach loses."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes import repeat_copy

VOCAB = 53


def pairs(found):
    return list(zip(found.second.tolist(), found.first.tolist(), strict=True))


def test_the_tokens_after_the_first_of_a_second_occurrence():
    ids = [1, 2, 3, 4, 50, 51, 52, 1, 2, 3, 4, 49]
    found = repeat_copy.find(ids, 4)
    assert pairs(found) == [(8, 1), (9, 2), (10, 3)]
    assert found.gap.tolist() == [7, 7, 7]
    assert pairs(repeat_copy.find(ids, 3)) == [(8, 1), (9, 2)], "what is left of the repeat holds no other n-gram"
    assert pairs(repeat_copy.find(ids, 5)) == []


def test_a_third_occurrence_and_an_overlapping_one_are_not_scored():
    ids = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3]
    assert pairs(repeat_copy.find(ids, 3)) == [(5, 1), (6, 2)]
    assert pairs(repeat_copy.find([7] * 9, 3)) == [], "the only other occurrences overlap"


def test_a_nearer_copy_of_the_pair_leaves_the_token_out():
    """2 3 occurs again in between: the token after 2 could be copied from there."""
    ids = [1, 2, 3, 4, 40, 2, 3, 41, 1, 2, 3, 4]
    assert pairs(repeat_copy.find(ids, 4)) == [(9, 1), (11, 3)]


def test_only_ngrams_that_few_documents_hold():
    ids = [1, 2, 3, 9, 8, 1, 2, 3]
    alone = repeat_copy.document_counts([ids, [1, 2, 4, 9]], 3)
    shared = repeat_copy.document_counts([ids, [5, 1, 2, 3, 5]], 3)
    assert (alone[1, 2, 3], shared[1, 2, 3]) == (1, 2), "documents, not occurrences"
    assert len(repeat_copy.find(ids, 3, alone).second) == 2
    assert len(repeat_copy.find(ids, 3, shared).second) == 0
    assert len(repeat_copy.find(ids, 3, shared, most_documents=2).second) == 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=40), st.integers(2, 4))
def test_every_scored_token_is_what_the_definition_says(ids, n):
    found = repeat_copy.find(ids, n)
    for t, s in pairs(found):
        assert (ids[t - 1], ids[t]) == (ids[s - 1], ids[s])
        assert all((ids[u - 1], ids[u]) != (ids[t - 1], ids[t]) for u in range(s + 1, t))
        starts = [t - k for k in range(1, n) if ids[t - k : t - k + n] == ids[s - k : s - k + n] and s >= k]
        assert any(
            [i for i in range(j) if ids[i : i + n] == ids[j : j + n]] == [s - (t - j)] and s - (t - j) + n <= j
            for j in starts
        ), "of an n-gram that has occurred exactly once before, without overlap"
    assert sorted(set(found.second.tolist())) == found.second.tolist(), "no token twice"


@pytest.mark.parametrize("reach", [8, 64, 500])
def test_a_model_that_copies_within_its_reach_loses_nothing_there_and_log_vocab_beyond(reach):
    """Induction over unique pairs: the loss of t is 0 if the pair (x_{t-1}, x_t) ended less than `reach` tokens before
    the position that predicts it, else log of the vocabulary."""
    rng = np.random.default_rng(3)
    ids: list[int] = []
    for step, gap in enumerate([6, 12, 20, 40, 90, 200, 400]):
        ngram = [1000 + 10 * step + k for k in range(4)]
        ids += [*ngram, *rng.permutation(np.arange(2000 + 1000 * step, 2000 + 1000 * step + gap - 4)), *ngram]
    losses = np.full(len(ids), math.log(VOCAB))
    for t in range(1, len(ids)):
        if any((ids[s - 1], ids[s]) == (ids[t - 1], ids[t]) for s in range(max(1, t - reach), t)):
            losses[t] = 0.0
    found = repeat_copy.find(ids, 4)
    assert sorted(set(found.gap.tolist())) == [6, 12, 20, 40, 90, 200, 400]
    edges = repeat_copy.gap_bins(512)
    second, first, count = repeat_copy.by_gap(losses, found, edges)
    assert edges.tolist() == [2, 4, 8, 16, 32, 64, 128, 256]
    assert count.tolist() == [0, 3, 3, 3, 3, 3, 3, 3]
    expected = [0.0 if gap <= reach else math.log(VOCAB) for gap in [6, 12, 20, 40, 90, 200, 400]]
    np.testing.assert_allclose(second[1:] / 3, expected)
    np.testing.assert_allclose(first[1:] / 3, math.log(VOCAB))


def test_a_gap_of_an_edge_lies_below_it():
    """A window of w = gap still shows the first occurrence, so bins from w on hold none that it shows."""
    losses, found = np.arange(40.0), repeat_copy.Repeats(np.array([9, 20]), np.array([1, 11]))
    second, first, count = repeat_copy.by_gap(losses, found, np.array([2, 4, 8]))
    assert count.tolist() == [0, 1, 1]
    assert (second.tolist(), first.tolist()) == ([0.0, 9.0, 20.0], [0.0, 1.0, 11.0])


def test_an_ngram_needs_a_cue():
    with pytest.raises(ValueError, match="n is 1; expected at least 2 tokens"):
        repeat_copy.find([1, 2, 1, 2], 1)
