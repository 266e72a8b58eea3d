"""What a pretraining run is made of; the field docs are the command's help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class PretrainConfig:
    """Train one hybrid from scratch on one device, on a corpus made by `make corpus`."""

    preset: str
    """SCALE/ARCHITECTURE, e.g. mini/swa-32-nope, mini/gdn, nano/swa-512-1to3."""
    out: Path
    """Folder of the run: log.jsonl, step_XXXXXXXX/ checkpoints, state.safetensors to resume from."""
    tokens: str = "130M"
    """Training tokens; K, M and B are 10^3, 10^6 and 10^9."""
    corpus: Path = Path("corpus")
    """Folder with train.bin, val.bin and tokenizer.json."""
    batch_size: int = 16
    """Sequences a step."""
    context: int | None = None
    """Tokens a sequence; default: the preset's context length."""
    vocabulary: int | None = None
    """Rows of the embeddings, at least the tokenizer's tokens; default: the preset's."""
    learning_rate: float = 3e-3
    """Peak of AdamW's learning rate."""
    warmup_steps: int = 200
    """Linear warm-up; a tenth of all steps where that is less."""
    decay_share: float = 0.2
    """Share of the run at its end in which the learning rate falls linearly to zero."""
    weight_decay: float = 0.1
    """On matrices only, not on embeddings, norms, biases, decays."""
    clip: float = 1.0
    """Largest gradient norm."""
    niah_share: float = 0.25
    """Share of sequences that carry a needle and end in its question and answer."""
    checkpoints: int = 16
    """Checkpoints at log-spaced token counts, the last at the end."""
    seed: int = 0
    """Of the weights, the data order and the needles."""
    device: str | None = None
    """cuda, cpu; default: CUDA if there is one."""
    impl: Literal["triton", "torch"] | None = None
    """Who computes the mixers; default: Triton on CUDA, torch elsewhere."""
    compile: bool | None = None
    """torch.compile the blocks; default: on CUDA only."""
    graph: bool | None = None
    """Replay the steps as one CUDA graph; default: on CUDA only."""
    log_every: int = 20
    """Steps between lines of log.jsonl."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "checkpoints", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected 1 or more.")
        for name in ("niah_share", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected 0 to 1.")
        token_count(self.tokens)


def token_count(text: str) -> int:
    """130M -> 130_000_000. Raises ValueError for anything but a positive number with an optional K, M or B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper().replace("_", ""))
    count = round(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}[match[2]]) if match else 0
    if count < 1:
        raise ValueError(f"--tokens is {text!r}; expected a positive number such as 130M.")
    return count
