"""What the receptive-field study measures a model on: documents with key tokens, and needle prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analyses.background import Background
from models.errors import InputError
from probes import long_ppl, niah, repeat_copy

NGRAM = 4
POSITION_SCALE = 1 / 8  # of the text: partners that far apart are as unlike as a whole caliper of the matching


@dataclass(frozen=True)
class EvaluationDocument:
    """A text with its key tokens under an independent evaluator (probes.long_ppl)."""

    name: str
    text: str
    key_tokens: long_ppl.KeyTokens

    @property
    def sha256(self) -> str:
        """Of all that decides a model's score on it: the evaluated text, and what the evaluator said of each token."""
        keys = self.key_tokens
        settings = [keys.text_sha256, keys.evaluator, keys.context, keys.alpha, keys.beta]
        digest = hashlib.sha256(json.dumps(settings).encode())
        for values, kind in ((keys.offsets, "<i8"), (keys.log_p_long, "<f8"), (keys.log_p_short, "<f8")):
            digest.update(np.ascontiguousarray(values, dtype=kind).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Encoded:
    """A document in one tokenizer: ids [T], and indices into them."""

    name: str
    ids: np.ndarray
    key: np.ndarray
    """Key tokens."""
    first: np.ndarray
    """Of these the first inside each key interval."""
    paired: np.ndarray
    """Key tokens that have a partner, in the order of `matched`."""
    matched: np.ndarray
    """Their partners, which are no key tokens."""
    repeats: repeat_copy.Repeats
    start: int = 0
    """Tokens in front that belong to other texts; neither measured nor counted."""

    @property
    def own(self) -> int:
        """Tokens of the document itself."""
        return len(self.ids) - self.start

    def behind(self, tokens: np.ndarray, bos: bool) -> Encoded:
        """The same document after `tokens` of other texts (behind the BOS, if there is one)."""
        ids, more = np.insert(self.ids, int(bos), tokens), len(tokens)
        moved = repeat_copy.Repeats(self.repeats.second + more, self.repeats.first + more)
        key, first, paired, matched = (p + more for p in (self.key, self.first, self.paired, self.matched))
        return Encoded(self.name, ids, key, first, paired, matched, moved, self.start + more)


def documents(
    texts: Path | None, key_tokens: Path | None, count: int | None, domain: str = "code"
) -> list[EvaluationDocument]:
    """The embedded documents of a domain, or those of two folders with the same file names (.txt and .json).

    Documents without a key token are left out; of the rest the `count` with the most key tokens, in order of names.
    Raises InputError if nothing is left, or if a text is not the one that its key tokens were made from.
    """
    from analyses import data

    if (texts is None) != (key_tokens is None):
        raise InputError("--texts and --key-tokens go together; make key tokens with `python -m analyses.key_tokens`")
    if texts is None or key_tokens is None:
        bodies, keys = data.texts(domain), data.key_tokens(domain=domain)
    else:
        bodies = {path.stem: data.read_text(path) for path in sorted(texts.glob("*.txt"))}
        keys = {path.stem: long_ppl.load_key_tokens(path) for path in sorted(key_tokens.glob("*.json"))}
    found = [EvaluationDocument(name, bodies[name], keys[name]) for name in sorted(bodies) if name in keys]
    for document in found:
        _check_text(document)
    usable = [document for document in found if document.key_tokens.n_key > 0]
    if not usable:
        where = f"{texts} and {key_tokens}" if texts else "the embedded texts"
        raise InputError(
            f"no usable document in {where}: {len(bodies)} texts, {len(keys)} key-token files, "
            f"{len(found)} of both, none with a key token; key tokens need texts longer than the short context"
        )
    ranked = sorted(usable, key=lambda document: (-document.key_tokens.n_key, document.name))
    return sorted(ranked[:count], key=lambda document: document.name)


def _check_text(document: EvaluationDocument) -> None:
    keys = document.key_tokens
    found = long_ppl.text_sha256(document.text[: keys.n_characters])
    if found != keys.text_sha256:
        raise InputError(
            f"document {document.name!r}: its first {keys.n_characters} characters are not those its key tokens were "
            f"made from (sha256 {found[:12]}, expected {keys.text_sha256[:12]}); make key tokens anew with "
            "`python -m analyses.key_tokens`"
        )


def encode(document: EvaluationDocument, tokenizer: Any, background: Background) -> Encoded:
    """The evaluated span in a model's tokenizer; partners as in probes.long_ppl.matched_tokens, repeated n-grams as in
    probes.repeat_copy, frequency and rarity as in `background`.

    One BOS stands in front if the tokenizer has one (its texts begin with it), and is no token of the span.
    """
    span = document.text[: document.key_tokens.n_characters]
    ids, offsets = tokenizer.encode_with_offsets(span)
    pairs = long_ppl.matched_tokens(
        ids, offsets, document.key_tokens, span,
        counts=background.token_counts, position_scale=max(1.0, POSITION_SCALE * len(ids)),
    )  # fmt: skip
    key = long_ppl.key_positions(offsets, document.key_tokens, span)
    first = long_ppl.first_positions(offsets, document.key_tokens, span)
    second, earlier = repeat_copy.find(ids, NGRAM, background.ngram_counts)
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    shift = len(bos)
    key, first = (places if bos else places[places > 0] for places in (key, first))
    scored = slice(None) if bos else earlier > 0  # nothing predicts the first token
    repeats = repeat_copy.Repeats(second[scored] + shift, earlier[scored] + shift)
    whole = np.asarray([*bos, *ids], dtype=np.int64)
    return Encoded(document.name, whole, key + shift, first + shift, pairs.key + shift, pairs.matched + shift, repeats)


@dataclass(frozen=True)
class Matching:
    """How alike key tokens and partners are: standardised differences [3] of the covariates of the matching."""

    before: np.ndarray
    after: np.ndarray
    key_means: np.ndarray
    matched_means: np.ndarray
    n_pairs: int
    n_unmatched: int


def matching(
    documents: Sequence[EvaluationDocument], encoded: Sequence[Encoded], tokenizer: Any, background: Background
) -> Matching:
    """Of all documents together; `before`: key tokens against all non-key tokens that could be partners."""
    key, matched, others = [], [], []
    shift = 0 if tokenizer.bos_id is None else 1
    for document, one in zip(documents, encoded, strict=True):
        span = document.text[: document.key_tokens.n_characters]
        ids, offsets = tokenizer.encode_with_offsets(span)
        found = long_ppl.covariates(ids, offsets, document.key_tokens, span, background.token_counts)
        key.append(found.values[one.paired - shift])
        matched.append(found.values[one.matched - shift])
        others.append(found.values[found.candidates])
    pairs, partners, candidates = map(np.concatenate, (key, matched, others))
    return Matching(
        long_ppl.standardised_differences(pairs, candidates, candidates),
        long_ppl.standardised_differences(pairs, partners, candidates),
        _means(pairs),
        _means(partners),
        len(pairs),
        sum(len(one.key) for one in encoded) - len(pairs),
    )


def _means(values: np.ndarray) -> np.ndarray:
    return values.mean(axis=0) if len(values) else np.full(values.shape[1], np.nan)


def prompts(tokenizer: Any, settings: Mapping[str, Any]) -> Sequence[niah.NIAHSample]:
    """Needle prompts for one tokenizer; `settings` are the arguments of probes.niah.build."""
    return niah.build(tokenizer, values="numbers", **settings)
