"""Which documents make train.bin and val.bin: long and short ones 1:1 by tokens, whole, in a fixed random order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from models.pretrain.corpus_bpe import END_OF_TEXT_ID
from models.pretrain.corpus_readers import order_key
from models.pretrain.corpus_sources import CorpusError, Document


class Encoded(NamedTuple):
    """A document and its uint16 ids (no separator)."""

    document: Document
    ids: np.ndarray


def select_halves(
    documents: Sequence[Document],
    encode: Callable[[Sequence[Document]], Iterator[np.ndarray]],
    *,
    budget: int,
    long_tokens: int,
    fillers: frozenset[str],
    seed: int,
) -> list[list[Encoded]]:
    """[long, short], each of `budget` tokens (separators included) to within its last document.

    Documents come in one fixed random order, all but the fillers first, and are encoded until both halves are full.
    """
    pool = sorted(documents, key=lambda d: (d.source in fillers, order_key(seed, "take", d.source, d.name)))
    chosen: dict[str, list[Encoded]] = {"long": [], "short": []}
    totals = dict.fromkeys(chosen, 0)
    for document, ids in zip(pool, encode(pool), strict=True):
        half = "long" if len(ids) >= long_tokens else "short"
        if totals[half] < budget:
            chosen[half].append(Encoded(document, ids))
            totals[half] += len(ids) + 1
        if min(totals.values()) >= budget:
            return list(chosen.values())
    half = min(totals, key=lambda name: totals[name])
    raise CorpusError(
        f"the {half} half has {totals[half]:,} tokens, expected {budget:,}: sources too small. Lower the token target."
    )


def split(halves: Sequence[Sequence[Encoded]], val_tokens: int, seed: int) -> tuple[list[Encoded], list[Encoded]]:
    """(train, val), each in one fixed random order; val takes whole documents of each half until val_tokens / 2."""
    train: list[Encoded] = []
    val: list[Encoded] = []
    for half in halves:
        total = 0
        for entry in sorted(half, key=lambda e: order_key(seed, "val", e.document.source, e.document.name)):
            held_out = total < val_tokens / len(halves)
            (val if held_out else train).append(entry)
            total += len(entry.ids) + 1
    for part in (train, val):
        part.sort(key=lambda e: order_key(seed, "shuffle", e.document.source, e.document.name))
    return train, val


def write_ids(entries: Sequence[Encoded], ids_path: Path, index_path: Path) -> None:
    """ids (uint16, little endian), one separator after each document; and the index of documents."""
    separator = np.array([END_OF_TEXT_ID], "<u2")
    with ids_path.open("wb") as file:
        for entry in entries:
            assert not (entry.ids == END_OF_TEXT_ID).any(), "text never encodes to the separator"
            file.write(entry.ids.astype("<u2").tobytes() + separator.tobytes())
    write_index(ids_path, index_path)


def write_index(ids_path: Path, index_path: Path) -> None:
    """int64 starts of all documents of an id file, then its end: document i is ids[starts[i] : starts[i + 1] - 1]."""
    ends = np.flatnonzero(np.fromfile(ids_path, "<u2") == END_OF_TEXT_ID) + 1
    np.save(index_path, np.concatenate([[0], ends]).astype("<i8"))


def counts(entries: Sequence[Encoded], long_tokens: int) -> dict[str, dict[str, dict[str, int]]]:
    """{"sources" | "halves": {name: documents, tokens (separators included), characters}}, names in order."""
    table: dict[str, dict[str, dict[str, int]]] = {"sources": {}, "halves": {}}
    for entry in entries:
        half = "long" if len(entry.ids) >= long_tokens else "short"
        for group, name in (("sources", entry.document.source), ("halves", half)):
            row = table[group].setdefault(name, {"documents": 0, "tokens": 0, "characters": 0})
            row["documents"] += 1
            row["tokens"] += len(entry.ids) + 1
            row["characters"] += len(entry.document.text)
    return {group: dict(sorted(rows.items())) for group, rows in table.items()}
