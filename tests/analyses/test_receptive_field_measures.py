"""Each measure against a direct computation: the floor fed token by token, LongPPL, effects, needle scores."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import hooks
from analyses import receptive_field_measures as measures
from analyses import receptive_field_summary
from analyses.conditions import Condition
from analyses.receptive_field import Config
from analyses.receptive_field_plan import Plan
from models.errors import InputError
from probes import long_ppl, niah

CONTEXT = 160


@pytest.fixture(scope="module")
def plan(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measures")
    tiny.recall_folder(folder)
    tiny.save(tiny.model("gdn", "full", "headwise", context_length=CONTEXT), folder / "mixed")
    config = Config(
        paths=(folder / "mixed",), out=folder / "r.h5", windows=(3, 9), documents=3, prompts=4, prompt_length=330,
        haystack="noise", texts=folder / "texts", key_tokens=folder / "keys", sinks=(0,), grid=True,
    )  # fmt: skip
    return Plan(config, "cpu")


@pytest.mark.parametrize("window", [1, 9, 97, 500])
def test_the_floor_equals_feeding_the_last_w_tokens_one_position_at_a_time(plan, window):
    model, document = plan.model("mixed"), plan.encoded("mixed")[1]
    ids = torch.from_numpy(document.ids)

    def naive(position):
        logits = model(ids[max(0, position - window) : position][None])[0, -1].double()
        return F.cross_entropy(logits[None], ids[position][None]).item()

    found = measures.document_losses(model, Condition("floor", window=window), [document], CONTEXT)[0]
    assert abs(found["key_loss"] - sum(naive(p) for p in document.key)) < 1e-4
    assert abs(found["matched_loss"] - np.mean([naive(p) for p in document.matched])) < 1e-5
    assert np.isnan(found["loss"])
    free = measures.document_losses(model, Condition("none"), [document], CONTEXT)[0]
    assert (abs(found["key_loss"] - free["key_loss"]) < 1e-4) == (window == 500)


@pytest.mark.parametrize(
    "condition", [Condition("none"), Condition("efficient", window=3), Condition("floor", window=9)]
)
def test_a_batch_of_documents_equals_one_by_one(plan, condition, monkeypatch):
    model, documents = plan.model("mixed"), plan.encoded("mixed")
    assert len({len(document.ids) for document in documents}) > 1
    monkeypatch.setattr(measures, "TOKENS_PER_BATCH", {"cpu": 10**6})
    together = measures.document_losses(model, condition, documents, CONTEXT)
    monkeypatch.setattr(measures, "TOKENS_PER_BATCH", {"cpu": 1})
    for document, found in zip(documents, together, strict=True):
        alone = measures.document_losses(model, condition, [document], CONTEXT)[0]
        for key, value in alone.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    "condition", [Condition("none"), Condition("full", window=3, sinks=2), Condition("layer", window=2, layer=0)]
)
def test_losses_are_those_of_the_probe(plan, condition):
    model, results = plan.model("mixed"), []
    for document, encoded in zip(plan.documents, plan.encoded("mixed"), strict=True):
        with condition.applied(model):
            expected = long_ppl.long_ppl(model, document.text, document.key_tokens)
        found = measures.document_losses(model, condition, [encoded], CONTEXT)[0]
        assert expected.positions.tolist() == encoded.key.tolist()
        assert abs(found["key_loss"] - expected.key_losses.sum()) < 1e-9
        assert abs(found["loss"] - expected.log_ppl) < 1e-9
        assert abs(found["matched_loss"] - expected.losses[encoded.matched].mean()) < 1e-9
        for name in ("first", "paired"):
            summed = found[{"first": "first_loss", "paired": "paired_key_loss"}[name]]
            assert abs(summed - expected.losses[getattr(encoded, name)].sum()) < 1e-9
        assert abs(found["paired_matched_loss"] - expected.losses[encoded.matched].sum()) < 1e-9
        losses = expected.losses
        for bucket in range(measures.BUCKETS):
            inside = [losses[t] for t in range(1, len(losses)) if t // (CONTEXT // measures.BUCKETS) == bucket]
            np.testing.assert_allclose(found["bucket_loss"][bucket], np.mean(inside) if inside else np.nan, rtol=1e-9)
        results.append(expected)
    parts = {}
    for unit in plan.unit_ids["mixed", "documents", Condition("none")]:
        parts[unit] = plan.compute(plan.units[unit])
    if condition.group == "none":
        total = np.concatenate([part["key_loss"] for part in parts.values()]).sum()
        n_key = sum(len(encoded.key) for encoded in plan.encoded("mixed"))
        assert abs(total / n_key - long_ppl.aggregate(results).log_long_ppl) < 1e-6


@pytest.mark.parametrize("window", [1, 9, 10_000])
def test_effects_equal_a_direct_computation(plan, window):
    model, document = plan.model("mixed"), plan.encoded("mixed")[0]
    found = measures.layer_effects(model, ("full", "efficient"), window, document)
    assert {group: sorted(layers) for group, layers in found.items()} == {"full": [1, 2], "efficient": [0, 2]}
    ids = torch.from_numpy(document.ids)[None]
    with hooks.record(model, [f"blocks.{i}.ln1.hook_normalized" for i in range(3)]) as inputs:
        model.final_hidden(ids)
    for group, layers in found.items():
        for layer, value in layers.items():
            block = model.blocks[layer]
            x = inputs[f"blocks.{layer}.ln1.hook_normalized"] * block.ln1.weight
            free = block.attn(x, torch.arange(ids.shape[1]))
            with hooks.restrict(model, group, window=window):
                limited = block.attn(x, torch.arange(ids.shape[1]))
            assert abs(value - ((free - limited).norm() / free.norm()).item()) < 1e-5
            inside = window == 10_000 or (layer == 2 and group == "efficient" and window >= 6)
            assert (value == 0) == inside
    assert all(mixer.restrictions == () for layer in model.layers for mixer in layer.mixers)


class Trigram:
    """A fake model that answers what followed the last three tokens before; enough to read most digits of a needle."""

    device = torch.device("cpu")

    def final_hidden(self, ids):
        out = torch.zeros(*ids.shape, dtype=torch.long)
        for row, tokens in enumerate(ids.tolist()):
            for t in range(len(tokens)):
                out[row, t] = self.next(tokens[: t + 1])
        return F.one_hot(out, 96).float()

    def next(self, tokens):
        for s in range(len(tokens) - 1, 2, -1):
            if tokens[s - 3 : s] == tokens[-3:]:
                return tokens[s]
        return 0

    def unembed(self, hidden):
        return hidden


def test_needles_are_scored_with_all_or_the_last_w_tokens(tiny):
    fake = Trigram()
    samples = list(niah.build(tiny.tokenizer(), length=330, n=3, seed=1, haystack="noise", depth=[0.1, 0.5, 0.9]))
    free = measures.prompt_accuracy(fake, Condition("none"), samples)
    assert [bool(row[0]) for row in free] == [False] * 3
    assert all(4 / 7 - 1e-9 <= row[1] < 1 for row in free), "digits from the fourth on follow three known ones"
    for window in (20, 150, 400):
        found = measures.prompt_accuracy(fake, Condition("floor", window=window), samples)
        for sample, row in zip(samples, found, strict=True):
            ids, (first, last) = sample.input_ids.tolist(), sample.answer_span
            predicted = [fake.next(ids[max(0, p - window) : p]) for p in range(first, last)]
            assert tuple(row) == tuple(niah.accuracy(np.array(predicted), sample))
        if window == 400:
            assert found == free
    near = measures.prompt_accuracy(fake, Condition("floor", window=20), samples)
    assert all(row[1] < other[1] for row, other in zip(near, free, strict=True))


def test_the_floor_of_a_needle_shows_exactly_the_last_w_tokens(tiny):
    class Witness(Trigram):
        def final_hidden(self, ids):
            seen.extend(ids.tolist())
            return super().final_hidden(ids)

    (sample,) = niah.build(tiny.tokenizer(), length=330, n=1, seed=1, haystack="noise")
    ids, (first, last) = sample.input_ids.tolist(), sample.answer_span
    for window, expected in ((5, [ids[p - 5 : p] for p in range(first, last)]),
                             (first, [ids[p - first : p] for p in range(first, last)])):  # fmt: skip
        seen: list[list[int]] = []
        measures.prompt_accuracy(Witness(), Condition("floor", window=window), [sample])
        assert seen == expected


def test_prompts_in_batches_score_like_prompts_alone(plan, monkeypatch):
    model, samples = plan.model("mixed"), plan.samples("mixed")
    condition = Condition("full", window=3)
    alone = [measures.prompt_accuracy(model, condition, [sample])[0] for sample in samples]
    monkeypatch.setitem(measures.TOKENS_PER_BATCH, "cpu", 3 * 330)
    assert measures.prompt_accuracy(model, condition, samples) == alone
    with condition.applied(model):
        for sample, (_, digits) in zip(samples, alone, strict=True):
            predicted = model(torch.from_numpy(sample.input_ids.astype(np.int64))[None])[0].argmax(-1)
            assert digits == niah.accuracy(predicted, sample).per_digit


def test_a_model_that_computes_nan_is_refused_not_stored_as_not_measured(tiny, plan):
    broken = tiny.model("swa", "full")
    broken.blocks[1].attn.o_proj.weight[3, 3] = float("nan")
    document = plan.encoded("mixed")[0]
    for condition in (Condition("none"), Condition("floor", window=3)):
        with pytest.raises(InputError, match=r"document 'text0': the loss of token \d+ is nan"):
            measures.document_losses(broken, condition, [document], CONTEXT)[0]


def test_tokens_beyond_the_training_length_fall_into_the_last_bucket(plan):
    model, document = plan.model("mixed"), plan.encoded("mixed")[0]
    found = measures.document_losses(model, Condition("none"), [document], 8)[0]["bucket_loss"]
    losses = long_ppl.long_ppl(model, plan.documents[0].text, plan.documents[0].key_tokens).losses
    np.testing.assert_allclose(found[7], losses[7:].mean(), rtol=1e-9)
    np.testing.assert_allclose(found[1:7], losses[1:7], rtol=1e-9)
    assert np.isnan(found[0])


def test_checkpoints_with_equal_tokenizers_share_prompts_and_encoded_documents(tiny, tmp_path, plan):
    for name in ("step_1", "step_2"):
        tiny.save(tiny.model("swa", seed=int(name[-1])), tmp_path / name)
    both = Plan(Config(
        paths=(tmp_path,), documents=2, prompts=2, prompt_length=330, haystack="noise", texts=plan.config.texts,
        key_tokens=plan.config.key_tokens,
    ), "cpu")  # fmt: skip
    assert both.encoded("step_1") is both.encoded("step_2")
    assert both.samples("step_1") is both.samples("step_2")
    held = [p for layers in both.layers.values() for layer in layers for p in layer.block.parameters()]
    assert held
    assert all(parameter.is_meta for parameter in held), "the plan must not keep every checkpoint in memory"
    assert not next(both.model("step_2").parameters()).is_meta


def test_documents_weigh_by_key_tokens(plan):
    """corpus log(LongPPL) = sum of losses / number of key tokens, not a mean of documents' means."""
    parts = {unit: plan.compute(work) for unit, work in plan.units.items()}
    result = receptive_field_summary.join(plan, parts)
    documents, group = result.groups["mixed/documents"], result.groups["mixed"]
    means = documents["key_loss"].sum(1) / documents["n_key"].sum()
    np.testing.assert_allclose(group["log_long_ppl"], means, rtol=1e-12)
    np.testing.assert_allclose(group["log_long_ppl_harm"], means - means[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(group["loss"], documents["loss"].mean(1), rtol=1e-12)
