"""The corpus from located package files: read, deduplicate, train the tokenizer, choose documents, write and record.

The same inputs, evaluation texts and Recipe give the same bytes: documents are ordered by name or by a hash of it,
never by a library's random numbers, and nothing depends on threads or on the machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tqdm import tqdm

from models.pretrain import corpus_bpe, corpus_dedup, corpus_readers, corpus_select
from models.pretrain.corpus_sources import CorpusError, Document, Located, Source, file_sha256

OUTPUTS = ("train.bin", "val.bin", "train.idx.npy", "val.idx.npy", "tokenizer.json")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the corpus, beside its sources and the evaluation texts."""

    seed: int = 0
    vocab_size: int = 4096
    bpe_sample_characters: int = 40_000_000
    train_tokens: int = 80_000_000  # separators included; reached to within one document
    val_tokens: int = 1_000_000
    long_tokens: int = 4096  # a document of at least so many tokens is long
    min_bytes: int = 128  # shorter documents are left out
    filler_bytes: int = 262_144  # larger files of a filler source are left out (tables)
    filler_small_bytes: int = 12_288  # a filler file below it probably is a short document
    filler_small_share: float = 0.9  # random share of the filler files below that size that are read at all
    filler_large_share: float = 0.16  # and of the others
    ngram_words: int = 13
    boilerplate_documents: int = 20  # evaluation n-grams in more documents than this are boilerplate
    near_duplicate_share: float = 0.5  # of a document's sampled n-grams already seen


def read_documents(located: Sequence[Located], recipe: Recipe) -> tuple[list[Document], list[Document], dict[str, int]]:
    """(documents sorted by source and name, held-out documents, counts of documents that were left out)."""
    documents: list[Document] = []
    held_out: list[Document] = []
    left_out = {"not_utf8": 0, "too_small": 0}
    for item in located:
        source = item.source
        found: list[Document] = []
        reading = corpus_readers.read_source(source, item.path, keep_rule(source, recipe))
        for name, data in tqdm(reading, desc=f"read {source.name}", unit="doc", mininterval=1):
            if len(data) < recipe.min_bytes:
                left_out["too_small"] += 1
                continue
            try:
                found.append(Document(source.name, name, data.decode()))
            except UnicodeDecodeError:
                left_out["not_utf8"] += 1
        if not found:
            raise CorpusError(f"source {source.name}: {item.path} has no document matching {source.pattern!r}.")
        longest = sorted(found, key=lambda document: (-len(document.text.encode()), document.name))
        held_out += longest[: source.hold_out_longest]
        documents += sorted(longest[source.hold_out_longest :], key=lambda document: document.name)
    return documents, held_out, left_out


def keep_rule(source: Source, recipe: Recipe) -> corpus_readers.Keep:
    """Which members of a source are read: all, or of a filler a fixed random share by size."""

    def keep(name: str, size: int) -> bool:
        if not source.filler:
            return True
        share = recipe.filler_small_share if size < recipe.filler_small_bytes else recipe.filler_large_share
        return size <= recipe.filler_bytes and corpus_readers.sampled(recipe.seed, f"{source.name}/{name}", share)

    return keep


def read_evaluation(folder: Path) -> tuple[list[str], dict[str, str]]:
    """(texts, sha256 by file name) of the folder's *.txt and *.py files, licence notices aside."""
    found = folder.iterdir() if folder.is_dir() else ()
    paths = sorted(p for p in found if p.suffix in (".txt", ".py") and not p.name.startswith(("NOTICE", "__init__")))
    if not paths:
        raise CorpusError(f"evaluation texts: no *.txt or *.py file in {folder}. Pass the folder: --evaluation-texts.")
    return [path.read_text("utf-8") for path in paths], {path.name: file_sha256(path) for path in paths}


def deduplicate(
    documents: list[Document], evaluation: list[str], recipe: Recipe
) -> tuple[list[Document], dict[str, dict[str, int]], int]:
    """(kept, removed documents by reason and source, boilerplate n-grams)."""
    unique, repeated = corpus_dedup.without_exact_duplicates(documents)
    kept, shared, near, boilerplate = corpus_dedup.without_evaluation_and_near_duplicates(
        unique,
        evaluation,
        n=recipe.ngram_words,
        boilerplate_documents=recipe.boilerplate_documents,
        fraction=recipe.near_duplicate_share,
    )
    removed = {"exact_duplicates": repeated, "shares_evaluation_text": shared, "near_duplicates": near}
    names = list(dict.fromkeys(document.source for document in documents))
    table = {
        reason: {name: sum(document.source == name for document in group) for name in names}
        for reason, group in removed.items()
    }
    return kept, table, boilerplate


def build(
    out: Path, recipe: Recipe, located: Sequence[Located], evaluation_texts: Path, overwrite: bool = False
) -> dict[str, Any]:
    """Build the corpus of `located` in `out` and return the content of its corpus.json.

    A finished corpus of the same recipe, inputs and evaluation texts is verified and kept; another one is refused
    unless `overwrite`. The real sources take 1.5 GB of memory and about six minutes on two cores.
    """
    evaluation, evaluation_sha256 = read_evaluation(evaluation_texts)
    identity = {
        "format": "hybridscope-corpus",
        "format_version": 1,
        "recipe": asdict(recipe),
        "inputs": {item.source.name: describe_input(item) for item in located},
        "evaluation_texts": evaluation_sha256,
    }
    if (out / "corpus.json").exists() and not overwrite:
        return verify(out, identity)
    out.mkdir(parents=True, exist_ok=True)
    (out / "corpus.json").unlink(missing_ok=True)  # written last: its presence says that the corpus is whole
    documents, held_out, left_out = read_documents(located, recipe)
    read = {item.source.name: sum(d.source == item.source.name for d in documents) for item in located}
    kept, removed, boilerplate = deduplicate(documents, evaluation + [d.text for d in held_out], recipe)
    train, val = tokenize_and_select(out, recipe, located, kept)
    record = identity | {
        "tokenizers_version": tokenizers.__version__,
        "read": read,
        "left_out": left_out,
        "removed": removed,
        "boilerplate_ngrams": boilerplate,
        "held_out": sorted(document.name for document in held_out),
        "train": totals(train, recipe),
        "val": totals(val, recipe),
        "outputs": {name: file_sha256(out / name) for name in OUTPUTS},
    }
    (out / "corpus.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", "utf-8")
    return record


def describe_input(item: Located) -> dict[str, str]:
    source = item.source
    return {
        "package": source.package,
        "registry": source.registry,
        "version": item.version,
        "file": item.path.name,
        "sha256": item.sha256,
        "licence": source.licence,
    }


def tokenize_and_select(
    out: Path, recipe: Recipe, located: Sequence[Located], kept: Sequence[Document]
) -> tuple[list[corpus_select.Encoded], list[corpus_select.Encoded]]:
    """Train and write the tokenizer, choose both halves, write train and val; returns what they hold, in order."""
    sample = corpus_bpe.bpe_sample(kept, recipe.seed, recipe.bpe_sample_characters)
    texts = tqdm((document.text for document in sample), desc="train tokenizer", total=len(sample), unit="doc")
    tokenizer = corpus_bpe.train_tokenizer(iter(texts), recipe.vocab_size)
    (out / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    halves = corpus_select.select_halves(
        kept,
        lambda documents: corpus_bpe.encode_documents(tokenizer, documents),
        budget=(recipe.train_tokens + recipe.val_tokens) // 2,
        long_tokens=recipe.long_tokens,
        fillers=frozenset(item.source.name for item in located if item.source.filler),
        seed=recipe.seed,
    )
    train, val = corpus_select.split(halves, recipe.val_tokens, recipe.seed)
    for name, part in (("train", train), ("val", val)):
        corpus_select.write_ids(part, out / f"{name}.bin", out / f"{name}.idx.npy")
    return train, val


def totals(entries: Sequence[corpus_select.Encoded], recipe: Recipe) -> dict[str, Any]:
    table = corpus_select.counts(entries, recipe.long_tokens)
    rows = table["halves"].values()
    return {key: sum(row[key] for row in rows) for key in ("documents", "tokens", "characters")} | table


def verify(out: Path, identity: dict[str, Any] | None = None, names: Sequence[str] = OUTPUTS) -> dict[str, Any]:
    """corpus.json of `out`, after checking that it is of this identity and that the files are those it records."""
    try:
        record: dict[str, Any] = json.loads((out / "corpus.json").read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise CorpusError(f"{out / 'corpus.json'} is not JSON ({error}). Rebuild with --overwrite.") from error
    for key, expected in (identity or {}).items():
        if record.get(key) != expected:
            raise CorpusError(
                f"{out} holds a corpus whose {key!r} differs from this build's. Choose another --out or --overwrite."
            )
    for name in names:
        found = file_sha256(out / name) if (out / name).exists() else "no file"
        if found != record["outputs"][name]:
            raise CorpusError(
                f"{out / name} has sha256 {found[:16]}, expected {record['outputs'][name][:16]} (corpus.json). "
                f"Rebuild with --overwrite."
            )
    return record
