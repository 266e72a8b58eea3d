"""The tensors of a checkpoint as a mapping that reads one when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from models.safetensors_files import scan


class LazyTensors(Mapping[str, Tensor]):
    """Names of all tensors of a directory's weight files; headers are read at once, a tensor at each access.

    Raises CheckpointError for damaged files, KeyError for unknown names.
    """

    def __init__(self, directory: Path) -> None:
        self._files = scan(directory).files

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as handle:
            return handle.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
