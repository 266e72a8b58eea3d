"""The tokenizer of a native checkpoint: `tokenizer.json` behind the four methods that prompts and scores need."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import tokenizers


class Tokenizer:
    """Encodes without special tokens. Offsets are character intervals [start, end) of the text given."""

    def __init__(self, backend: tokenizers.Tokenizer, bos_id: int | None = None):
        self.backend = backend
        self.bos_id = bos_id

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Raises ValueError naming the file if it is missing or no tokenizer."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path}: no such tokenizer file; expected a tokenizer.json.")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception for every parsing fault
            raise ValueError(f"{path} is not a tokenizer.json of the tokenizers library: {error}.") from error

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        self.backend.save(str(path))
