"""bf16 and fp16: the forms that save passes over memory give what the plain ones give, to the last bit or nearly."""

import pytest
import torch

import hooks
from models.config import HybridConfig
from models.hybrid_lm import HybridLM
from models.norm import RMSNorm
from models.rope import rotate

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF)
def test_the_norm_is_the_same_to_one_rounding_whether_its_scale_is_read_or_not(dtype):
    torch.manual_seed(0)
    norm = RMSNorm(96, 1e-6).to(dtype).requires_grad_(False)
    norm.weight.uniform_(0.5, 2)
    x = (3 * torch.randn(5, 40, 96) * torch.logspace(-3, 1, 40)[:, None]).to(dtype)
    fused, scales = norm(x), []
    handle = norm.hook_scale.register_forward_hook(lambda module, args, value: scales.append(value))
    plain = norm(x)
    handle.remove()
    expected = (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(scales[0].double(), expected, rtol=1e-6, atol=0)
    assert (fused == plain).double().mean() > 0.999
    torch.testing.assert_close(fused, plain, rtol=2 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(plain.double(), norm.weight.double() * x / expected, rtol=2e-2, atol=1e-6)


def test_an_edited_scale_is_obeyed_in_half_precision():
    norm = RMSNorm(32, 1e-6).to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, 3, 32).to(torch.bfloat16)
    handle = norm.hook_scale.register_forward_hook(lambda module, args, value: 2 * value)
    halved = norm(x)
    handle.remove()
    torch.testing.assert_close(2 * halved, norm(x), rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
def test_rotation_is_the_same_with_and_without_gradients(dtype):
    torch.manual_seed(1)
    x = torch.randn(2, 50, 6, 16).to(dtype)
    positions = torch.arange(1000, 1050)
    with torch.no_grad():
        without = rotate(x[:, :, 1:5], positions, 1e4)
    with torch.enable_grad():
        recorded = rotate(x[:, :, 1:5].clone().requires_grad_(), positions, 1e4)
    assert without.dtype == recorded.dtype == dtype
    assert torch.equal(without, recorded.detach())
    exact = rotate(x[:, :, 1:5].double(), positions, 1e4)
    torch.testing.assert_close(without.double(), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def every_kind(dtype):
    torch.manual_seed(2)
    kinds = ("swa", "full", "gdn", "mamba2", "lightning")
    config = HybridConfig(
        d_model=24, n_layers=5, n_heads=4, n_kv_heads=2, d_head=6, d_ffn=40, vocab_size=37, context_length=64,
        layer_kinds=kinds, window=5, rope_base=1e4, mamba2_state=5,
    )  # fmt: skip
    model = HybridLM(config).to(dtype).eval().requires_grad_(False)
    return model, torch.randint(37, (2, 30))


@pytest.mark.parametrize("dtype", HALF)
def test_the_residual_stream_is_float32_and_its_sum_is_never_rounded(dtype):
    model, ids = every_kind(dtype)
    with torch.no_grad(), hooks.record(model, lambda name: "hook_resid" in name or name.endswith("_out")) as seen:
        hidden = model.final_hidden(ids)
    assert hidden.dtype == dtype
    for layer in range(5):
        pre, mid, post, attn, mlp = (
            seen[f"blocks.{layer}.hook_{name}"]
            for name in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
        )
        assert torch.equal(attn, attn.to(dtype).float())
        assert torch.equal(mlp, mlp.to(dtype).float())
        assert torch.equal(mid, pre + attn)
        assert torch.equal(post, mid + mlp)
        assert not torch.equal(post, post.to(dtype).float())
    with torch.no_grad():
        assert torch.equal(model.final_hidden_from(ids, 3, seen["blocks.3.hook_resid_pre"]), hidden)
        rounded = model.final_hidden_from(ids, 3, seen["blocks.3.hook_resid_pre"].to(dtype))
    torch.testing.assert_close(rounded, hidden, rtol=0.05, atol=0.05)


def test_a_model_in_bf16_gives_the_same_logits_while_everything_is_recorded():
    model, ids = every_kind(torch.bfloat16)
    with torch.no_grad():
        alone = model(ids)
        with hooks.record(model, lambda name: name.endswith("hook_scale")) as seen:
            recorded = model(ids)
    assert len(seen) >= 11
    torch.testing.assert_close(alone, recorded, rtol=0.02, atol=0.02 * float(alone.abs().max()))
