"""The door to Hugging Face models: a local directory (config.json, safetensors) becomes a scoring model, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from models.gguf_files import gguf_source
from models.huggingface.lm import HuggingFaceLM
from models.huggingface.remote_code import check_model_code
from models.huggingface.tokenizer import load_tokenizer
from models.safetensors_files import CheckpointError, read_json, scan
from models.selfcheck import selfcheck

FAULTS = (ValueError, OSError, RuntimeError, KeyError, ImportError, AttributeError, TypeError)


def load_huggingface(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
) -> HuggingFaceLM:
    """A model in eval mode from a directory with config.json and safetensors, or one GGUF file; opens no connection.

    device None: CUDA if there is one, else CPU; on the meta device no weight is read and only `layers` are known.
    dtype None: fp32 on CPU, the stored dtype on CUDA. CheckpointError (a ValueError) naming the file for absent or
    damaged files, and for tensors that are missing (transformers would leave them random) or extra.
    trust_remote_code=True runs the Python files of the directory; without it one that needs them is refused.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no directory; expected a checkpoint directory (config.json, model.safetensors)."
        )
    source = gguf_source(path)
    if not source:
        read_json(path / "config.json")
        scan(path)
        check_model_code(path, trust_remote_code)
    device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "meta":
        described, tokenizer = _described(path, trust_remote_code), load_tokenizer(path, trust_remote_code)
        return HuggingFaceLM(described, tokenizer, name=path.resolve().name)
    if dtype is None and device.type == "cpu":
        dtype = torch.float32
    hf = _from_pretrained(path, dtype if dtype is not None else "auto", trust_remote_code)
    hf = hf.to(device).eval().requires_grad_(False)
    model = HuggingFaceLM(hf, load_tokenizer(path, trust_remote_code), name=path.resolve().name)
    for check in selfcheck(model, quick=True):
        if check.verdict == "fail":
            flag = " --trust-remote-code" if trust_remote_code else ""
            raise CheckpointError(
                f"{path}: {check.name}: {check.detail}; `python -m models.selfcheck {path}{flag}` tells more"
            )
    return model


def _described(path: Path, trust_remote_code: bool) -> Any:
    """The model of config.json without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code, **gguf_source(path)
        )
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code).eval()
    except FAULTS as error:
        raise CheckpointError(f"{path}: transformers cannot read its config.json: {error}") from error


def _from_pretrained(path: Path, dtype: torch.dtype | str, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, local_files_only=True, output_loading_info=True,
            trust_remote_code=trust_remote_code, **gguf_source(path),
        )  # fmt: skip
    except FAULTS as error:
        raise CheckpointError(f"{path}: transformers cannot load this directory: {error}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    hf, info = loaded
    for fault, remedy in (
        ("missing_keys", "transformers would leave it random"),
        ("mismatched_keys", "its shape is not the config's"),
        ("unexpected_keys", "it belongs to no layer of config.json"),
    ):
        if names := sorted(str(name) for name in info.get(fault) or ()):
            raise CheckpointError(
                f"{path}: tensor {names[0]!r} is in {fault} ({len(names)} in all): {remedy}; "
                "check config.json and weights."
            )
    return hf
