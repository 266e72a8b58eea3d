"""The tensors of a checkpoint as a mapping that reads one when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from models import released_formats
from models.safetensors_files import read_json, scan


class LazyTensors(Mapping[str, Tensor]):
    """Names of all tensors of a directory's weight files; headers are read at once, a tensor at each access.

    Raises CheckpointError for damaged files, KeyError for unknown names.
    """

    def __init__(self, directory: Path, names: Mapping[str, str] | None = None) -> None:
        """`names`: {name here: name in the files}, of the tensors that are wanted; None for all under their own."""
        files = scan(directory).files
        self._stored = {name: name for name in files} if names is None else dict(names)
        self._files = {name: files[stored] for name, stored in self._stored.items()}

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as handle:
            return handle.get_tensor(self._stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def as_loaded(directory: Path) -> tuple[LazyTensors, dict[str, Any]]:
    """Tensors and config.json of a checkpoint as models.load understands them: a release's under native names, without
    those that are joined of several."""
    path = directory / "config.json"
    fields = read_json(path)
    if not released_formats.is_released(fields):
        return LazyTensors(directory), fields
    reading = released_formats.read(path, fields, scan(directory).files)
    names = {rule.native: rule.released[0] for rule in reading.rules if len(rule.released) == 1}
    return LazyTensors(directory, names), reading.config.to_json()
