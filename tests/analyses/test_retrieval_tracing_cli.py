"""The command line: bad input is one line, a finished run is kept, a killed one goes on, the preset is its options."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import models
from analyses import retrieval_tracing, store
from analyses import retrieval_tracing_measures as measures
from analyses.figures import __main__ as figures
from models import command_line

REPOSITORY = Path(__file__).resolve().parents[2]
LENGTH = 24


def own_prompts(path, count=6, **changes):
    """Random tokens: no model retrieves from them, which the plumbing does not mind."""
    rng = np.random.default_rng(0)
    arrays = {
        "ids": rng.integers(0, 96, (count, LENGTH)),
        "value": np.tile([4, 6], (count, 1)),
        "answer": np.tile([LENGTH - 2, LENGTH], (count, 1)),
    }
    np.savez(path, **{name: array for name, array in (arrays | changes).items() if array is not None})


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Runs and prompts that every test only reads; the run's natural order of names is that of its tokens."""
    folder = tmp_path_factory.mktemp("cli")
    for step in (2, 10):
        model = tiny.model("swa", "full", "full", seed=step)
        models.save(model, folder / "run" / f"step_{step}", training={"step": step, "tokens": 100 * step})
    shutil.copytree(folder / "run", folder / "half")
    weights = folder / "half" / "step_2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    shutil.copytree(folder / "run", folder / "untold")
    (folder / "untold" / "step_2" / "training.json").write_text('{"step": 2}')
    shutil.copytree(folder / "run", folder / "twice")
    shutil.copytree(folder / "run" / "step_2", folder / "twice" / "step_2_again")
    tiny.save(tiny.model("gdn", "full"), folder / "mixed" / "gdn")
    tiny.save(tiny.model("swa", "full"), folder / "mixed" / "swa")
    tiny.save(tiny.model("gdn", "mamba2"), folder / "recurrent")
    mute = tiny.model("swa", "full")
    mute.tokenizer = None
    tiny.save(mute, folder / "mute")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "empty").mkdir()
    own_prompts(folder / "own.npz")
    own_prompts(folder / "none.npz", answer=None)
    own_prompts(folder / "floats.npz", value=np.tile([4.0, 6.0], (6, 1)))
    own_prompts(folder / "spans.npz", value=np.tile([6, 4], (6, 1)))
    own_prompts(folder / "shapes.npz", value=np.tile([4, 6], (5, 1)))
    own_prompts(folder / "vocab.npz", ids=np.full((6, LENGTH), 96))
    return folder


def call(folder, *arguments):
    """Exit code of the command line in this process."""
    given = [str(folder / word.removeprefix("@")) if word.startswith("@") else word for word in arguments]
    with pytest.raises(SystemExit) as stop:
        command_line.run(retrieval_tracing.main, retrieval_tracing.Config, arguments=given)
    return stop.value.code


BAD = [
    (["@nowhere"], r"nowhere: no such directory"),
    (["@empty"], r"empty holds no checkpoint"),
    ([], r"no run given"),
    (["@run", "--top", "999"], r"--top is 999, but .* has \d+ softmax heads"),
    (["@hf"], r"hf has neither model\.safetensors nor"),
    (["@mute"], r"mute has no tokenizer\.json; needle prompts need one, or give --prompts"),
    (["@half"], r"half/step_2/model\.safetensors .* is not a readable safetensors file"),
    (["@untold"], r"step_2/training\.json: tokens is None; expected the number of training tokens"),
    (["@twice"], r"step_2 and step_2_again both have 200 tokens; keep one"),
    (["@mixed"], r"mixed holds several models: gdn and swa differ in layer_kinds; name .* a RUN of its own"),
    (["@recurrent"], r"recurrent has no softmax attention \(its layers: gdn, mamba2\)"),
    (["@run", "--top", "0"], r"--top is 0; expected 1 or more"),
    (["@run", "--threshold", "2"], r"--threshold is 2\.0; expected a mass above 0, at most 1"),
    (["@run", "--threshold", "0.1", "--top", "2"], r"both choose heads; give one of them"),
    (["@run", "--query", "0"], r"--query is 0; expected a position from the prompt's end"),
    (["@run", "--prompts", "@own.npz", "--query", "-40"], r"--query is -40; the prompts of .* are shorter"),
    (["@run", "--length", "20"], r"length 20 is too short"),
    (["@run", "--haystack", "straw"], r"--haystack"),
    (["@run", "--mass-marks", "0.5", "-1"], r"--mass-marks has \(0\.5, -1\.0\); expected numbers above 0"),
    (["@run", "--prompts", "@nowhere.npz"], r"nowhere\.npz: No such file"),
    (["@run", "--prompts", "@none.npz"], r"none\.npz .*answer.*; expected an \.npz file with ids, value and answer"),
    (["@run", "--prompts", "@hf/config.json"], r"expected an \.npz file with ids, value and answer"),
    (["@run", "--prompts", "@floats.npz"], r"types are \['int64', 'float64', 'int64'\]; expected integers"),
    (["@run", "--prompts", "@shapes.npz"], r"expected ids \[N, T\], value \[N, 2\], answer \[N, 2\]"),
    (["@run", "--prompts", "@spans.npz"], r"prompt 0 has value \[6, 4\], answer \[22, 24\] in 24 tokens"),
    (["@run", "--prompts", "@vocab.npz"], r"token 96; run knows 0 to 95"),
    (["@run", "--prompts", "@own.npz", "--choosing", "6"], r"has 6 prompts; 7 are asked for"),
    (["@run", "--dtype", "float8"], r"--dtype is 'float8'; expected float32, bfloat16 or float16"),
    (["@run", "--impl", "fast"], r"impl is 'fast'"),
    (["@run", "--device", "tpu3000"], r"--device is 'tpu3000'; expected cpu, cuda or cuda:N"),
    (["@run", "--preset", "book"], r"--preset"),
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


def test_help_names_values(folder, capsys):
    assert call(folder, "--help") == 0
    said = capsys.readouterr().out
    for words in ("RUN [RUN ...]", "--top K", "--threshold MASS", "--prompts FILE.npz", "--no-ablation "):
        assert words in said, words
    assert "None" not in said


def test_a_finished_run_is_printed_again_and_another_is_kept(folder, tmp_path, capsys, monkeypatch):
    out = ["--prompts", "@own.npz", "--out", str(tmp_path / "r.h5")]
    assert call(folder, "@run", *out) == 0
    first = capsys.readouterr().out
    assert first.splitlines()[0].startswith("run   n = 4 prompts of 24 tokens")
    digest = store.read(tmp_path / "r.h5").digest()
    monkeypatch.setattr(measures, "trace", None)
    assert call(folder, "@run", *out) == 0
    assert capsys.readouterr().out == first
    assert call(folder, "@run", *out, "--top", "1") == 2
    assert "resolved_top: 4 stored, 1 asked" in capsys.readouterr().err
    assert store.read(tmp_path / "r.h5").digest() == digest


def test_a_killed_run_goes_on_with_the_checkpoints_that_are_missing(folder, tmp_path, monkeypatch):
    arguments = ["@run", "--prompts", "@own.npz", "--out"]
    assert call(folder, *arguments, str(tmp_path / "whole.h5")) == 0
    traced, trace = [], measures.trace

    def counted(*given):
        traced.append(given)
        if len(traced) == 2:
            raise KeyboardInterrupt
        return trace(*given)

    monkeypatch.setattr(measures, "trace", counted)
    assert call(folder, *arguments, str(tmp_path / "killed.h5")) == 130
    assert len(list((tmp_path / "killed.h5.units").glob("*.h5"))) == 1
    assert call(folder, *arguments, str(tmp_path / "killed.h5")) == 0
    assert len(traced) == 3, "the checkpoint that was finished is not traced again"
    whole, again = (store.read(tmp_path / f"{name}.h5") for name in ("whole", "killed"))
    assert again.digest() == whole.digest()
    assert not (tmp_path / "killed.h5.units").exists()


def test_the_released_preset_is_the_last_but_one_token_and_the_top_four(folder, tmp_path):
    common = ["@run", "--prompts", "@own.npz", "--no-ablation", "--out"]
    assert call(folder, *common, str(tmp_path / "preset.h5"), "--preset", "released") == 0
    assert call(folder, *common, str(tmp_path / "options.h5"), "--query", "-2", "--top", "4") == 0
    assert call(folder, *common, str(tmp_path / "default.h5")) == 0
    preset, options, default = (store.read(tmp_path / f"{n}.h5") for n in ("preset", "options", "default"))
    assert preset.digest() == options.digest() != default.digest()
    assert len(preset["run/followed"]) == 4
    assert "run/ablation" not in preset.groups
    assert preset.attributes["query"] == -2


def test_two_ranks_and_two_runs_of_one_name_give_the_data_of_one_process(folder, tmp_path):
    shutil.copytree(folder / "run" / "step_10", tmp_path / "other" / "run")
    arguments = [str(folder / "run"), str(tmp_path / "other" / "run"), "--prompts", str(folder / "own.npz"), "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, "-m", "analyses.retrieval_tracing", *arguments, str(tmp_path / "two.h5")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert call(folder, *arguments, str(tmp_path / "one.h5")) == 0
    one, two = store.read(tmp_path / "one.h5"), store.read(tmp_path / "two.h5")
    assert one.digest() == two.digest()
    assert done.stdout.count("4 prompts of 24 tokens") == 2, "one table of two runs, by rank 0"
    names = [name for name in one.groups if name and "/" not in name]
    assert names == [f"{folder.name}_run", "other_run"]
    with pytest.raises(SystemExit) as stop:
        figures.cli([str(tmp_path / "one.h5"), "--out", str(tmp_path / "f.svg")])
    assert not stop.value.code
    drawn = (tmp_path / "f.svg").read_text()
    for words in ("other_run", "needle accuracy", "normalised entropy", "Q/K distance", "random"):
        assert words in drawn, words
