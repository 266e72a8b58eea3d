"""Where the class of a value set can be read off the next token: a probe at a position after which all classes agree
finds nothing.

The `hard` values share their first digits, so under single-digit tokens the last prompt token is followed by 3
whatever the class is. `given_tokens` says how many answer tokens a probe has to pass first, or refuses the set.
"""

from __future__ import annotations

from collections.abc import Sequence

from probes.niah.tokens import Encoder, Tokenizer, token_span
from probes.niah.wording import Template, fill

Tokens = tuple[int, ...]
ANY_KEY = "amber-falcon"


class ClassSetError(ValueError):
    """A class set that cannot be probed where asked. `finding` is the message without its remedy."""

    def __init__(self, finding: str, remedy: str, shared: int = 0) -> None:
        super().__init__(f"{finding}; {remedy}")
        self.finding = finding
        self.shared = shared
        """Answer tokens that all classes share, beyond those given; behind them the set might be probed."""


def _questions(
    tokenizer: Tokenizer, values: Sequence[str], template: Template | None
) -> tuple[list[Tokens], list[Tokens]]:
    """The question's tokens up to the answer, and the answer's, for each value."""
    encoder, question = Encoder(tokenizer), (template or Template()).question
    before, answers = [], []
    for value in values:
        filled = fill(question, ANY_KEY, (value,))
        piece = encoder.line(filled.text)
        start, end = token_span(piece.offsets, *filled.values[0])
        encoder.require_value(piece.ids[start:end].tolist(), value)
        before.append(tuple(piece.ids[:start].tolist()))
        answers.append(tuple(piece.ids[start:end].tolist()))
    return before, answers


def answer_tokens(tokenizer: Tokenizer, values: Sequence[str], template: Template | None = None) -> list[Tokens]:
    """The answer's tokens for each value, encoded behind the question."""
    return _questions(tokenizer, values, template)[1]


def next_token_distinct(tokenizer: Tokenizer, values: Sequence[str], template: Template | None = None) -> bool:
    """True if the first answer token tells all the values apart; False if any two of them share it."""
    first = [answer[0] for answer in answer_tokens(tokenizer, values, template)]
    return len(set(first)) == len(first)


def shared_answer_tokens(tokenizer: Tokenizer, values: Sequence[str], template: Template | None = None) -> int:
    """Length of the prefix that the answers of all values share. Probing for the class belongs at answer_span[0] - 1
    + this.
    """
    return _common(answer_tokens(tokenizer, values, template))


def _common(answers: Sequence[Tokens]) -> int:
    shared = 0
    for column in zip(*answers, strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    return shared


def given_tokens(
    tokenizer: Tokenizer, values: Sequence[str], after_shared: bool, template: Template | None = None
) -> int:
    """Answer tokens given (teacher forcing) before the class is probed: 0, or with `after_shared` all shared ones.

    ClassSetError unless the tokens up to there are the same for all classes (a tokenizer may join the value's first
    characters with the space before it for some values only) and the next one is different for each of them.
    """
    before, answers = _questions(tokenizer, values, template)
    names = f"the {len(values)} values {values[0]} ... {values[-1]}"
    if len(set(before)) > 1:
        odd = next(i for i, tokens in enumerate(before) if tokens != before[0])
        found = [tokenizer.decode(list(before[i][-2:])) for i in (0, odd)]
        raise ClassSetError(
            f"{names} change the tokens before the answer under this tokenizer ({found[0]!r} before {values[0]}, "
            f"{found[1]!r} before {values[odd]}), expected the same: the probed token itself would tell the class",
            "choose values whose first characters it splits alike, or values='numbers' where no class is probed",
        )
    shared = _common(answers)
    given = shared if after_shared else 0
    following = {answer[given : given + 1] for answer in answers}
    if len(following) == len(values):
        return given
    where = f"after the {given} answer tokens that they share" if given else "after the last prompt token"
    remedy = "use values='easy', or fewer of them"
    if shared > given:
        remedy = f"probe behind the {shared} tokens that all answers begin with (after_shared=True), or {remedy}"
    raise ClassSetError(
        f"{where} {names} go on with {len(following)} different token(s) under this tokenizer, expected "
        f"{len(values)}: what a probe there finds is not the class",
        remedy,
        shared - given,
    )
