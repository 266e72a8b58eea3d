"""Reading a released config.json strictly: every key is either read, or known to leave the numbers as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.safetensors_files import CheckpointError

UNREAD = frozenset(
    {
        "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path",
        "use_cache", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout",
        "_attn_implementation", "attn_implementation", "return_dict", "output_attentions", "output_hidden_states",
        "is_decoder", "is_encoder_decoder", "use_return_dict", "gradient_checkpointing", "pretraining_tp",
    }
)  # fmt: skip
"""Keys of transformers itself that say nothing of the forward pass in eval mode."""
_REQUIRED = object()


class ConfigFile:
    """The keys of one config.json. CheckpointError names the file, the key, the value found and the value expected."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path, self.values = path, values
        self._read = set(UNREAD)

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """A positive integer, or the default where the key is absent or null."""
        value = self._value(name, default)
        if value is not default and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise self.error(name, "a positive integer")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def plain(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value as it is; the caller checks it."""
        return self._value(name, default)

    def expect(self, name: str, *allowed: Any, because: str) -> None:
        """The value, or an absent key, must mean the first of `allowed`; the others are its other spellings."""
        if self._value(name, allowed[0]) not in allowed:
            raise self.error(name, f"{allowed[0]!r}, because {because}")

    def rotary(self) -> float:
        """Base of plain rotary positions; scaled ones are refused."""
        base = self.number("rope_theta")
        for name in ("rope_scaling", "rope_parameters"):
            value = self._value(name, None)
            if value and (value.get("rope_type") != "default" or float(value.get("rope_theta", base)) != base):
                raise self.error(name, f"null or plain rotary positions of base {base:g}; scaled ones are not built")
        return base

    def ignore(self, *names: str) -> None:
        """Keys of the format that do not touch the numbers."""
        self._read.update(names)

    def close(self) -> None:
        """Raises CheckpointError for the first key that nobody read."""
        if unknown := sorted(set(self.values) - self._read):
            raise CheckpointError(
                f"{self.path}: {unknown[0]!r} is {self.values[unknown[0]]!r}, a key that this format is not known to "
                f"have ({len(unknown)} such in all); expected none, because it may change the numbers. "
                "Remove it if it does not."
            )

    def error(self, name: str, expected: str) -> CheckpointError:
        found = repr(self.values[name]) if name in self.values else "absent"
        return CheckpointError(f"{self.path}: {name!r} is {found}; expected {expected}.")

    def _value(self, name: str, default: Any) -> Any:
        self._read.add(name)
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise self.error(name, "a value")
            return default
        return value
