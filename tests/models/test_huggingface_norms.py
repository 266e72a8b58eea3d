"""Fused RMSNorms of transformers' families: the family's numbers, and its own code where the form is not known."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, LlamaConfig

from models.huggingface import HuggingFaceLM, norms

SMALL = dict(
    vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=12,
)  # fmt: skip
CONFIGS = {
    "llama": (LlamaConfig(**SMALL), norms.rounded_first, 5),
    "gpt_oss": (GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), norms.rounded_last, 5),
    "gemma3": (Gemma3TextConfig(**SMALL, sliding_window=8), norms.one_added, 13),
}


@pytest.fixture(params=CONFIGS)
def model(request):
    config, form, count = CONFIGS[request.param]
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if "norm" in name:
                parameter.normal_(0.7, 0.3)
    return hf, form, count


def rms_norms(hf):
    return [module for module in hf.modules() if type(module).__name__.endswith("RMSNorm")]


def test_every_norm_is_fused_by_the_form_of_its_family(model):
    hf, form, count = model
    plain = [copy.deepcopy(module) for module in rms_norms(hf)]
    assert norms.fuse(hf) == count == len(plain)
    assert norms.fuse(hf) == 0  # once
    for own, fused in zip(plain, rms_norms(hf), strict=True):
        assert fused.forward.args[2] is form
        x = (5 * torch.randn(200, fused.weight.numel())).bfloat16().requires_grad_()
        ours, theirs = fused(x), own(x)
        assert (ours != theirs).float().mean() < 0.01  # sums in another order
        assert (ours - theirs).abs().max() <= 2**-7 * theirs.abs().max()
        towards = torch.randn_like(ours)
        (gradient,) = torch.autograd.grad(ours, x, towards)
        (reference,) = torch.autograd.grad(own.double()(x.double()), x, towards.double())
        (of_own,) = torch.autograd.grad(theirs, x, towards)
        error, own_error = ((g.double() - reference.double()).norm() / reference.norm() for g in (gradient, of_own))
        assert error <= 1.1 * own_error + 1e-4


def test_float32_computes_with_the_familys_own_code(model):
    hf, _, _ = model
    hf = hf.float()
    ids = torch.arange(20)[None] * 3 % 64
    plain = copy.deepcopy(hf)
    norms.fuse(hf)
    assert torch.equal(hf(ids).logits, plain(ids).logits)


def test_hooks_of_a_fused_norm_act_and_a_copy_is_its_own(model):
    hf, _, _ = model
    norms.fuse(hf)
    other = copy.deepcopy(hf)
    norm = rms_norms(other)[0]
    with torch.no_grad():
        norm.weight.zero_()
    seen = []
    norm.register_forward_hook(lambda module, args, value: seen.append(value))
    x = torch.randn(3, norm.weight.numel()).bfloat16()
    assert norm(x) is seen[0]
    assert not torch.equal(norm(x), rms_norms(hf)[0](x))


class MeanRMSNorm(nn.Module):
    """Like an RMSNorm by name and parts, but the mean is taken away first."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps = 1e-6

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def test_an_unknown_norm_keeps_its_own_code():
    module = nn.Sequential(MeanRMSNorm().bfloat16())
    assert norms.fuse(module) == 0
    assert "forward" not in vars(module[0])


def test_a_loaded_model_is_fused():
    config, form, count = CONFIGS["llama"]
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    HuggingFaceLM(hf)
    assert [module.forward.args[2] for module in rms_norms(hf)] == [form] * count
