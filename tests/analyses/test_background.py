"""The texts round the measured ones, and those whose means stand in for a mixer's outputs."""

from collections import Counter

import numpy as np
import pytest
import torch

import hooks
from analyses import background, evaluation, mean_ablation
from analyses.conditions import Condition
from models.errors import InputError


def test_frequencies_and_rarity_over_all_texts(tiny):
    found = background.in_tokens({"b": "abcdabcd", "a": "abcx"}, tiny.tokenizer(), 3)
    letters = tiny.tokenizer().encode("abcdx")
    assert found.token_counts == Counter(dict(zip(letters, [3, 3, 3, 2, 1], strict=True)))
    assert found.ngram_counts[tuple(letters[:3])] == 2
    assert found.ngram_counts[tuple(letters[1:4])] == 1


def test_what_stands_in_front_are_the_last_tokens_of_the_texts_that_follow(tiny):
    texts = {"a": "aaaa", "b": "bbbb", "c": "cccc", "d": "dddd"}
    found = background.in_tokens(texts, tiny.tokenizer(), 4)

    def before(name, length):
        return tiny.tokenizer().decode(found.before(name, length).tolist())

    assert before("b", 6) == "ccdddd"
    assert before("c", 6) == "ddaaaa"
    assert before("d", 0) == ""
    assert before("d", 12) == "aaaabbbbcccc"
    with pytest.raises(InputError, match="the 3 texts beside 'd' have 12 tokens, 13 have to stand in front"):
        found.before("d", 13)


def test_the_measured_texts_are_always_among_the_background(tmp_path, monkeypatch):
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text(name * 9)
    monkeypatch.setattr(background, "MOST_TEXTS", 4)
    found = background.background_texts(tmp_path, "code", {"f": "fffffffff", "b": "bbbbbbbbb"})
    assert found == {name: name * 9 for name in "abcf"}
    assert background.sha256(found) != background.sha256(found | {"a": "x"})


def test_a_document_behind_other_texts_keeps_its_tokens(tiny):
    text = "abcdefghij" * 3 + "ABCD" + "klmnopqrstuv" + "ABCD"
    document = evaluation.EvaluationDocument("x", text, tiny.key_tokens(text, [47]))
    alone = evaluation.encode(document, tiny.tokenizer(), background.in_tokens({"x": text}, tiny.tokenizer(), 4))
    for bos in (False, True):
        moved = alone.behind(np.array([90, 91, 92]), bos)
        assert (moved.start, moved.own, len(moved.ids)) == (3, len(text), len(text) + 3)
        assert moved.ids[int(bos) : int(bos) + 3].tolist() == [90, 91, 92]
        for field in ("key", "first", "paired", "matched"):
            places = getattr(moved, field)
            assert len(places)
            np.testing.assert_array_equal(places, getattr(alone, field) + 3)
            if not bos:
                np.testing.assert_array_equal(moved.ids[places], alone.ids[getattr(alone, field)])
        np.testing.assert_array_equal(moved.repeats.gap, alone.repeats.gap)


def test_the_embedded_calibration_is_measured_nowhere():
    texts = mean_ablation.calibration(None, []).texts
    assert sorted(texts) == ["pydoc", "turtle"]
    measured = [document.text for document in evaluation.documents(None, None, None)]
    assert mean_ablation.calibration(None, measured).texts == texts


@pytest.mark.parametrize("kind", ["full", "swa", "gdn", "mamba2", "lightning"])
def test_a_group_of_means_says_nothing_about_the_context(tiny, kind):
    """With every mixer at its mean the prediction depends on the current token alone, and on the mean."""
    model = tiny.model(kind, kind)
    texts = mean_ablation.Calibration({"a": "the quick brown fox", "b": "jumps over"})
    rows = mean_ablation.batches(texts, model.tokenizer, 12)
    assert [row.shape for row in rows] == [(1, 12), (1, 10)]
    condition = Condition("full" if kind == "full" else "efficient", ablated=True)
    means = mean_ablation.means(model, rows, condition.layers)
    assert sorted(means) == [(layer.index, head) for layer in model.layers for head in range(layer.n_heads)]
    with hooks.record(model, "blocks.0.attn.hook_z") as seen:
        model(torch.from_numpy(rows[0]))
    with hooks.record(model, "blocks.0.attn.hook_z") as more:
        model(torch.from_numpy(rows[1]))
    z = torch.cat([seen["blocks.0.attn.hook_z"], more["blocks.0.attn.hook_z"]], dim=1)[0]
    for head in range(2):
        torch.testing.assert_close(means[0, head].float(), z[:, head].mean(0), rtol=1e-4, atol=1e-5)
    first, other = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[40, 41, 42, 8]])
    free = model(first)[0, -1] - model(other)[0, -1]
    with condition.applied(model, means):
        left = model(first)[0, -1] - model(other)[0, -1]
    assert free.abs().max() > 1e-3
    assert left.abs().max() < 1e-5
