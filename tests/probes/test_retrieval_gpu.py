"""Tracing on a GPU: the CPU's numbers, and a number of waits for the device that does not grow with the layers."""

import warnings

import pytest
import torch

from models.config import HybridConfig
from models.hybrid_lm import HybridLM
from probes import retrieval

pytestmark = pytest.mark.gpu
TIME = 300


def build(n_layers, kinds=("swa", "full")):
    torch.manual_seed(3)
    model = HybridLM(
        HybridConfig(
            d_model=96, n_layers=n_layers, n_heads=6, n_kv_heads=2, d_head=16, d_ffn=120, vocab_size=101, window=70,
            context_length=512, layer_kinds=kinds * (n_layers // len(kinds)), rope_base=1e4,
        ),
        impl="torch",
    )  # fmt: skip
    return model.eval().requires_grad_(False)


def inputs():
    torch.manual_seed(0)
    return torch.randint(101, (3, TIME)), torch.tensor([[[3, 9]], [[100, 104]], [[290, 299]]])


def test_the_numbers_are_those_of_the_cpu():
    ids, spans = inputs()
    model = build(4)
    expected = retrieval.trace(model, ids, (-4, -3, -2, -1), spans)
    found = retrieval.trace(model.cuda(), ids.cuda(), (-4, -3, -2, -1), spans)
    for name in ("mass", "entropy", "normalised_entropy"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5, equal_nan=True)
    assert (found.largest == expected.largest).float().mean() > 0.99
    assert found.softmax == expected.softmax


def waits(n_layers):
    """Operations of one trace that wait for the device."""
    ids, spans = inputs()
    model = build(n_layers).cuda()
    ids = ids.cuda()
    retrieval.trace(model, ids, (-2, -1), spans)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            retrieval.trace(model, ids, (-2, -1), spans)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


def test_no_layer_waits_for_the_device():
    few, many = waits(2), waits(8)
    assert few > 0, "the results are copied to the CPU, so the counter must see that"
    assert many == few
