"""Where the class of a value set can be read off the next token: a probe at a position after which all classes agree
finds nothing.

The `hard` values share their first digits, so under single-digit tokens the last prompt token is followed by 3
whatever the class is; `shared_answer_tokens` says how many answer tokens a probe has to pass first.
"""

from __future__ import annotations

from collections.abc import Sequence

from probes.niah.tokens import Encoder, Tokenizer, token_span
from probes.niah.wording import Template, fill


def answer_tokens(
    tokenizer: Tokenizer, values: Sequence[str], template: Template | None = None
) -> list[tuple[int, ...]]:
    """The answer's tokens for each value, encoded behind the question."""
    encoder, question = Encoder(tokenizer), (template or Template()).question
    answers = []
    for value in values:
        filled = fill(question, "amber-falcon", (value,))
        piece = encoder.line(filled.text)
        start, end = token_span(piece.offsets, *filled.values[0])
        encoder.require_value(piece.ids[start:end].tolist(), value)
        answers.append(tuple(piece.ids[start:end].tolist()))
    return answers


def next_token_distinct(tokenizer: Tokenizer, values: Sequence[str], template: Template | None = None) -> bool:
    """True if the first answer token tells all the values apart; False if any two of them share it."""
    first = [answer[0] for answer in answer_tokens(tokenizer, values, template)]
    return len(set(first)) == len(first)


def shared_answer_tokens(tokenizer: Tokenizer, values: Sequence[str], template: Template | None = None) -> int:
    """Length of the prefix that the answers of all values share. Probing for the class belongs at answer_span[0] - 1
    + this.
    """
    shared = 0
    for column in zip(*answer_tokens(tokenizer, values, template), strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    return shared
