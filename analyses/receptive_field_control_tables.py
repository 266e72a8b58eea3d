"""The controls of a receptive-field study as text: stricter key tokens, repeats, needles by distance, lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analyses.result import Dataset, Result

COLUMNS = (
    "restriction", "intervals [95 %]", "first tokens [95 %]", "verdict", "excess [95 %]", "verdict",
    "repeats beyond w [95 %]", "verdict", "needles: within w", "within reach", "beyond",
)  # fmt: skip
EXPLAINED = (
    "Controls: harm in nats. intervals: key intervals as wholes, summed over their tokens; first tokens: of each.\n"
    "excess: key token minus its matched partner. repeats beyond w: second occurrences of rare n-grams whose first\n"
    "lies beyond the window. needles: share found (of so many) where one restricted layer sees the needle, where only\n"
    "the group together can cross to it, and beyond."
)
LENGTH_COLUMNS = (
    "restriction", "tokens", "log(LongPPL)", "harm [95 %]", "excess [95 %]", "repeats beyond w [95 %]", "all tokens",
    "needles", "change [95 %]",
)  # fmt: skip

LENGTH_HARMS = ("log_long_ppl_harm", "excess_harm", "repeat_beyond_harm")


def controls(result: Result, names: Sequence[str]) -> list[str]:
    """Blocks of text, those of lengths after them; none for a file without controls."""
    blocks = [_block(result, name) for name in names if f"{name}/needles" in result.groups]
    blocks += [_lengths(result, name) for name in names if f"{name}/lengths" in result.groups]
    return [*blocks, EXPLAINED] if blocks else []


def _block(result: Result, name: str) -> str:
    group, documents, needles = (result.groups[f"{name}{part}"] for part in ("", "/documents", "/needles"))
    matching, repeats = result.groups[f"{name}/matching"], result.groups[f"{name}/repeats"]
    alike = ", ".join(
        f"{covariate} {number(after, '+.2f')} (was {number(before, '+.2f')})"
        for covariate, before, after in zip(matching["covariate"], matching["before"], matching["after"], strict=True)
    )
    head = (
        f"{name}: controls   n = {documents['n_intervals'].sum()} key intervals, {documents['n_pairs'].sum()} matched "
        f"pairs, {repeats['n_repeats'].sum()} tokens of repeats\npairs differ in standard deviations by: {alike}"
    )
    rows = [
        _row(group, needles, i)
        for i in range(1, len(group["condition"]))
        if not str(group["status"][i]) and group["restricted_group"][i] != "layer"
    ]
    return "\n".join([head, *aligned(COLUMNS, rows)])


def _row(group: Dataset, needles: Dataset, i: int) -> tuple[str, ...]:
    cells = [str(group["condition"][i]), change(group, "interval_loss_harm", i, "+.3f")]
    for key in ("first_loss_harm", "excess_harm", "repeat_beyond_harm"):
        cells += [change(group, key, i, "+.3f"), str(group[f"{key}_verdict"][i])]
    counts, shares = needles["n_needles"][i], needles["niah_by_distance"][i]
    return (*cells, *(f"{share:.2f} ({n})" if n else "" for n, share in zip(counts, shares, strict=True)))


def _lengths(result: Result, name: str) -> str:
    group = result.groups[f"{name}/lengths"]
    rows = []
    for i, condition in enumerate(group["condition"]):
        if np.isnan(group["log_long_ppl"][:, i]).any():
            continue  # not measured at all lengths
        for m, tokens in enumerate(group["context"]):
            cells = [
                str(condition), str(tokens), number(group["log_long_ppl"][m][i], ".3f"),
                *(change(group, key, i, "+.3f", m) for key in LENGTH_HARMS),
                number(group["loss"][m][i], ".3f"), number(group["niah"][m][i], ".2f"),
                change(group, "niah_change", i, "+.2f", m),
            ]  # fmt: skip
            rows.append((*cells, "extrapolation" if group["extrapolation"][m] else ""))
    head = f"{name}: lengths   the same documents behind other texts, longer needle prompts"
    return "\n".join([head, *aligned(LENGTH_COLUMNS, rows)])


def aligned(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines: the first column to the left, the others to the right, what a row has beyond them behind it."""
    every = [columns, *rows]
    widths = [max(len(row[column]) for row in every if len(row) > column) for column in range(len(columns))]
    return [_line(row, widths) for row in every]


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)]
    return "  ".join([row[0].ljust(widths[0]), *cells, *row[len(widths) :]]).rstrip()


def number(value: float, form: str) -> str:
    return "n/a" if np.isnan(value) else f"{value + 0.0:{form}}"


def change(group: Dataset, key: str, i: int, form: str, length: int | None = None) -> str:
    """A value with its interval; empty for the first condition, which everything is compared with."""
    if i == 0:
        return ""
    values, bounds = group[key], group[f"{key}_interval"]
    if length is not None:
        values, bounds = values[length], bounds[length]
    low, high = (number(bound, form) for bound in bounds[i])
    interval_text = "[n/a]" if low == "n/a" else f"[{low}, {high}]"
    value = number(values[i], form)
    return value if value == "n/a" else f"{value} {interval_text}"
