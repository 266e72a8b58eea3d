"""What one condition does to one model: losses on documents, needle accuracy, and each mixer's change of output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

import hooks
from analyses.conditions import Condition
from analyses.evaluation import Encoded
from models.errors import InputError
from probes import repeat_copy
from probes.long_ppl import token_losses
from probes.niah import NIAHSample, accuracy

BUCKETS = 8
TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 131_072}
CHUNK, LOGITS = 4096, 2**28  # unembedded at a time: positions, and these times the vocabulary (1 GiB in float32)


def document_losses(
    model: Any,
    condition: Condition,
    documents: Sequence[Encoded],
    context: int,
    means: Mapping[Any, Any] | None = None,
) -> list[dict[str, Any]]:
    """Per document, in nats. Sums: key_loss over key tokens, first_loss over the first of each key interval,
    paired_key_loss and paired_matched_loss over matched pairs, repeat_loss and repeat_first_loss [G] over repeated
    n-grams by gap. Means: matched_loss, loss (all its tokens but the first), bucket_loss [BUCKETS].

    The floor knows only key and matched tokens, each from the last w tokens before it; the rest is NaN there. `means`
    are what an ablation puts in the place of outputs. Documents measured together have equally many tokens in front.
    """
    if condition.group == "floor":
        scored = [np.concatenate((document.key, document.matched)) for document in documents]
        losses = _floor_losses(model, documents, scored, condition.window)
    else:
        scored = [np.arange(document.start + 1, len(document.ids)) for document in documents]
        with condition.applied(model, means):
            losses = _all_losses(model, documents)
    results = []
    for document, values, positions in zip(documents, losses, scored, strict=True):
        _check_finite(values, positions, document, condition)
        results.append(_summed(values, document, context, condition.group != "floor"))
    return results


def _summed(losses: np.ndarray, document: Encoded, context: int, whole: bool) -> dict[str, Any]:
    """`whole`: every token of the document has a loss."""
    own = losses[document.start :]
    bucket = np.minimum(np.arange(len(own)) * BUCKETS // context, BUCKETS - 1)
    edges = repeat_copy.gap_bins(context)
    unknown = np.full(len(edges), np.nan)
    second, first, _ = repeat_copy.by_gap(losses, document.repeats, edges) if whole else (unknown, unknown, None)
    return {
        "key_loss": float(losses[document.key].sum()),
        "first_loss": float(losses[document.first].sum()),
        "paired_key_loss": float(losses[document.paired].sum()),
        "paired_matched_loss": float(losses[document.matched].sum()),
        "matched_loss": _mean(losses[document.matched]),
        "loss": _mean(own[1:]),
        "bucket_loss": [_mean(own[1:][bucket[1:] == b]) for b in range(BUCKETS)],
        "repeat_loss": second,
        "repeat_first_loss": first,
    }


def _all_losses(model: Any, documents: Sequence[Encoded]) -> list[np.ndarray]:
    """The loss of every token of a document but its first. Those of a batch are padded behind their end, which nothing
    sees."""
    losses: list[np.ndarray] = []
    longest = max(len(document.ids) for document in documents)
    (start,) = {document.start for document in documents}
    size = max(1, _budget(model) // longest)
    chunk = max(1, min(CHUNK, LOGITS // model.config.vocab_size))
    for at in range(0, len(documents), size):
        part = [torch.from_numpy(document.ids) for document in documents[at : at + size]]
        batch = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(model.device)
        found = token_losses(model, batch, range(start + 1, batch.shape[1]), chunk=chunk).double().cpu().numpy()
        unknown = np.full(start + 1, np.nan)
        losses += [np.concatenate((unknown, row[: len(ids) - start - 1])) for row, ids in zip(found, part, strict=True)]
    return losses


def _check_finite(losses: np.ndarray, positions: np.ndarray, document: Encoded, condition: Condition) -> None:
    """NaN means not measured: a model that computes NaN must not pass for that."""
    bad = positions[~np.isfinite(losses[positions])]
    if len(bad):
        raise InputError(
            f"condition {condition.label!r}, document {document.name!r}: the loss of token {bad[0]} is "
            f"{losses[bad[0]]}; expected a finite number: check the checkpoint's weights and --dtype"
        )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _floor_losses(
    model: Any, documents: Sequence[Encoded], chosen: Sequence[np.ndarray], window: int
) -> list[np.ndarray]:
    """Loss of each chosen token when the model is given only the `window` tokens before it (or all, where fewer)."""
    losses = [np.full(len(document.ids), np.nan) for document in documents]
    by_width: dict[int, list[tuple[int, int]]] = {}
    for index, positions in enumerate(chosen):
        for position in positions:
            by_width.setdefault(min(int(position), window), []).append((index, int(position)))
    for width, tokens in sorted(by_width.items()):
        size = max(1, _budget(model) // width)
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            rows = np.stack([_tail(documents[i].ids[: p + 1], width + 1, model) for i, p in part])
            batch, last = torch.from_numpy(rows).to(model.device), rows.shape[1] - 1
            found = token_losses(model, batch, [last])[:, 0].double().cpu().numpy()
            for (index, position), loss in zip(part, found, strict=True):
                losses[index][position] = loss
    return losses


@torch.no_grad()
def prompt_accuracy(
    model: Any, condition: Condition, samples: Sequence[NIAHSample], means: Mapping[Any, Any] | None = None
) -> list[tuple[bool, float]]:
    """(all digits correct, share of digits correct) of each prompt, under teacher forcing."""
    if condition.group == "floor":
        return [_floor_accuracy(model, sample, condition.window) for sample in samples]
    results = []
    size = max(1, _budget(model) // len(samples[0].input_ids))
    with condition.applied(model, means):
        for start in range(0, len(samples), size):
            part = samples[start : start + size]
            batch = torch.from_numpy(np.stack([sample.input_ids for sample in part]).astype(np.int64))
            hidden = model.final_hidden(batch[:, :-1].to(model.device))
            for row, sample in zip(hidden, part, strict=True):
                first, last = sample.answer_span
                predicted = model.unembed(row[first - 1 : last - 1]).argmax(-1).cpu()
                score = accuracy(predicted, sample)
                results.append((score.all_correct, score.per_digit))
    return results


def _floor_accuracy(model: Any, sample: NIAHSample, window: int) -> tuple[bool, float]:
    width = min(window, sample.answer_span[0])
    rows = np.stack([_tail(sample.input_ids[:p].astype(np.int64), width, model) for p in range(*sample.answer_span)])
    batch = torch.from_numpy(rows)
    hidden = model.final_hidden(batch.to(model.device))[:, -1]
    return tuple(accuracy(model.unembed(hidden).argmax(-1).cpu(), sample))  # type: ignore[return-value]


def _tail(ids: np.ndarray, count: int, model: Any) -> np.ndarray:
    """The last `count` tokens, behind the text's BOS if the model's texts begin with one."""
    tail, bos = ids[-count:], getattr(getattr(model, "tokenizer", None), "bos_id", None)
    return tail if bos is None or len(tail) == len(ids) else np.concatenate(([bos], tail))


@torch.no_grad()
def layer_effects(model: Any, groups: Sequence[str], window: int, document: Encoded) -> dict[str, dict[int, float]]:
    """{group: {layer: ||o - o_w|| / ||o||}} of each mixer of a group on the input it has in the unrestricted model."""
    with ExitStack() as stack:
        effects = {group: stack.enter_context(hooks.mixer_effect(model, group, window=window)) for group in groups}
        model.final_hidden(torch.from_numpy(document.ids)[None].to(model.device))
    return {group: {layer: values[0] for layer, values in effect.items()} for group, effect in effects.items()}


def _budget(model: Any) -> int:
    return TOKENS_PER_BATCH[model.device.type]
