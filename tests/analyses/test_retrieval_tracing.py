"""A copy head set by hand in three steps is found, and nothing else; a model without one is said to have none."""

import numpy as np
import pytest
import torch

import models
from analyses import retrieval_tracing, store
from analyses import retrieval_tracing_measures as measures
from analyses.retrieval_prompts import read_prompts
from analyses.retrieval_tracing import Config
from analyses.retrieval_tracing_table import table
from models.config import HybridConfig
from models.hybrid_lm import HybridLM
from probes import retrieval

VOCAB, LENGTH, NEEDLE = 12, 40, 4
STRENGTHS = {1_000_000: 0.0, 10_000_000: 2.0, 100_000_000: 60.0}
FOUND, PREVIOUS = (1, 1), (0, 0)


def copying(strength):
    """Layer 0 head 0 writes the token before, layer 1 head 1 attends to the key behind its own token and copies it.

    The stream holds [token now | token before | copied]. The other heads have queries and keys too small to matter,
    the same at every step, so that their distance is exactly 0.
    """
    n = VOCAB
    model = HybridLM(
        HybridConfig(
            d_model=3 * n, n_layers=2, n_heads=2, n_kv_heads=2, d_head=n, d_ffn=4, vocab_size=n, window=2,
            context_length=64, layer_kinds=("swa", "full"), rope_base=1e4, rope_on_full=False,
        )
    ).requires_grad_(False)  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.zero_()
    eye = torch.eye(n)
    model.embed.weight[:, :n] = eye
    first, second = model.blocks[0].attn, model.blocks[1].attn
    for attention in (first, second):
        attention.q_proj.weight.fill_(1e-9)
        attention.k_proj.weight.fill_(1e-9)
    first.v_proj.weight[:n, :n] = eye
    first.o_proj.weight[n : 2 * n, :n] = eye
    second.q_proj.weight[n : 2 * n] = 0
    second.q_proj.weight[n : 2 * n, :n] = strength * eye
    second.k_proj.weight[n : 2 * n] = 0
    second.k_proj.weight[n : 2 * n, n : 2 * n] = eye
    second.k_proj.weight[n : 2 * n, :n] = -0.5 * eye  # not the key that is the token itself
    second.v_proj.weight[n : 2 * n, :n] = eye
    second.o_proj.weight[2 * n :, n:] = eye
    model.unembed.weight[:, 2 * n :] = eye
    return model


def write_prompts(path, count=14):
    """Prompts hold a, b, c, d somewhere, end in a, and are followed by their answer b, c, d."""
    rng = np.random.default_rng(3)
    ids, value = [], []
    for _ in range(count):
        permuted = rng.permutation(VOCAB)
        needle, noise = permuted[:NEEDLE], permuted[NEEDLE:]
        prompt = rng.choice(noise, LENGTH)
        start = rng.integers(1, LENGTH - NEEDLE - 2)
        prompt[start : start + NEEDLE], prompt[-1] = needle, needle[0]
        ids.append([*prompt, *needle[1:]])
        value.append([start + 1, start + NEEDLE])
    answer = np.tile([LENGTH, LENGTH + NEEDLE - 1], (count, 1))
    np.savez(path, ids=np.array(ids), value=np.array(value), answer=answer)
    return path


def write_run(folder, strengths):
    for step, (tokens, strength) in enumerate(strengths.items()):
        models.save(copying(strength), folder / f"step_{step:08d}", training={"step": step, "tokens": tokens})
    return folder


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    run = write_run(folder / "run", STRENGTHS)
    config = Config(
        paths=(run,), out=folder / "r.h5", prompts=write_prompts(folder / "prompts.npz"), threshold=0.5,
        mass_marks=(0.2, 0.5), draws=3,
    )  # fmt: skip
    return retrieval_tracing.retrieval_tracing(config)


def series(result, name):
    group = result.groups["run"]
    return group["curve"][list(group["series"]).index(name)]


def crossing_of(result, name, mark):
    group = result.groups["run"]
    (index,) = np.flatnonzero((group["crossing_series"] == name) & (group["crossing_mark"] == mark))
    return {key: group[f"crossing_{key}"][index] for key in ("tokens", "after", "by", "status", "interval")}


def test_the_planted_head_is_found_and_nothing_else(planted):
    group, heads = planted.groups["run"], planted.groups["run/heads"]
    assert group["followed"].tolist() == [list(FOUND)]
    assert (group["n_noted"], group["n_softmax"]) == (1, 4)
    assert heads["rank"].tolist() == [[0, 0], [0, 1]]
    mass = heads["mass"]
    assert mass[2, 1, 1] > 0.99
    assert mass[2, 0].max() == 0, "the window of two keys is far behind the needle"
    assert mass[2, 1, 0] == pytest.approx((NEEDLE - 1) / LENGTH, rel=1e-4)
    assert group["uniform_mass"] == pytest.approx((NEEDLE - 1) / LENGTH)
    assert mass[0, 1, 1] == pytest.approx(mass[0, 1, 0], rel=1e-4), "without strength it attends to all keys alike"
    assert group["best"][1:].tolist() == [list(FOUND)] * 2


def test_mass_crosses_its_mark_at_the_planted_step(planted):
    values = series(planted, "mass, followed")
    np.testing.assert_allclose(values, planted["run/prompts/mass"][:, :, 1, 1].mean(1), rtol=1e-6)
    assert 0.2 < values[1] < 0.5, "the middle step lies between the marks"
    early, late = crossing_of(planted, "mass, followed", 0.2), crossing_of(planted, "mass, followed", 0.5)
    assert (early["after"], early["by"], early["status"]) == (1e6, 1e7, "")
    assert (late["after"], late["by"], late["status"]) == (1e7, 1e8, "")
    share = (0.5 - values[1]) / (values[2] - values[1])
    assert late["tokens"] == pytest.approx(10 ** (7 + share))
    assert late["interval"][0] <= late["tokens"] <= late["interval"][1]
    area = planted["run/area"][list(planted["run/series"]).index("mass, followed")]
    assert area == pytest.approx((values[0] / 2 + values[1] + values[2] / 2) / 2)


def test_entropy_copy_score_and_distance_are_those_of_the_weights(planted):
    assert series(planted, "entropy, followed")[0] == pytest.approx(1, abs=1e-5)
    assert series(planted, "copy, followed")[2] == 1
    assert np.isnan(series(planted, "copy, followed")[0]), "no prompt solved, so undefined"
    assert planted["run/heads/copy"][2, 1, 0] == 0
    np.testing.assert_allclose(series(planted, "distance, followed"), [1, 1 - 2 / 60, 0], atol=1e-6)
    np.testing.assert_allclose(series(planted, "distance, others"), 0, atol=1e-9)
    assert crossing_of(planted, "copy, followed", 0.5)["by"] in (1e7, 1e8)


@pytest.mark.parametrize(("strength", "misled", "solved"), [(0.0, 0, 0), (60.0, 5, 9), (60.0, 0, 14)])
def test_copy_score_is_that_of_greedy_decoding(tmp_path, strength, misled, solved):
    """It is read off one forward over prompt and answer; decoding token by token gives the same, prompt by prompt."""
    prompts, model = read_prompts(write_prompts(tmp_path / "prompts.npz")), copying(strength)
    prompts.ids[:misled, LENGTH - 1] = prompts.ids[:misled, 0]  # these end in another token than the needle's first
    found, answers = measures.trace(model, prompts, query=-1)
    ids, needle = torch.from_numpy(prompts.ids[:, :LENGTH]), torch.from_numpy(prompts.value)
    decoded = retrieval.copy_score(model, ids, needle)
    assert found.success.tolist() == decoded.success.tolist() == answers.correct.tolist()
    assert decoded.n_scored == solved
    expected = np.where(decoded.success[:, None, None], decoded.per_sample, np.nan)
    np.testing.assert_allclose(found.copy, expected)
    assert solved == 0 or np.nanmax(found.copy[:, 1, 1]) == 1


def test_ablating_the_planted_circuit_destroys_accuracy_and_others_do_not(planted):
    group = planted.groups["run/ablation"]
    assert series(planted, "accuracy").tolist()[::2] == [0, 1]
    remaining = dict(zip(group["ablation"], group["accuracy"], strict=True))
    assert remaining == {"none": 1, "0.0": 0, "0.1": 1, "1.0": 1, "1.1": 0}, "0.0 is the circuit's first half"
    np.testing.assert_array_equal(group["correct"][0], planted["run/prompts/correct"][-1])
    assert group["n_others"].tolist() == [1, 0]
    assert group["top_accuracy_change"][0] == -1
    assert group["others_accuracy_change"][0] == 0
    assert group["difference_accuracy_change_interval"][0].tolist() == [-1, -1]
    assert np.isnan(group["top_accuracy_change"][1]), "one head followed: there is no pair"


def test_prompts_that_choose_are_not_traced(planted):
    assert planted["run/n_choosing"] + planted["run/n_tracing"] == 14
    assert planted["run/prompts/correct"].shape == (3, planted["run/n_tracing"])


def test_the_table_says_what_was_found(planted):
    said = table(planted)
    for words in (
        "run   n = 10 prompts of 43 tokens (own prompts), 4 others choose heads; 3 checkpoints",
        "followed, by mass at the last checkpoint: 1.1 (1.00)",
        "1 of 4 softmax heads have a mean mass of 0.1 or more; attention to all keys alike: 0.075",
        "top 1: accuracy -1.00 [-1.00, -1.00]; each of all unselected full-attention heads (n = 1): +0.00",
        "top 2: n/a, fewer than 2 heads followed",
    ):
        assert words in said, words


def test_a_model_without_copy_heads_has_none_and_says_so(tmp_path):
    run = write_run(tmp_path / "run", {1_000_000: 0.0, 2_000_000: 0.0})
    prompts = write_prompts(tmp_path / "prompts.npz")
    config = Config(paths=(run,), out=tmp_path / "r.h5", prompts=prompts, threshold=0.2)
    found = retrieval_tracing.retrieval_tracing(config)
    said = table(found)
    assert found["run/followed"].shape == (0, 2)
    assert "followed, by mass at the last checkpoint: no head has a mean mass of 0.2 or more" in said
    assert "no retrieval head: none of 4 softmax heads has a mean mass of 0.1 or more;" in said
    assert np.isnan(series(found, "mass, followed")).all()
    group = found.groups["run"]
    followed = np.char.endswith(group["crossing_series"], "followed")
    assert (group["crossing_status"][followed] == "n/a: no values").all()
    assert found["run/ablation/n_others"].tolist() == [2, 0]
    assert store.read(tmp_path / "r.h5").digest() == found.digest()


def test_a_random_model_on_needle_prompts_has_no_retrieval_head(tiny, tmp_path):
    """Four heads are followed as asked, and the table says that they are the largest of nothing."""
    kinds = ("gdn", "full", "full", "headwise")
    for step, tokens in enumerate((1000, 2000)):
        model = tiny.model(*kinds, seed=step, std=None, efficient="swa")
        models.save(model, tmp_path / "null" / f"step_{step}", training={"step": step, "tokens": tokens})
    config = Config(
        paths=(tmp_path / "null",), out=tmp_path / "r.h5", haystack="noise", length=330, choosing=3, tracing=4, draws=2
    )
    found = retrieval_tracing.retrieval_tracing(config)
    group, heads = found.groups["null"], found.groups["null/heads"]
    assert len(group["followed"]) == 4
    assert group["n_noted"] == 0
    assert "none of 6 softmax heads has a mean mass of 0.1 or more; those followed are the largest" in table(found)
    assert "extrapolation: prompts longer than the training length" in table(found)
    assert "recurrent heads, share of |W| on the value: at most" in table(found)
    assert np.isnan(heads["mass"][:, 0]).all()
    assert np.isfinite(heads["recurrent_mass"][:, 0]).all()
    assert np.isnan(heads["recurrent_mass"][:, 1:]).all()
    assert np.isnan(heads["mass_group_mean"][:, 0]).all()
    np.testing.assert_allclose(heads["mass_group_mean"][:, 1, 0], heads["mass"][:, 1].mean(1))
    np.testing.assert_allclose(heads["mass_group_max"][:, 3], heads["mass"][:, 3], rtol=1e-6)
    rest = (heads["kind"] == "full") & (heads["rank"] == 0)
    assert found["null/ablation/n_others"][0] == rest.sum()
    labels = found["null/ablation/ablation"].tolist()
    assert labels[:9] == ["none", "0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "3.0", "3.1"], "recurrent heads too"
    changes = found["null/ablation/loss_change"]
    assert (changes[1:3] != 0).all()
    grid = next(line for line in table(found).splitlines() if line.startswith("0      gdn"))
    assert "n/a" not in grid


def test_random_pairs_are_seeded_full_attention_heads_that_were_not_chosen(tiny, tmp_path):
    tiny.save(tiny.model("swa", "full", "full", "full"), tmp_path / "run")
    found = {}
    for seed in (0, 1):
        config = Config(
            paths=(tmp_path / "run",), out=tmp_path / f"{seed}.h5", haystack="noise", length=330, choosing=2,
            tracing=2, draws=3, top=2, seed=seed,
        )  # fmt: skip
        found[seed] = retrieval_tracing.retrieval_tracing(config)
        group = found[seed].groups["run/ablation"]
        followed = {tuple(head) for head in found[seed]["run/followed"].tolist()}
        pairs = [tuple(map(tuple, pair)) for pair in group["heads"][group["kind"] == "random"].tolist()]
        assert len(set(pairs)) == 3
        assert all(head[0] > 0 and head not in followed for pair in pairs for head in pair)
        (top,) = group["heads"][group["kind"] == "top"].tolist()
        assert {tuple(head) for head in top} == followed
        assert group["n_others"].tolist() == [len({(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)} - followed), 3]
    assert "crossing" in found[0].groups["run"].sizes, "one checkpoint: crossings are n/a, not missing"
