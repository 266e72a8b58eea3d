"""Residual streams are read where they are, once each, and nothing stays behind."""

import pytest
import torch
from torch import nn

from hooks.streams import record_streams, stream_names
from models.config import HybridConfig
from models.hybrid_lm import HybridLM

VOCAB, TIME = 23, 9


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(2)
    config = dict(
        d_model=12, n_layers=3, n_heads=2, n_kv_heads=1, d_head=6, d_ffn=10, vocab_size=VOCAB, window=4,
        context_length=32, layer_kinds=("swa", "full", "gdn"), rope_base=1e4,
    )  # fmt: skip
    return HybridLM(HybridConfig(**config)).eval().requires_grad_(False)


@pytest.fixture
def ids():
    return torch.randint(VOCAB, (2, TIME), generator=torch.Generator().manual_seed(0))


def test_names_and_values_are_those_of_the_hook_points(model, ids):
    with record_streams(model, [-1, 0, 5]) as streams:
        model.final_hidden(ids)
    _, cache = model.run_with_cache(ids)
    assert tuple(streams) == stream_names(model)
    assert len(streams) == 1 + 2 * 3
    for name, value in streams.items():
        torch.testing.assert_close(value, cache[name][:, [-1, 0, 5]], rtol=1e-5, atol=1e-8)
        assert value.dtype == torch.float32


def test_half_precision_becomes_fp32_and_values_are_copies(model, ids):
    half = HybridLM(model.config).to(torch.bfloat16).eval().requires_grad_(False)
    with record_streams(half, [-1]) as streams:
        half.final_hidden(ids)
    kept = streams["blocks.1.hook_resid_mid"].clone()
    half.final_hidden(ids.flip(1))
    assert streams["blocks.1.hook_resid_mid"].dtype == torch.float32
    torch.testing.assert_close(streams["blocks.1.hook_resid_mid"], kept, rtol=0, atol=0)


class Plain(nn.Module):
    """Blocks without hook points; they return tuples, and the first is called by keyword, as some families do."""

    class Block(nn.Module):
        def forward(self, hidden_states):
            return (2 * hidden_states, None)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Plain.Block() for _ in range(3))
        self.layers = [type("View", (), {"block": block}) for block in self.blocks]

    def forward(self, x):
        for block in self.blocks:
            x = block(hidden_states=x)[0]
        return x


def test_models_without_hook_points_are_read_at_their_blocks():
    plain, x = Plain(), torch.arange(24.0).view(1, 4, 6)
    with record_streams(plain, [1, 3]) as streams:
        plain(x)
    assert list(streams) == ["blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(3))]
    for power, value in enumerate(streams.values()):
        torch.testing.assert_close(value, 2**power * x[:, [1, 3]])
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in plain.blocks)
    with pytest.raises(ValueError, match=r"shape \[4, 6\]; expected one residual stream"), record_streams(plain, [0]):
        plain(x[0])


def test_positions_and_forwards_are_checked_and_hooks_removed(model, ids):
    with pytest.raises(ValueError, match=r"has 9 positions; -10 does not exist"), record_streams(model, [-10, 3]):
        model.final_hidden(ids)
    twice = model.final_hidden
    with pytest.raises(ValueError, match="hook_resid_pre fired 2 times"), record_streams(model, [-1]):
        twice(twice(ids))
    with pytest.raises(ValueError, match="fired 0 times"), record_streams(model, [-1]):
        pass
    assert not any(point._forward_hooks for point in model.hook_dict.values())
