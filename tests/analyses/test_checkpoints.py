"""What an analysis says of a checkpoint before it runs."""

from pathlib import Path

import pytest
import torch

from analyses.checkpoints import Checkpoint, kernel_impl

BOTH = "triton (torch where attention hides nothing)"


@pytest.mark.parametrize(
    ("native", "asked", "device", "dtype", "expected"),
    [
        (True, None, "cuda", "bfloat16", "triton"),
        (True, "torch", "cuda", "bfloat16", "torch"),
        (True, None, "cpu", "float32", "torch"),
        (False, None, "cuda", "bfloat16", BOTH),
        (False, None, "cuda", "float16", BOTH),
        (False, None, "cuda", "float32", "triton"),
        (False, None, "cpu", "bfloat16", "torch"),
    ],
)
def test_results_name_who_computes(native, asked, device, dtype, expected):
    checkpoint = Checkpoint(Path("m"), native, 64, None, dtype, ())
    assert kernel_impl(checkpoint, asked, torch.device(device), dtype) == expected
