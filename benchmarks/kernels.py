"""Every Triton kernel beside its peers on one GPU, in one process, on the same inputs.

    python benchmarks/kernels.py [--op attention linear_decay gated_delta_rule short_conv] [--quick] [--tune]

Columns: operation, shape, direction, our milliseconds, peer, its milliseconds, ours / peer, floor. Peers:
flash-linear-attention (fla-core, if installed), torch's SDPA, FlexAttention, conv1d; windowed and statistics forms are
held against our own plain one. floor: bytes that must move over the copy bandwidth, or products over the matmul rate,
whichever is larger, both measured here. --tune times every configuration of every kernel instead.
"""

import argparse
import importlib
import sys
from pathlib import Path

# this file is called like the package it measures: import from the repository's root, not from beside it
sys.path[0] = str(Path(__file__).resolve().parents[1])

OPERATIONS = ("linear_decay", "gated_delta_rule", "attention", "short_conv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--quick", action="store_true", help="the first shapes only")
    parser.add_argument("--tune", action="store_true", help="time every configuration of every kernel")
    options = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        parser.exit(2, "error: no CUDA device found; expected one, because these are GPU timings.\n")
    from benchmarks import kernel_timing

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {kernel_timing.copy_bandwidth() / 1e9:.2f} "
          f"TB/s, bf16 matmul {kernel_timing.matmul_rate() / 1e9:.0f} TFLOP/s", flush=True)  # fmt: skip
    for name in options.op:
        module = importlib.import_module(f"benchmarks.kernels_{name}")
        if options.tune:
            module.tune()
        else:
            for row in module.rows(options.quick):
                kernel_timing.show(row)


if __name__ == "__main__":
    main()
