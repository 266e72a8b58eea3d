"""Finding retrieval heads in one forward, on one GPU, beside the released script on the same weights and prompts.

    python -m benchmarks.retrieval_tracing [--released DIR] [--scale S5] [--lengths 4096 8192 131072] [--device cuda]

The all-full model of a scale with random bf16 weights. Ours: probes.retrieval.trace, mass on the needle and entropy
from the last four positions of every head, results on the CPU. DIR holds find_retrieval_heads.py of the paper's
release (thunlp/rethinking-hybrid-attention at feaad08, src/tracing, MIT); it runs unchanged, in this process, on a
Llama of the same weights, at every length but the longest. Its time a sample is that from one start to the next.
"""

import argparse
import gc
import importlib.util
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from models.hybrid_lm import HybridLM
from models.presets import preset
from models.tokenizer import Tokenizer
from probes import niah, retrieval

ROOT = Path(__file__).resolve().parents[1]
POSITIONS = (-4, -3, -2, -1)
RELEASED_QUERY = -2
TOKENIZER = ROOT / "ckpt" / "gdn" / "tokenizer.json"
BARS = {8192: ("60 ms and 6 GB a sample", 60.0, 6.0)}
FASTER_AT, FASTER = 4096, 6.0
LONG = 32_768  # from here on one sample at a time, three times
LLAMA_NAMES = {
    "blocks.": "model.layers.", ".attn.": ".self_attn.", ".ln1.": ".input_layernorm.",
    ".ln2.": ".post_attention_layernorm.", "embed.weight": "model.embed_tokens.weight", "ln_final": "model.norm",
}  # fmt: skip


class Prompt(NamedTuple):
    """Ends where the answer would begin; `span` is the needle's value."""

    ids: torch.Tensor
    span: tuple[int, int]
    text: str
    value: str


class Measured(NamedTuple):
    median: float
    low: float
    high: float
    peak: float
    """Gigabytes, weights included; NaN on a CPU."""

    def __str__(self) -> str:
        return f"{self.median:8.1f} ms [{self.low:.1f}, {self.high:.1f}]  {self.peak:6.2f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--released", type=Path, help="folder with the released find_retrieval_heads.py")
    parser.add_argument("--scale", default="S5")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 131_072])
    parser.add_argument("--samples", type=int, default=14, help="prompts of the released script, two to warm up")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a tokenizer.json of single digits")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "error: no CUDA device found; expected one, because these are GPU timings.\n")
    if options.released is not None and not (options.released / "find_retrieval_heads.py").is_file():
        parser.exit(2, f"error: {options.released} has no find_retrieval_heads.py; see the text above.\n")
    model = random_model(options.scale, options.device)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}; {options.scale} full, {model.num_parameters() / 1e6:.0f}M parameters, "
          f"{model.dtype}, impl {model.impl}", flush=True)  # fmt: skip
    prompts = {length: needle_prompts(options.tokenizer, length, options.samples) for length in options.lengths}
    found = {length: ours(model, prompts[length]) for length in options.lengths}
    for length, (text, milliseconds, gigabytes) in BARS.items():
        if length in found:
            met = found[length].median <= milliseconds and found[length].peak <= gigabytes
            say(length, f"bar, {text}: {'met' if met else 'missed'}")
    if options.released is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        write_llama(model, options.tokenizer, Path(folder))
        for length in [n for n in options.lengths if n < LONG]:
            beside(options, model, Path(folder), prompts[length], found[length])


def say(length: int, text: str) -> None:
    print(f"{length:7} tokens, {text}", flush=True)


def random_model(scale: str, device: str) -> HybridLM:
    torch.manual_seed(0)
    with torch.device(device):
        model = HybridLM(preset(scale, "full"))
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def needle_prompts(file: Path, length: int, count: int) -> list[Prompt]:
    """`count` different prompts of exactly `length` tokens without their answer; one if they are long."""
    tokenizer: Any = Tokenizer.from_file(file)
    count = 1 if length >= LONG else count
    extra = len(niah.build(tokenizer, length=length, n=1, seed=0, values="numbers")[0].answer_digits)
    samples = niah.build(tokenizer, length=length + extra, n=count, seed=0, values="numbers")
    found = []
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids[:length]).long()
        found.append(Prompt(ids, sample.value_span, tokenizer.decode(ids.tolist()), sample.value))
    return found


def ours(model: HybridLM, prompts: Sequence[Prompt]) -> Measured:
    """One prompt at a time; beside it the same forward without tracing, and four prompts at once."""
    length = len(prompts[0].ids)
    repeats = 3 if length >= LONG else 20
    ids = torch.stack([prompt.ids for prompt in prompts[:4]]).to(model.device)
    spans = torch.tensor([[prompt.span] for prompt in prompts[:4]])
    one = timed(lambda: retrieval.trace(model, ids[:1], POSITIONS, spans[:1]), repeats)
    say(length, f"ours, heads and entropy  {one}")
    say(length, f"ours, the forward alone  {timed(lambda: forward(model, ids[:1]), repeats)}")
    if len(ids) == 4:
        four = timed(lambda: retrieval.trace(model, ids, POSITIONS, spans), max(3, repeats // 4))
        say(length, f"ours, a sample of four   {Measured(four.median / 4, four.low / 4, four.high / 4, four.peak)}")
    return one


@torch.no_grad()
def forward(model: HybridLM, ids: torch.Tensor) -> None:
    model.final_hidden(ids)[0, -1, 0].item()


def timed(run: Callable[[], Any], repeats: int) -> Measured:
    """Wall-clock milliseconds; `run` must wait for the device."""
    on_gpu = torch.cuda.is_available()
    run()
    run()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    milliseconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        milliseconds.append(1e3 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else float("nan")
    return Measured(statistics.median(milliseconds), min(milliseconds), max(milliseconds), peak)


def write_llama(model: HybridLM, tokenizer: Path, folder: Path) -> None:
    """A Hugging Face directory of the same weights."""
    from transformers import LlamaConfig

    shape = model.config
    LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.d_model, intermediate_size=shape.d_ffn,
        num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_heads, num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.d_head, rms_norm_eps=shape.rms_eps, max_position_embeddings=shape.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base}, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    tensors = {}
    for name, tensor in model.state_dict().items():
        renamed = "lm_head.weight" if name == "unembed.weight" else name
        for native, theirs in LLAMA_NAMES.items():
            renamed = renamed.replace(native, theirs)
        tensors[renamed] = tensor.cpu().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(tokenizer, folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def beside(options: Any, model: HybridLM, folder: Path, prompts: Sequence[Prompt], one: Measured) -> None:
    """The released script's time, memory and scores at one length, and how ours compare."""
    length = len(prompts[0].ids)
    model.to("cpu")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        peer, scores, spans = released(options, folder, prompts)
    except torch.OutOfMemoryError as error:
        peak = torch.cuda.max_memory_allocated() / 1e9
        say(length, f"released: out of memory at {peak:.1f} GB: {str(error).splitlines()[0][:90]}")
        return
    finally:
        gc.collect()
        model.to(options.device)
    say(length, f"released, heads alone    {peer}")
    masses = [
        retrieval.attention_mass(model, p.ids[None].to(model.device), torch.tensor([[span]]), (RELEASED_QUERY,))
        for p, span in zip(prompts, spans, strict=True)
    ]
    mass, ratio = torch.cat(masses)[..., 0, 0].mean(0), peer.median / one.median
    difference = float((scores - mass).abs().max())
    say(length, f"{ratio:.1f} times faster; mean masses up to {float(mass.max()):.1e} differ by up to {difference:.1e}")
    if length == FASTER_AT:
        say(length, f"bar, {FASTER:.0f} times faster: {'met' if ratio >= FASTER else 'missed'}")


def released(
    options: Any, folder: Path, prompts: Sequence[Prompt]
) -> tuple[Measured, torch.Tensor, list[tuple[int, int]]]:
    """main() of the unchanged script; a clock is read where it looks for the needle of each sample.

    Its scores [layer, head], and the tokens that it takes for the needle: the value with its colon and full stop.
    """
    script = imported(options.released / "find_retrieval_heads.py")
    rows, find = folder / "niah.jsonl", script._needle_positions
    lines = [{"input": prompt.text, "outputs": [prompt.value]} for prompt in prompts]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    starts: list[float] = []
    spans: list[tuple[int, int]] = []

    def marked(tokenizer: Any, ids: torch.Tensor, needles: list[str]) -> list[int]:
        starts.append(time.perf_counter())
        assert torch.equal(ids, prompts[len(spans)].ids), "the script's tokens are not ours"
        found: list[int] = find(tokenizer, ids, needles)
        spans.append((found[0], found[-1] + 1))
        assert len(found) == spans[-1][1] - spans[-1][0], "the script finds the needle in several places"
        return found

    script._needle_positions = marked
    arguments = ["--model-path", folder, "--niah-jsonl", rows, "--output-json", folder / "heads.json",
                 "--max-input-tokens", len(prompts[0].ids), "--device", options.device,
                 "--device-map", "none"]  # fmt: skip
    before, sys.argv = sys.argv, [script.__file__, *map(str, arguments)]
    try:
        script.main()
    finally:
        sys.argv = before
    each = [1e3 * (stop - start) for start, stop in itertools.pairwise(starts[2:])]
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else float("nan")
    scores = torch.tensor(json.loads((folder / "heads.json").read_text())["layer_head_scores"])
    return Measured(statistics.median(each), min(each), max(each), peak), scores, spans


def imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"released_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # its dataclasses look themselves up there
    spec.loader.exec_module(script)
    return script


if __name__ == "__main__":
    main()
