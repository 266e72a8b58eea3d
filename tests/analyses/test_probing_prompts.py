"""Probing prompts: exact length, the class nowhere but in the needle, the needle gone where it should be."""

import numpy as np
import pytest

from analyses.probing_prompts import ProbingPrompts, depth_bins, given_tokens
from models.errors import InputError
from probes import layerwise, niah

LENGTH = 350


def build(tiny, **changes):
    settings = dict(haystack="noise", length=LENGTH, n=24, seed=3, values=niah.EASY, after_shared=False)
    return ProbingPrompts(tiny.tokenizer(), **(settings | changes))


@pytest.mark.parametrize("haystack", ["repeat", "essay", "noise"])
@pytest.mark.parametrize(("values", "after_shared", "given"), [(niah.EASY, False, ""), (niah.HARD, True, "3141592")])
def test_prompts_end_in_the_probed_token_and_hold_one_needle(tiny, haystack, values, after_shared, given):
    prompts = build(tiny, haystack=haystack, values=values, after_shared=after_shared)
    assert prompts.given == len(given)
    batch = prompts.batch(0, 24)
    assert batch.ids.shape == (24, LENGTH)
    assert batch.label.tolist() == [i % 8 for i in range(24)]
    for row, label, needle in zip(batch.ids, batch.label, batch.needle, strict=True):
        text = prompts.tokenizer.decode(row.tolist())
        assert text.endswith(f"given in the text is {given}"), "the probed token is the last one"
        assert text[needle:].startswith(values[label])
        assert text.count(values[label]) == 1
        assert not any(other in text for other in values if other != values[label])
    again = prompts.batch(5, 9)
    np.testing.assert_array_equal(again.ids, batch.ids[5:9])


def test_the_null_prompts_are_the_noise_prompts_without_their_needle(tiny):
    noise, null = build(tiny, n=80), build(tiny, n=80, haystack="null")
    with_needle, without = noise.batch(0, 80), null.batch(0, 80)
    assert without.ids.shape == with_needle.ids.shape
    np.testing.assert_array_equal(without.label, with_needle.label)
    for a, b, start in zip(with_needle.ids, without.ids, with_needle.needle, strict=True):
        changed = np.flatnonzero(a != b)
        line = null.tokenizer.decode(a.tolist()).split("\n")
        needle = next(i for i, part in enumerate(line) if part.startswith("One of the special magic numbers for "))
        first = sum(len(part) + 1 for part in line[:needle])
        assert first <= changed.min() <= start <= changed.max() <= first + len(line[needle])
        text = null.tokenizer.decode(b.tolist())
        assert not any(character.isdigit() for character in text)
        assert text.endswith("given in the text is ")


def test_nothing_in_the_null_prompts_tells_the_class(tiny):
    """Counts of all characters, and where the needle stood: many prompts, so that a small leak would show."""
    batch = build(tiny, n=1200, haystack="null").batch(0, 1200)
    counts = np.stack([np.bincount(row, minlength=96) for row in batch.ids]).astype(np.float32)
    result = layerwise.fit({"counts": counts, "depth": depth_bins(batch.needle, LENGTH)}, batch.label, test_size=0.5)
    low, high = result.accuracy_interval(0.975).T  # 95 % for both together
    assert ((low <= 1 / 8) & (high >= 1 / 8)).all()
    assert (high < 0.18).all()


def test_values_that_go_on_alike_are_refused_with_the_remedy(tiny):
    tokenizer = tiny.tokenizer()
    with pytest.raises(InputError, match=r"8 values 31415920 .* 1 different token.*add --after-shared .*7 tokens"):
        given_tokens(tokenizer, niah.HARD, after_shared=False)
    assert given_tokens(tokenizer, niah.HARD, after_shared=True) == 7
    assert given_tokens(tokenizer, niah.EASY, after_shared=True) == given_tokens(tokenizer, niah.EASY, False) == 0
    with pytest.raises(InputError, match=r"3 values 12 \.\.\. 34 go on with 2 different token.*use --values easy"):
        given_tokens(tokenizer, ("12", "13", "34"), after_shared=True)


def test_answers_of_different_token_counts_do_not_tell_the_class(tiny):
    """All prompts end at the same place, whatever the answer's length would be."""
    values = ("1", "23456", "345")
    prompts = build(tiny, values=values, n=12)
    batch = prompts.batch(0, 12)
    assert batch.ids.shape == (12, LENGTH)
    texts = [prompts.tokenizer.decode(row.tolist()) for row in batch.ids]
    assert all(text.endswith("given in the text is ") for text in texts)
    assert all(f"is: {values[label]}." in text for text, label in zip(texts, batch.label, strict=True))
    assert len(prompts.hashes) == 3


def test_depth_bins_are_one_hot():
    found = depth_bins(np.array([0, 15, 16, 349]), 350)
    assert found.argmax(1).tolist() == [0, 0, 0, 15]
    assert depth_bins(np.array([22]), 350).argmax() == 1
    assert (found.sum(1) == 1).all()
