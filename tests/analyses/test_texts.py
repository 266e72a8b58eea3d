"""Texts from files and folders, cut and never padded; what cannot be read is named by file and line."""

import json

import numpy as np
import pytest

from analyses.texts import Text, first_tokens, read_texts
from models.errors import InputError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_bytes("zwei\r\nZeilen é".encode())
    (tmp_path / "deep" / "a.txt").write_text("first")
    lines = [{"text": "one"}, {"input": "two", "id": 3}, {"prompt": "three"}, {"text": None, "context": "four"}]
    (tmp_path / "c.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "notes.md").write_text("no text")
    return tmp_path


def test_folders_are_read_to_their_depth_in_order_of_names(folder):
    found = read_texts([folder])
    assert [text.name for text in found] == ["b", "c:1", "c:3", "c:5", "c:7", "a"]
    assert [text.content for text in found] == ["zwei\r\nZeilen é", "one", "two", "three", "four", "first"]
    given = read_texts([folder / "c.jsonl", folder / "deep"])
    assert [text.name for text in given] == ["c:1", "c:3", "c:5", "c:7", "a"]


def test_default_is_what_ships():
    assert {"argparse", "tarfile"} <= {text.name for text in read_texts(None)}


@pytest.mark.parametrize(("content", "words"), [
    ("{bad", r"x\.jsonl, line 2 is not JSON"),
    ("[1]", r"x\.jsonl, line 2 is a JSON list; expected an object with one of text, input, prompt, context"),
    ('{"body": "a", "text": 3}', r"x\.jsonl, line 2 has body, text; expected text in one of"),
    ("{}", r"line 2 has no fields"),
    ('{"text": "\\ud800"}', r"line 2 holds half a character"),
])  # fmt: skip
def test_lines_that_are_no_text(tmp_path, content, words):
    (tmp_path / "x.jsonl").write_text('{"text": "good"}\n' + content)
    with pytest.raises(InputError, match=words):
        read_texts([tmp_path])


def test_paths_that_are_no_texts(folder):
    (folder / "empty").mkdir()
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    for path, words in (
        (folder / "nowhere", "no such file or folder"),
        (folder / "notes.md", r"suffix '\.md', expected \.txt or \.jsonl"),
        (folder / "empty", "no text found; give .txt files"),
        (folder / "latin.txt", r"latin\.txt cannot be read as UTF-8"),
    ):
        with pytest.raises(ValueError, match=words):
            read_texts([path])


TEXTS = [Text("long", "abcdefghij"), Text("short", "abc"), Text("exact", "klmno"), Text("more", "pqrstuv")]


def test_texts_are_cut_or_skipped_never_padded(tiny):
    tokenizer = tiny.tokenizer()
    cut = first_tokens(TEXTS, tokenizer, 5, None)
    assert cut.names == ["long", "exact", "more"]
    assert [tokenizer.decode(row) for row in cut.ids] == ["abcde", "klmno", "pqrst"]
    assert cut.n_tokens.tolist() == [10, 5, 7]
    assert (cut.examined, cut.too_short, cut.longest, cut.bos) == (4, 1, 10, False)
    two = first_tokens(TEXTS, tokenizer, 5, 2)
    assert (two.names, two.examined, two.too_short) == (["long", "exact"], 3, 1)
    assert two.sha256 != cut.sha256 == first_tokens(TEXTS, tokenizer, 5, 99).sha256
    with pytest.raises(
        InputError, match="none of 4 texts has 11 tokens, the longest 10; give longer texts, or --length 10"
    ):
        first_tokens(TEXTS, tokenizer, 11, None)


def test_a_bos_stands_in_front_once_and_counts(tiny):
    tokenizer = tiny.tokenizer()
    tokenizer.bos_id = tokenizer.encode("<")[0]
    cut = first_tokens([*TEXTS, Text("own", "<wxyz")], tokenizer, 5, None)
    assert cut.bos
    assert [tokenizer.decode(row) for row in cut.ids] == ["<abcd", "<klmn", "<pqrs", "<wxyz"]
    assert cut.n_tokens.tolist() == [11, 6, 8, 5]
    assert np.issubdtype(cut.ids.dtype, np.int64)
