"""The points of training runs that models.pretrain wrote: one a checkpoint, from log.jsonl and the step folders.

N is counted from the shapes in the header of a step's model.safetensors (from its config.json where the weights are
gone); D and loss are `tokens` and `val_loss` of the log. Architecture and scale: the preset in run.json, else the name
of the folder.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from analyses.scaling_points import Points
from models.errors import InputError

LOG, RUN, WEIGHTS, CONFIG = "log.jsonl", "run.json", "model.safetensors", "config.json"
EMBEDDINGS = ("embed.weight", "unembed.weight")
LONGEST_HEADER = 100 * 2**20  # bytes; safetensors' own limit


def find_runs(path: Path) -> list[Path]:
    """`path` if it is a run, else the runs directly in it, by name; InputError if there are none."""
    if (path / LOG).is_file():
        return [path]
    found = sorted(folder.parent for folder in path.glob(f"*/{LOG}"))
    if not found:
        raise InputError(f"{path} holds no {LOG}, nor does a folder in it; give tables, or runs of models.pretrain")
    return found


def read_run(path: Path, last: bool = False) -> Points:
    """The validated checkpoints of one run, by tokens; `last`: the final one only."""
    preset = _json(path / RUN).get("preset", "") if (path / RUN).is_file() else ""
    scale, _, architecture = str(preset).rpartition("/")
    losses = _losses(path / LOG)
    n = _parameters(path)
    chosen = sorted(losses.items())[-1:] if last else sorted(losses.items())
    label, size = architecture or path.resolve().name, scale or f"{n:.4g}"
    return Points.of([(float(n), float(tokens), loss, label, size, path.resolve().name) for tokens, loss in chosen])


def _losses(path: Path) -> dict[int, float]:
    """{tokens: val_loss}; a resumed run repeats lines, and the later one counts."""
    found: dict[int, float] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if "val_loss" not in entry:
                continue
            tokens, loss = int(entry["tokens"]), float(entry["val_loss"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}, line {number}: not a line of a training log ({error}); remove it") from error
        if tokens < 1 or not (math.isfinite(loss) and loss > 0):
            raise InputError(f"{path}, line {number}: tokens {tokens}, val_loss {loss}; expected positive numbers")
        found[tokens] = loss
    if not found:
        raise InputError(f"{path}: no line has val_loss; give a run that reached its first checkpoint")
    return found


def _parameters(run: Path) -> int:
    """Parameters without embeddings, the same at every step."""
    steps = sorted(folder for folder in run.glob("step_*") if (folder / CONFIG).is_file())
    if not steps:
        raise InputError(f"{run}: no step_*/{CONFIG}, so its number of parameters is unknown; give a table instead")
    weights = [step / WEIGHTS for step in steps if (step / WEIGHTS).is_file()]
    return _counted(weights[-1]) if weights else _built(steps[-1] / CONFIG)


def _counted(path: Path) -> int:
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        try:
            if not 0 < length <= LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{path} is not a readable safetensors file ({error}); copy it again") from error
    if absent := [name for name in EMBEDDINGS if name not in shapes]:
        raise InputError(f"{path} has no {absent[0]}; expected a checkpoint of models.pretrain (or give a table)")
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in EMBEDDINGS)


def _built(config: Path) -> int:
    import torch

    from models.config import HybridConfig
    from models.hybrid_lm import HybridLM

    shape = HybridConfig.from_json(_json(config))
    with torch.device("meta"):  # shapes without numbers
        return HybridLM(shape).num_parameters(embeddings=False)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a JSON {type(content).__name__}; expected an object")
    return content
