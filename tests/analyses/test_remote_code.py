"""--trust-remote-code of the commands that take a Hugging Face directory: refused without, run and recorded with it."""

import importlib
import json

import h5py
import pytest

from analyses.gradient_influence import Config
from analyses.gradient_influence_plan import Plan
from models import command_line

PROMPTS = ("--length", 330, "--haystack", "noise")
COMMANDS = {
    "analyses.receptive_field": (
        "@study", "--documents", 1, "--prompts", 1, "--prompt-length", 330, "--haystack", "noise",
    ),
    "analyses.gradient_influence": ("--texts", "@texts", "--length", 64, "--max-texts", 1),
    "analyses.layerwise_probing": (*PROMPTS, "--samples", 8, "--classes", 2),
    "analyses.retrieval_tracing": (*PROMPTS, "--choosing", 1, "--tracing", 1, "--no-ablation"),
    "analyses.causal_tracing": (*PROMPTS, "--pairs", 1, "--samples", 0, "--no-heads", "--layers-at-once", 1),
    "analyses.key_tokens": ("--texts", "@texts", "--context", 24, "--stride", 6),
    "models.selfcheck": ("--quick",),
}  # fmt: skip


@pytest.fixture
def directory(remote_code, tiny):
    from transformers import PreTrainedTokenizerFast

    tiny.recall_folder(remote_code.parent)
    PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer().backend).save_pretrained(remote_code)
    return remote_code


def run(name, path, *more):
    """Exit code of a command on `path`; its result is named out.h5 beside it."""
    folder, module = path.parent, importlib.import_module(name)
    options = [] if name == "models.selfcheck" else ["--out", folder / "out.h5"]
    for argument in COMMANDS[name]:
        study = ["--texts", folder / "texts", "--key-tokens", folder / "keys"]
        options += {"@study": study, "@texts": [folder / "texts"]}.get(argument, [argument])
    with pytest.raises(SystemExit) as stop:
        command_line.run(module.main, module.Config, arguments=[str(a) for a in (path, *options, *more)])
    return stop.value.code


@pytest.mark.parametrize("name", COMMANDS)
def test_code_is_run_only_with_the_flag_and_recorded(directory, name, capsys):
    assert run(name, directory) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {directory / 'config.json'}: model_type is 'x_llama'")
    assert "--trust-remote-code" in line
    assert run(name, directory, "--trust-remote-code") == 0, capsys.readouterr().err
    if name in ("analyses.key_tokens", "models.selfcheck"):
        return
    with h5py.File(directory.parent / "out.h5") as file:
        config = json.loads(file.attrs["config"])
    assert set(config["remote_code_sha256"]) == set(config["checkpoints"])
    assert "trust_remote_code" not in config


def test_a_result_of_other_code_is_another_result(directory, capsys):
    name = "analyses.gradient_influence"
    assert run(name, directory, "--trust-remote-code") == 0
    assert run(name, directory, "--trust-remote-code") == 0
    (directory / "modeling_x.py").write_text((directory / "modeling_x.py").read_text().replace("Tanh", "GELU"))
    assert run(name, directory, "--trust-remote-code") == 2
    assert "of another configuration (config.remote_code_sha256.x: " in capsys.readouterr().err


def test_the_flag_changes_no_result_that_runs_no_code(tiny, tmp_path):
    tiny.save(tiny.model("full", "gdn"), tmp_path / "m")
    tiny.recall_folder(tmp_path)
    given = dict(paths=(tmp_path / "m",), texts=(tmp_path / "texts",), length=64)
    without, trusted = (Plan(Config(**given, **more), "cpu").identity() for more in ({}, {"trust_remote_code": True}))
    assert trusted == without
    assert "trust_remote_code" not in without
