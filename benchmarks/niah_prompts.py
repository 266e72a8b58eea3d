"""How fast needle prompts are built, and in how much memory: 10,000 of 16,384 tokens, streamed.

    python -m benchmarks.niah_prompts [--tokenizer ckpt/gdn/tokenizer.json] [--n 10000] [--length 16384] [--verify 64]

Bar: 10,000 in a minute, memory that does not grow with their number. The table says which way was taken: a tokenizer
whose tokens end at line ends (byte-level ones with a regex before them such as GPT-2's and Llama 3's; Gemma's, with a
token for the line break) has its prompts put together from lines encoded once; one whose tokens cross them has the
announcement, the needles and the question spliced into stretches of haystack whose tokens are known. `--values numbers`
for tokenizers under which the easy classes cannot be told apart.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

from models.tokenizer import Tokenizer
from probes import niah

TOKENIZER = Path(__file__).resolve().parents[1] / "ckpt" / "gdn" / "tokenizer.json"


def resident() -> float:
    """Most memory ever held, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a tokenizer.json")
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--verify", type=int, default=64, help="every k-th prompt is encoded whole and compared")
    parser.add_argument("--haystacks", nargs="+", default=["repeat", "essay", "noise"])
    parser.add_argument("--values", default="easy", help="easy, hard or numbers")
    options = parser.parse_args()
    tokenizer: Any = Tokenizer.from_file(options.tokenizer)
    for haystack in options.haystacks:
        started = time.perf_counter()
        prompts = niah.build(
            tokenizer, length=options.length, n=options.n, seed=0, haystack=haystack, verify=options.verify,
            values=options.values,
        )  # fmt: skip
        before = resident()
        exact = sum(len(sample.input_ids) == options.length for sample in prompts)
        took = time.perf_counter() - started
        way = "from lines" if prompts.additive else "spliced"
        print(
            f"{haystack:8} {options.n:,} prompts of {options.length:,} tokens, {exact:,} exact, {way}: {took:.1f} s, "
            f"{1e4 * took / options.n:.1f} s for 10,000; memory grew by {resident() - before:.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
