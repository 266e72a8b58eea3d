"""The door to Hugging Face models: a local directory becomes a model with HybridLM's surface, offline."""

from models.huggingface.lm import HuggingFaceLM
from models.huggingface.loading import load_huggingface

__all__ = ["HuggingFaceLM", "load_huggingface"]
