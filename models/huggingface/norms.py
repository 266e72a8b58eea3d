"""RMSNorm of a family's own code in 16 bits: torch's fused kernel instead of six passes over x in float32.

The families write x / rms out, operation by operation; on a GPU that takes longer than the attention of 8,192 tokens
(LOG.md). What a module computes is asked of the module: a class whose result is not one of the known orders of rounding
keeps its own code, and so does every float32 and float64 model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

HALF = (torch.float16, torch.bfloat16)
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
Form = Callable[[Tensor, Tensor, float], Tensor]


def rounded_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * round(x / rms): Llama, Qwen, Mistral."""
    return weight * F.rms_norm(x, weight.shape, eps=eps)


def rounded_last(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """round(w * x / rms): GPT-OSS, OLMo."""
    return F.rms_norm(x, weight.shape, weight, eps)


def one_added(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """round((1 + w) * x / rms): Gemma, Qwen3-Next; 1 + w would lose digits in 16 bits, so x is widened."""
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)


FORMS: tuple[Form, ...] = (rounded_first, rounded_last, one_added)
FLIPPED = 0.02  # share of results that a fp32 sum in another order may round to the neighbour; another form flips 0.2


def fuse(hf: nn.Module) -> int:
    """Lets every RMSNorm of a known form compute with the fused kernel where its input is 16-bit; how many these are.

    Module hooks act as before. Weights and results are the family's own, up to the order of a float32 sum.
    """
    forms: dict[tuple[type, float], Form | None] = {}
    count = 0
    for module in hf.modules():
        eps = _eps(module)
        if eps is None or "forward" in vars(module):
            continue
        key = type(module), eps
        if key not in forms:
            forms[key] = _form(module, eps)
        form = forms[key]
        if form is not None:
            module.forward = partial(_forward, module, module.forward, form, eps)
            count += 1
    return count


def _forward(module: Any, own: Callable[..., Tensor], form: Form, eps: float, x: Tensor) -> Tensor:
    if x.dtype in HALF and module.weight.dtype == x.dtype:
        return form(x, module.weight, eps)
    return own(x)


def _eps(module: nn.Module) -> float | None:
    """The epsilon of what looks like an RMSNorm of one tensor; None for anything else."""
    if not type(module).__name__.endswith("RMSNorm") or [*module._parameters] != ["weight"]:
        return None
    if module._buffers or [*module.children()] or len(inspect.signature(type(module).forward).parameters) != 2:
        return None
    return next((float(getattr(module, name)) for name in EPS_NAMES if hasattr(module, name)), None)


def _form(module: nn.Module, eps: float) -> Form | None:
    """The form whose results are the module's own, on random numbers with a random weight."""
    generator = torch.Generator().manual_seed(0)
    width = module._parameters["weight"].shape  # type: ignore[union-attr]
    x = (3 * torch.randn(64, *width, generator=generator)).bfloat16()
    weight = (1 + 0.5 * torch.randn(width, generator=generator)).bfloat16()
    with torch.no_grad():
        expected = functional_call(module, {"weight": weight}, (x,))
        for form in FORMS:
            if (form(x, weight, eps) != expected).float().mean() <= FLIPPED:
                return form
    return None
