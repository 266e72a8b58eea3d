"""The command line: bad input is one line, nothing written; interrupted runs go on; ranks and Hugging Face folders."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

import models
from analyses import gradient_influence, store
from analyses.gradient_influence_plan import Plan
from models import command_line
from probes import gradient

REPOSITORY = Path(__file__).resolve().parents[2]
LENGTH, TARGETS = 40, 3


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Checkpoints and texts that every test only reads."""
    folder = tmp_path_factory.mktemp("cli")
    tiny.save(tiny.model("swa", "full", context_length=LENGTH), folder / "ckpt" / "swa")
    tiny.save(tiny.model("gdn", "full", context_length=LENGTH), folder / "ckpt" / "gdn")
    mute = tiny.model("swa")
    mute.tokenizer = None
    tiny.save(mute, folder / "mute")
    shutil.copytree(folder / "ckpt", folder / "half")
    weights = folder / "half" / "swa" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    rng = np.random.default_rng(0)
    (folder / "texts").mkdir()
    for i, length in enumerate((60, 12, 45, 70)):
        (folder / "texts" / f"t{i}.txt").write_text("".join(rng.choice(list("abcdefgh "), length)))
    (folder / "empty").mkdir()
    return folder


def llama(folder, tiny, bos):
    """A Hugging Face directory with the tiny tokenizer; `bos`: it puts one in front of a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=20, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=28,
        vocab_size=len(tiny.characters), max_position_embeddings=LENGTH, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    backend = tiny.tokenizer().backend
    if bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="~ $A", special_tokens=[("~", backend.token_to_id("~"))]
        )
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="~", unk_token="~").save_pretrained(folder)
    return folder


def call(folder, *arguments, texts=True):
    """Exit code of the command line in this process."""
    given = [str(folder / word.removeprefix("@")) if word.startswith("@") else word for word in arguments]
    given += ["--texts", str(folder / "texts")] if texts else []
    given += [] if "--n-targets" in given else ["--n-targets", str(TARGETS)]
    with pytest.raises(SystemExit) as stop:
        command_line.run(gradient_influence.main, gradient_influence.Config, arguments=given)
    return stop.value.code


BAD = [
    (["@nowhere"], r"nowhere: no such directory"),
    (["@empty"], r"empty holds no checkpoint"),
    ([], r"no checkpoint given"),
    (["@mute"], r"mute has no tokenizer\.json"),
    (["@half"], r"half/swa/model\.safetensors .* is not a readable safetensors file"),
    (["@ckpt", "--score", "logits"], r"--score"),
    (["@ckpt", "--preset", "book"], r"--preset"),
    (["@ckpt", "--n-targets", "0"], r"--n-targets is 0; expected 1 or more"),
    (["@ckpt", "--n-targets", "39"], r"40 tokens for 39 targets; expected --length 41 or more"),
    (["@ckpt", "--length", "4"], r"--length is 4; expected 8 or more"),
    (["@ckpt", "--length", "71"], r"none of 4 texts has 71 tokens, the longest 70; .* --length 70 or less"),
    (["@ckpt", "--max-texts", "0"], r"--max-texts is 0"),
    (["@ckpt", "--windows", "0"], r"--windows has 0"),
    (["@ckpt", "--windows", "39"], r"--windows has 39; curves have 39 distances"),
    (["@ckpt", "--noise-texts", "-1"], r"--noise-texts is -1; expected 0 or more"),
    (["@ckpt", "--keep-gb", "-1"], r"--keep-gb is -1\.0; expected 0"),
    (["@ckpt", "--dtype", "float8"], r"--dtype is 'float8'; expected float32, bfloat16 or float16"),
    (["@ckpt", "--impl", "fast"], r"impl is 'fast'"),
    (["@ckpt", "--device", "tpu3000"], r"--device is 'tpu3000'; expected cpu, cuda or cuda:N"),
    (["@ckpt", "--max-texts", "many"], r"many"),
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


def test_texts_that_cannot_be_used_are_one_line(folder, tmp_path, capsys):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "x.jsonl").write_text('{"no": 1}')
    out = ["--out", str(tmp_path / "r.h5")]
    for path, words in (("nowhere", "no such file or folder"), ("t", "x.jsonl, line 1 has no; expected text")):
        assert call(folder, "@ckpt", *out, "--texts", str(tmp_path / path), texts=False) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1


def test_help_names_values(folder, capsys):
    assert call(folder, "--help") == 0
    said = capsys.readouterr().out
    for words in (
        "PATH [PATH ...]",
        "--texts TEXTS [TEXTS ...]",
        "--n-targets N",
        "--length T",
        "--groups ",
        "--layers ",
    ):
        assert words in said, words
    assert "None" not in said
    assert "--no-groups" not in said


def test_weights_that_are_not_finite_name_text_and_cause(tiny, folder, tmp_path, capsys):
    model = tiny.model("swa", "full", context_length=LENGTH)
    model.blocks[1].mlp.down_proj.weight[0, 0] = torch.nan
    tiny.save(model, tmp_path / "nan")
    assert call(folder, str(tmp_path / "nan"), "--out", str(tmp_path / "r.h5")) == 2
    assert "texts t0, t2: the gradient of sample 0 is not finite" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "r.h5").exists()


def test_an_interrupted_run_computes_what_is_missing_and_a_finished_one_is_kept(folder, tmp_path, capsys, monkeypatch):
    whole, target = tmp_path / "whole.h5", tmp_path / "new" / "r.h5"
    arguments = ["@ckpt", "--layers", "--groups"]
    assert call(folder, *arguments, "--out", str(whole)) == 0
    first = capsys.readouterr().out
    assert "1 of 4 skipped as shorter" in first
    assert first.splitlines()[-1] == str(whole)

    compute, done = Plan.compute, []
    with monkeypatch.context() as patch:

        def counted(plan, unit):
            if len(done) in stops:
                stops.remove(len(done))
                raise KeyboardInterrupt
            found = compute(plan, unit)
            done.append(unit.id)
            return found

        patch.setattr(Plan, "compute", counted)
        stops = [3, 10]
        for code in (130, 130, 0):
            assert call(folder, *arguments, "--out", str(target)) == code
        assert len(done) == len(set(done)) == 16, "2 checkpoints x 4 parts x 2 batches of texts"
        assert store.read(target).digest() == store.read(whole).digest()
        assert list(target.parent.iterdir()) == [target]

        patch.setattr(Plan, "compute", lambda *_: pytest.fail("computed again"))
        capsys.readouterr()
        spelt_out = ("--length", str(LENGTH), "--score", "log_prob", "--dtype", "float32", "--impl", "torch")
        assert call(folder, "@ckpt/swa", "@ckpt/gdn", *arguments[1:], "--out", str(target), *spelt_out) == 0
        assert capsys.readouterr().out.splitlines()[:-1] == first.splitlines()[:-1], "the same, said differently"
        for changed in (["--seed", "1"], ["--score", "logit_sum"], ["--max-texts", "1"], ["--windows", "9"]):
            assert call(folder, *arguments, "--out", str(target), *changed) == 2
            said = capsys.readouterr().err
            assert "another configuration" in said
            assert said.count("\n") == 1


def test_two_ranks_give_the_data_of_one_process(folder, tmp_path):
    arguments = [str(folder / "ckpt"), "--texts", str(folder / "texts"), "--n-targets", str(TARGETS)]
    assert call(folder, "@ckpt", "--out", str(tmp_path / "one.h5")) == 0
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "analyses.gradient_influence", *arguments, "--out", str(tmp_path / "two.h5"),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert store.read(tmp_path / "two.h5").digest() == store.read(tmp_path / "one.h5").digest()
    assert done.stdout.count("influence beyond w: share") == 1, "one table, by rank 0"
    assert sorted(os.listdir(tmp_path)) == ["one.h5", "two.h5"]


@pytest.mark.parametrize("bos", [False, True])
def test_a_hugging_face_directory_gives_the_probes_curves_without_its_bos(tiny, folder, tmp_path, capsys, bos):
    path = llama(tmp_path / "llama", tiny, bos)
    assert call(folder, str(path), "--out", str(tmp_path / "r.h5"), "--groups", "--layers") == 0
    said = capsys.readouterr().out
    assert "influence through efficient mixers only: n/a: no efficient path" in said
    result, model = store.read(tmp_path / "r.h5"), models.load(path)
    values = result.groups["llama/texts"]
    assert result["llama/length"] == LENGTH
    assert result["llama/bos"] == bos
    front = [model.tokenizer.bos_id] if bos else []
    for row, name in enumerate(("t0", "t2", "t3")):
        ids = (front + model.tokenizer.encode((folder / "texts" / f"{name}.txt").read_text()))[:LENGTH]
        expected = gradient.gradient_influence(model, torch.tensor([ids]), n_targets=TARGETS, layers=True)
        kept = LENGTH - 1 - bos
        np.testing.assert_allclose(values["influence"][row], expected.norm[0, :kept], rtol=1e-4)
        np.testing.assert_allclose(result["llama/layers/influence"][row, :, :8], expected.layers[0, :, :8], rtol=1e-4)
        alone = result["llama/groups/influence"][0, row, :8]  # all mixers are full ones
        np.testing.assert_allclose(alone, expected.norm[0, :8], rtol=1e-4)
        for column, window in enumerate(result["llama/window"]):
            given = torch.tensor([[*front, *ids[-window - 1 :]]])
            loss = -model(given)[0, -TARGETS - 1 : -1].log_softmax(-1).gather(-1, given[0, -TARGETS:, None]).mean()
            np.testing.assert_allclose(values["truncated_loss"][row, column], loss.item(), rtol=1e-4)
        if bos:
            np.testing.assert_allclose(values["bos_influence"][row], expected.norm[0, -1], rtol=1e-4)
    assert ("bos_influence" in values.variables) == bos
    assert result.attributes["kernel_impl"] == "torch"
    assert result.attributes["layer_kinds"] == '{"llama": ["full", "full"]}'


def test_impl_is_refused_for_hugging_face_directories(tiny, folder, tmp_path, capsys):
    path = llama(tmp_path / "llama", tiny, bos=False)
    assert call(folder, str(path), "--out", str(tmp_path / "r.h5"), "--impl", "torch") == 2
    assert "is no native checkpoint" in capsys.readouterr().err
