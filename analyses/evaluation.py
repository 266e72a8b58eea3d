"""What the receptive-field study measures a model on: documents with key tokens, and needle prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import InputError
from probes import long_ppl, niah


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
    """A document in one tokenizer: ids [T], indices of key tokens, and of their matched non-key tokens."""

    name: str
    ids: np.ndarray
    key: np.ndarray
    matched: np.ndarray


def documents(texts: Path | None, key_tokens: Path | None, count: int | None) -> list[EvaluationDocument]:
    """The embedded documents, or those of two folders with the same file names (.txt and .json).

    Documents without a key token are left out; of the rest the `count` with the most key tokens, in order of names.
    Raises InputError if nothing is left, or if a text is not the one that its key tokens were made from.
    """
    from analyses import data

    if (texts is None) != (key_tokens is None):
        raise InputError("--texts and --key-tokens go together; make key tokens with `python -m analyses.key_tokens`")
    if texts is None or key_tokens is None:
        bodies, keys = data.texts(), data.key_tokens()
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


def encode(document: EvaluationDocument, tokenizer: Any) -> Encoded:
    """The evaluated span in a model's tokenizer; matched tokens as in probes.long_ppl.matched_tokens.

    One BOS stands in front if the tokenizer has one (its texts begin with it), and is no token of the span.
    """
    span = document.text[: document.key_tokens.n_characters]
    ids, offsets = tokenizer.encode_with_offsets(span)
    key = long_ppl.key_positions(offsets, document.key_tokens, span)
    matched = long_ppl.matched_tokens(ids, offsets, document.key_tokens, span)
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    key, shift = (key if bos else key[key > 0]), len(bos)
    return Encoded(document.name, np.asarray([*bos, *ids], dtype=np.int64), key + shift, matched.matched + shift)


def prompts(tokenizer: Any, settings: Mapping[str, Any]) -> Sequence[niah.NIAHSample]:
    """Needle prompts for one tokenizer; `settings` are the arguments of probes.niah.build."""
    return niah.build(tokenizer, values="numbers", **settings)
