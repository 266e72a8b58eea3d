"""The controls of a receptive-field study on the planted copy model, whose every loss is known in closed form."""

import math

import numpy as np
import pytest

from analyses import background, evaluation, receptive_field
from analyses import receptive_field_measures as measures
from analyses.conditions import Condition
from analyses.receptive_field import Config
from analyses.receptive_field_metrics import needles_by_distance
from analyses.receptive_field_table import table
from analyses.result import Dataset, Variable
from probes import repeat_copy

V, CONTEXT, PROMPT, WINDOW = 96, 160, 340, 32
READ = 0.23  # nats: what the planted model loses on a token that it copies is 0.222


def repeat_text(seed: int, gap: int) -> tuple[str, list[int]]:
    """Four n-grams of letters of their own, filler, the n-grams again `gap` tokens later; key: their second tokens."""
    rng = np.random.default_rng(seed)
    ngrams = "".join(rng.permutation(list("ABCDEFGHIJKLMNOP")))
    filler = "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), gap - 16))
    start = ngrams + filler
    return start + ngrams + "yz", [len(start) + 4 * i + 1 for i in range(4)]


@pytest.fixture(scope="module")
def study(tiny, tmp_path_factory):
    """Copying by one full layer among three sliding ones; at T and 2 T; texts with gaps 30, 50 and 90, another one."""
    folder = tmp_path_factory.mktemp("controls")
    made = {f"gap{gap}": repeat_text(gap, gap) for gap in (30, 50, 90)}
    texts, key = {name: text for name, (text, _) in made.items()}, {name: keys for name, (_, keys) in made.items()}
    options = tiny.texts(folder, texts, key)
    (folder / "texts" / "other.txt").write_text("the quick brown fox jumps over the lazy dog " * 3)
    (folder / "calibration").mkdir()
    (folder / "calibration" / "words.txt").write_text("sphinx of black quartz, judge my vow")
    tiny.save(tiny.planted("swa", "swa", "full", "swa"), folder / "copy")
    config = Config(
        paths=(folder / "copy",), out=folder / "r.h5", windows=(WINDOW,), reach=(WINDOW,), ablate=True, lengths=(1, 2),
        prompts=2, prompt_length=PROMPT, haystack="noise", texts=folder / "texts", key_tokens=folder / "keys",
        calibration=folder / "calibration",
    )  # fmt: skip
    assert options[1] == str(folder / "texts")
    return receptive_field.receptive_field(config), texts, key, folder


def row_of(result, label):
    return list(result.groups["copy"]["condition"]).index(label)


def tokens(tiny, texts):
    return {name: tiny.tokenizer().encode(text) for name, text in texts.items()}


def test_repeats_cost_nothing_inside_the_reach_and_the_log_of_the_vocabulary_beyond(study, tiny):
    result, texts, _, _ = study
    group = result.groups["copy/repeats"]
    gaps = {name: 16 + len(text) - 34 for name, text in texts.items()}
    assert gaps == {"gap30": 30, "gap50": 50, "gap90": 90}
    at = {gap: list(group["gap"]).index(edge) for gap, edge in ((30, 16), (50, 32), (90, 64))}
    assert group["n_repeats"][list(at.values())].tolist() == [12, 12, 12]
    for label in ("full -> 32", "full reach 32"):
        row = row_of(result, label)
        assert group["repeat_loss"][row, at[30]] < READ
        for gap in (50, 90):
            assert abs(group["repeat_loss"][row, at[gap]] - math.log(V)) < 0.6
    assert (group["repeat_loss"][row_of(result, "none"), list(at.values())] < READ).all()
    assert (group["repeat_first_loss"][0, list(at.values())] > 4).all()
    np.testing.assert_allclose(group["repeat_gain"], group["repeat_first_loss"] - group["repeat_loss"], atol=1e-9)


def test_repeat_losses_are_those_computed_by_hand(study, tiny):
    result, texts, _, _ = study
    documents = result.groups["copy/repeats/documents"]
    for column, (name, ids) in enumerate(tokens(tiny, texts).items()):
        found = repeat_copy.find(ids, evaluation.NGRAM)
        for label, window in (("none", None), ("full -> 32", WINDOW)):
            losses = np.concatenate(([np.nan], tiny.losses_by_hand(ids, window, "full")))
            for key, places in (("repeat_loss", found.second), ("repeat_first_loss", found.first)):
                stored = documents[key][row_of(result, label), column].sum()
                assert abs(stored - losses[places].sum()) < 1e-3, (name, label, key)


def test_verdicts_say_what_was_planted(study):
    group = study[0].groups["copy"]
    verdict = {
        key: dict(zip(group["condition"], group[f"{key}_verdict"], strict=True))
        for key in ("log_long_ppl_harm", "first_loss_harm", "excess_harm", "repeat_beyond_harm")
    }
    assert study[0].attributes["margin"] == 0.1
    for key, found in verdict.items():
        assert found["efficient -> 32"] == "equivalent", key
        assert found["efficient -> mean"] != "", key
    assert verdict["repeat_beyond_harm"]["full -> 32"] == "matters"
    assert verdict["repeat_beyond_harm"]["none"] == "" == verdict["repeat_beyond_harm"]["none"]
    row = row_of(study[0], "full -> 32")
    assert group["n_repeats_beyond"][row] == 24, "the bins above 32, of two texts"
    assert group["repeat_beyond_harm"][row] > 3.5


def test_intervals_as_wholes_and_by_their_first_tokens(study):
    """One token a key interval here: wholes, first tokens and key tokens are the same."""
    group, documents = study[0].groups["copy"], study[0].groups["copy/documents"]
    assert documents["n_intervals"].tolist() == [4, 4, 4]
    np.testing.assert_array_equal(group["first_loss"], group["log_long_ppl"])
    np.testing.assert_array_equal(group["interval_loss"], group["log_long_ppl"])


@pytest.mark.parametrize("gap", [30, 50])
def test_the_needle_is_read_at_the_reach_and_not_one_token_beyond(tiny, gap):
    """The copy layer is the only full one, so that the whole reach is its window."""
    model = tiny.planted("swa", "swa", "full", "swa")
    text, key = repeat_text(gap, gap)
    document = evaluation.EvaluationDocument("x", text, tiny.key_tokens(text, key))
    encoded = evaluation.encode(document, tiny.tokenizer(), background.in_tokens({"x": text}, tiny.tokenizer(), 4))
    for reach, readable in ((gap + 1, True), (gap, True), (gap - 1, False)):
        found = measures.document_losses(model, Condition("full", reach=reach), [encoded], CONTEXT)[0]["key_loss"] / 4
        assert (found < READ) == readable, (reach, found)
        assert readable or found > 4


def test_the_reach_of_two_layers_is_that_of_one_with_the_same_budget(tiny):
    """Full layers 1 (which puts out nothing) and 2 (which copies) share the budget: 2 gets half of it."""
    model = tiny.planted("swa", "full", "full", "swa")
    text, key = repeat_text(30, 30)
    document = evaluation.EvaluationDocument("x", text, tiny.key_tokens(text, key))
    encoded = evaluation.encode(document, tiny.tokenizer(), background.in_tokens({"x": text}, tiny.tokenizer(), 4))
    for reach, readable in ((2 * 29 + 1, True), (2 * 29, False)):
        found = measures.document_losses(model, Condition("full", reach=reach), [encoded], CONTEXT)[0]["key_loss"] / 4
        assert (found < READ) == readable, (reach, found)


def test_mean_ablation_puts_the_mean_over_the_calibration_tokens_in_the_place_of_every_copy(study, tiny):
    result, texts, key, folder = study
    words = tiny.tokenizer().encode((folder / "calibration" / "words.txt").read_text())
    mean = np.mean(tiny.copied_by_hand([*words, 0], None, "full"), axis=0)  # the last position copies too
    assert result.attributes["n_calibration_tokens"] == [len(words)]
    losses = {name: tiny.losses_by_hand(ids, None, "full", copied=mean) for name, ids in tokens(tiny, texts).items()}
    expected = np.mean([losses[name][position - 1] for name in texts for position in key[name]])
    assert abs(result.groups["copy"]["log_long_ppl"][row_of(result, "full -> mean")] - expected) < 1e-4
    assert expected > 4
    group = result.groups["copy"]
    row = row_of(result, "full -> mean")
    assert [group[f"restricted_{name}"][row] for name in ("ablated", "window", "reach")] == [1, 0, 0]
    assert group["reach"][row] == 0


def test_twice_the_length_is_the_same_document_behind_other_texts(study, tiny):
    result, texts, key, folder = study
    group = result.groups["copy/lengths"]
    assert group["context"].tolist() == [CONTEXT, 2 * CONTEXT]
    assert group["multiple"].tolist() == [1, 2]
    assert group["extrapolation"].tolist() == [1, 1], "the prompts are longer than the training length"
    documents = result.groups["copy/lengths/documents"]
    assert documents["extrapolation"].tolist() == [[0] * 3, [1] * 3]
    every = tokens(tiny, texts | {"other": (folder / "texts" / "other.txt").read_text()})
    order = sorted(every)
    total = {None: 0.0, WINDOW: 0.0}
    for name in texts:
        at = order.index(name)
        others = [token for other in (*order[at + 1 :], *order[:at]) for token in every[other]]
        taken: list[int] = []
        for other in (*order[at + 1 :], *order[:at]):
            if len(taken) < CONTEXT:
                taken += every[other]
        assert others[: len(taken)] == taken
        ids = taken[len(taken) - CONTEXT :] + every[name]
        for window in total:
            losses = tiny.losses_by_hand(ids, window, "full")
            total[window] += sum(losses[CONTEXT + position - 1] for position in key[name])
    none, full = row_of(result, "none"), row_of(result, "full -> 32")
    assert abs(group["log_long_ppl"][1, none] - total[None] / 12) < 1e-4
    assert abs(group["log_long_ppl_harm"][1, full] - (total[WINDOW] - total[None]) / 12) < 1e-4
    for variable in ("log_long_ppl", "excess_harm", "repeat_beyond_harm_interval"):
        np.testing.assert_array_equal(group[variable][0], result.groups["copy"][variable])
    assert np.isnan(group["log_long_ppl"][1, row_of(result, "full -> mean")]), "not measured there"
    prompts = result.groups["copy/lengths/prompts"]
    assert prompts["length"].tolist() == [[PROMPT] * 2, [2 * PROMPT] * 2]


def test_the_tables_of_the_controls(study):
    blocks = table(study[0]).split("\n\n")
    assert [block.split("\n")[0].split("   ")[0] for block in blocks[:3]] == [
        "copy", "copy: controls", "copy: lengths",
    ]  # fmt: skip
    rows = {line.split("  ")[0] for line in blocks[1].splitlines()[3:]}
    assert rows == {"full -> 32", "full reach 32", "full -> mean", "efficient reach 32", "efficient -> mean"}
    assert [line.endswith("extrapolation") for line in blocks[2].splitlines()[2:]] == [True] * 6
    assert "margin of 0.1 nats" in blocks[-1]


def test_needles_inside_and_outside_the_reach_by_hand():
    prompts = Dataset({
        "distance": Variable(("prompt",), [5, 10, 11, 30, 31, 90], "token", "d"),
        "correct": Variable(("condition", "prompt"), [[1.0] * 6, [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 0]], "1", "c"),
    })  # fmt: skip
    windows, reaches = np.array([np.nan, 10.0, 0.0]), np.array([np.nan, 30.0, 0.0])
    found = needles_by_distance(prompts, windows, reaches)
    assert found["n_needles"].values.tolist() == [[0, 0, 0], [2, 2, 2], [0, 0, 6]]
    np.testing.assert_array_equal(
        found["niah_by_distance"].values, [[np.nan] * 3, [1.0, 0.5, 0.5], [np.nan, np.nan, 4 / 6]]
    )
    low, high = found["niah_by_distance_interval"].values[1, 0]
    assert low == pytest.approx(1 / (1 + 1.959964**2 / 2)), "Wilson, 2 of 2"
    assert high == 1
    unbounded = needles_by_distance(prompts, windows, np.array([np.nan, np.nan, np.nan]))
    assert unbounded["n_needles"].values[1].tolist() == [2, 4, 0]
