"""Knockouts, patches and states with the Triton kernels are those of the torch forms on the CPU."""

import numpy as np
import pytest
import torch

import hooks
from analyses.state_features import extract_states
from models.config import HybridConfig
from models.hybrid_lm import HybridLM
from probes import patching
from probes.patching import ValueSwaps

VOCAB, TIME = 61, 200
KINDS = ("swa", "full", "gdn", "mamba2", "lightning", "headwise")


def models():
    torch.manual_seed(0)
    model = HybridLM(
        HybridConfig(
            d_model=64, n_layers=6, n_heads=4, n_kv_heads=2, d_head=16, d_ffn=48, vocab_size=VOCAB, context_length=256,
            layer_kinds=KINDS, window=32, efficient="gdn", rope_base=1e4, mamba2_state=16,
        )
    ).eval().requires_grad_(False)  # fmt: skip
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, 0.15)
        if name.endswith(("A_log", "dt_bias")):
            parameter.fill_(-2.0)
    other = HybridLM(model.config).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    return model, other.cuda()


def swaps():
    rng = np.random.default_rng(0)
    clean = rng.integers(3, VOCAB, (3, TIME))
    corrupt, needle = clean.copy(), np.array([[20, 24], [90, 94], [150, 154]])
    for row, (first, stop) in enumerate(needle):
        corrupt[row, first:stop] = (clean[row, first:stop] - 2) % (VOCAB - 3) + 3
    whole = np.concatenate([clean, np.ones((3, 1), int)], 1)
    ones = np.ones(3, int)
    return ValueSwaps(clean, corrupt, needle, ones, 2 * ones, whole, TIME, ones[:, None], ones)


@pytest.mark.gpu
def test_triton_agrees_with_torch():
    on_cpu, on_gpu = models()
    assert on_gpu.impl == "triton"
    pairs = swaps()
    spans, ids = torch.from_numpy(pairs.needle), torch.from_numpy(pairs.clean)
    for layers in ([0], [1], [2], [3], [4], [5], "full", "efficient"):
        for queries in ((-1,), None):
            outs = []
            for model in (on_cpu, on_gpu):
                with hooks.knockout(model, spans, layers=layers, queries=queries):
                    outs.append(model(ids.to(model.device)).cpu())
            torch.testing.assert_close(*outs, atol=2e-3, rtol=2e-3)
    found = [patching.activation_patching(model, pairs, "noising") for model in (on_cpu, on_gpu)]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3, equal_nan=True)
    at = np.tile([0, 5, 63, 64, 130, 199], (3, 1))
    states = [extract_states(model, pairs.clean, at, width=0, seed=0, batch=3).states for model in (on_cpu, on_gpu)]
    np.testing.assert_allclose(*states, atol=2e-3, rtol=2e-3)
