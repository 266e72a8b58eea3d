"""What is measured at every checkpoint: held-out loss, its late part, and needle retrieval."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.pretrain.data import TokenStream

SEQUENCES, LATE_SHARE = 32, 0.25
VALIDATION_SEED = 1_000_003  # never a training seed's stream


class Validation:
    """Fixed held-out sequences, half of them with needles; losses in nats per token."""

    def __init__(self, path: Path, length: int, tokenizer: Any, device: torch.device):
        plain = TokenStream(path, length, VALIDATION_SEED, 0.0, tokenizer)
        needles = TokenStream(path, length, VALIDATION_SEED, 1.0, tokenizer, whole=1.0)
        count = min(SEQUENCES, plain.blocks)
        self.plain = torch.from_numpy(np.stack([plain.sequence(i)[0] for i in range(count)]).astype(np.int64))
        drawn = [needles.sequence(i) for i in range(count)]
        self.needle = torch.from_numpy(np.stack([ids for ids, _ in drawn]).astype(np.int64))
        self.answers = [answer for _, answer in drawn if answer is not None]
        self.device = device

    def __call__(self, logits_of: Callable[[Tensor], Tensor], batch_size: int) -> dict[str, float]:
        """val_loss, val_late_loss (last quarter of positions), niah (all digits), niah_digits (share of digits)."""
        losses, hits = [], []
        for rows in self.plain.split(batch_size):
            rows = rows.to(self.device)
            logits = logits_of(rows[:, :-1]).float()
            losses.append(torch.nn.functional.cross_entropy(logits.mT, rows[:, 1:], reduction="none").cpu())
        for rows, spans in zip(self.needle.split(batch_size), _chunks(self.answers, batch_size), strict=True):
            predicted = logits_of(rows.to(self.device)[:, :-1]).argmax(-1).cpu()
            for row, guess, (start, end) in zip(rows, predicted, spans, strict=True):
                hits.append((guess[start - 1 : end - 1] == row[start:end]).float())
        loss = torch.cat(losses)
        late = loss[:, -int(loss.shape[1] * LATE_SHARE) :]
        return {
            "val_loss": loss.mean().item(),
            "val_late_loss": late.mean().item(),
            "niah": float(np.mean([bool(hit.all()) for hit in hits])),
            "niah_digits": float(np.mean([hit.mean().item() for hit in hits])),
        }


def _chunks(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
