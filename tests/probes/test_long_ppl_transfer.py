"""Key tokens between tokenizers by character intervals, and matched non-key tokens."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.long_ppl import KeyTokens, key_positions, matched_tokens

TEXT = "alpha beta gamma, delta; eps zeta."


def evaluator_tokens(offsets, key=(), long=None, context=1, n_characters=None) -> KeyTokens:
    """Evaluator tokens with these offsets; those in `key` gain 8 nats by the long context, the others 0.5."""
    is_key = np.isin(np.arange(len(offsets)), key)
    long = np.where(is_key, -0.5, -1.0) if long is None else np.asarray(long, dtype=float)
    short = np.where(is_key, long - 8.0, long - 0.5)
    short[:context] = np.nan
    return KeyTokens(
        evaluator="by hand",
        context=context,
        stride=1,
        alpha=2.0,
        beta=-2.0,
        bos=False,
        token_ids_sha256="",
        text_sha256="",
        n_characters=n_characters if n_characters is not None else max(end for _, end in offsets),
        offsets=np.array(offsets),
        log_p_long=long,
        log_p_short=short,
    )


# "alpha" " beta" " gamma" "," " delta" ";" " eps" " zeta" "."
WORDS = [(0, 5), (5, 10), (10, 16), (16, 17), (17, 23), (23, 24), (24, 28), (28, 33), (33, 34)]


def pieces(offsets, positions):
    return [TEXT[slice(*offsets[i])] for i in positions]


def test_smaller_tokens_inside_a_key_interval_count_and_larger_ones_do_not():
    found = evaluator_tokens(WORDS, key=[2, 6])
    halves = [(0, 3), (3, 5), (5, 8), (8, 10), (10, 13), (13, 16), (16, 17), (17, 34)]
    assert pieces(halves, key_positions(halves, found, TEXT)) == [" ga", "mma"]
    pairs = [(0, 10), (10, 17), (17, 24), (24, 33), (33, 34)]
    assert key_positions(pairs, found, TEXT).tolist() == []


def test_touching_intervals_are_one_so_a_token_across_both_counts():
    found = evaluator_tokens(WORDS, key=[2, 3, 7])
    assert found.intervals == ((10, 17), (28, 33))
    across = [(0, 10), (10, 14), (14, 17), (17, 24), (24, 30), (30, 33), (33, 34)]
    assert pieces(across, key_positions(across, found, TEXT)) == [" gam", "ma,", "eta"]


def test_intervals_with_a_gap_stay_apart():
    trimmed = [(0, 5), (6, 10), (11, 16)]
    found = evaluator_tokens(trimmed, key=[1, 2])
    assert found.intervals == ((6, 10), (11, 16))
    assert key_positions([(0, 5), (6, 16)], found, TEXT).tolist() == []


@pytest.mark.parametrize("evaluator_trims", [True, False])
@pytest.mark.parametrize("evaluated_trims", [True, False])
def test_a_leading_space_in_the_offsets_changes_nothing(evaluator_trims, evaluated_trims):
    def trimmed(offsets):
        return [(end - len(TEXT[start:end].lstrip()), end) for start, end in offsets]

    found = evaluator_tokens(trimmed(WORDS) if evaluator_trims else WORDS, key=[1, 4, 8])
    ours = trimmed(WORDS) if evaluated_trims else WORDS
    assert key_positions(ours, found, TEXT).tolist() == [1, 4, 8]


def test_tokens_of_spaces_must_lie_inside_and_tokens_of_nothing_never_count():
    text = "if x:\n    y = 1\n"
    found = evaluator_tokens([(0, 2), (2, 5), (5, 11), (11, 16)], key=[2])
    offsets = [(0, 2), (2, 5), (5, 6), (6, 10), (10, 10), (10, 11), (11, 12), (12, 16)]
    assert key_positions(offsets, found, text).tolist() == [2, 3, 5]


def test_bytes_of_one_character_share_its_interval():
    text = "ab\N{THINKING FACE}c"
    found = evaluator_tokens([(0, 1), (1, 2), (2, 3), (2, 3), (2, 3), (3, 4)], key=[2, 3, 4])
    assert found.intervals == ((2, 3),)
    assert key_positions([(0, 2), (2, 3), (2, 3), (2, 3), (2, 3), (3, 4)], found, text).tolist() == [1, 2, 3, 4]


def test_no_key_tokens_and_no_tokens():
    assert key_positions(WORDS, evaluator_tokens(WORDS), TEXT).tolist() == []
    assert key_positions([], evaluator_tokens(WORDS, key=[2]), TEXT).tolist() == []


cuts = st.sets(st.integers(1, 59), max_size=40).map(lambda inner: list(itertools.pairwise([0, *sorted(inner), 60])))


@settings(max_examples=150, deadline=None)
@given(cuts, cuts, st.sets(st.integers(1, 40)))
def test_equals_the_definition_character_by_character(theirs, ours, key):
    """Without spaces: a token counts if and only if every character of it belongs to a key token of the evaluator."""
    found = evaluator_tokens(theirs, key=[k for k in key if k < len(theirs)])
    marked = np.zeros(60, dtype=bool)
    for (start, end), is_key in zip(theirs, found.is_key, strict=True):
        marked[start:end] = is_key
    expected = [i for i, (start, end) in enumerate(ours) if marked[start:end].all()]
    assert key_positions(ours, found, "x" * 60).tolist() == expected


# Matched non-key tokens: one evaluator token per character, the evaluated model has the same tokens.
LETTERS = "abcdefghijkl"
SAME = [(i, i + 1) for i in range(12)]


def test_the_partner_has_the_nearest_evaluator_log_p():
    long = [-1.0, -0.30, -0.95, -0.62, -0.50, -0.45, -1.20, -0.31, -0.90, -0.10, -3.0, -0.70]
    found = evaluator_tokens(SAME, key=[4, 8], long=long)
    result = matched_tokens(range(12), SAME, found, LETTERS)
    assert (result.key.tolist(), result.matched.tolist(), result.n_unmatched) == ([4, 8], [5, 2], 0)


def test_partners_are_used_once_and_as_many_as_possible_are_paired():
    """5 is nearest to both key tokens; greedy pairing of 4 with 5 would leave 8 alone."""
    long = [-1.0, -9.0, -9.0, -0.10, -0.50, -0.60, -9.0, -9.0, -1.00, -9.0, -9.0, -9.0]
    found = evaluator_tokens(SAME, key=[4, 8], long=long)
    result = matched_tokens(range(12), SAME, found, LETTERS)
    assert dict(zip(result.key.tolist(), result.matched.tolist(), strict=True)) == {4: 3, 8: 5}


def test_no_partner_beyond_the_calipers():
    long = [-1.0, -9.0, -9.0, -1.3, -0.50, -9.0, -9.0, -9.0, -9.0, -9.0, -9.0, -9.0]
    found = evaluator_tokens(SAME, key=[4], long=long)
    assert matched_tokens(range(12), SAME, found, LETTERS) == (pytest.approx([]), pytest.approx([]), 1)
    assert matched_tokens(range(12), SAME, found, LETTERS, caliper_log_p=0.9).matched.tolist() == [3]


def test_partners_are_of_similar_frequency():
    long = [-1.0, -0.5, -0.6, -9.0, -0.5, -9.0, -9.0, -9.0, -9.0, -9.0, -9.0, -9.0]
    found = evaluator_tokens(SAME, key=[4], long=long)
    counts = {1: 500, 2: 7, 4: 5}
    assert matched_tokens(range(12), SAME, found, LETTERS, counts=counts).matched.tolist() == [2]
    assert matched_tokens(range(12), SAME, found, LETTERS).matched.tolist() == [1]
    ids = [0, 1, 2, 3, 4, 1, 1, 1, 1, 1, 1, 1]  # within the text: token 1 eight times
    assert matched_tokens(ids, SAME, found, LETTERS).matched.tolist() == [2]


def test_partners_lie_beyond_the_short_context_and_touch_no_key_token():
    long = [-0.5, -0.5, -0.5, -0.5, -0.9, -0.5, -0.8, -9.0, -9.0, -9.0, -9.0, -9.0]
    found = evaluator_tokens(SAME, key=[5], long=long, context=4)
    assert matched_tokens(range(12), SAME, found, LETTERS).matched.tolist() == [6]
    ours = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 12)]
    assert matched_tokens(range(8), ours, found, LETTERS).matched.tolist() == [6]
    ours = [(0, 1), (1, 2), (2, 3), (3, 5), (5, 6), (6, 12)]  # (3, 5) starts within the context; (6, 12) is -0.8
    assert matched_tokens(range(6), ours, found, LETTERS).matched.tolist() == [5]
    ours = [(0, 1), (1, 4), (4, 5), (5, 6), (4, 6), (7, 12)]  # (4, 6) touches the key token
    assert matched_tokens(range(6), ours, found, LETTERS, caliper_log_p=9.9).matched.tolist() == [2]


def test_the_assignment_is_the_cheapest_of_all():
    generator = np.random.default_rng(5)
    for _ in range(20):
        long = -generator.uniform(0.05, 1.9, 12)
        key = generator.choice(np.arange(1, 12), 3, replace=False).tolist()
        found = evaluator_tokens(SAME, key=key, long=long)
        result = matched_tokens(range(12), SAME, found, LETTERS)
        free = [i for i in range(1, 12) if i not in key]

        def cost(partners, key=key, long=long):
            far = [abs(long[k] - long[p]) / 0.5 for k, p in zip(key, partners, strict=True)]
            return -sum(f <= 1 for f in far), sum(f**2 for f in far if f <= 1)

        best = min(cost(partners) for partners in itertools.permutations(free, 3))
        pairs = np.abs(long[result.key] - long[result.matched]) / 0.5
        assert (-len(pairs), (pairs**2).sum()) == (best[0], pytest.approx(best[1], abs=1e-5))
        assert len(set(result.matched.tolist())) == len(pairs)
        assert not found.is_key[result.matched].any()
        assert result.n_unmatched == 3 - len(pairs)


def test_calipers_must_be_positive():
    with pytest.raises(ValueError, match=r"calipers are 0 and 1\.5"):
        matched_tokens(range(12), SAME, evaluator_tokens(SAME), LETTERS, caliper_log_p=0)
