"""What one checkpoint does on retrieval prompts: attention of every head, needle accuracy, copy score, ablations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

import hooks
from analyses.retrieval_heads import Head
from analyses.retrieval_prompts import RetrievalPrompts
from models.errors import InputError
from probes import retrieval

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 131_072}
LOGIT_TOKENS = {"cpu": 4096, "cuda": 16_384}  # where every token is unembedded
ENTROPY_QUERIES = 4


class Answers(NamedTuple):
    """Under teacher forcing, per prompt. `loss`: mean over the answer's tokens, in nats."""

    correct: Bool[np.ndarray, " N"]
    digits: Float[np.ndarray, " N"]
    loss: Float[np.ndarray, " N"]


class Attention(NamedTuple):
    """Of every head, NaN where there is none; recurrent heads by the shares of their absolute weights."""

    mass: Float[np.ndarray, "N L H"]
    """On the value, from the query position."""
    entropy: Float[np.ndarray, "N L H"]
    """Normalised by the visible keys; mean over the last four positions before the answer."""
    sink_mass: Float[np.ndarray, "N L H"]
    softmax: Bool[np.ndarray, "L H"]


def choosing_mass(model: Any, prompts: RetrievalPrompts, query: int) -> Float[np.ndarray, "N L H"]:
    """Mass of the softmax heads on the value; the query is counted from the end of the prompt without its answer."""
    rows: dict[int, np.ndarray] = {}
    for batch in prompts.alike(_size(model, prompts)):
        ids = _ids(model, prompts, batch)[:, : prompts.answer[batch[0], 0]]
        found = retrieval.trace(model, ids, [query], _spans(prompts, batch), recurrent=False)
        rows |= dict(zip(batch.tolist(), found.mass[..., 0, 0].numpy(), strict=True))
    return _in_order(rows)


def trace(model: Any, prompts: RetrievalPrompts, query: int) -> tuple[Attention, Answers]:
    """Attention and answers of one forward over each prompt with its answer."""
    rows: dict[int, tuple[np.ndarray, ...]] = {}
    answers: dict[int, tuple[bool, float, float]] = {}
    softmax: Any = None
    for batch in prompts.alike(_size(model, prompts)):
        end = int(prompts.answer[batch[0], 0])
        listening = _Listening(model)
        positions = [end + query, *range(end - ENTROPY_QUERIES, end)]
        found = retrieval.trace(listening, _ids(model, prompts, batch)[:, :-1], positions, _spans(prompts, batch))
        softmax = found.softmax
        values = (found.mass[..., 0, 0], found.normalised_entropy[..., 1:].mean(-1), found.sink_mass[..., 0])
        rows |= dict(zip(batch.tolist(), zip(*(v.numpy() for v in values), strict=True), strict=True))
        answers |= _scored(model, listening.hidden, prompts, batch)
    mass, entropy, sink = (_in_order({row: values[i] for row, values in rows.items()}) for i in range(3))
    return Attention(mass, entropy, sink, np.array(softmax)), _answers(answers)


def copy_score(
    model: Any, prompts: RetrievalPrompts, answers: Answers
) -> tuple[Float[np.ndarray, "N L H"], Bool[np.ndarray, " N"]]:
    """Copy score of each prompt and head, NaN unless greedy decoding gives the value; and whether it does.

    A prompt whose answer is the value, and wrong under teacher forcing, cannot succeed and is not decoded.
    """
    shape = (len(prompts.ids), len(model.layers), max(layer.n_heads for layer in model.layers))
    scores, success = np.full(shape, np.nan), np.zeros(len(prompts.ids), bool)
    decoded = np.array([answers.correct[row] or not _repeats(prompts, row) for row in range(len(prompts.ids))])
    for whole in prompts.alike(_size(model, prompts)):
        batch = whole[decoded[whole]]
        if not len(batch):
            continue
        ids = _ids(model, prompts, batch)[:, : prompts.answer[batch[0], 0]]
        found = retrieval.copy_score(model, ids, _spans(prompts, batch)[:, 0])
        success[batch] = found.success.numpy()
        scores[batch] = torch.where(found.success[:, None, None], found.per_sample, torch.nan).numpy()
    return scores, success


def mean_outputs(model: Any, prompts: RetrievalPrompts) -> dict[Head, Tensor]:
    """Mean output of every head over all tokens of the prompts."""
    size = max(1, LOGIT_TOKENS[model.device.type] // prompts.ids.shape[1])
    rows = np.arange(len(prompts.ids))
    batches = (_ids(model, prompts, rows[start : start + size])[:, :-1] for start in range(0, len(rows), size))
    return hooks.head_means(model, batches)


@torch.no_grad()
def ablated(
    model: Any, prompts: RetrievalPrompts, heads: Iterable[Head], means: Mapping[Head, Float[Tensor, " V"]]
) -> Answers:
    """The answers that remain while these heads put out their mean."""
    found: dict[int, tuple[bool, float, float]] = {}
    with hooks.ablate(model, heads=heads, how="mean", means=means):
        for batch in prompts.alike(_size(model, prompts)):
            hidden = model.final_hidden(_ids(model, prompts, batch)[:, :-1])
            found |= _scored(model, hidden, prompts, batch)
    return _answers(found)


class _Listening:
    """A model whose last final_hidden is kept, so that tracing and scoring share one forward."""

    def __init__(self, model: Any) -> None:
        self.layers, self._model = model.layers, model
        self.hidden: Any = None

    def final_hidden(self, ids: Tensor) -> Tensor:
        self.hidden = self._model.final_hidden(ids)
        return self.hidden


@torch.no_grad()
def _scored(
    model: Any, hidden: Float[Tensor, "B T D"], prompts: RetrievalPrompts, batch: np.ndarray
) -> dict[int, tuple[bool, float, float]]:
    found = {}
    for state, row in zip(hidden, batch.tolist(), strict=True):
        first, stop = prompts.answer[row]
        log_p = model.unembed(state[first - 1 : stop - 1]).float().log_softmax(-1).cpu()
        expected = torch.from_numpy(prompts.ids[row, first:stop])
        if not bool(log_p.isfinite().all()):
            raise InputError(
                f"prompt {row}: a log probability is {float(log_p[~log_p.isfinite()][0])}; expected finite numbers: "
                "check the checkpoint's weights and --dtype"
            )
        right, digits = (log_p.argmax(-1) == expected).numpy(), prompts.weights(row)
        loss = -log_p.gather(1, expected[:, None]).mean()
        found[row] = (bool(right[digits > 0].all()), float(digits[right].sum() / digits.sum()), float(loss))
    return found


def _answers(found: dict[int, tuple[bool, float, float]]) -> Answers:
    ordered = [found[row] for row in sorted(found)]
    return Answers(*(np.array(column) for column in zip(*ordered, strict=True)))


def _repeats(prompts: RetrievalPrompts, row: int) -> bool:
    """Whether the answer consists of the value's own tokens."""
    value, answer = (slice(*span) for span in (prompts.value[row], prompts.answer[row]))
    return np.array_equal(prompts.ids[row, value], prompts.ids[row, answer])


def _in_order(rows: dict[int, np.ndarray]) -> np.ndarray:
    return np.stack([rows[row] for row in sorted(rows)])


def _ids(model: Any, prompts: RetrievalPrompts, batch: np.ndarray) -> Tensor:
    return torch.from_numpy(prompts.ids[batch]).to(model.device)


def _spans(prompts: RetrievalPrompts, batch: np.ndarray) -> Tensor:
    return torch.from_numpy(prompts.value[batch])[:, None]


def _size(model: Any, prompts: RetrievalPrompts) -> int:
    return max(1, TOKENS_PER_BATCH[model.device.type] // prompts.ids.shape[1])
