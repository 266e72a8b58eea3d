"""Hybrid-attention language models: shapes, mixers, checkpoints, pretraining. Heavy imports happen at first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.cache import Cache as Cache
    from models.checkpoint import find_checkpoints as find_checkpoints
    from models.checkpoint import load as load
    from models.checkpoint import save as save
    from models.config import ConfigError as ConfigError
    from models.config import HybridConfig as HybridConfig
    from models.hybrid_lm import HybridLM as HybridLM
    from models.safetensors_files import CheckpointError as CheckpointError

_HOMES = {
    "Cache": "models.cache",
    "CheckpointError": "models.safetensors_files",
    "find_checkpoints": "models.checkpoint",
    "load": "models.checkpoint",
    "save": "models.checkpoint",
    "ConfigError": "models.config",
    "HybridConfig": "models.config",
    "HybridLM": "models.hybrid_lm",
}
__all__ = ["Cache", "CheckpointError", "ConfigError", "HybridConfig", "HybridLM", "find_checkpoints", "load", "save"]


def __getattr__(name: str) -> Any:
    """PEP 562: torch and TransformerLens take seconds to import, which `--help` must not pay for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'models' has no attribute {name!r}; it offers {', '.join(__all__)}.")
    return getattr(importlib.import_module(_HOMES[name]), name)
