"""Undoing the later merges of a BPE is encoding without them, and a model may have embeddings as narrow as that."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from models.pretrain import corpus_vocabulary
from models.pretrain.corpus_sources import CorpusError
from models.pretrain.corpus_vocabulary import Config, expanded, expansions, narrow, narrowed

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = json.loads((ROOT / "ckpt" / "gdn" / "tokenizer.json").read_text("utf-8"))
TEXT = (ROOT / "README.md").read_text("utf-8") + "\n\tif (x == 31415926) { naïve(…); } 😀<|endoftext|>\n" + __doc__


def encode(definition, text):
    return tokenizers.Tokenizer.from_str(json.dumps(definition)).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("size", [257, 258, 512, 4096])
def test_expanding_ids_is_encoding_with_fewer_merges(size):
    whole = encode(TOKENIZER, TEXT)
    found = expanded(np.array(whole, np.uint16), expansions(TOKENIZER, size))
    expected = encode(narrowed(TOKENIZER, size), TEXT)
    assert found.tolist() == expected
    assert max(expected) < size
    assert (len(expected) == len(whole)) is (size == 4096)


def test_a_folder_is_narrowed_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_vocabulary, "CHUNK", 100)
    ids = np.array(encode(TOKENIZER, TEXT), np.uint16)
    (tmp_path / "corpus").mkdir()
    for part in ("train.bin", "val.bin"):
        ids.tofile(tmp_path / "corpus" / part)
    (tmp_path / "corpus" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    counts = narrow(Config(size=300, out=tmp_path / "small", corpus=tmp_path / "corpus"))
    written = np.fromfile(tmp_path / "small" / "train.bin", np.uint16)
    assert len(ids) > 300
    assert counts == {"train.bin": len(written), "val.bin": len(written)}
    small = tokenizers.Tokenizer.from_file(str(tmp_path / "small" / "tokenizer.json"))
    assert small.get_vocab_size() == 300
    assert small.decode(written.tolist(), skip_special_tokens=False) == TEXT


def test_what_cannot_be_narrowed_is_refused(tmp_path):
    with pytest.raises(CorpusError, match=r"--size is 256; expected 257 \(no merge\) to 4096"):
        narrowed(TOKENIZER, 256)
    swapped = copy.deepcopy(TOKENIZER)
    swapped["model"]["merges"][:2] = swapped["model"]["merges"][1::-1]
    with pytest.raises(CorpusError, match="does not make the token of its rank"):
        narrowed(swapped, 300)
    other = copy.deepcopy(TOKENIZER)
    other["model"]["type"] = "Unigram"
    with pytest.raises(CorpusError, match="of type Unigram; expected BPE"):
        expansions(other, 300)
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    with pytest.raises(CorpusError, match="is not empty; expected a new folder"):
        narrow(Config(size=300, out=tmp_path, corpus=tmp_path))
