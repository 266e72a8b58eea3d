"""The points of a scaling law: (N, D, loss) with architecture, size and run, from tables of named columns.

A table is TSV or CSV with a header; lines that start with # are comments; numbers may end in K, M or B (10^3, 6, 9).
    N             n, params, parameters, n_params, num_parameters     parameters without embeddings
    D             d, tokens, train_tokens, training_tokens            training tokens, or instead
                  d_over_n, d/n, tokens_per_parameter, token_multiplier (a final "n" is allowed)
    loss          loss, val_loss, validation_loss, log_longppl, log_long_ppl    nats, or instead, its exponential:
                  longppl, long_ppl, perplexity, ppl
    architecture  architecture, arch, model              optional; default: the name of the file
    scale         scale, model_size, size                optional; default: N
    run           run, run_id                            optional; points of one run share their noise
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from models.errors import InputError

ALIASES = {
    "n": ("n", "params", "parameters", "n_params", "num_parameters"),
    "d": ("d", "tokens", "train_tokens", "training_tokens"),
    "d_over_n": ("d_over_n", "d/n", "tokens_per_parameter", "token_multiplier"),
    "loss": ("loss", "val_loss", "validation_loss", "log_longppl", "log_long_ppl"),
    "perplexity": ("longppl", "long_ppl", "perplexity", "ppl"),
    "architecture": ("architecture", "arch", "model"),
    "scale": ("scale", "model_size", "size"),
    "run": ("run", "run_id"),
}
SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9}


@dataclass(frozen=True, eq=False)
class Points:
    """One row a point: N parameters without embeddings, D tokens, loss in nats; labels are text, "" where not given."""

    n: Float[np.ndarray, " N"]
    d: Float[np.ndarray, " N"]
    loss: Float[np.ndarray, " N"]
    architecture: tuple[str, ...]
    scale: tuple[str, ...]
    run: tuple[str, ...]

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, float, str, str, str]]) -> Points:
        """From rows (N, D, loss, architecture, scale, run)."""
        n, d, loss, architecture, scale, run = zip(*rows, strict=True) if rows else ((),) * 6
        return cls(np.array(n, float), np.array(d, float), np.array(loss, float), architecture, scale, run)

    @property
    def rows(self) -> list[tuple[float, float, float, str, str, str]]:
        numbers = (self.n.tolist(), self.d.tolist(), self.loss.tolist())
        return list(zip(*numbers, self.architecture, self.scale, self.run, strict=True))

    def where(self, chosen: Sequence[bool] | np.ndarray) -> Points:
        """The points of a mask, in order."""
        return Points.of([row for row, keep in zip(self.rows, chosen, strict=True) if keep])

    @property
    def sha256(self) -> str:
        """Of all values and labels: what decides a fit, wherever the points came from."""
        return hashlib.sha256(repr(self.rows).encode()).hexdigest()


def read_table(path: Path, loss_column: str | None = None, perplexity: bool = False) -> Points:
    """The points of one table; `perplexity`: the loss column holds exp(loss). InputError names file, line, column."""
    lines = list(_lines(path))
    if not lines:
        raise InputError(f"{path}: no header; expected a line of column names such as n, d, loss")
    (_, header), body = lines[0], lines[1:]
    columns = _columns(path, header, loss_column)
    if not body:
        raise InputError(f"{path}: a header without rows; expected a point a line")
    rows = []
    for number, cells in body:
        if len(cells) != len(header):
            raise InputError(f"{path}, line {number}: {len(cells)} cells, the header has {len(header)} columns")
        row = _Row(path, number, header, cells, columns)
        n = row.number("n")
        d = row.number("d") if "d" in columns else n * row.number("d_over_n", final="n")
        loss = row.loss(perplexity or "perplexity" in columns)
        architecture = row.text("architecture") or path.stem
        rows.append((n, d, loss, architecture, row.text("scale") or f"{n:.4g}", row.text("run")))
    return Points.of(rows)


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of every line that is neither empty nor a comment; the first is the header."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text table ({error.reason} at byte {error.start}); give TSV or CSV") from error
    kept = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]
    delimiter = "\t" if kept and "\t" in kept[0][1] else ","
    for number, line in kept:
        yield number, [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]


def _columns(path: Path, header: list[str], loss_column: str | None) -> dict[str, int]:
    """{what: position}, each found once; either of d and d_over_n, and of loss and perplexity."""
    lowered = [name.lower() for name in header]
    found: dict[str, int] = {}
    for what, names in ALIASES.items():
        places = [place for place, name in enumerate(lowered) if name in names]
        if what in ("loss", "perplexity") and loss_column is not None:
            places = [place for place in places if header[place] == loss_column]
        if len(places) > 1:
            listed = " and ".join(repr(header[place]) for place in places)
            remedy = "choose with --loss-column" if what in ("loss", "perplexity") else "keep one"
            raise InputError(f"{path}: columns {listed} both give {what}; {remedy}")
        if places:
            found[what] = places[0]
    if loss_column is not None and not {"loss", "perplexity"} & set(found):
        if loss_column not in header:
            raise InputError(f"{path}: no column {loss_column!r}; the header has {', '.join(header)}")
        found["loss"] = header.index(loss_column)
    for needed in (("n",), ("d", "d_over_n"), ("loss", "perplexity")):
        present = [what for what in needed if what in found]
        if not present:
            known = ", ".join(alias for what in needed for alias in ALIASES[what])
            raise InputError(f"{path}: no column gives {needed[0]} ({', '.join(header)}); name one of {known}")
        if len(present) > 1:
            both = " and ".join(repr(header[found[what]]) for what in present)
            remedy = "choose with --loss-column" if "loss" in present else "keep one"
            raise InputError(f"{path}: columns {both} both give {needed[0]}; {remedy}")
    return found


@dataclass(frozen=True)
class _Row:
    path: Path
    line: int
    header: list[str]
    cells: list[str]
    columns: dict[str, int]

    def text(self, what: str) -> str:
        return self.cells[self.columns[what]] if what in self.columns else ""

    def number(self, what: str, final: str = "") -> float:
        """Positive and finite."""
        text = self.text(what)
        plain = text.lower().removesuffix(final) if final else text.lower()
        factor = SUFFIXES.get(plain[-1:], 1.0)
        try:
            value = float(plain[:-1] if factor > 1 else plain) * factor
        except ValueError:
            value = float("nan")
        if not (np.isfinite(value) and value > 0):
            raise self.error(what, f"{text!r} is not a positive, finite number")
        return value

    def loss(self, exponential: bool) -> float:
        what = "perplexity" if "perplexity" in self.columns else "loss"
        value = self.number(what)
        if not exponential:
            return value
        if value <= 1:
            raise self.error(what, f"perplexity {value:g} has no positive log; expected more than 1")
        return float(np.log(value))

    def error(self, what: str, problem: str) -> InputError:
        return InputError(f"{self.path}, line {self.line}, column {self.header[self.columns[what]]!r}: {problem}")
