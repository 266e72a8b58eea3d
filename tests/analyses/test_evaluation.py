"""What models are measured on: documents with key tokens, their choice and their refusal, and their encoding."""

import dataclasses

import numpy as np
import pytest

from analyses import background, evaluation
from models.errors import InputError
from probes import long_ppl


def write(tiny, folder, key):
    texts = {name: "".join(tiny.characters[(7 * i + len(name)) % 94] for i in range(60)) for name in key}
    tiny.texts(folder, texts, key)
    return texts


def test_documents_with_the_most_key_tokens_in_order_of_names(tiny, tmp_path):
    key = {"d": [30, 31], "b": [30, 33, 40], "a": [], "c": [41, 43], "ee": [30]}
    texts = write(tiny, tmp_path, key)
    found = evaluation.documents(tmp_path / "texts", tmp_path / "keys", None)
    assert [document.name for document in found] == ["b", "c", "d", "ee"], "no key token, no document"
    assert all(document.text == texts[document.name] for document in found)
    for count, names in ((1, ["b"]), (2, ["b", "c"]), (3, ["b", "c", "d"]), (99, ["b", "c", "d", "ee"])):
        found = evaluation.documents(tmp_path / "texts", tmp_path / "keys", count)
        assert [document.name for document in found] == names, "ties go to the earlier name"


def test_the_embedded_documents_are_whole_and_ordered():
    found = evaluation.documents(None, None, None)
    assert len(found) >= 4
    assert all(document.key_tokens.n_key > 0 for document in found)
    best = evaluation.documents(None, None, 4)
    least = min(document.key_tokens.n_key for document in best)
    assert sum(document.key_tokens.n_key > least for document in found) <= 4
    assert len({document.sha256 for document in found}) == len(found)


def test_a_text_that_changed_after_its_key_tokens_were_made_is_refused(tiny, tmp_path):
    text = write(tiny, tmp_path, {"one": [30]})["one"]
    path = tmp_path / "texts" / "one.txt"
    path.write_text(text + " and more that was never evaluated")
    assert len(evaluation.documents(tmp_path / "texts", tmp_path / "keys", None)) == 1
    for changed in (text[:20] + "\u00e9" + text[21:], text[:-1], " " + text):
        path.write_text(changed)
        with pytest.raises(InputError, match="'one': its first 60 characters are not those its key tokens"):
            evaluation.documents(tmp_path / "texts", tmp_path / "keys", None)


def test_folders_that_cannot_be_used(tiny, tmp_path):
    write(tiny, tmp_path, {"one": []})
    for texts, keys in ((tmp_path / "texts", None), (None, tmp_path / "keys")):
        with pytest.raises(InputError, match="--texts and --key-tokens go together"):
            evaluation.documents(texts, keys, None)
    with pytest.raises(InputError, match="1 texts, 1 key-token files, 1 of both, none with a key token"):
        evaluation.documents(tmp_path / "texts", tmp_path / "keys", None)
    with pytest.raises(InputError, match="1 texts, 0 key-token files, 0 of both"):
        evaluation.documents(tmp_path / "texts", tmp_path / "nothing", None)
    (tmp_path / "keys" / "one.json").write_text("{}")
    with pytest.raises(ValueError, match=r"one\.json"):
        evaluation.documents(tmp_path / "texts", tmp_path / "keys", None)


def test_encoding_keeps_the_evaluated_span_and_finds_keys_and_matches(tiny, tmp_path):
    text = write(tiny, tmp_path, {"one": [0, 30, 41]})["one"]
    (tmp_path / "texts" / "one.txt").write_text(text + "0123")
    (document,) = evaluation.documents(tmp_path / "texts", tmp_path / "keys", None)
    tokenizer = tiny.tokenizer()
    around = background.in_tokens({"one": text}, tokenizer, evaluation.NGRAM)
    encoded = evaluation.encode(document, tokenizer, around)
    assert encoded.name == "one"
    assert encoded.ids.tolist() == tokenizer.encode(text)
    assert encoded.key.tolist() == [30, 41], "nothing predicts the first token"
    ids, offsets = tokenizer.encode_with_offsets(text)
    expected = long_ppl.matched_tokens(
        ids, offsets, document.key_tokens, text, counts=around.token_counts, position_scale=60 / 8
    )
    np.testing.assert_array_equal(encoded.matched, expected.matched)
    np.testing.assert_array_equal(encoded.paired, expected.key)
    assert len(expected.matched) == 2
    assert (expected.matched > tiny.short).all()


def test_the_hash_covers_all_that_decides_a_score(tiny):
    text = "the quick brown fox jumps over the lazy dog again"
    base = evaluation.EvaluationDocument("x", text, tiny.key_tokens(text, [30]))
    assert base.sha256 == evaluation.EvaluationDocument("y", text, tiny.key_tokens(text, [30])).sha256
    longer = np.where(np.arange(len(text)) == 35, -0.5, base.key_tokens.log_p_long)
    changed = [
        tiny.key_tokens(text, [31]),
        tiny.key_tokens(text.upper(), [30]),
        dataclasses.replace(base.key_tokens, alpha=1.0),
        dataclasses.replace(base.key_tokens, beta=-3.0),
        dataclasses.replace(base.key_tokens, context=23),
        dataclasses.replace(base.key_tokens, log_p_long=longer),
        dataclasses.replace(base.key_tokens, offsets=base.key_tokens.offsets + 1),
    ]
    hashes = {base.sha256, *(evaluation.EvaluationDocument("x", text, keys).sha256 for keys in changed)}
    assert len(hashes) == 1 + len(changed)


def test_prompts_are_those_of_the_probe(tiny):
    prompts = evaluation.prompts(tiny.tokenizer(), {"length": 330, "n": 3, "seed": 4, "haystack": "noise"})
    assert len(prompts) == 3
    assert all(len(sample.input_ids) == 330 for sample in prompts)
    with pytest.raises(ValueError, match="ask for at least"):
        evaluation.prompts(tiny.tokenizer(), {"length": 30, "n": 3, "seed": 4, "haystack": "noise"})
