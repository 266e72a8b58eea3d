"""Continuing sequences token by token on an exact cache."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from models.cache import Cache


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Int[Tensor, "B T"],
    max_new_tokens: int,
    *,
    cache: Cache | None = None,
    temperature: float = 0.0,
    stop_ids: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
) -> Int[Tensor, "B N"]:
    """The N <= max_new_tokens tokens that follow, without the prompt: greedy at temperature 0, else sampled.

    `cache` holds what came before `input_ids`, and afterwards everything but the last new token. Sequences that
    produced a stop id repeat it; N is smaller than max_new_tokens when all have. Raises ValueError for bad arguments.
    """
    if max_new_tokens < 1 or temperature < 0:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}, temperature {temperature}; expected at least 1 and at least 0."
        )
    cache = Cache() if cache is None else cache
    produced: list[Tensor] = []
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    fed = input_ids
    for _ in range(max_new_tokens):
        logits = model.unembed(model.final_hidden(fed, cache=cache)[:, -1]).float()
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        if produced:
            token = torch.where(ended, produced[-1], token)
        produced.append(token)
        for stop in stop_ids:
            ended = ended | (token == stop)
        if stop_ids and bool(ended.all()):
            break
        fed = token[:, None]
    return torch.stack(produced, 1)
