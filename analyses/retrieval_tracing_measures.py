"""What one checkpoint does on retrieval prompts: attention of every head, needle accuracy, copy score, ablations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

import hooks
import models
from analyses.lazy_tensors import as_loaded
from analyses.retrieval_heads import Head
from analyses.retrieval_prompts import RetrievalPrompts
from models.errors import InputError
from probes import retrieval
from probes.weight_distance import qk_distance

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
    copy: Float[np.ndarray, "N L H"]
    """Copy score; NaN unless `success`, and without softmax."""
    success: Bool[np.ndarray, " N"]
    """Every answer token is the argmax, so that greedy decoding gives the answer, and the answer holds the value."""
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
    """Attention and answers of one forward over each prompt with its answer.

    Where greedy decoding gives the answer, the rows behind which its tokens stand are those of the decoding steps.
    """
    rows: dict[int, tuple[np.ndarray, ...]] = {}
    answers: dict[int, tuple[bool, float, float]] = {}
    right: dict[int, bool] = {}
    softmax: Any = None
    for batch in prompts.alike(_size(model, prompts)):
        end, whole = int(prompts.answer[batch[0], 0]), _ids(model, prompts, batch)
        listening, steps = _Listening(model), range(end - 1, whole.shape[1] - 1)
        positions = [end + query, *range(end - ENTROPY_QUERIES, end), *steps]
        found = retrieval.trace(listening, whole[:, :-1], positions, _spans(prompts, batch))
        softmax = torch.tensor(found.softmax)
        copied = retrieval.copied_share(found.largest[..., -len(steps) :], whole, _spans(prompts, batch)[:, 0], steps)
        values = (found.mass[..., 0, 0], found.normalised_entropy[..., 1 : 1 + ENTROPY_QUERIES].mean(-1),
                  found.sink_mass[..., 0], torch.where(softmax, copied, torch.nan))  # fmt: skip
        rows |= dict(zip(batch.tolist(), zip(*(v.numpy() for v in values), strict=True), strict=True))
        scored, all_right = _scored(model, listening.hidden, prompts, batch)
        answers |= scored
        right |= dict(zip(batch.tolist(), all_right.tolist(), strict=True))
    mass, entropy, sink, copy = (_in_order({row: values[i] for row, values in rows.items()}) for i in range(4))
    success = np.array([right[row] and _holds_value(prompts, row) for row in sorted(right)])
    copy = np.where(success[:, None, None], copy, np.nan)
    return Attention(mass, entropy, sink, copy, success, softmax.numpy()), _answers(answers)


def distances(
    checkpoint: Path, last: Path, n_layers: int, n_heads: int
) -> tuple[Float[np.ndarray, "L H"], Float[np.ndarray, "L H"], str]:
    """Of every head's query rows and of its group's key rows from the last checkpoint; NaN and why, if refused."""
    query, key = np.full((2, n_layers, n_heads), np.nan)
    try:
        reference, config = as_loaded(last)
        found = qk_distance(as_loaded(checkpoint)[0], reference, config)
    except ValueError as error:
        return query, key, str(error)
    for table, values in ((query, found.query), (key, found.key)):
        rows, columns = min(n_layers, values.shape[0]), min(n_heads, values.shape[1])
        table[:rows, :columns] = values[:rows, :columns].numpy()
    return query, key, ""


def mean_outputs(model: Any, prompts: RetrievalPrompts) -> dict[Head, Tensor]:
    """Mean output of every head over all tokens of the prompts."""
    size = max(1, LOGIT_TOKENS[model.device.type] // prompts.ids.shape[1])
    rows = np.arange(len(prompts.ids))
    batches = (_ids(model, prompts, rows[start : start + size])[:, :-1] for start in range(0, len(rows), size))
    return hooks.head_means(model, batches)


@torch.no_grad()
def ablated(
    model: Any,
    prompts: RetrievalPrompts,
    sets: Sequence[Sequence[Head]],
    means: Mapping[Head, Float[Tensor, " V"]],
) -> list[Answers]:
    """For each set of heads the answers that remain while these put out their mean.

    Layers below the lowest head of all sets see no ablation and are computed once for all of them.
    """
    found: list[dict[int, tuple[bool, float, float]]] = [{} for _ in sets]
    lowest = min((layer for heads in sets for layer, _ in heads), default=0)
    for batch in prompts.alike(_size(model, prompts)) if sets else ():
        ids = _ids(model, prompts, batch)[:, :-1]
        below = _entering(model, ids, lowest)
        for answers, heads in zip(found, sets, strict=True):
            with hooks.ablate(model, heads=heads, how="mean", means=means):
                hidden = model.final_hidden_from(ids, lowest, below)
            answers |= _scored(model, hidden, prompts, batch)[0]
    return [_answers(answers) for answers in found]


def _entering(model: Any, ids: Tensor, layer: int) -> Float[Tensor, "B T D"]:
    """The residual stream that enters a layer; the layers from there on run only in a Hugging Face model."""
    if isinstance(model, models.HybridLM):
        stream, positions = model.hook_embed(model.embed(ids)), torch.arange(ids.shape[1], device=ids.device)
        for block in model.blocks[:layer]:
            stream = block(stream, positions)
        return stream
    seen: list[Tensor] = []
    point = model.hook_dict[f"blocks.{layer}.hook_resid_pre"]
    handle = point.register_forward_hook(lambda module, args, stream: seen.append(stream))
    try:
        model.final_hidden(ids)
    finally:
        handle.remove()
    return seen[0]


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
) -> tuple[dict[int, tuple[bool, float, float]], Bool[np.ndarray, " B"]]:
    """Answers by prompt, and whether all of an answer's tokens are right, those without a digit too.

    Prompts of a batch begin their answer at one place and end with it, so that they are scored together.
    """
    first = int(prompts.answer[batch[0], 0])
    expected = torch.from_numpy(prompts.ids[batch, first:]).to(hidden.device)
    log_p = model.unembed(hidden[:, first - 1 :]).float().log_softmax(-1)
    right = (log_p.argmax(-1) == expected).cpu().numpy()
    loss = -log_p.gather(2, expected[..., None]).squeeze(-1).mean(1).cpu()
    broken = (~log_p.isfinite()).flatten(1).any(1).cpu()
    found = {}
    for i, row in enumerate(batch.tolist()):
        if broken[i]:
            value = float(log_p[i][~log_p[i].isfinite()][0])
            raise InputError(
                f"prompt {row}: a log probability is {value}; expected finite numbers: check the checkpoint's weights "
                "and --dtype"
            )
        digits = prompts.weights(row)
        share = float(digits[right[i]].sum() / digits.sum())
        found[row] = (bool(right[i][digits > 0].all()), share, float(loss[i]))
    return found, right.all(1)


def _answers(found: dict[int, tuple[bool, float, float]]) -> Answers:
    ordered = [found[row] for row in sorted(found)]
    return Answers(*(np.array(column) for column in zip(*ordered, strict=True)))


def _holds_value(prompts: RetrievalPrompts, row: int) -> bool:
    """Whether the answer holds the value's tokens, in order and without a gap."""
    value, answer = (prompts.ids[row, slice(*span)] for span in (prompts.value[row], prompts.answer[row]))
    if len(value) > len(answer):
        return False
    return bool((np.lib.stride_tricks.sliding_window_view(answer, len(value)) == value).all(1).any())


def _in_order(rows: dict[int, np.ndarray]) -> np.ndarray:
    return np.stack([rows[row] for row in sorted(rows)])


def _ids(model: Any, prompts: RetrievalPrompts, batch: np.ndarray) -> Tensor:
    return torch.from_numpy(prompts.ids[batch]).to(model.device)


def _spans(prompts: RetrievalPrompts, batch: np.ndarray) -> Tensor:
    return torch.from_numpy(prompts.value[batch])[:, None]


def _size(model: Any, prompts: RetrievalPrompts) -> int:
    return max(1, TOKENS_PER_BATCH[model.device.type] // prompts.ids.shape[1])
