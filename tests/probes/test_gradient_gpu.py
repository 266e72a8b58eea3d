"""Gradient influence on a GPU: both backwards give the CPU's curves, exactly nothing beyond the reach; memory."""

import math

import pytest
import torch

import hooks
from models.hybrid_lm import HybridLM
from models.presets import preset
from probes.gradient import gradient_influence

pytestmark = pytest.mark.gpu
T, TARGETS = 600, 7
# layers of each kind in mini: four efficient, four full; a convolution of width 4 adds 3 to what a window lets through
REACH = {"swa-32": 4 * 19 + 4 * 19, "lightning": 4 * 19 + 4 * 19, "mamba2": 4 * 19 + 4 * 22, "gdn": 4 * 19 + 4 * 22}


def build(architecture, impl=None):
    torch.manual_seed(0)
    model = HybridLM(preset("mini", architecture), impl).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("dt_bias", "A_log")):
                parameter.fill_(-1.5)  # decays near 1: what is beyond the reach must be zero, not small
            elif parameter.ndim == 2 and parameter.shape[1] > 4 and "blocks" in name:
                parameter.mul_(2.5)
    return model, torch.randint(4096, (2, T))


@pytest.mark.parametrize("architecture", ["full", *REACH])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_curves_equal_the_cpus(architecture, impl):
    torch.backends.cuda.matmul.allow_tf32 = False
    model, ids = build(architecture)
    expected = gradient_influence(model, ids, n_targets=TARGETS, layers=True)
    model, _ = build(architecture, impl)
    for keep_bytes in (0, math.inf):
        found = gradient_influence(model.cuda(), ids.cuda(), n_targets=TARGETS, layers=True, keep_bytes=keep_bytes)
        assert torch.allclose(found.norm.cpu(), expected.norm, rtol=1e-2, atol=1e-3 * expected.norm.max())
        assert (found.norm.cpu() - expected.norm).norm() < 1e-3 * expected.norm.norm()
        assert (found.layers.cpu() - expected.layers).norm() < 1e-3 * expected.layers.norm()


@pytest.mark.parametrize("architecture", REACH)
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exactly_zero_beyond_the_reach(architecture, impl, dtype):
    model, ids = build(architecture, impl)
    model = model.to("cuda", dtype)
    with hooks.restrict(model, "full", window=20), hooks.restrict(model, "efficient", window=20):
        norm = gradient_influence(model, ids.cuda(), n_targets=TARGETS).norm
    assert not norm[:, REACH[architecture] + TARGETS :].any()
    assert (norm[:, : 4 * 19] > 0).all()


def test_memory_is_that_of_one_block_and_of_what_may_be_kept():
    model, _ = build("full")
    model, ids = model.cuda(), torch.randint(4096, (1, 8000), device="cuda")
    peaks = {}
    for keep_bytes in (0, 5e8, math.inf):
        gradient_influence(model, ids, keep_bytes=keep_bytes)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradient_influence(model, ids, keep_bytes=keep_bytes)
        peaks[keep_bytes] = torch.cuda.max_memory_allocated() - before
        assert torch.cuda.memory_allocated() == before, "nothing is left behind"
    assert peaks[0] < peaks[math.inf] / 3
    assert peaks[0] + 1e8 < peaks[5e8] < min(peaks[0] + 6e8, peaks[math.inf])
