"""The random-weights control: a checkpoint's architecture as training would find it, initialised from a fixed seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import models
from analyses.checkpoints import is_hybrid_lm


def untrained(
    path: Path,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None,
    impl: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """HybridLM(config), or the family's own class built from the configuration of a Hugging Face directory.

    Initialised on the CPU in fp32, so that every device has the same weights; torch's generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        if is_hybrid_lm(path):
            config = models.load(path, device="meta").config
            torch.manual_seed(seed)
            model: Any = models.HybridLM(config, impl=impl)
        else:
            from models.huggingface import HuggingFaceLM

            trained = models.load(path, device="cpu", trust_remote_code=trust_remote_code)
            torch.manual_seed(seed)
            model = HuggingFaceLM(type(trained.hf)(trained.hf.config).eval(), trained.tokenizer, trained.name)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)
