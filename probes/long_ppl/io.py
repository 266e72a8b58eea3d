"""KeyTokens, what an evaluator said about one text, and its JSON file (parsed strictly, never evaluated)."""

import hashlib
import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

FORMAT = "hybridscope.key_tokens"
VERSION = 1
DIGITS = (
    4  # log probabilities are rounded to 1e-4 nats before anything is decided, so that a file decides as the run did
)


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, eq=False)
class KeyTokens:
    """Key tokens of the first n_characters characters of one text, with what is needed to check and to match them.

    Arrays run over the evaluator's text tokens (no BOS). log_p_long is NaN where nothing precedes the token (index 0
    without a BOS), log_p_short is NaN for i < context: such tokens have no short context and are never key.
    """

    evaluator: str
    context: int  # K: a token's short context is K..K+stride-1 tokens
    stride: int
    alpha: float
    beta: float
    bos: bool  # whether the evaluator got a BOS at the start of the long context and of every window
    token_ids_sha256: str  # of the evaluator's ids of the span: identifies its tokenizer by what it did
    text_sha256: str  # of the span, UTF-8
    n_characters: int
    offsets: np.ndarray  # [n_tokens, 2] start, end in characters
    log_p_long: np.ndarray  # [n_tokens] nats
    log_p_short: np.ndarray  # [n_tokens] nats

    @property
    def n_tokens(self) -> int:
        return len(self.log_p_long)

    @property
    def n_key(self) -> int:
        """Key tokens counted in the evaluator's tokens."""
        return int(self.is_key.sum())

    @cached_property
    def is_key(self) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # NaN compares false: no short context, no key token
            gain = np.round(self.log_p_long - self.log_p_short, DIGITS)
            return (gain > self.alpha) & (self.log_p_long > self.beta)

    @cached_property
    def intervals(self) -> tuple[tuple[int, int], ...]:
        """Character intervals of the key tokens. Those that touch or overlap are one: a token across both counts."""
        merged: list[tuple[int, int]] = []
        for start, end in self.offsets[self.is_key].tolist():
            if end <= start:
                continue  # a token without characters cannot be found in the text
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return tuple(merged)


def save_key_tokens(key_tokens: KeyTokens, path: str | Path) -> None:
    """Writes JSON (about 20 bytes a token) under a temporary name and renames it."""
    path = Path(path)
    fields: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for name in _SCALARS:
        fields[name] = getattr(key_tokens, name)
    fields["n_tokens"] = key_tokens.n_tokens
    fields["intervals"] = [list(pair) for pair in key_tokens.intervals]
    fields["starts"] = key_tokens.offsets[:, 0].tolist()
    fields["widths"] = (key_tokens.offsets[:, 1] - key_tokens.offsets[:, 0]).tolist()
    fields["log_p_long"] = _numbers(key_tokens.log_p_long)
    fields["log_p_short"] = _numbers(key_tokens.log_p_short[key_tokens.context :])
    lines = ",\n".join(
        f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}" for name, value in fields.items()
    )
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    os.replace(temporary, path)


def load_key_tokens(path: str | Path) -> KeyTokens:
    """Reads what save_key_tokens wrote; ValueError naming the file and the field for anything else."""
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
        fields = json.loads(content, parse_constant=_refuse_constant)
    except OSError as error:
        raise ValueError(
            f"key-token file {path} cannot be read: {error.strerror}; expected a file from save_key_tokens"
        ) from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, _refuse_constant
        raise ValueError(
            f"key-token file {path} is not JSON ({error}); expected a file from save_key_tokens; make it anew"
        ) from error
    try:
        return _parse(fields)
    except _Bad as error:
        raise ValueError(
            f"key-token file {path}: {error}; make it anew with `python -m analyses.key_tokens`"
        ) from error


class _Bad(Exception):
    """A field that is not what the format says."""


_SCALARS: dict[str, type] = {
    "evaluator": str,
    "context": int,
    "stride": int,
    "alpha": float,
    "beta": float,
    "bos": bool,
    "token_ids_sha256": str,
    "text_sha256": str,
    "n_characters": int,
}
_LISTS = ("intervals", "starts", "widths", "log_p_long", "log_p_short")


def _parse(fields: Any) -> KeyTokens:
    if not isinstance(fields, dict) or fields.get("format") != FORMAT or fields.get("version") != VERSION:
        found = (fields.get("format"), fields.get("version")) if isinstance(fields, dict) else type(fields).__name__
        raise _Bad(f"found {found}, expected format {FORMAT!r} version {VERSION}")
    expected = {"format", "version", "n_tokens", *_SCALARS, *_LISTS}
    if set(fields) != expected:
        raise _Bad(f"missing fields {sorted(expected - set(fields))}, unknown fields {sorted(set(fields) - expected)}")
    scalars = {name: _scalar(name, fields[name], kind) for name, kind in _SCALARS.items()}
    n_tokens = _scalar("n_tokens", fields["n_tokens"], int)
    for name in ("context", "stride"):
        if scalars[name] < 1:
            raise _Bad(f"{name} is {scalars[name]}, expected at least 1")
    starts = _array("starts", fields["starts"], n_tokens, integer=True)
    widths = _array("widths", fields["widths"], n_tokens, integer=True)
    n_short = max(n_tokens - scalars["context"], 0)
    log_p_short = np.full(n_tokens, np.nan)
    log_p_short[n_tokens - n_short :] = _array("log_p_short", fields["log_p_short"], n_short)
    log_p_long = _array("log_p_long", fields["log_p_long"], n_tokens)
    offsets = np.stack([starts, starts + widths], axis=1)
    if (
        (widths < 0).any()
        or (np.diff(starts) < 0).any()
        or (starts < 0).any()
        or (offsets > scalars["n_characters"]).any()
    ):
        raise _Bad("starts and widths are no increasing character offsets inside the text")
    parsed = KeyTokens(**scalars, offsets=offsets, log_p_long=log_p_long, log_p_short=log_p_short)
    if fields["intervals"] != [list(pair) for pair in parsed.intervals]:
        raise _Bad("intervals do not follow from the log probabilities, alpha and beta")
    return parsed


def _scalar(name: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise _Bad(f"{name} is {value!r}, expected {kind.__name__}")
    return value


def _array(name: str, values: Any, length: int, *, integer: bool = False) -> np.ndarray:
    allowed = (int,) if integer else (int, float, type(None))
    if not isinstance(values, list) or len(values) != length or any(type(value) not in allowed for value in values):
        found = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
        raise _Bad(f"{name} has {found}, expected a list of {length} {'integers' if integer else 'numbers or null'}")
    if integer:
        return np.asarray(values, dtype=np.int64).reshape(length)
    numbers = np.asarray([math.nan if value is None else float(value) for value in values], dtype=np.float64)
    bad = numbers[(numbers > 0) | np.isinf(numbers)]
    if len(bad):
        raise _Bad(f"{name} holds {bad[0]}, expected log probabilities (finite, at most 0)")
    return numbers


def _numbers(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else round(value, DIGITS) + 0.0 for value in values.tolist()]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the constant {name} is not JSON")
