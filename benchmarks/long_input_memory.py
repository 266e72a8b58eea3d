"""Peak memory of one S1 swa-128 forward over 16,384 tokens on a CPU: python -m benchmarks.long_input_memory [TOKENS]

Random weights; logits of every token (4.8 GB of them).
"""

import resource
import sys
import time

import torch

from models.hybrid_lm import HybridLM
from models.presets import preset

tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384
torch.manual_seed(0)
model = HybridLM(preset("S1", "swa-128")).eval()
ids = torch.randint(model.config.vocab_size, (1, tokens))
started = time.perf_counter()
with torch.no_grad():
    logits = model(ids)
seconds = time.perf_counter() - started
assert torch.isfinite(logits[:, -1]).all()
gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(f"{tokens} tokens, S1 swa-128, fp32: {seconds:.1f} s, peak resident memory {gigabytes:.2f} GiB")
