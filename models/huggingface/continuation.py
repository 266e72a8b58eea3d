"""Continuing sequences: through the family's own cache where that is exact, else by computing the whole again.

A recurrent state of transformers does not say which tokens made it, so under a restriction of a recurrent layer the
cache holds the tokens themselves; also in families that keep states inside their modules, and where decoding through
the family's cache does not give what one forward gives (measured once a model: Bamba and MiniMax in transformers 5.24).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from models.cache import Cache
from models.huggingface.recurrent import Bound

KEEP_STATES_INSIDE = ("recurrent_gemma",)
PREFILL, DECODED = 9, 3


def continued(model: Any, inputs: Tensor, cache: Cache) -> Float[Tensor, "B T D"]:
    """Final hidden states of `inputs`, which follow what the cache holds; the cache is brought up to date."""
    with cache.foreign(model, inputs) as held:
        restricted = any(m.restrictions for layer in model.layers for m in layer.mixers if isinstance(m, Bound))
        if restricted or not model.has_exact_cache:
            whole = torch.cat([*held.get("inputs", []), inputs], 1)
            held["inputs"] = [whole]
            return model.final_hidden(whole)[:, -inputs.shape[1] :]
        return _through_cache(model, inputs, held)


def _through_cache(model: Any, inputs: Tensor, held: dict[str, Any]) -> Float[Tensor, "B T D"]:
    base = model.hf.base_model
    name = "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
    past = {name: held["past"]} if "past" in held else {}
    out = base(**model.given(inputs, None), **past, use_cache=True)
    held["past"] = getattr(out, name)
    return out.last_hidden_state


@torch.no_grad()
def cache_is_exact(model: Any) -> bool:
    """Whether prefill and decoding of a few tokens through the family's cache equal one forward."""
    if model.config.model_type in KEEP_STATES_INSIDE:
        return False
    length = PREFILL + DECODED
    ids = torch.arange(length, device=model.device)[None] * 7 % model.config.vocab_size
    expected, held = model.final_hidden(ids), dict[str, Any]()
    parts = [_through_cache(model, ids[:, :PREFILL], held)]
    parts += [_through_cache(model, ids[:, t : t + 1], held) for t in range(PREFILL, length)]
    error = (torch.cat(parts, 1) - expected).float().norm() / expected.float().norm()
    return bool(error < (1e-4 if model.dtype in (torch.float32, torch.float64) else 5e-2))
