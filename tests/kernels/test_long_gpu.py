"""On a GPU: every operation at 131,072 tokens, and operands of more than 2^31 elements, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from kernels.attention import Band, attention
from kernels.gated_delta_rule import gated_delta_rule
from kernels.linear_decay import linear_decay
from kernels.short_conv import short_conv

pytestmark = pytest.mark.gpu
LENGTH, HEADS, WIDTH = 131072, 20, 64
FORMS = {
    "linear_decay": lambda x: linear_decay(**x, impl="triton").out,
    "linear_decay, window": lambda x: linear_decay(**x, window=5000, impl="triton").out,
    "gated_delta_rule": lambda x: gated_delta_rule(**x, impl="triton").out,
    "gated_delta_rule, window": lambda x: gated_delta_rule(**x, window=5000, impl="triton").out,
    "attention": lambda x: attention(**x, impl="triton"),
    "attention, window": lambda x: attention(**x, bands=(Band(1024, 0),), impl="triton"),
    "short_conv": lambda x: short_conv(**x, activation="silu", impl="triton").out,
}

BOUNDED = [name for name in FORMS if name != "attention"]  # what a token sees ends somewhere before it


def operands(name, batch):
    """bfloat16 [B, T, H, D], every row other numbers."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    shape = (batch, LENGTH, HEADS, WIDTH)
    if name == "short_conv":
        return {"x": normal(batch, LENGTH, HEADS * WIDTH), "weight": normal(HEADS * WIDTH, 4)}
    x = {"query": normal(*shape), "key": normal(*shape), "value": normal(*shape)}
    if name.startswith("attention"):
        return x
    x["key"] = F.normalize(x["key"], dim=-1)
    x["log_decay"] = -0.1 * torch.rand(shape[:3], generator=generator, device="cuda")
    if name.startswith("gated"):
        x["beta"] = torch.rand(shape[:3], generator=generator, device="cuda")
    return x


def outputs(name, x):
    """The output, and the gradients under a cotangent that is the same for every number of rows."""
    leaves = {n: y.detach().requires_grad_() for n, y in x.items()}
    out = FORMS[name](leaves)
    weight = torch.linspace(-1, 1, out.shape[-1], device="cuda", dtype=out.dtype).expand_as(out)
    return out.detach(), dict(zip(x, torch.autograd.grad(out, list(leaves.values()), weight), strict=True))


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("name", BOUNDED)
def test_bounded_operations_at_131072_tokens(name):
    """The end of the sequence is right: it equals its own last part where that is all that it can see."""
    x = operands(name, 1)
    out, gradients = outputs(name, x)
    reach = 16384  # windows end long before; without one, decays of 0.05 a token leave exp(-400)
    part = {n: y[:, -2 * reach :] if y.ndim > 2 else y for n, y in x.items()}
    part_out, part_gradients = outputs(name, part)
    assert relative(out[:, -reach:], part_out[:, -reach:]) <= 5e-3
    for n, y in part_gradients.items():
        if y.ndim > 2:
            assert relative(gradients[n][:, -reach:], y[:, -reach:]) <= 1e-2, n


def test_full_attention_at_131072_tokens():
    """Chosen rows against a softmax in float64, and d value of the last token, which only the last row sees."""
    x = operands("attention", 1)
    out, gradients = outputs("attention", x)
    for row in (0, 1, 65_537, LENGTH - 1):
        seen = {n: x[n][0, : row + 1].double() for n in ("key", "value")}
        scores = torch.einsum("hk,shk->hs", x["query"][0, row].double(), seen["key"]) * WIDTH**-0.5
        expected = torch.einsum("hs,shv->hv", scores.softmax(-1), seen["value"])
        assert relative(out[0, row], expected) <= 5e-3, row
    weight = torch.linspace(-1, 1, WIDTH, device="cuda", dtype=torch.double)
    probability = scores.softmax(-1)[:, -1]
    assert relative(gradients["value"][0, -1], probability[:, None] * weight) <= 1e-2


@pytest.mark.parametrize("name", BOUNDED)
def test_more_than_two_to_the_31_elements(name):
    batch = 2**31 // (LENGTH * HEADS * WIDTH) + 1
    x = operands(name, batch)
    assert next(iter(x.values())).numel() > 2**31
    out, gradients = outputs(name, x)
    for row in (0, batch - 1):
        alone = {n: y[row : row + 1] if y.ndim > 2 else y for n, y in x.items()}
        out_alone, gradients_alone = outputs(name, alone)
        assert relative(out[row], out_alone[0]) <= 3e-3, row
        for n, y in gradients_alone.items():
            if y.ndim > 2:
                assert relative(gradients[n][row], y[0]) <= 5e-3, (row, n)
