"""What is measured in batches is what single prompts give, computed another way; sets of prompts are disjoint."""

import numpy as np
import pytest
import torch

import hooks
from analyses import retrieval_tracing_measures as measures
from analyses.lazy_tensors import LazyTensors
from analyses.retrieval_heads import by_kv_groups, chosen, heads_of, kv_groups, ranked
from analyses.retrieval_prompts import RetrievalPrompts, needle_prompts
from analyses.retrieval_tracing import Config
from analyses.retrieval_tracing_plan import Plan
from models.errors import InputError

VOCAB, LENGTH = 96, 26


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.model("swa", "full", "gdn", "headwise", efficient="swa", n_heads=4, n_kv_heads=2)


@pytest.fixture(scope="module")
def prompts():
    """Answers of two and three tokens, values of two and three: batches cannot hold all of them."""
    rng = np.random.default_rng(4)
    start = np.array([5, 9, 5, 11, 7])
    return RetrievalPrompts(
        rng.integers(0, VOCAB, (5, LENGTH)),
        np.stack([start, start + [2, 2, 3, 2, 3]], axis=1),
        np.stack([LENGTH - np.array([2, 3, 2, 2, 2]), np.full(5, LENGTH)], axis=1),
        [(3, 1), (1, 0, 2), (1, 1), (0, 2), (1, 1)],
    )


def pattern(model, row, layer):
    """Attention of all heads of a softmax layer over one prompt: [H, T, T]."""
    names = [f"blocks.{layer}.{path}.hook_pattern" for path in ("attn", "attn.full", "attn.efficient")]
    names = [name for name in names if name in model.hook_dict]
    with hooks.record(model, names) as found:
        model(torch.from_numpy(row)[None, :-1])
    return torch.cat([found[name][0] for name in names]).double().numpy()


def test_mass_and_entropy_are_those_of_single_prompts(model, prompts):
    found, _ = measures.trace(model, prompts, query=-2)
    chosen_by = measures.choosing_mass(model, prompts, query=-2)
    assert found.softmax.tolist() == [[True] * 4, [True] * 4, [False] * 4, [True] * 4]
    for row in range(5):
        (first, stop), end = prompts.value[row], prompts.answer[row, 0]
        for layer in (0, 1, 3):
            p = pattern(model, prompts.ids[row], layer)
            mass = p[:, end - 2, first:stop].sum(-1)
            np.testing.assert_allclose(found.mass[row, layer], mass, atol=1e-6)
            np.testing.assert_allclose(chosen_by[row, layer], mass, atol=1e-6)
            rows = p[:, end - 4 : end]
            entropy = -np.where(rows > 0, rows * np.log(np.where(rows > 0, rows, 1)), 0).sum(-1)
            normalised = (entropy / np.log((rows > 0).sum(-1))).mean(-1)
            np.testing.assert_allclose(found.entropy[row, layer], normalised, atol=1e-5)


def test_answers_are_those_of_the_logits_and_of_the_digits_held(model, prompts):
    ids = prompts.ids.copy()
    first = prompts.answer[1, 0]
    with torch.no_grad():  # the first answer token of prompt 1 is made right
        ids[1, first] = int(model(torch.from_numpy(ids[1])[None])[0, first - 1].argmax())
    changed = RetrievalPrompts(ids, prompts.value, prompts.answer, prompts.digits)
    _, answers = measures.trace(model, changed, query=-1)
    logits = model(torch.from_numpy(ids)).double().log_softmax(-1)
    for row in range(5):
        first, stop = prompts.answer[row]
        expected = torch.from_numpy(ids[row, first:stop])
        log_p = logits[row, first - 1 : stop - 1]
        right = (log_p.argmax(-1) == expected).numpy()
        assert answers.loss[row] == pytest.approx(-float(log_p[range(stop - first), expected].mean()), rel=1e-5)
        assert answers.digits[row] == pytest.approx((right * prompts.weights(row)).sum() / prompts.weights(row).sum())
        assert answers.correct[row] == right[prompts.weights(row) > 0].all()
    assert answers.digits[1] >= 1 / 3


def test_an_answer_with_words_before_the_value_can_succeed():
    ids = np.array([[1, 2, 3, 4, 9, 2, 3], [1, 2, 3, 4, 2, 9, 3]])
    prompts = RetrievalPrompts(ids, np.array([[1, 3]] * 2), np.array([[4, 7]] * 2))
    assert [measures._holds_value(prompts, row) for row in range(2)] == [True, False]


def test_ablated_sets_are_whole_forwards_and_share_the_layers_below(model, prompts):
    """Recurrent heads too. The layers below the lowest ablated head run once, not once a set."""
    means = measures.mean_outputs(model, prompts)
    sets = [[(1, 3)], [(2, 0)], [(3, 1), (2, 3)]]
    calls = dict.fromkeys(range(4), 0)
    handles = [
        layer.block.register_forward_hook(lambda *_, index=layer.index: calls.update({index: calls[index] + 1}))
        for layer in model.layers
    ]
    found = measures.ablated(model, prompts, sets, means)
    for handle in handles:
        handle.remove()
    batches = len(list(prompts.alike(100)))
    assert list(calls.values()) == [batches, *[batches * len(sets)] * 3]
    _, unablated = measures.trace(model, prompts, query=-1)
    for heads, answers in zip(sets, found, strict=True):
        for row in range(5):
            first, stop = prompts.answer[row]
            with hooks.ablate(model, heads=heads, means=means), torch.no_grad():
                log_p = model(torch.from_numpy(prompts.ids[row])[None])[0, first - 1 : stop - 1].log_softmax(-1)
            expected = -float(log_p[range(stop - first), prompts.ids[row, first:stop]].mean())
            assert answers.loss[row] == pytest.approx(expected, rel=1e-5)
        assert np.abs(answers.loss - unablated.loss).max() > 1e-4, "the ablation acted"
    assert measures.ablated(model, prompts, [], means) == []


def test_a_model_that_computes_nan_does_not_pass(tiny, prompts):
    broken = tiny.model("full")
    broken.unembed.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="prompt 0: a log probability is nan; expected finite numbers"):
        measures.trace(broken, prompts, query=-1)


def test_heads_are_ranked_by_mass_without_those_that_have_none():
    mass = np.array([[np.nan, 0.3, 0.5], [0.5, 0.1, np.nan]])
    assert ranked(mass) == [(0, 2), (1, 0), (0, 1), (1, 1)]
    assert chosen(mass, 1, None) == [(0, 2)]
    assert chosen(mass, None, 0.3) == [(0, 2), (1, 0), (0, 1)]
    assert chosen(mass, None, 0.9) == []


def test_kv_groups_of_plain_and_headwise_layers(model):
    assert kv_groups(model.layers, 4).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [-1] * 4, [0, 0, 1, 1]]
    assert heads_of(model.layers, ("full",)) == [(1, 0), (1, 1), (1, 2), (1, 3), (3, 0), (3, 1)]
    values = np.arange(16.0).reshape(4, 4)
    np.testing.assert_equal(by_kv_groups(values, model.layers, "mean")[[0, 2]], [[0.5, 2.5], [np.nan, np.nan]])
    np.testing.assert_equal(by_kv_groups(values, model.layers, "max")[3], [13, 15])


def test_prompts_that_choose_and_those_traced_have_nothing_in_common(tiny, tmp_path):
    tiny.save(tiny.model("full"), tmp_path / "run")
    plan = Plan(Config(paths=(tmp_path / "run",), haystack="noise", length=330, choosing=3, tracing=5), "cpu")
    choosing, traced = plan.chooses("run"), plan.traced("run")
    assert (len(choosing.ids), len(traced.ids)) == (3, 5)

    def values(prompts):
        return {tuple(row[slice(*span)]) for row, span in zip(prompts.ids, prompts.value, strict=True)}

    assert len(values(choosing) | values(traced)) == 8
    same = needle_prompts(tiny.tokenizer(), length=330, n=8, seed=0, haystack="noise")
    assert same.sha256 == plan.prompts["run"].sha256
    assert needle_prompts(tiny.tokenizer(), length=330, n=8, seed=1, haystack="noise").sha256 != same.sha256


def test_lazy_tensors_are_those_of_the_checkpoint(tiny, tmp_path):
    model = tiny.model("full", "gdn")
    tensors = LazyTensors(tiny.save(model, tmp_path / "c"))
    assert set(tensors) == set(model.state_dict())
    assert len(tensors) == len(model.state_dict())
    name = "blocks.0.attn.q_proj.weight"
    assert torch.equal(tensors[name], model.state_dict()[name])
    assert "nothing" not in tensors
