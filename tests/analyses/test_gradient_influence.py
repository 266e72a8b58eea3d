"""Planted answers: models set by hand whose influence lies at known distances, and models that carry nothing back."""

import json
import math

import numpy as np
import pytest
import torch

import models
from analyses import gradient_influence as analysis
from analyses import store
from analyses.gradient_influence import Config, gradient_influence
from analyses.gradient_influence_table import table
from probes import gradient

V, T, BACK, GAIN = 96, 64, 20, 0.6
CUR, OUT, CONST = range(V), range(V, 2 * V), 2 * V
D = 2 * V + 1


def copier(tiny, context=T):
    """One full layer that attends to the token BACK positions earlier alone, and writes its identity into OUT.

    Query and key are constants turned by the position: a cosine of the distance with its peak at BACK, period 63.
    """
    model = tiny.model(
        "full", d_model=D, n_heads=1, d_head=V, d_ffn=3, context_length=context, rope_base=100.0, rms_eps=1e-9
    )
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if "ln" in name or name.endswith("norm.weight") else 0.0)
    one, turn = torch.eye(V), 0.1 * BACK  # radians: pair V // 4 turns by 100 ** -0.5 a token
    model.embed.weight[:, CUR], model.embed.weight[:, CONST] = one, 1.0
    model.unembed.weight[:, OUT] = GAIN * one
    attention, pair = model.blocks[0].attn, V // 4
    amplitude = math.sqrt(2 / D) * math.sqrt(4e4 * math.sqrt(V))
    attention.q_proj.weight[pair, CONST] = amplitude
    attention.k_proj.weight[pair, CONST] = amplitude * math.cos(turn)
    attention.k_proj.weight[pair + V // 2, CONST] = amplitude * math.sin(turn)
    attention.v_proj.weight[:, CUR], attention.o_proj.weight[OUT, :] = math.sqrt(2 / D) * one, one
    return model


def by_hand(own, copied, following):
    """float64: log p of the next token, and its gradients with respect to the two embeddings that matter."""

    def embedding(token):
        e = torch.zeros(D, dtype=torch.float64)
        e[token], e[CONST] = 1, 1
        return e.requires_grad_()

    def normed(x):
        return x / x.pow(2).mean().sqrt()

    here, there = embedding(own), embedding(copied)
    written = torch.zeros(D, dtype=torch.float64)
    written[list(OUT)] = math.sqrt(2 / D) * normed(there)[:V]
    log_p = (GAIN * normed(here + written)[list(OUT)]).log_softmax(-1)[following]
    gradients = torch.autograd.grad(log_p, (here, there))
    return log_p.item(), *(gradient.norm().item() for gradient in gradients)


def periodic(folder, seeds, period=BACK + 1, length=T + 9):
    """Texts that repeat `period` random letters: the next token is the one BACK positions earlier."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for seed in range(seeds):
        letters = "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyzABCDEFGH"), period, replace=False))
        (folder / f"t{seed}.txt").write_text((letters * 9)[:length])
    return folder


def study(folder, **options):
    fields = {"paths": (folder / "ckpt",), "texts": (folder / "texts",), "out": folder / "r.h5", "length": T}
    return gradient_influence(Config(**{**fields, **options}))


@pytest.fixture(scope="module")
def copied(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("copier")
    tiny.save(copier(tiny), folder / "ckpt" / "copier")
    periodic(folder / "texts", 3)
    return study(folder, n_targets=1), folder


def test_influence_lies_at_the_two_distances_put_in_and_has_the_size_computed_by_hand(copied, tiny):
    values, summary = copied[0].groups["copier/texts"], copied[0].groups["copier"]
    assert values["influence"].shape == (3, T - 1)
    for row, name in enumerate(values["text"]):
        ids = tiny.tokenizer().encode((copied[1] / "texts" / f"{name}.txt").read_text())[:T]
        log_p, own, there = by_hand(ids[-2], ids[-2 - BACK], ids[-1])
        assert ids[-1] == ids[-2 - BACK]
        np.testing.assert_allclose(values["score"][row], log_p, rtol=1e-4)
        np.testing.assert_allclose(values["loss"][row], -log_p, rtol=1e-4)
        np.testing.assert_allclose(values["influence"][row, [0, BACK]], [own, there], rtol=1e-3)
        others = np.delete(values["influence"][row], [0, BACK])
        assert others.max() < 1e-6 * there
    share = dict(zip(summary["window"], summary["share_beyond"], strict=True))
    expected = there / (own + there)
    assert 0.05 < expected < 0.95
    for window in (1, 2, 4, 8, 16):
        np.testing.assert_allclose(share[window], expected, rtol=1e-3)
    assert share[32] < 1e-6
    assert summary["meeting_distance"] == 23, "where its bin ends"


def test_the_loss_changes_where_the_copied_token_is_not_given_and_by_the_amount_computed_by_hand(copied, tiny):
    values, summary = copied[0].groups["copier/texts"], copied[0].groups["copier"]
    for row, name in enumerate(values["text"]):
        ids = tiny.tokenizer().encode((copied[1] / "texts" / f"{name}.txt").read_text())[:T]
        for column, window in enumerate(summary["window"]):
            seen = min(BACK, window - 1)  # of what is given, the token nearest to BACK
            expected = -by_hand(ids[-2], ids[-2 - seen], ids[-1])[0]
            np.testing.assert_allclose(values["truncated_loss"][row, column], expected, rtol=1e-4)
    change = dict(zip(summary["window"], summary["truncation_loss_change"], strict=True))
    assert abs(change[32]) < 1e-5
    assert min(change[w] for w in (1, 2, 4, 8, 16)) > 1


def test_several_targets_move_the_mass_by_their_number(copied):
    _, folder = copied
    result = study(folder, n_targets=5, out=folder / "five.h5", score="logit_sum")
    values, summary = result.groups["copier/texts"]["influence"], result.groups["copier"]
    assert values.shape == (3, T), "every position is read"
    where = np.zeros(T, bool)
    where[:5], where[BACK : BACK + 5] = True, True
    assert (values[:, where] > 1e-3 * values.max()).all()
    assert values[:, ~where].max() < 1e-6 * values.max()
    assert np.isnan(summary["truncation_loss_change"][summary["window"] < 5]).all() or summary["window"].min() >= 5
    assert summary["window"].tolist() == [8, 16, 32]
    np.testing.assert_allclose(summary["share_beyond"][2], 0, atol=1e-6)


def test_windows_reach_as_far_as_they_can_and_no_further(tiny, tmp_path):
    """Two sliding layers of 6, three targets: exactly 0 beyond 2 (6 - 1) + 2, and nothing lost without it."""
    tiny.save(tiny.model("swa", "swa", context_length=T), tmp_path / "ckpt" / "narrow")
    tiny.save(tiny.model("swa", "full", "swa", context_length=T), tmp_path / "ckpt" / "wide")
    periodic(tmp_path / "texts", 4)
    result = study(tmp_path, n_targets=3, windows=(13, 20), layers=True, groups=True)
    narrow, wide = result.groups["narrow"], result.groups["wide"]
    values = result["narrow/texts/influence"]
    assert (values[:, :13] > 0).all()
    assert (values[:, 13:] == 0).all()
    assert narrow["marked"].tolist() == [False, False, True, False, True, False][-len(narrow["marked"]) :]
    beyond = narrow["window"] >= 13
    assert (narrow["share_beyond"][beyond] == 0).all()
    assert (narrow["share_beyond_interval"][beyond] == 0).all()
    assert (narrow["share_beyond"][~beyond] > 0).all()
    assert np.abs(narrow["truncation_loss_change"][beyond]).max() < 1e-5
    assert np.abs(narrow["truncation_loss_change"][~beyond]).min() > 1e-3
    assert narrow["baseline"] == 0
    assert narrow["meeting_distance"] == 13
    assert (wide["share_beyond"] > 0).all()
    assert np.abs(wide["truncation_loss_change"]).min() > 1e-3

    layers = result.groups["narrow/layers"]["influence"]  # bins of one token up to 8
    assert (layers[:, 1, : 5 + 3] > 0).all()
    assert (layers[:, 1, 8:] == 0).all(), "the last layer's input acts from one window away"
    np.testing.assert_allclose(layers[:, 0, :8], values[:, :8], rtol=1e-5)
    assert result["wide/layers/kind"].tolist() == ["swa", "full", "swa"]

    groups = result.groups["wide/groups"]
    full, efficient = groups["influence"]
    far = groups["bin"] >= 13
    assert (efficient[:, far] == 0).all(), "through windows alone it reaches no further than they do"
    assert (efficient[:, ~far] > 0).all()
    assert (full[:, far] > 0).all()
    assert result["narrow/groups/status"].tolist() == ["n/a: no full path", ""]
    assert np.isnan(result["narrow/groups/influence"][0]).all()
    np.testing.assert_allclose(result["narrow/groups/influence"][1][:, :8], values[:, :8], rtol=1e-5)
    assert "influence through full mixers only: n/a: no full path" in table(result)


def test_a_model_without_mixing_has_influence_at_its_targets_only(tiny, tmp_path):
    model = tiny.model("gdn", "full", "mamba2", context_length=T)
    for block in model.blocks:
        block.attn.o_proj.weight.zero_() if hasattr(block.attn, "o_proj") else block.attn.out_proj.weight.zero_()
    tiny.save(model, tmp_path / "ckpt" / "deaf")
    periodic(tmp_path / "texts", 4)
    result = study(tmp_path, n_targets=4)
    values, summary = result["deaf/texts/influence"], result.groups["deaf"]
    assert (values[:, :4] > 0).all()
    assert (values[:, 4:] == 0).all()
    assert (summary["share_beyond"] == 0).all()
    assert np.abs(summary["truncation_loss_change"]).max() < 1e-5
    assert summary["meeting_distance"] == 4
    assert "n/a" in table(result), "nothing stands above a baseline of nothing"


def test_an_untrained_model_on_random_tokens_loses_nothing_without_its_past(tiny, tmp_path):
    tiny.save(tiny.model("swa", "full", std=None, context_length=T), tmp_path / "ckpt" / "untrained")
    (tmp_path / "texts").mkdir()
    rng = np.random.default_rng(0)
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(rng.choice(list(tiny.characters[:90]), T)))
    summary = study(tmp_path, max_texts=12).groups["untrained"]
    low, high = summary["truncation_loss_change_interval"][summary["window"] >= 20].T
    assert ((low < 0.002) & (high > -0.002)).all()
    assert (summary["share_beyond"] > 0).all(), "influence alone does not tell that the past is of use"


def test_half_precision_is_compared_with_float32(tiny, tmp_path):
    tiny.save(tiny.model("swa", "full", context_length=T), tmp_path / "ckpt" / "m")
    periodic(tmp_path / "texts", 5)
    rough = study(tmp_path, dtype="bfloat16", noise_texts=3)
    exact = study(tmp_path, out=tmp_path / "exact.h5")
    assert "m/noise" not in exact.groups
    noise = rough.groups["m/noise"]
    np.testing.assert_array_equal(noise["influence_float32"], exact["m/texts/influence"][:3])
    apart = np.abs(rough["m/texts/influence"][:3] / exact["m/texts/influence"][:3] - 1)
    model, apart = models.load(tmp_path / "ckpt" / "m"), []
    for name in rough["m/texts/text"][:3]:
        ids = torch.tensor([model.tokenizer.encode((tmp_path / "texts" / f"{name}.txt").read_text())[:T]])
        exactly, roughly = (
            gradient.gradient_influence(m, ids, vectors=True).gradient[0].float() for m in (model, models.load(
                tmp_path / "ckpt" / "m", dtype=torch.bfloat16))
        )  # fmt: skip
        apart.append((roughly - exactly).norm(dim=-1).numpy())
    np.testing.assert_allclose(noise["error"], apart, rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(noise["noise_floor"][:8], np.mean(apart, axis=0)[:8], rtol=1e-4)
    size = noise["error"].mean(0) / noise["influence_float32"].mean(0)
    assert 1e-3 < size.min() < size.max() < 0.2
    low = np.abs(rough["m/texts/influence"][:3] - exact["m/texts/influence"][:3])
    assert (low < noise["error"] * 1.001 + 1e-9).all(), "norms differ by less than vectors do"
    assert np.abs(noise["relative_difference"]).max() < 0.2
    assert "against float32 on 3 texts" in table(rough)
    assert "the noise floor, is " in table(rough)
    assert rough.attributes["dtype"] == "bfloat16"


def test_compact_files_hold_the_values_of_each_text_to_two_digits_and_the_same_summary(tiny, tmp_path):
    tiny.save(tiny.model("swa", "full", context_length=T), tmp_path / "ckpt" / "m")
    periodic(tmp_path / "texts", 5)
    options = dict(layers=True, groups=True, dtype="bfloat16", noise_texts=2)
    whole, packed = (study(tmp_path, out=tmp_path / f"{c}.h5", compact=c, **options) for c in (False, True))
    for key, value in whole.groups["m"].variables.items():
        np.testing.assert_allclose(packed.groups["m"].variables[key].values, value.values, rtol=1e-7, err_msg=key)
    for group, key in (("texts", "influence"), ("layers", "influence"), ("groups", "influence"), ("noise", "error")):
        values, stored = whole[f"m/{group}/{key}"], packed[f"m/{group}/{key}"]
        apart = np.abs(stored / np.where(values, values, 1) - 1)[values > 0]
        assert 1e-3 < apart.max() <= 2.0**-6
        assert not (stored.view(np.uint32) & 0x3FFFF).any()
        assert (stored[values == 0] == 0).all()


def test_allowance_for_activations_does_not_change_the_numbers(tiny, tmp_path):
    tiny.save(tiny.model("swa", "full", "gdn", context_length=T), tmp_path / "ckpt" / "m")
    periodic(tmp_path / "texts", 3)
    nothing, everything = (study(tmp_path, out=tmp_path / f"{gb}.h5", keep_gb=gb) for gb in (0, 10))
    a, b = nothing["m/texts/influence"], everything["m/texts/influence"]
    np.testing.assert_allclose(a, b, rtol=1e-5)
    assert nothing.attributes["config"] == everything.attributes["config"]
    assert study(tmp_path, out=tmp_path / "0.h5", keep_gb=5).digest() == nothing.digest(), "the finished one is kept"


def test_the_papers_preset_and_what_overrides_it(copied, tmp_path):
    preset = Config(paths=(tmp_path,), preset="paper")
    found = [preset.resolved(name) for name in ("score", "n_targets", "length", "max_texts")]
    assert found == ["logit_sum", 20, 8192, 1000]
    _, folder = copied
    result = study(folder, preset="paper", max_texts=2, out=folder / "paper.h5")
    config = json.loads(result.attributes["config"])
    assert (config["score"], config["n_targets"], config["lengths"]) == ("logit_sum", 20, {"copier": T})
    assert result["copier/n_texts"] == 2


def test_default_texts_ship_with_the_package(tiny, tmp_path):
    tiny.save(tiny.model("full", context_length=T), tmp_path / "ckpt" / "m")
    result = study(tmp_path, texts=None, length=None)
    assert result["m/length"] == T
    assert result["m/n_texts"] == analysis.CPU_TEXTS
    assert result["m/texts/text"][0] == "_pydecimal"
    assert (result["m/texts/n_tokens"] > 10_000).all(), "what was cut is recorded"
    assert store.read(tmp_path / "r.h5").digest() == result.digest()
