"""A transformers tokenizer behind the methods that prompts and scores need, with offsets that can be trusted."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.gguf_files import gguf_source
from models.huggingface.remote_code import check_tokenizer_code, names_tokenizer_code
from models.safetensors_files import CheckpointError

_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "sentencepiece.bpe.model",
)


class HuggingFaceTokenizer:
    """Encodes without special tokens. Offsets are character intervals [start, end) of the text given."""

    def __init__(self, backend: Any):
        self.backend = backend

    @property
    def bos_id(self) -> int | None:
        """The BOS the tokenizer itself puts before a text; None if it names one without using it (SmolLM2)."""
        ids = self.backend("a", add_special_tokens=True)["input_ids"]
        return int(ids[0]) if ids and ids[0] == self.backend.bos_token_id else None

    @property
    def vocab_size(self) -> int:
        return len(self.backend)

    @property
    def sha256(self) -> str:
        """Of the fast tokenizer's whole definition; of its vocabulary for a slow one."""
        fast = getattr(self.backend, "backend_tokenizer", None)
        content = fast.to_str() if fast is not None else repr(sorted(self.backend.get_vocab().items()))
        return hashlib.sha256(content.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(self.backend(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Offsets of zero width (Llama 3's in some versions) are replaced by those found by decoding step by step.

        ValueError for a slow tokenizer, and when a token that stands for visible characters cannot be placed in the
        text.
        """
        if not self.backend.is_fast:
            raise ValueError(
                f"tokenizer {type(self.backend).__name__} is a slow one and has no character offsets; "
                "expected a fast tokenizer: put a tokenizer.json into the checkpoint directory"
            )
        encoding = self.backend(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = (
            list(encoding["input_ids"]),
            [(int(start), int(end)) for start, end in encoding["offset_mapping"]],
        )
        empty = [index for index, (start, end) in enumerate(offsets) if end <= start]
        if not empty:
            return ids, offsets
        decoded = self._offsets_by_decoding(ids, text)
        if decoded is not None:
            return ids, decoded
        for index in empty:  # trimmed offsets leave nothing of a token of spaces: harmless
            if piece := self.decode([ids[index]]).strip():
                raise ValueError(
                    f"tokenizer {type(self.backend).__name__} gives token {index} ({piece!r}) offsets "
                    f"{offsets[index]}, and decoding gives another text; expected offsets covering its characters: "
                    "renew its tokenizer.json"
                )
        return ids, offsets

    def save(self, path: Path) -> None:
        """The tokenizer.json of a native checkpoint; ValueError where that cannot say what this tokenizer does."""
        fast = getattr(self.backend, "backend_tokenizer", None)
        if fast is None or self.bos_id is not None:
            found = "a slow one" if fast is None else f"one that puts token {self.bos_id} before every text"
            raise ValueError(
                f"tokenizer {type(self.backend).__name__} is {found}; expected a fast one without, which is all that a "
                "native checkpoint can hold. Set model.tokenizer to None and keep the tokenizer files beside it."
            )
        fast.save(str(path))

    def _offsets_by_decoding(self, ids: list[int], text: str) -> list[tuple[int, int]] | None:
        """Tokens that share a character (bytes of an emoji) get its interval; None if decoding gives another text."""
        offsets: list[tuple[int, int]] = []
        position = first = 0
        for index in range(len(ids)):
            piece = self.decode(ids[first : index + 1])
            if piece and text.startswith(piece, position):
                offsets += [(position, position + len(piece))] * (index + 1 - first)
                position, first = position + len(piece), index + 1
            elif not piece.endswith("\ufffd"):  # the replacement character: bytes of a character still to be completed
                return None
        return offsets if position == len(text) and first == len(ids) else None


def load_tokenizer(
    path: Path, trust_remote_code: bool = False, *, foreign: bool = False
) -> HuggingFaceTokenizer | None:
    """The directory's tokenizer, None if it has none; CheckpointError naming the file if it does not load.

    trust_remote_code=True runs the Python files that tokenizer_config.json names; without it a tokenizer that needs
    them is refused. `foreign`: the config.json is of no model that transformers knows, which it need not say.
    """
    source = gguf_source(path)
    found = list(source.values()) or [name for name in _VOCABULARIES if (path / name).is_file()]
    if not found:
        if (path / "tokenizer_config.json").exists():
            raise CheckpointError(
                f"{path / 'tokenizer_config.json'} is there without a vocabulary file; expected tokenizer.json."
            )
        return None
    brings_code = not source and names_tokenizer_code(path)
    trusted = trust_remote_code and (brings_code or not foreign)
    if brings_code and trusted:
        check_tokenizer_code(path, trusted)
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    if foreign:
        logging.set_verbosity_error()
    try:
        backend = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=trusted, **source)
    except Exception as error:  # tokenizers raises bare Exception for every parsing fault
        if brings_code:
            check_tokenizer_code(path, trusted)
        raise CheckpointError(
            f"{path / found[0]}: the tokenizer does not load ({error}); copy the tokenizer files again."
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    return HuggingFaceTokenizer(backend)
