"""Removal of duplicates and of evaluation text, by n-grams of words.

word   = an ASCII identifier or word, lower case; numbers, punctuation and white space do not count
n-gram = h_t = sum_i w_{t+i} P^(n-1-i) mod 2^64 over n consecutive words, w = 64-bit hashes of the words
A document is removed when it shares an n-gram with an evaluation text, unless that n-gram is boilerplate: it occurs in
more than `boilerplate_documents` documents of the candidates (licence headers and the like).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

import numpy as np
from tqdm import tqdm

from models.pretrain.corpus_sources import Document

WORD = re.compile(rb"\b[A-Za-z_]\w*")
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class WordHashes(dict[bytes, int]):
    """Word -> 64-bit hash, computed once a word (Python's own hash() differs from run to run)."""

    def __missing__(self, word: bytes) -> int:
        value = int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little")
        self[word] = value
        return value


def ngram_hashes(text: str, n: int, words: WordHashes) -> np.ndarray:
    """uint64 hashes of all n-grams of the text, in order; empty for fewer than n words."""
    found = WORD.findall(text.encode().lower())
    values = np.fromiter((words[word] for word in found), np.uint64, len(found))
    count = len(values) - n + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    hashes = np.zeros(count, np.uint64)
    for i in range(n):
        hashes = hashes * MULTIPLIER + values[i : i + count]
    return hashes


def without_exact_duplicates(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """(kept, removed); the first of equal texts (ends stripped) in the given order stays."""
    seen: dict[bytes, None] = {}
    kept: list[Document] = []
    removed: list[Document] = []
    for document in documents:
        digest = hashlib.sha256(document.text.strip().encode()).digest()
        (removed if digest in seen else kept).append(document)
        seen[digest] = None
    return kept, removed


def evaluation_ngrams(texts: Iterable[str], n: int, words: WordHashes) -> np.ndarray:
    """Sorted distinct n-gram hashes of the evaluation texts."""
    return np.unique(np.concatenate([np.empty(0, np.uint64), *(ngram_hashes(text, n, words) for text in texts)]))


def hits(hashes: np.ndarray, evaluation: np.ndarray) -> np.ndarray:
    """Distinct indices into `evaluation` of the n-grams that also occur in `hashes`."""
    if not len(evaluation) or not len(hashes):
        return np.empty(0, np.int64)
    at = np.minimum(np.searchsorted(evaluation, hashes), len(evaluation) - 1)
    return np.unique(at[evaluation[at] == hashes])


def is_near_duplicate(hashes: np.ndarray, seen: set[int], every: int, fraction: float) -> bool:
    """Whether more than `fraction` of the document's sampled n-grams (one in `every`, by value) were seen before.

    Adds them to `seen` otherwise. Documents with fewer than 4 sampled n-grams are never judged.
    """
    sample = np.unique(hashes[hashes % np.uint64(every) == 0]).tolist()
    if len(sample) >= 4 and sum(value in seen for value in sample) > fraction * len(sample):
        return True
    seen.update(sample)
    return False


def without_evaluation_and_near_duplicates(
    documents: Sequence[Document], evaluation: Iterable[str], *, n: int, boilerplate_documents: int, fraction: float
) -> tuple[list[Document], list[Document], list[Document], int]:
    """(kept, shares an n-gram with evaluation texts, near-duplicate of an earlier document, boilerplate n-grams)."""
    words = WordHashes()
    targets = evaluation_ngrams(evaluation, n, words)
    counts = np.zeros(len(targets), np.int64)
    found: list[np.ndarray] = []
    near: list[bool] = []
    seen: set[int] = set()
    for document in tqdm(documents, desc="deduplicate", unit="doc", mininterval=1):
        hashes = ngram_hashes(document.text, n, words)
        found.append(hits(hashes, targets))
        counts[found[-1]] += 1
        near.append(is_near_duplicate(hashes, seen, 16, fraction))
    boilerplate = counts > boilerplate_documents
    kept: list[Document] = []
    shared: list[Document] = []
    repeated: list[Document] = []
    for document, indices, is_near in zip(documents, found, near, strict=True):
        evaluated = not boilerplate[indices].all()
        (shared if evaluated else repeated if is_near else kept).append(document)
    return kept, shared, repeated, int(boilerplate.sum())
