"""The measured effect of a restriction: zero where it cannot matter, the exact ratio where it does."""

import pytest
import torch

import hooks
from models.config import HybridConfig
from models.hybrid_lm import HybridLM


@pytest.fixture
def model():
    torch.manual_seed(3)
    return HybridLM(
        HybridConfig(
            d_model=18,
            n_layers=4,
            n_heads=3,
            n_kv_heads=1,
            d_head=6,
            d_ffn=22,
            vocab_size=29,
            context_length=64,
            layer_kinds=("swa", "full", "gdn", "lightning"),
            window=4,
            rope_base=1e4,
            lightning_slopes="transnormer",
        )
    ).eval()


def test_ratio_equals_the_direct_computation_and_output_is_unchanged(model):
    ids = torch.randint(29, (2, 30))
    with torch.no_grad():
        expected = model(ids)
        with hooks.record(model, "blocks.1.ln1.hook_normalized") as seen:
            model(ids)
        x = seen["blocks.1.ln1.hook_normalized"] * model.blocks[1].ln1.weight
        free = model.blocks[1].attn(x, torch.arange(30))
        with hooks.restrict(model, [1], window=3, sinks=2):
            limited = model.blocks[1].attn(x, torch.arange(30))
        ratio = (free - limited).flatten(1).norm(dim=1) / free.flatten(1).norm(dim=1)
        with hooks.mixer_effect(model, [1], window=3, sinks=2) as effect:
            assert torch.equal(model(ids), expected)
    assert effect[1] == pytest.approx(ratio.tolist(), rel=1e-5)
    assert min(effect[1]) > 1e-4


def test_a_window_that_is_wider_already_is_vacuous(model):
    ids = torch.randint(29, (1, 30))
    with torch.no_grad(), hooks.mixer_effect(model, "efficient", window=4) as effect:
        model(ids)
    assert effect[0] == [0.0]
    assert effect[2][0] > 0
    assert effect[3][0] > 0
    assert set(effect) == {0, 2, 3}


def test_hooks_are_gone_afterwards_also_after_an_exception(model):
    with pytest.raises(RuntimeError), hooks.mixer_effect(model, "full", window=2):
        raise RuntimeError
    assert not any(block.attn._forward_hooks for block in model.blocks)
    assert all(mixer.restrictions == () for layer in model.layers for mixer in layer.mixers)
