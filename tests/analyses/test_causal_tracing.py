"""A planted circuit, a null model, a recurrent and a Hugging Face one through the whole study; resuming; bad input."""

import json
import re
import shutil
import string

import numpy as np
import pytest
import torch

import models
from analyses import causal_tracing, store
from analyses.causal_knockouts import elsewhere
from analyses.causal_tracing import Config
from analyses.causal_tracing_table import table
from analyses.figures import __main__ as figures
from analyses.layerwise_probing_results import probe_result
from models import command_line

LENGTH, PAIRS, SAMPLES = 330, 2, 32
MOVER = (1, 1)


def moving(tiny):
    """Layer 1 head 1 copies the digit behind a space, which the haystack `repeat` has only in the needle.

    The stream holds [character now | character before | copied]; layer 0 head 0 writes this one and the one before.
    """
    n = len(tiny.characters)
    model = tiny.model(
        "swa", "full", "swa", std=None, d_model=3 * n, d_head=n, n_kv_heads=2, d_ffn=4, window=2, rope_on_full=False,
        context_length=512,
    )  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.zero_()
    eye, space = torch.eye(n), tiny.characters.index(" ")
    digits = [tiny.characters.index(digit) for digit in string.digits]
    model.embed.weight[:, :n] = eye
    first, second = model.blocks[0].attn, model.blocks[1].attn
    first.q_proj.weight[0, :n], first.k_proj.weight[0, :n] = 0, 0
    first.v_proj.weight[:n, :n] = eye
    first.o_proj.weight[n : 2 * n, :n] = eye
    second.q_proj.weight[n, :n] = 400.0
    second.k_proj.weight[n, n + space] = 1
    second.k_proj.weight[n, digits] = 1
    second.v_proj.weight[n:, :n] = eye
    second.o_proj.weight[2 * n :, n:] = eye
    model.unembed.weight[:, 2 * n :] = 8 * eye
    return model


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal")
    models.save(moving(tiny), folder / "planted")
    models.save(tiny.model("swa", "full", std=None, context_length=512), folder / "null")
    models.save(tiny.model("gdn", "headwise", efficient="mamba2", context_length=512), folder / "recurrent")
    mute = tiny.model("full")
    mute.tokenizer = None
    models.save(mute, folder / "mute")
    (folder / "empty").mkdir()
    return folder


def study(folder, *names, out="r.h5", **changes):
    fields = dict(pairs=PAIRS, samples=SAMPLES, length=LENGTH, haystack="repeat") | changes
    return Config(paths=tuple(folder / name for name in names), out=folder / out, **fields)


@pytest.fixture(scope="module")
def result(folder):
    return causal_tracing.causal_tracing(study(folder, "planted", "null"))


def patched(result, name, direction, component, position):
    group = result.groups[f"{name}/patching"]
    indices = [list(group[dim]).index(value) for dim, value in
               (("direction", direction), ("component", component), ("position", position))]  # fmt: skip
    return group["recovered"][indices[0], :, indices[1], indices[2]]


def knocked(result, name, label, span=0):
    group = result.groups[f"{name}/knockout"]
    return group["logit_difference"][list(group["knockout"]).index(label), span]


def test_the_planted_head_is_recovered_and_nothing_else(result):
    group = result.groups["planted/patching"]
    assert group["separated"].all()
    last = list(group["position"]).index("last")
    share = group["head_recovered"][0].copy()
    assert share[*MOVER, last] == pytest.approx(1, abs=1e-3)
    share[*MOVER, last] = 0
    np.testing.assert_allclose(share, 0, atol=1e-3)
    np.testing.assert_allclose(patched(result, "planted", "denoising", "resid_post", "needle"), [1, 0, 0], atol=1e-3)
    np.testing.assert_allclose(patched(result, "planted", "denoising", "resid_post", "last"), [0, 1, 1], atol=1e-3)
    np.testing.assert_allclose(patched(result, "planted", "denoising", "attn_out", "last"), [0, 1, 0], atol=1e-3)
    np.testing.assert_allclose(patched(result, "planted", "noising", "attn_out", "last"), [1, 0, 1], atol=1e-3)
    assert group["head_recovered_interval"][0, *MOVER, last] == pytest.approx([1, 1], abs=1e-3)


def test_knocking_the_planted_layer_out_takes_the_preference_away(result):
    plain = knocked(result, "planted", "none")
    assert (plain > 5).all()
    for label in ("1", "1.1", "full, answer", "all, answer", "0 to 2"):
        assert (knocked(result, "planted", label) < 1e-2).all(), label
        assert np.array_equal(knocked(result, "planted", label, 1), plain) or "0 to 2" in label or "all" in label
    for label in ("0", "2", "1.0", "efficient, answer"):
        np.testing.assert_allclose(knocked(result, "planted", label), plain, atol=1e-3)
    changes = result["planted/knockout/log_p_change"]
    labels = list(result["planted/knockout/knockout"])
    assert changes[labels.index("1"), 0] < 0
    assert changes[labels.index("none"), 0] == 0


def test_the_class_is_read_at_the_last_token_from_the_moving_layer_on(result):
    probes = result.groups["planted/probes"]
    found = dict(zip(probes["feature"], probes["accuracy"][0], strict=True))
    assert found["blocks.0.hook_resid_post"] < 0.5
    assert found["blocks.1.hook_resid_post"] > 0.85  # 16 prompts for 8 classes
    assert probe_result(probes).accuracy[-1] == probes["accuracy"][0, -1]
    assert not probes["is_state"].any()
    assert "planted/states" not in result.groups


def test_a_model_that_never_learned_separates_nothing_and_has_no_shares(result):
    assert result["null/n_separated"] == 0
    assert result["planted/n_separated_untrained"] == 0
    group = result.groups["null/patching"]
    assert np.isnan(group["recovered"]).all()
    assert np.isnan(group["head_recovered_interval"]).all()
    assert np.isfinite(group["logit_difference"]).all()
    assert np.abs(result["null/knockout/log_p_change"]).max() < 0.1


def test_table_figure_and_file_say_the_same(result, folder, tmp_path):
    said = table(result)
    assert "2 of 2 pairs separate by 1 nats; untrained: 0" in said
    assert "heads, recovered at the last token, 0.05 or more: 1.1 (full) 1.00 [1.00, 1.00]\n" in said
    assert "heads, recovered at the last token: n/a" in said
    assert re.search(r"\n1 full +0\.00 +0\.00 +1\.00 +0\.00 +1\.00 +0\.00 +0\.00 +1\.00\n", said)
    with pytest.raises(SystemExit) as stop:
        figures.cli([str(folder / "r.h5"), "--out", str(tmp_path / "f.png")])
    assert not stop.value.code
    assert (tmp_path / "f.png").stat().st_size > 20_000
    for path, dataset in result.groups.items():
        for name, variable in dataset.variables.items():
            assert variable.description, f"{path}/{name}"


def test_recurrent_layers_have_states_and_other_units_give_the_same(folder, tiny, monkeypatch):
    from analyses import causal_tracing_plan

    settings = dict(pairs=3, no_heads=True, layers_at_once=1)
    one = causal_tracing.causal_tracing(study(folder, "recurrent", out="one.h5", **settings))
    monkeypatch.setattr(causal_tracing_plan, "CPU_UNIT", 2)
    monkeypatch.setattr(causal_tracing_plan, "CPU_STATES", 20)
    other = causal_tracing.causal_tracing(study(folder, "recurrent", out="other.h5", **settings))
    states, probes = one.groups["recurrent/states"], one.groups["recurrent/probes"]
    assert states["recurrent"].tolist() == [0, 1]
    assert states["distance"][0] == 0
    near = states["difference"][0, :, :, 0]
    assert (near > 0).all()
    assert sorted(set(probes["feature_layer"][probes["is_state"]])) == [0, 1]
    assert np.isnan(one["recurrent/patching/head_recovered"]).all()
    for path in ("patching/logit_difference", "knockout/log_p", "states/difference", "probes/accuracy"):
        np.testing.assert_allclose(one[f"recurrent/{path}"], other[f"recurrent/{path}"], atol=1e-4, equal_nan=True)
    kinds = set(one["recurrent/knockout/set_kind"])
    assert kinds == {"none", "group", "layer"}
    assert "layer 0, random weights" in table(one)


def test_a_killed_study_goes_on_and_a_finished_one_is_kept(folder, monkeypatch):
    from analyses import causal_tracing_plan

    config = study(folder, "null", out="killed.h5", pairs=5, samples=0, no_heads=True)
    whole = causal_tracing.causal_tracing(study(folder, "null", out="whole.h5", pairs=5, samples=0, no_heads=True))
    measure, count = causal_tracing_plan.measure, [0]

    def dying(*arguments):
        count[0] += 1
        if count[0] == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(causal_tracing_plan, "measure", dying)
    with pytest.raises(KeyboardInterrupt):
        causal_tracing.causal_tracing(config)
    assert not config.out.exists()
    monkeypatch.setattr(causal_tracing_plan, "activation_patching", None)  # its units are there already
    resumed = causal_tracing.causal_tracing(config)
    assert resumed.digest() == whole.digest()
    assert causal_tracing.causal_tracing(config).digest() == whole.digest()
    with pytest.raises(ValueError, match="another configuration .*separation"):
        causal_tracing.causal_tracing(study(folder, "null", out="killed.h5", pairs=5, samples=0, separation=2.0))


def test_a_hugging_face_hybrid(tiny, tmp_path):
    from transformers import PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=96, hidden_size=20, intermediate_size=28, num_hidden_layers=4, head_dim=10, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, linear_num_key_heads=2, linear_num_value_heads=6,
        linear_key_head_dim=6, linear_value_head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=20, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.fill_(-3.0)  # states that remember the needle
    model.save_pretrained(tmp_path / "hybrid")
    PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer().backend).save_pretrained(tmp_path / "hybrid")
    found = causal_tracing.causal_tracing(
        study(tmp_path, "hybrid", pairs=1, samples=0, separation=1e-6, layers_at_once=1, no_heads=True)
    )
    group = found.groups["hybrid/patching"]
    assert np.isfinite(group["logit_difference"]).all()
    first = group["logit_difference"][0, :, 0, 0, 0]  # everything at the needle clean, before any layer
    np.testing.assert_allclose(first, group["clean"], rtol=1e-3, atol=1e-4)
    assert found["hybrid/states/recurrent"].tolist() == [0, 1, 2]
    changes = found["hybrid/knockout/log_p_change"][:, 0]
    assert (changes[found["hybrid/knockout/set_kind"] != "none"] != 0).all()
    assert found["hybrid/head_kind"][0].tolist() == ["gdn"] * 6


BAD = [
    (["@nowhere"], r"nowhere: no such directory"),
    (["@empty"], r"empty holds no checkpoint"),
    ([], r"no checkpoint given"),
    (["@mute"], r"mute has no tokenizer\.json"),
    (["@null", "--length", "40"], r"40 tokens of essay: length 40 is too short"),
    (["@null", "--pairs", "0"], r"--pairs is 0; expected 1 or more"),
    (["@null", "--samples", "8"], r"--samples is 8; expected 32 or more"),
    (["@null", "--separation", "0"], r"--separation is 0\.0; expected nats above 0"),
    (["@null", "--layers-at-once", "0"], r"--layers-at-once is 0; expected 1 or more"),
    (["@null", "--impl", "fast"], r"impl is 'fast'"),
    (["@null", "--device", "tpu"], r"--device is 'tpu'; expected cpu, cuda"),
    (["@null", "--dtype", "int8"], r"--dtype is 'int8'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line(folder, capsys, arguments, message):
    given = [str(folder / word[1:]) if word.startswith("@") else word for word in arguments]
    with pytest.raises(SystemExit) as stop:
        command_line.run(causal_tracing.main, Config, arguments=[*given, "--out", str(folder / "bad.h5")])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert re.search(message, said), said
    assert said.count("\n") == 1
    assert not (folder / "bad.h5").exists()


def test_the_control_span_is_as_long_and_elsewhere():
    needle = np.array([[10, 17], [90, 97], [50, 57]])
    spans = elsewhere(needle, 100)
    assert ((spans[:, 1] - spans[:, 0]) == 7).all()
    assert (spans[:, 0] >= 0).all()
    assert (spans[:, 1] <= 100).all()
    overlap = np.minimum(spans[:, 1], needle[:, 1]) - np.maximum(spans[:, 0], needle[:, 0])
    assert (overlap <= 0).all()


def test_the_configuration_that_decides_is_stored(result, folder):
    stored = store.read_attributes(folder / "r.h5")
    config = json.loads(stored["config"])
    assert stored["analysis"] == "causal_tracing"
    assert (config["n_pairs"], config["n_samples"], config["lengths"]) == (2, 32, {"planted": LENGTH, "null": LENGTH})
    assert len(config["pairs_sha256"]["planted"]) == 64
    shutil.rmtree(folder / "r.h5.units", ignore_errors=True)
