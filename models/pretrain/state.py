"""The state a run resumes from: fp32 weights, AdamW's moments and the step, as one safetensors file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from models.hybrid_lm import HybridLM

STATE = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_state(folder: Path, model: HybridLM, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Written under a temporary name and renamed: a kill leaves the previous state."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach().cpu()
        for moment in MOMENTS:
            tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment].detach().cpu()
    temporary = folder / f".{STATE}.tmp"
    save_file(tensors, temporary, metadata={"progress": json.dumps(progress)})
    os.replace(temporary, folder / STATE)


def load_state(folder: Path, model: HybridLM, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Restores weights and moments in place and returns the progress; None if there is no state to resume from."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as handle:
            progress = json.loads(handle.metadata()["progress"])
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); remove the run's folder to start again.") from error
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(tensors[f"weight/{name}"])
        moments = {moment: tensors[f"{moment}/{name}"].to(parameter.device) for moment in MOMENTS}
        step = torch.tensor(float(progress["step"]), device=parameter.device)
        optimizer.state[parameter] = {"step": step, **moments}
    return progress
