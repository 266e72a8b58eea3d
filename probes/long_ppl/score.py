"""Token losses at chosen positions, and LongPPL = exp(mean over key tokens of -log p(x_i | x_<i))."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from probes.long_ppl.io import KeyTokens, text_sha256
from probes.long_ppl.transfer import key_positions

Bos = Literal["own", "none"]


class ScoringModel(Protocol):
    """What a probe needs of a language model: hidden states after the final norm, and their unembedding."""

    tokenizer: Any

    @property
    def device(self) -> torch.device: ...

    def final_hidden(self, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]: ...

    def unembed(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... vocab"]: ...


@dataclass(frozen=True, eq=False)
class LongPPL:
    """One document under one model. Indices count the model's text tokens without a BOS. Losses in nats, float64."""

    log_long_ppl: float  # mean loss over the key tokens; NaN when there is none
    n_key: int
    positions: np.ndarray  # [n_key] key tokens, as indices into `losses`
    key_losses: np.ndarray  # [n_key]
    log_ppl: float  # mean loss over every scored token
    n_tokens: int  # tokens of the evaluated span
    losses: np.ndarray  # [n_tokens]; NaN at index 0 when the model has no BOS: nothing predicts that token
    n_unscored: int  # key tokens left out because nothing predicts them (index 0 without a BOS)
    bos: bool  # whether a BOS was put in front


class CorpusLongPPL(NamedTuple):
    """Token-weighted mean over documents; NaN with n_key = 0 when no document has a key token."""

    log_long_ppl: float
    n_key: int
    n_documents: int  # documents that count: at least one key token
    n_skipped: int  # documents without a key token


@torch.no_grad()
def token_losses(
    model: ScoringModel,
    input_ids: Int[Tensor, "B T"],
    positions: Sequence[int] | Int[Tensor, " P"],
    *,
    chunk: int = 256,
) -> Float[Tensor, "B P"]:
    """-log p(x_p | x_<p) in nats (fp32) for every position p in 1..T-1 of each row.

    One forward to the final hidden states; the unembedding is applied to `chunk` positions at a time, so the largest
    logits tensor is [chunk, vocab] and never [T, vocab].
    """
    positions = torch.as_tensor(positions, dtype=torch.long, device=input_ids.device)
    length = input_ids.shape[1]
    outside = positions[(positions < 1) | (positions >= length)].tolist()[:5]
    if outside:
        raise ValueError(
            f"token_losses: positions {outside} are outside 1..{length - 1}: position 0 has nothing "
            f"before it and the input has {length} tokens; put a BOS in front or leave position 0 out"
        )
    if chunk < 1:
        raise ValueError(f"token_losses: chunk is {chunk}; expected at least 1 position")
    hidden = model.final_hidden(input_ids)
    hidden = hidden[:, positions - 1].flatten(0, 1)
    targets = input_ids[:, positions].flatten()
    losses = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    for start in range(0, targets.numel(), chunk):
        part = slice(start, start + chunk)
        logits = model.unembed(hidden[part]).float()
        losses[part] = torch.nn.functional.cross_entropy(logits, targets[part].to(logits.device), reduction="none")
    return losses.unflatten(0, (input_ids.shape[0], positions.numel()))


def long_ppl(model: ScoringModel, text: str, key_tokens: KeyTokens, *, bos: Bos = "own", chunk: int = 256) -> LongPPL:
    """Scores the span of `text` in which `key_tokens` were sought (its first key_tokens.n_characters characters).

    A token counts if it lies inside a key interval (transfer.py). bos="own" gives the model its BOS when its
    tokenizer has one; "none" never does, which is what the PyPI package `longppl` does to every evaluated model.
    Cost: one forward over the span.
    """
    if bos not in ("own", "none"):
        raise ValueError(f"long_ppl: bos is {bos!r}; expected 'own' or 'none'")
    if getattr(model, "tokenizer", None) is None:
        raise ValueError(
            "long_ppl: the model has no tokenizer; expected the tokenizer files in its checkpoint directory"
        )
    span = text[: key_tokens.n_characters]
    if text_sha256(span) != key_tokens.text_sha256:
        raise ValueError(
            f"long_ppl: the first {key_tokens.n_characters} characters of the text are not those of the key tokens "
            f"(sha256 {text_sha256(span)[:12]}, expected {key_tokens.text_sha256[:12]}); pass the original text"
        )
    ids, offsets = model.tokenizer.encode_with_offsets(span)
    front = [model.tokenizer.bos_id] if bos == "own" and model.tokenizer.bos_id is not None else []
    losses = np.full(len(ids), np.nan)
    first = 0 if front else 1
    if len(ids) > first:
        row = torch.tensor([front + list(ids)], dtype=torch.long, device=model.device)
        scored = token_losses(model, row, list(range(1, row.shape[1])), chunk=chunk)
        losses[first:] = scored[0].double().cpu().numpy()
    return _summary(losses, key_positions(offsets, key_tokens, span), bool(front))


def _summary(losses: np.ndarray, positions: np.ndarray, has_bos: bool) -> LongPPL:
    scored = np.ones(len(losses), dtype=bool)
    scored[:1] = has_bos
    if not np.isfinite(losses[scored]).all():
        index = int(np.flatnonzero(scored & ~np.isfinite(losses))[0])
        raise ValueError(
            f"long_ppl: the loss of token {index} is {losses[index]}; expected a finite loss: check dtype and weights"
        )
    kept = positions[scored[positions]]
    return LongPPL(
        log_long_ppl=float(losses[kept].mean()) if len(kept) else math.nan,
        n_key=len(kept),
        positions=kept,
        key_losses=losses[kept],
        log_ppl=float(losses[scored].mean()) if scored.any() else math.nan,
        n_tokens=len(losses),
        losses=losses,
        n_unscored=len(positions) - len(kept),
        bos=has_bos,
    )


def aggregate(results: Iterable[LongPPL]) -> CorpusLongPPL:
    """log LongPPL of a corpus: sum_d n_d log(LongPPL_d) / sum_d n_d, n_d = key tokens of document d."""
    documents = list(results)
    counted = [document for document in documents if document.n_key > 0]
    n_key = sum(document.n_key for document in counted)
    total = math.fsum(document.n_key * document.log_long_ppl for document in counted)
    return CorpusLongPPL(total / n_key if n_key else math.nan, n_key, len(counted), len(documents) - len(counted))
