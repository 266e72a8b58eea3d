"""Gradient influence beside the paper's released script, and at lengths where that one runs out of memory.

    python benchmarks/gradient_influence.py --released DIR --tokens 8192 32768        # Llama-3.1-8B's shape
    python benchmarks/gradient_influence.py --hybrid gdn mamba2 --tokens 131072       # native S5 shapes, a memory test
    python benchmarks/gradient_influence.py --released DIR --tokens 256 --tiny        # seconds on a CPU: does it run?

DIR holds github thunlp/rethinking-hybrid-attention at feaad08 (src/gradient/run_gradient_influence.py; MIT). Its own
function runs, unchanged, with its defaults but sdpa for eager, on the same model object and token ids as ours in the
same process; only what it would read from disk is handed to it. Its time per sample is that between two steps of its
own progress bar. Weights are random, made on the device. Times are medians over samples after two to warm up, with the
fastest and the slowest; memory is the peak of what tensors take, and of what the allocator holds, in 10^9 bytes.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# benchmarks/kernels.py is called like the package: import from the repository's root, not from beside this file
sys.path[0] = str(Path(__file__).resolve().parents[1])

SCRIPT = Path("src") / "gradient" / "run_gradient_influence.py"
LLAMA_8B = dict(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131_072, rms_norm_eps=1e-5,
)  # fmt: skip
TINY = LLAMA_8B | dict(
    vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
WARM_UP = 2
LONG = 8192  # tokens; longer samples run once
LEAN_BYTES, MOST_BYTES = 5e9, 6e10
Times = list[float]


@dataclass
class Row:
    """One measurement: seconds per sample, peak bytes of tensors and of the allocator (0 on a CPU), curves [N, T]."""

    label: str
    seconds: Times
    allocated: int
    reserved: int
    curves: Tensor | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def text(self, peer: Row | None) -> str:
        times = f"{1e3 * self.median:9.1f} ms [{1e3 * min(self.seconds):.1f}, {1e3 * max(self.seconds):.1f}]"
        line = f"{self.label:58} {times:34} peak {self.allocated / 1e9:6.2f} GB, held {self.reserved / 1e9:6.2f} GB"
        if peer is None:
            return line
        memory = f", memory x {self.allocated / peer.allocated:.2f}" if peer.allocated else ""
        return f"{line}; time x {self.median / peer.median:.2f}{memory}"


def synchronised(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measured(label: str, device: torch.device, run: Callable[[], tuple[Times, Tensor]]) -> Row | None:
    """`run` with the peaks of memory while it runs; its first WARM_UP times are left out. None if memory runs out."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    try:
        seconds, curves = run()
    except torch.OutOfMemoryError as error:
        print(f"{label:58} out of memory: {str(error)[:90]}", flush=True)
        return None
    peaks = (0, 0)
    if device.type == "cuda":
        peaks = (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    return Row(label, seconds[WARM_UP:] or seconds, *peaks, curves)


def llama(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Any:
    """A LlamaForCausalLM with random weights, made on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    shape = TINY if options.tiny else LLAMA_8B
    config = LlamaConfig(**shape, rope_parameters=rope | {"original_max_position_embeddings": 8192})
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def released(path: Path, model: Any, ids: Tensor, score: str, keep_cache: bool) -> tuple[Times, Tensor]:
    """Seconds per sample and mean curve [1, T] of the released function. `keep_cache`: without its empty_cache()."""
    found = importlib.util.spec_from_file_location("released_gradient", path / SCRIPT)
    assert found is not None
    assert found.loader is not None
    script: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    device, marks = ids.device, []

    def steps(texts: list[str], **_: Any) -> Iterator[str]:
        for text in texts:
            marks.append(synchronised(device))
            yield text
        marks.append(synchronised(device))

    def tokenizer(text: str, **_: Any) -> dict[str, Tensor]:
        row = ids[int(text)][None].cpu()
        return {"input_ids": row, "attention_mask": torch.ones_like(row)}

    script.tqdm = steps
    script.AutoConfig = SimpleNamespace(from_pretrained=lambda *_, **__: copy.deepcopy(model.config))
    script.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer)
    script.AutoModelForCausalLM = SimpleNamespace(from_pretrained=lambda *_, **__: model)
    if keep_cache:
        script.torch = _Torch(torch)
    curve, _, _ = script._compute_curve_for_model(
        model_name="random", model_path="random", texts=[str(i) for i in range(len(ids))], context_len=ids.shape[1],
        device=device, dtype=model.dtype, target_mode=score, target_last_n_tokens=20, attn_implementation="sdpa",
        gradient_checkpointing=False, trust_remote_code=False, local_files_only=True, device_map="none",
    )  # fmt: skip
    return [end - start for start, end in itertools.pairwise(marks)], torch.from_numpy(curve)[None]


class _Torch:
    """torch, but its cuda.empty_cache does nothing."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.cuda = SimpleNamespace(is_available=module.cuda.is_available, empty_cache=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def ours(model: Any, ids: Tensor, score: str, keep_bytes: float) -> tuple[Times, Tensor]:
    """Seconds per sample, its curve on the CPU included, and the curves [N, T]."""
    from probes.gradient import gradient_influence

    seconds, curves = [], []
    for row in ids:
        start = synchronised(ids.device)
        result = gradient_influence(model, row[None], score=score, keep_bytes=keep_bytes)
        curves.append(result.norm.cpu())
        seconds.append(synchronised(ids.device) - start)
    return seconds, torch.cat(curves)


def beside_released(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    """The bars: time and memory of the plain and of the lean setting, and that the curves are the same."""
    from models.huggingface import HuggingFaceLM

    hf = llama(options, device, dtype)
    inputs = {length: tokens(options, length, hf.config.vocab_size, device) for length in options.tokens}
    peers = {length: released_rows(options, hf, ids) for length, ids in inputs.items()} if options.released else {}
    model = HuggingFaceLM(hf)  # from here on the model's attention is ours
    for length, ids in inputs.items():
        for score, (words, keep_bytes) in settings(options, length):
            run = partial(ours, model, ids, score, keep_bytes)
            row = measured(f"{length}: ours, {score}, {words} kept", device, run)
            peer = peers.get(length)
            if row is not None:
                show(row, peer)
            if row is not None and peer is not None and score == options.score:
                compare(row, peer)
            if options.profile and keep_bytes == float("inf"):
                profile(run)


def settings(options: argparse.Namespace, length: int) -> list[tuple[str, tuple[str, float]]]:
    """(score, (words, bytes of activations kept)) of the rows."""
    everything, lean, nothing = ("all", float("inf")), (f"{LEAN_BYTES / 1e9:g} GB", LEAN_BYTES), ("nothing", 0.0)
    if length > LONG:  # the activations of 32 blocks do not fit
        return [("log_prob", (f"{MOST_BYTES / 1e9:g} GB", MOST_BYTES)), ("log_prob", nothing)]
    rows = [(options.score, kept) for kept in (everything, lean, nothing)]
    return [*rows, ("log_prob", everything), ("log_prob", lean)]


def released_rows(options: argparse.Namespace, hf: Any, ids: Tensor) -> Row | None:
    """As released, and without its empty_cache(), which it calls after every sample; the first is the peer."""
    peer = None
    for keep_cache in (False, True):
        label = f"{ids.shape[1]}: released, sdpa, {options.score}{', no empty_cache()' if keep_cache else ''}"
        run = partial(released, options.released, hf, ids, options.score, keep_cache)
        row = measured(label, ids.device, run)
        if row is None:
            return None
        peer = peer or row
        show(row, peer)
    return peer


def compare(row: Row, peer: Row) -> None:
    assert row.curves is not None
    assert peer.curves is not None
    apart = (row.curves.double().mean(0) / peer.curves[0].double() - 1).abs()
    print(f"    its curve is {apart.median():.1e} from the released one in the median, {apart.max():.1e} at most")


def profile(run: Callable[[], Any]) -> None:
    """Where the time of the device goes, over all samples."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
    order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=90))


def hybrids(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    """Native models of the paper's largest shape (or of nano's), every block run again."""
    from models.hybrid_lm import HybridLM
    from models.presets import preset

    for name, length in itertools.product(options.hybrid, options.tokens):
        torch.manual_seed(0)
        with torch.device(device):
            model = HybridLM(preset("nano" if options.tiny else "S5", name), options.impl)
        model = model.to(dtype).eval().requires_grad_(False)
        ids = tokens(options, length, model.config.vocab_size, device)
        ours(model, ids[:1, :512], "log_prob", 0.0)  # imports and first launches
        label = f"{length}: {'nano' if options.tiny else 'S5'} {name}, {model.impl}, log_prob, nothing kept"
        row = measured(label, device, partial(ours, model, ids, "log_prob", 0.0))
        if row is not None:
            show(row)
        del model


def tokens(options: argparse.Namespace, length: int, vocab: int, device: torch.device) -> Tensor:
    count = options.samples + WARM_UP if options.samples > 1 and length <= LONG else 1
    return torch.randint(vocab, (count, length), generator=torch.Generator().manual_seed(0)).to(device)


def show(row: Row, peer: Row | None = None) -> None:
    print(row.text(None if peer is row else peer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--released", type=Path, help="folder of the released repository")
    parser.add_argument("--hybrid", nargs="+", help="architectures of models.presets instead of the Llama")
    parser.add_argument("--impl", help="whose kernels a hybrid takes, triton or torch; default: the device's")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--samples", type=int, default=5, help="timed samples; 1: one, not warmed up")
    parser.add_argument("--score", default="logit_sum", choices=["logit_sum", "argmax_logit"])
    parser.add_argument("--profile", action="store_true", help="also where the time of our first setting goes")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    options = parser.parse_args()
    if options.impl and not options.hybrid:
        parser.error("--impl chooses the kernels of a --hybrid; a Llama's attention hides nothing and is torch's")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {dtype}", flush=True)
    (hybrids if options.hybrid else beside_released)(options, device, dtype)


if __name__ == "__main__":
    main()
