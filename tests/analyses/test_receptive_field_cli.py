"""The command line: bad input is one line and exit code 2 with nothing written; a finished run is kept."""

import json
import re
import shutil

import pytest

from analyses import receptive_field, store
from analyses.receptive_field_plan import Plan
from models import command_line

CONTEXT, PROMPT = 64, 330


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Checkpoints, texts and key tokens that every test only reads."""
    folder = tmp_path_factory.mktemp("cli")
    tiny.recall_folder(folder)
    tiny.save(tiny.model("swa", "full", context_length=CONTEXT), folder / "ckpt" / "swa")
    tiny.save(tiny.model("gdn", "full", context_length=CONTEXT), folder / "ckpt" / "gdn")
    mute = tiny.model("swa", "full")
    mute.tokenizer = None
    tiny.save(mute, folder / "mute")
    shutil.copytree(folder / "ckpt", folder / "half")
    weights = folder / "half" / "swa" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (folder / "empty").mkdir()
    return folder


def call(folder, *arguments, texts=True):
    """Exit code of the command line in this process."""
    given = [str(folder / word.removeprefix("@")) if word.startswith("@") else word for word in arguments]
    if texts:
        given += ["--texts", str(folder / "texts"), "--key-tokens", str(folder / "keys")]
    for option, value in (("--haystack", "noise"), ("--prompts", "2"), ("--prompt-length", str(PROMPT))):
        if option not in given:
            given += [option, value]
    with pytest.raises(SystemExit) as stop:
        command_line.run(receptive_field.main, receptive_field.Config, arguments=given)
    return stop.value.code


BAD = [
    (["@nowhere"], r"nowhere: no such directory"),
    (["@empty"], r"empty holds no checkpoint"),
    ([], r"no checkpoint given"),
    (["@texts/text0.txt"], r"text0\.txt is a file; expected a checkpoint directory"),
    (["@mute"], r"mute has no tokenizer\.json"),
    (["@half"], r"half/swa/model\.safetensors .* is not a readable safetensors file"),
    (["@ckpt", "--windows", "0"], r"--windows has 0; expected"),
    (["@ckpt", "--windows", "16", "-3"], r"--windows has -3; expected"),
    (["@ckpt", "--reach", "0"], r"--reach has 0"),
    (["@ckpt", "--sinks", "-1"], r"--sinks has -1; expected 0 or more first tokens"),
    (["@ckpt/gdn", "--sinks", "4"], r"gdn: efficient -> 8 \+ 4 sinks: a recurrent state has no sinks; use --sinks 0"),
    (["@ckpt", "--prompts", "0"], r"--prompts is 0; expected 1 or more"),
    (["@ckpt", "--documents", "0"], r"--documents is 0"),
    (["@ckpt", "--prompt-length", "20"], r"length 20 is too short.*ask for at least \d+"),
    (["@ckpt", "--haystack", "straw"], r"straw.*repeat, essay, noise"),
    (["@ckpt", "--dtype", "float8"], r"--dtype is 'float8'; expected float32 or bfloat16"),
    (["@ckpt", "--impl", "fast"], r"impl is 'fast'"),
    (["@ckpt", "--device", "tpu3000"], r"--device is 'tpu3000'; expected cpu, cuda or cuda:N"),
    (["@ckpt", "--device", "meta"], r"--device is 'meta'"),
    (["@ckpt", "--device", "cuda:99"], r"--device is 'cuda:99', but \d+ GPUs are visible"),
    (["@ckpt", "--window", "16"], r"--window"),
    (["@ckpt", "--lengths", "0"], r"--lengths has 0; expected multiples of the training length: 1 or more"),
    (["@ckpt", "--lengths", "9"], r"--lengths: the 2 texts beside 'text0' have \d+ tokens, 512 have to stand in front"),
    (["@ckpt", "--margin", "0"], r"--margin is 0\.0; expected nats, more than 0"),
    (["@ckpt", "--domain", "poetry"], r"--domain is 'poetry'; expected code or documentation"),
    (["@ckpt", "--ablate", "--calibration", "@texts"], r"--calibration: 'text0' is measured too"),
    (["@ckpt", "--ablate", "--calibration", "@nowhere"], r"nowhere: no such file or folder"),
    (["@ckpt", "--documents", "many"], r"many"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--texts", "@texts"], "--texts and --key-tokens go together"),
        (["--key-tokens", "@keys"], "--texts and --key-tokens go together"),
        (["--texts", "@empty", "--key-tokens", "@keys"], "0 texts, 3 key-token files"),
        (["--texts", "@nowhere", "--key-tokens", "@nowhere"], "no usable document in"),
    ],
)
def test_documents_that_cannot_be_used(folder, tmp_path, capsys, options, message):
    assert call(folder, "@ckpt", *options, "--out", str(tmp_path / "r.h5"), texts=False) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_names_values_and_does_not_show_what_python_calls_them(folder, capsys):
    assert call(folder, "--help") == 0
    said = capsys.readouterr().out
    for words in ("PATH [PATH ...]", "--windows W [W ...]", "--key-tokens FOLDER", "--documents N", "--grid "):
        assert words in said, words
    assert "None" not in said
    assert "--no-grid" not in said


def test_a_hugging_face_directory_without_a_tokenizer_is_refused(folder, tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, vocab_size=30)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    assert call(folder, str(tmp_path / "llama"), "--out", str(tmp_path / "out" / "r.h5")) == 2
    said = capsys.readouterr().err
    assert "llama has no tokenizer.json; documents and prompts need one" in said.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_finished_run_is_printed_again_and_another_configuration_is_refused(folder, tmp_path, capsys, monkeypatch):
    target = tmp_path / "new" / "r.h5"
    arguments = ["@ckpt", "--out", str(target), "--documents", "2"]
    assert call(folder, *arguments) == 0
    first, stamp = capsys.readouterr().out, target.stat()
    assert first.splitlines()[-1] == str(target)
    assert "efficient -> 8" in first

    with monkeypatch.context() as patch:
        patch.setattr(Plan, "compute", lambda *_: pytest.fail("computed again"))
        assert call(folder, *arguments) == 0
        again = capsys.readouterr()
        assert again.out == first
        assert again.err == ""
        assert call(folder, "@ckpt/swa", "@ckpt/gdn/", *arguments[1:], "--device", "cpu") == 0, "the same, elsewhere"
        assert capsys.readouterr().out == first
        for changed in (["--windows", "5"], ["--seed", "1"], ["--prompts", "3"], ["--documents", "1"]):
            assert call(folder, *arguments, *changed) == 2
            said = capsys.readouterr().err
            assert "another configuration" in said
            assert "--overwrite" in said
            assert said.count("\n") == 1
    assert target.stat() == stamp
    assert list(target.parent.iterdir()) == [target]

    digest = store.read(target).digest()
    assert call(folder, *arguments, "--windows", "5", "--overwrite") == 0
    assert "efficient -> 5" in capsys.readouterr().out
    assert store.read(target).digest() != digest


def test_other_key_tokens_of_the_same_texts_are_another_configuration(tiny, folder, tmp_path, capsys):
    texts, key, _ = tiny.recall_folder(tmp_path)
    arguments = ["@ckpt/swa", "--out", str(tmp_path / "r.h5"), "--windows", "5", "--texts", str(tmp_path / "texts")]
    assert call(folder, *arguments, "--key-tokens", str(folder / "keys"), texts=False) == 0
    assert call(folder, *arguments, "--key-tokens", str(tmp_path / "keys"), texts=False) == 0, "same content, elsewhere"
    shutil.rmtree(tmp_path / "texts")
    shutil.rmtree(tmp_path / "keys")
    tiny.texts(tmp_path, texts, {name: positions[:-1] for name, positions in key.items()})
    capsys.readouterr()
    assert call(folder, *arguments, "--key-tokens", str(tmp_path / "keys"), texts=False) == 2
    assert "document_sha256" in capsys.readouterr().err


@pytest.mark.parametrize("context", [1, 5, 12])
def test_the_whole_grid_of_a_context_shorter_than_its_windows(tiny, folder, tmp_path, capsys, context):
    tiny.save(tiny.model("swa", "full", "mamba2", context_length=context), tmp_path / "short")
    arguments = [str(tmp_path / "short"), "--out", str(tmp_path / "r.h5"), "--grid", "--documents", "2"]
    assert call(folder, *arguments) == 0
    result, out = store.read(tmp_path / "r.h5"), capsys.readouterr().out
    group, documents = result.groups["short"], result.groups["short/documents"]
    windows = {w for w in (1, 2, 4) if w < context} or {1}
    assert set(group["restricted_window"][group["restricted_group"] == "floor"]) == windows
    assert {"layer 2 -> 16", "full -> 1 + 4 sinks", "last 1 only"} <= set(group["condition"])
    assert {f"{who} reach {max(1, context // 8)}" for who in ("full", "efficient")} <= set(group["condition"])
    assert documents["extrapolation"].tolist() == [1, 1]
    assert "extrapolation: 2 documents and 2 prompts longer than the training length" in out
    measured = [not status for status in group["status"]]
    assert sum(measured) > 10
    for row, status in enumerate(group["status"]):
        assert status.startswith("n/a") == bool(documents["key_loss"][row][0] != documents["key_loss"][row][0]), status
    assert len({tuple(values) for values in documents["key_loss"][measured].tolist()}) > 5, "conditions differ"


def test_one_document_and_one_prompt_have_no_interval(folder, tmp_path, capsys):
    assert call(folder, "@ckpt/swa", "--out", str(tmp_path / "r.h5"), "--documents", "1", "--prompts", "1") == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("full -> 8"))
    assert re.search(r"[+-]\d\.\d{3} \[n/a\] .* [+-]0\.00 \[n/a\]", row), row


def test_a_run_in_other_numbers_is_another_configuration(folder, tmp_path, capsys):
    target = tmp_path / "r.h5"
    assert call(folder, "@ckpt/swa", "--out", str(target), "--dtype", "bfloat16") == 0
    attributes = store.read_attributes(target)
    assert attributes["dtype"] == "bfloat16"
    assert json.loads(attributes["config"])["resolved_dtype"] == "bfloat16"
    assert call(folder, "@ckpt/swa", "--out", str(target)) == 2
    assert "resolved_dtype: 'bfloat16' stored, 'float32' asked" in capsys.readouterr().err
