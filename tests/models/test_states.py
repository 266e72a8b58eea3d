"""States made on demand at a few tokens are those of hook_ssm_state, which makes all of them."""

import pytest
import torch

import hooks
from models.config import HybridConfig
from models.hybrid_lm import HybridLM

TIME, AT = 23, torch.tensor([0, 1, 9, 17, 22])
OPERANDS = {"lightning": ("k", "v", "log_decay"), "mamba2": ("k", "v", "beta", "log_decay"),
            "gdn": ("k", "v", "beta", "log_decay")}  # fmt: skip


def check(model, layer, kind, ids, tolerance):
    prefix = f"blocks.{layer}.attn"
    names = {f"{prefix}.hook_{name}": name for name in OPERANDS[kind]}
    with hooks.record(model, [*names, f"{prefix}.hook_ssm_state"]) as seen:
        model(ids)
    state = seen.pop(f"{prefix}.hook_ssm_state")
    mixer = model.layers[layer].mixers[0]
    found = mixer.states(AT, **{names[name]: value for name, value in seen.items()})
    torch.testing.assert_close(found, state[:, AT].to(found), atol=tolerance, rtol=tolerance)
    assert (state[:, 22] - state[:, 17]).abs().max() > 1e-3
    with hooks.restrict(model, [layer], window=3), pytest.raises(ValueError, match="restricted to 3 tokens"):
        mixer.states(AT, **{names[name]: value for name, value in seen.items()})


@pytest.mark.parametrize(("layer", "kind"), list(enumerate(OPERANDS)))
def test_native(layer, kind):
    torch.manual_seed(3)
    model = HybridLM(
        HybridConfig(
            d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, d_head=6, d_ffn=20, vocab_size=31, context_length=64,
            layer_kinds=tuple(OPERANDS), window=4, rope_base=1e4, mamba2_state=5,
        )
    ).eval().requires_grad_(False).double()  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, 0.3)
    check(model, layer, kind, torch.randint(31, (2, TIME)), 1e-9)


@pytest.mark.parametrize(("name", "kind"), [("qwen3_next", "gdn"), ("bamba", "mamba2"), ("minimax", "lightning")])
def test_huggingface(wrapped, name, kind):
    torch.manual_seed(4)
    check(wrapped(name), 0, kind, torch.randint(3, 97, (2, TIME)), 1e-4)
