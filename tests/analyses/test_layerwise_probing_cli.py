"""The command line of the probing study: bad input, resuming after kills, ranks, kept features, Hugging Face."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from analyses import layerwise_probing, store
from analyses.layerwise_probing_plan import Plan
from analyses.layerwise_probing_results import probe_result
from models import command_line
from probes import layerwise

REPOSITORY = Path(__file__).parents[2]
LENGTH, N = 330, 24
SMALL = ["--length", str(LENGTH), "--samples", str(N)]


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Checkpoints that every test only reads."""
    folder = tmp_path_factory.mktemp("cli")
    for name, kinds in (("gdn", ("gdn", "full")), ("swa", ("swa", "full", "swa"))):
        tiny.save(tiny.model(*kinds, context_length=64), folder / "ckpt" / name)
    mute = tiny.model("swa", "full")
    mute.tokenizer = None
    tiny.save(mute, folder / "mute")
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("Round the bend and home.\n" * 40)
    return folder


def call(folder, *arguments):
    """Exit code of the command line in this process."""
    given = [str(folder / word.removeprefix("@")) if word.startswith("@") else word for word in arguments]
    for option, value in (("--length", str(LENGTH)), ("--samples", str(N))):
        if option not in given:
            given += [option, value]
    with pytest.raises(SystemExit) as stop:
        command_line.run(layerwise_probing.main, layerwise_probing.Config, arguments=given)
    return stop.value.code


BAD = [
    (["@nowhere"], r"nowhere: no such directory"),
    (["@empty"], r"empty holds no checkpoint"),
    ([], r"no checkpoint given"),
    (["@mute"], r"mute has no tokenizer\.json; prompts need one"),
    (["@ckpt", "--samples", "3"], r"--samples is 3; expected 4 or more"),
    (["@ckpt", "--samples", "9"], r"--samples 9 at --test-size 0\.5: class .* has 1 prompt; expected at least 2"),
    (
        ["@ckpt", "--samples", "16", "--test-size", "0.1"],
        r"--samples 16 at --test-size 0\.1: the test part has 2 prompt",
    ),
    (["@ckpt", "--length", "20"], r"gdn, repeat: length \d+ is too short.*ask for at least \d+"),
    (["@ckpt", "--classes", "9"], r"--classes is 9; the value sets have 8"),
    (["@ckpt", "--classes", "1"], r"--classes is 1; expected 2 or more"),
    (["@ckpt", "--values", "hard"], r"gdn, repeat: after the last prompt token the 8 values .* add --after-shared"),
    (["@ckpt", "--values", "middling"], r"middling"),
    (["@ckpt", "--haystack", "straw"], r"straw"),
    (["@ckpt", "--texts", "@text.txt"], r"--texts is given, but --haystack is repeat noise; add essay"),
    (["@ckpt", "--haystack", "essay", "--texts", "@none"], r"none: no such file or folder"),
    (["@ckpt", "--depth", "0.5", "1.5"], r"--depth is 0\.5 1\.5; expected shares between 0 and 1"),
    (["@ckpt", "--distractors", "0"], r"--distractors is 0; expected 1 or more"),
    (["@ckpt", "--form", "multi_value"], r"multi_value"),
    (["@ckpt", "--C", "0"], r"--C is 0\.0; expected a number above 0"),
    (["@ckpt", "--test-size", "1"], r"--test-size is 1\.0; expected a share between 0 and 1"),
    (["@ckpt", "--seed", "-1"], r"--seed is -1; expected 0 or more"),
    (["@ckpt", "--dtype", "float8"], r"--dtype is 'float8'; expected float32, bfloat16 or float16"),
    (["@ckpt", "--impl", "fast"], r"impl is 'fast'"),
    (["@ckpt", "--device", "tpu3000"], r"--device is 'tpu3000'; expected cpu, cuda or cuda:N"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) or "nothing" for arguments, _ in BAD])
def test_bad_input_is_one_line_and_nothing_is_written(folder, tmp_path, capsys, arguments, message):
    code = call(folder, *arguments, "--out", str(tmp_path / "r.h5"))
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1, said.err
    assert re.search(message, said.err), said.err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def finished(folder):
    """One whole study of both checkpoints, with its features; on one thread, as ranks are: sums depend on how many."""
    torch.set_num_threads(1)
    out = folder / "whole.h5"
    assert call(folder, "@ckpt", "--keep-features", "--out", str(out)) == 0
    return out


def test_a_finished_study_is_printed_again_and_another_refused(folder, finished, capsys, monkeypatch):
    before = finished.read_bytes()
    monkeypatch.setattr(Plan, "_extract", None)
    monkeypatch.setattr(Plan, "_fit", None)
    assert call(folder, "@ckpt", "--keep-features", "--out", str(finished)) == 0
    said = capsys.readouterr().out
    blocks = [f"{name}, {what}   n = 12" for name in ("gdn", "swa") for what in ("repeat", "noise", "noise without")]
    assert all(block.split("   ")[0] in said for block in blocks)
    assert said.count("n = 12 held-out of 24 prompts") == 6
    assert "extrapolation: longer than the training length" in said
    assert said.splitlines()[-1] == str(finished)
    assert call(folder, "@ckpt", "--keep-features", "--seed", "7", "--out", str(finished)) == 2
    said = capsys.readouterr().err
    assert "seed: 42 stored, 7 asked" in said
    assert said.count("\n") == 1
    assert finished.read_bytes() == before
    assert not Path(f"{finished}.units").exists()


def test_kept_features_give_the_stored_probes(folder, finished):
    result = store.read(finished)
    kept, group = result.groups["swa/noise/features"], result.groups["swa/noise"]
    assert kept["trained"].shape == (N, 2 * 3 + 1, 20)
    labels = [str(group["class"][index]) for index in kept["class_index"]]
    for weights in ("trained", "random weights"):
        features = {str(name): kept[weights][:, i] for i, name in enumerate(kept["hook"])}
        again = layerwise.fit(features, labels, test_size=0.5, seed=42)
        stored = probe_result(group, weights)
        np.testing.assert_array_equal(again.predicted, stored.predicted[:-2])  # without the two baselines
        np.testing.assert_array_equal(again.row, stored.row)
    assert not np.array_equal(kept["trained"], kept["random weights"])
    assert "swa/null/features" in result.groups
    assert "random weights" not in result.groups["swa/null/features"].variables


def test_an_interrupted_study_goes_on_where_it_stopped(folder, finished, tmp_path, monkeypatch):
    """Stopped while features are computed, and again while probes are fitted: no finished unit is computed twice.

    Only features that were damaged meanwhile are.
    """
    out, done = tmp_path / "stopped.h5", []
    compute = {name: getattr(Plan, name) for name in ("_extract", "_fit")}

    def stopping(name, at):
        def run(self, unit, *load):
            if len(done) == at:
                raise KeyboardInterrupt
            done.append(unit.id)
            return compute[name](self, unit, *load)

        return run

    total = 2 * (3 + 2) + 2 * (2 * 3 + 1)
    for at in (3, 13, None):
        for name in compute:
            monkeypatch.setattr(Plan, name, stopping(name, at))
        assert call(folder, "@ckpt", "--keep-features", "--out", str(out)) == (130 if at else 0)
        assert out.exists() == (at is None)
        assert len(set(done)) == (at or total)
        if at == 13:
            victim = next(Path(f"{out}.units").glob("swa_null_trained*.h5"))
            victim.write_bytes(victim.read_bytes()[:-100])
    assert sorted(done) == sorted([*set(done), f"swa/null/trained 0-{N}"])
    assert store.read(out).digest() == store.read(finished).digest()
    assert os.listdir(tmp_path) == ["stopped.h5"]


def test_two_ranks_give_the_data_of_one_process(folder, finished, tmp_path):
    out = tmp_path / "two.h5"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, "-m", "analyses.layerwise_probing", str(folder / "ckpt"), *SMALL,
               "--keep-features", "--out", str(out)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert store.read(out).digest() == store.read(finished).digest()
    assert done.stdout.count("gdn, repeat") == 1
    assert os.listdir(tmp_path) == ["two.h5"]


def test_shared_prefixes_change_no_accuracy(folder, tmp_path):
    found = []
    for name, more in (("whole", ["--whole-prompts"]), ("shared", [])):
        out = tmp_path / f"{name}.h5"
        short = ["--length", "600", "--haystack", "repeat", "--controls", "shuffled"]
        assert call(folder, "@ckpt/swa", *short, *more, "--out", str(out)) == 0
        found.append(store.read(out).groups["swa/repeat"])
    whole, shared = found
    # before the full layer all prompts look alike: features differ by rounding alone, which standardising enlarges
    seen = list(whole["feature"]).index("blocks.1.hook_resid_mid")
    np.testing.assert_allclose(whole["log_p_true"][0, seen:], shared["log_p_true"][0, seen:], atol=1e-3)
    assert np.ptp(whole["log_p_true"][0, seen]) > 1, "the probe has learned something there"
    assert whole["tokens_computed"] == N * 600 > 1.1 * shared["tokens_computed"]


def test_depths_and_distractors_reach_the_prompts(folder, tmp_path):
    """Needles at the two shares asked for, each with every class; the question's key picks one of three needles."""
    options = ["--depth", "0.25", "1", "--form", "multi_key", "--distractors", "2", "--haystack", "noise"]
    out = tmp_path / "d.h5"
    assert call(folder, "@ckpt/gdn", *options, "--length", "1400", "--samples", "32", "--out", str(out)) == 0
    result = store.read(out)
    config = json.loads(result.attributes["config"])
    assert (config["depth"], config["form"], config["distractors"]) == ([0.25, 1.0], "multi_key", 2)
    group = result.groups["gdn/noise"]
    places = np.sort(group["needle"])
    gap = int(np.diff(places).argmax()) + 1
    assert places[gap] - places[gap - 1] > 300, "two groups, far apart"
    assert max(np.ptp(places[:gap]), np.ptp(places[gap:])) < 150
    assert "gdn/null" in result.groups


def test_a_hugging_face_directory_is_probed_too(tmp_path, tiny, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    shape = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=20, vocab_size=96)
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path / "llama")
    PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer().backend, unk_token="~").save_pretrained(
        tmp_path / "llama"
    )
    capsys.readouterr()
    assert call(tmp_path, "@llama", "--haystack", "noise", "--controls", "random", "--out", str(tmp_path / "r.h5")) == 0
    result = store.read(tmp_path / "r.h5")
    group = result.groups["llama/noise"]
    assert json.loads(result.attributes["layer_kinds"]) == {"llama": ["full"] * 3}
    names = [str(name) for name in group["feature"]]
    assert names[0] == "blocks.0.hook_resid_pre"
    assert [n for n in names if n.endswith("post")] == [f"blocks.{i}.hook_resid_post" for i in range(3)]
    known = "blocks.0.hook_resid_mid" in names  # whether a place between mixer and MLP is known
    assert (np.isfinite(group["gain"][:, 1:]) == known).all()
    assert np.isfinite(group["gain"][:, 0]).all()
    assert np.isfinite(group["over_random"]).all()
    assert not np.array_equal(group["log_p_true"][0], group["log_p_true"][1])
    said = capsys.readouterr().out
    assert "n/a: all of the 3 layers are full attention" in said


def test_help_names_values_and_does_not_show_what_python_calls_them(folder, capsys):
    assert call(folder, "--help") == 0
    said = capsys.readouterr().out
    for words in ("PATH [PATH ...]", "--haystack NAME [NAME ...]", "--samples N", "--after-shared ", "--preset paper"):
        assert words in said, words
    assert "None" not in said
    assert "--no-after-shared" not in said
