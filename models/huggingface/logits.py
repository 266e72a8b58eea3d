"""From the final hidden states to a family's logits: scaled or soft-capped in different ways, found by comparison."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.safetensors_files import CheckpointError

Finish = Callable[[Tensor], Tensor]


def find_finish(config: Any, expected: Tensor, raw: Tensor) -> Finish:
    """What turns `raw` logits into the family's own: of the known forms the one that does it best.

    CheckpointError if none does, because then no logits at chosen positions can be computed.
    """
    finishes = _finishes(config)
    expected = expected.float()
    errors = [float((finish(raw).float() - expected).abs().max() / expected.abs().max()) for finish in finishes]
    best = min(range(len(finishes)), key=lambda index: errors[index])
    if not errors[best] <= (1e-4 if raw.dtype in (torch.float32, torch.float64) else 2e-2):
        raise CheckpointError(
            f"model type {config.model_type!r}: no known scaling or soft-capping of the unembedding gives "
            f"its logits (relative error {errors[best]:.1e}, nan: not finite); it cannot be scored by positions."
        )
    return finishes[best]


def _finishes(config: Any) -> list[Finish]:
    """Forms that a family may apply to raw logits, those its config declares first."""
    finishes: list[Finish] = []
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    if cap:
        finishes.append(partial(_soft_cap, cap=cap))
    for attribute in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        scale = getattr(config, attribute, None)
        if scale:
            finishes += [partial(torch.mul, other=scale), partial(torch.div, other=scale)]
    return [*finishes, torch.Tensor.contiguous]


def _soft_cap(logits: Tensor, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap
