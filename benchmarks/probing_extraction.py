"""Features for layer-wise probes: the released extraction script beside ours, in one process, on the same prompts.

    git clone https://github.com/thunlp/rethinking-hybrid-attention
    git -C rethinking-hybrid-attention checkout feaad08
    python -m benchmarks.probing_extraction --released rethinking-hybrid-attention/src/probing        # needs a GPU
    python -m benchmarks.probing_extraction --released DIR --scale nano --length 700 --prompts 4 --device cpu  # a trial

Released: their 02_extract_hiddenstate.py as it is, on transformers' Llama of the same shape and weights (random) in
bf16, timed from one prompt to the next, tokenizing included. (Without a GPU its device_map is replaced.) Ours: what a
unit of analyses.layerwise_probing does, from building prompts to features in HDF5, with every prompt whole, and with
shared prefixes: haystack repeat, needle depths uniform. Bars: whole <= 0.8 of their time per prompt at no more memory,
shared <= 0.5. Features of the two are compared layer by layer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tqdm

import models
from analyses import store
from analyses.features import extract, mean_embedding
from analyses.probing_prompts import ProbingPrompts
from benchmarks.retrieval_tracing import TOKENIZER, write_llama
from models.presets import preset
from models.tokenizer import Tokenizer
from probes import niah

SCRIPT, SEED = "02_extract_hiddenstate.py", 0
SKIPPED = 2  # first prompts of the released script, which warm up
BARS = {"whole": 0.8, "shared": 0.5}


@dataclass(frozen=True)
class Measured:
    """Seconds a prompt and what they are made of, peak GiB of the device's allocator, weights included."""

    total: float
    parts: dict[str, float]
    peak: float
    values: np.ndarray  # [N, layers + 1, D] of ours (before the first layer and after each), [N, layers, D] of theirs
    forwarded: float = 1.0  # share of the prompts' tokens

    def line(self, name: str, other: Measured | None) -> str:
        parts = ", ".join(f"{part} {1e3 * seconds:.1f}" for part, seconds in self.parts.items())
        text = f"{name}: {1e3 * self.total:.1f} ms a prompt ({parts}), peak {self.peak:.2f} GiB"
        text += f", {self.forwarded:.2f} of the tokens" if self.forwarded < 1 else ""
        return text if other is None else f"{text}, {self.total / other.total:.2f} x released"


def settle(device: str) -> None:
    """Free what nobody holds, and start counting memory anew."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")


def build_model(options: argparse.Namespace, architecture: str) -> models.HybridLM:
    torch.manual_seed(SEED)
    with torch.device(options.device):
        model = models.HybridLM(preset(options.scale, architecture), impl=options.impl)
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def prompts_of(options: argparse.Namespace, n: int) -> ProbingPrompts:
    return ProbingPrompts(
        options.tokenizer,
        haystack="repeat",
        length=options.length,
        n=n,
        seed=SEED,
        values=niah.EASY,
        after_shared=False,
    )


@contextlib.contextmanager
def stopwatch(device: str, stamps: list[float]) -> Iterator[None]:
    """Notes when each prompt of the released script begins, and when the last one has ended."""
    plain = tqdm.tqdm

    def timed(iterable: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(iterable, list) and iterable and "text" in iterable[0]):
            return plain(iterable, *args, **kwargs)
        return noted(iterable)

    def noted(samples: list[Any]) -> Iterator[Any]:
        settle(device)
        for sample in samples:
            stamps.append(time.perf_counter())
            yield sample
        stamps.append(time.perf_counter())

    tqdm.tqdm = timed  # type: ignore[misc]
    try:
        yield
    finally:
        tqdm.tqdm = plain  # type: ignore[misc]


@contextlib.contextmanager
def on_cpu(device: str) -> Iterator[None]:
    """The script asks for device_map="cuda"; where there is none, it gets the CPU instead."""
    from transformers import AutoModelForCausalLM as Auto

    given = Auto.from_pretrained
    if device != "cuda":
        Auto.from_pretrained = lambda *args, **kwargs: given(*args, **{**kwargs, "device_map": None})
    try:
        yield
    finally:
        if device != "cuda":
            del Auto.from_pretrained


def released(options: argparse.Namespace, folder: Path, ids: np.ndarray) -> Measured:
    texts = [options.tokenizer.decode(row.tolist()) for row in ids]
    again = [options.tokenizer.encode(text) for text in texts]
    assert all(a == row.tolist() for a, row in zip(again, ids, strict=True)), "a text is not the tokens of its prompt"
    (folder / "prompts.json").write_text(json.dumps([{"text": text, "label": 0} for text in texts]))
    script, stamps = Path(options.released) / SCRIPT, []
    argv, sys.argv = sys.argv, [
        str(script), "--model_path", str(folder / "llama"), "--data_path", str(folder / "prompts.json"),
        "--output_dir", str(folder), "--model_alias", "peer",
    ]  # fmt: skip
    sys.path.insert(0, str(script.parent))
    try:
        with stopwatch(options.device, stamps), on_cpu(options.device):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = argv
        sys.path.remove(str(script.parent))
        sys.modules.pop("common", None)
    most = peak(options.device)
    took = np.diff(stamps)[SKIPPED:]
    started = time.perf_counter()
    for text in texts:
        options.tokenizer.encode(text)
    tokenizing = (time.perf_counter() - started) / len(texts)
    with np.load(folder / "acts_peer.npz") as acts:
        values = np.stack([acts[f"layer_{i}"] for i in range(sum(name.startswith("layer_") for name in acts))], 1)
    settle(options.device)
    spread = {"tokenizing": tokenizing, "least": float(took.min()), "most": float(took.max())}
    return Measured(float(took.mean()), spread, most, values)


def ours(options: argparse.Namespace, model: Any, n: int, share: bool, budget: int | None, folder: Path) -> Measured:
    """One unit, from nothing to a file."""
    prompts = prompts_of(options, n)
    settle(options.device)
    stamps = [time.perf_counter()]
    batch = prompts.batch(0, n)
    stamps.append(time.perf_counter())
    found = extract(model, batch.ids, share_prefix=share, tokens_per_batch=budget)
    means = mean_embedding(model, batch.ids)
    stamps.append(time.perf_counter())
    variables = {
        "features": store.Variable(("sample", "feature", "width"), found.values[:, 0], "1", "residual stream"),
        "mean": store.Variable(("sample", "width"), means, "1", "of the prompt's embeddings"),
    }
    coords = {"sample": store.Variable(("sample",), np.arange(n), "1", "prompt")}
    store.write(folder / "unit.h5", store.Result({store.ROOT: store.Dataset(variables, coords)}, {}), compress=False)
    stamps.append(time.perf_counter())
    parts = dict(zip(("prompts", "features", "file"), (np.diff(stamps) / n).tolist(), strict=True))
    ends = [i for i, name in enumerate(found.names) if not name.endswith("mid")]
    total, share = (stamps[-1] - stamps[0]) / n, found.computed / batch.ids.size
    return Measured(total, parts, peak(options.device), found.values[:, 0, ends], share)


def agreement(model: Any, mine: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference over the largest entry, layer by layer; their last layer is read behind the final norm."""
    mine = mine[: len(theirs), 1:].copy()
    last = torch.from_numpy(mine[:, -1]).to(model.device, model.dtype)
    mine[:, -1] = model.ln_final(last).float().cpu().numpy()
    scale = np.abs(theirs).max((0, 2))
    return float((np.abs(mine - theirs).max((0, 2)) / scale).max())


def report(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    model = build_model(options, "full")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    count = f"{model.num_parameters():,}"
    yield f"{options.scale}, {count} weights, bf16, {options.length} tokens, {name}, impl {model.impl}"
    peer = None
    if options.released:
        (folder / "llama").mkdir()
        write_llama(model=model, tokenizer=TOKENIZER, folder=folder / "llama")
        model.cpu()
        peer = released(options, folder, prompts_of(options, options.prompts).batch(0, options.prompts).ids)
        yield peer.line(f"released, full, n = {options.prompts}", None)
        model.to(options.device)
    yield from rows(options, model, "full", peer, folder)
    del model
    settle(options.device)
    yield from rows(options, build_model(options, "swa-128"), "swa-128", peer, folder)


def rows(
    options: argparse.Namespace, model: Any, architecture: str, peer: Measured | None, folder: Path
) -> Iterator[str]:
    for kind, n in (("whole", options.prompts), ("shared", options.shared_prompts)):
        for budget in options.tokens_per_batch or [None]:
            ours(options, model, min(n, 16), kind == "shared", budget, folder)  # compiles kernels
            found = ours(options, model, n, kind == "shared", budget, folder)
            yield found.line(f"ours, {architecture}, {kind}, n = {n}, {budget or 'default'} tokens at once", peer)
            if peer is not None and architecture == "full":
                yield f"    {verdict(model, kind, found, peer)}"


def verdict(model: Any, kind: str, found: Measured, peer: Measured) -> str:
    """Against the bar, and against the bar without what each side needs for its prompts' ids."""
    alone = (found.total - found.parts["prompts"]) / (peer.total - peer.parts["tokenizing"])
    said = f"bar {BARS[kind]}: {'met' if found.total <= BARS[kind] * peer.total else 'missed'}"
    said += f" ({alone:.2f} x without tokenizing there and making prompts here)"
    if kind == "shared":
        return said
    difference = agreement(model, found.values, peer.values)
    return f"{said}; memory {found.peak / peer.peak:.2f} x; features differ by up to {difference:.4f} of their largest"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--released", help="folder of the released scripts, src/probing; without it ours alone")
    parser.add_argument("--scale", default="S5")
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--prompts", type=int, default=24, help="of the released script and of ours, whole")
    parser.add_argument("--shared-prompts", type=int, default=128, help="of ours with shared prefixes: one unit")
    parser.add_argument("--tokens-per-batch", type=int, nargs="*", help="of ours; default: what the analysis takes")
    parser.add_argument("--impl", default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.tokenizer = Tokenizer.from_file(TOKENIZER)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for line in report(options, Path(folder)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
