"""The command that makes key tokens, and the embedded evaluation data."""

import hashlib
import os
import platform
from pathlib import Path

import numpy as np
import pytest
import torch

from analyses import data
from analyses.key_tokens import Config, main
from models import command_line
from probes.long_ppl import load_key_tokens

TEXTS = {"first": "abcabcabcdabcdeabcdefab" * 2, "second": "fedcbafedcbafedcbafedcba"}


class Evaluator:
    """One token per letter; a smooth function of the mean of what was seen."""

    device = torch.device("cpu")

    def __init__(self):
        generator = np.random.default_rng(0)
        self.table, self.output = (torch.tensor(generator.normal(size=size)) for size in ((6, 5), (5, 6)))
        self.tokenizer = self
        self.bos_id = None

    def encode_with_offsets(self, text):
        return ["abcdef".index(c) for c in text], [(i, i + 1) for i in range(len(text))]

    def final_hidden(self, input_ids):
        return self.table[input_ids].cumsum(1)

    def unembed(self, hidden):
        return hidden @ self.output


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """texts/ with two files; models.load gives Evaluator and counts its calls in `loads`."""
    import models

    loads = []

    def load(path, device=None, *, trust_remote_code=False):
        loads.append(path)
        return Evaluator()

    monkeypatch.setattr(models, "load", load, raising=False)
    (tmp_path / "texts").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    return tmp_path, loads


def command(folder: Path, *more: str) -> int:
    texts, out = folder / "texts", folder / "out"
    settings = ["--context", "6", "--stride", "3", "--alpha", "0.1", "--beta", "-9", "--length", "20"]
    arguments = [str(folder / "evaluator"), "--texts", str(texts), "--out", str(out), *settings, *more]
    with pytest.raises(SystemExit) as stop:
        command_line.run(main, Config, arguments=arguments)
    return stop.value.code


def test_one_file_per_text_and_a_rerun_computes_only_what_is_missing(folder, capsys):
    path, loads = folder
    assert command(path) == 0
    files = {file.name: file.read_bytes() for file in (path / "out").iterdir()}
    assert sorted(files) == ["first.json", "second.json"]
    found = load_key_tokens(path / "out" / "first.json")
    assert (found.evaluator, found.n_tokens, found.context, found.stride) == ("evaluator", 20, 6, 3)
    assert found.n_key > 0
    assert "key tokens in 2 texts" in capsys.readouterr().out
    (path / "out" / "second.json").unlink()
    before = (path / "out" / "first.json").stat().st_mtime_ns
    assert command(path) == 0
    assert {file.name: file.read_bytes() for file in (path / "out").iterdir()} == files
    assert (path / "out" / "first.json").stat().st_mtime_ns == before
    assert command(path) == 0
    assert len(loads) == 2  # nothing was missing the third time


def test_results_of_other_settings_are_kept_unless_told(folder, capsys):
    path, _ = folder
    command(path)
    for change in (["--stride", "2"], ["--alpha", "0.25"], ["--length", "19"], ["--name", "another"]):
        assert command(path, *change) == 2
        assert "made with other settings" in capsys.readouterr().err
    (path / "texts" / "first.txt").write_text("b" + TEXTS["first"][1:])
    assert command(path) == 2
    assert command(path, "--stride", "2", "--overwrite") == 0
    assert load_key_tokens(path / "out" / "first.json").stride == 2


@pytest.mark.parametrize("fault", ["no texts", "short text", "not UTF-8"])
def test_bad_input_is_one_line_and_exit_code_2(folder, capsys, fault):
    path, _ = folder
    if fault == "no texts":
        for file in (path / "texts").iterdir():
            file.unlink()
    elif fault == "short text":
        (path / "texts" / "first.txt").write_text("abc")
    else:
        (path / "texts" / "first.txt").write_bytes(b"\xff\xfe")
    assert command(path) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


# The embedded evaluation


@pytest.mark.parametrize(("domain", "least_texts", "least_keys"), [("code", 16, 3), ("documentation", 12, 16)])
def test_embedded_key_tokens_are_enough_and_belong_to_the_texts(domain, least_texts, least_keys):
    texts, found = data.texts(domain), data.key_tokens(domain=domain)
    assert len(found) >= least_texts
    assert set(found) <= set(texts)
    assert sum(document.n_key for document in found.values()) >= 400
    for name, document in found.items():
        span = texts[name][: document.n_characters]
        assert hashlib.sha256(span.encode()).hexdigest() == document.text_sha256, name
        assert (document.n_tokens, document.context, document.stride) == (3072, 384, 96), name
        assert (document.alpha, document.beta) == (2.0, -2.0), name
        assert document.n_key >= least_keys, name
        assert (np.flatnonzero(document.is_key) >= 384).all(), name


@pytest.mark.parametrize("domain", data.FOLDERS)
def test_embedded_texts_are_those_of_the_notice(domain):
    notice = (data.FOLDERS[domain] / "NOTICE").read_text()
    files = sorted((data.FOLDERS[domain] / "texts").glob("*.txt"))
    assert [file.stem for file in files] == list(data.texts(domain))
    for file in files:
        assert f"{hashlib.sha256(file.read_bytes()).hexdigest()}  texts/{file.name}" in notice
    assert notice.count("  texts/") == len(files)


def test_the_domains_share_no_text():
    assert not set(data.texts("code").values()) & set(data.texts("documentation").values())
    with pytest.raises(ValueError, match="domain is 'poetry'; expected code or documentation"):
        data.texts("poetry")


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="the texts are those of CPython 3.11.7")
def test_embedded_texts_are_the_beginning_of_the_modules():
    library = Path(os.__file__).parent
    for name, text in data.texts().items():
        stem = library / name.replace(".", "/")
        module = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        assert module.read_bytes().decode().startswith(text), name


def test_an_evaluator_without_key_tokens_is_named():
    with pytest.raises(ValueError, match=f"evaluators with key tokens: {data.EVALUATOR}"):
        data.key_tokens("llama-3.1-8b")
