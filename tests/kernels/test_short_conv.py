"""short_conv: the loop against torch's conv1d, the torch form against the loop."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from kernels.short_conv import short_conv


def operands(tokens=23, width=4, bias=True, initial=True, dtype=torch.float64):
    torch.manual_seed(0)
    result = {"x": torch.randn(2, tokens, 5), "weight": torch.randn(5, width)}
    if bias:
        result["bias"] = torch.randn(5)
    if initial:
        result["initial"] = torch.randn(2, width - 1, 5)
    return {name: x.to(dtype) for name, x in result.items()}


@pytest.mark.parametrize("impl", ["naive", "torch"])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_is_a_causal_depthwise_convolution(impl, activation, width):
    x = operands(width=width, initial=False)
    inputs = F.pad(x["x"].transpose(1, 2), (width - 1, 0))
    expected = F.conv1d(inputs, x["weight"].unsqueeze(1), x["bias"], groups=5).transpose(1, 2)
    expected = F.silu(expected) if activation else expected
    result = short_conv(**x, activation=activation, impl=impl)
    assert (result.out - expected).abs().max() <= 1e-14
    assert torch.equal(result.tail, x["x"][:, 23 - (width - 1) :])


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(
    ("tokens", "width", "bias", "initial"), [(1, 4, True, True), (2, 4, False, True), (9, 3, True, False)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_torch_form_and_gradients(activation, tokens, width, bias, initial, dtype, tolerance):
    results = []
    for impl in ("torch", "naive"):
        leaves = {n: x.requires_grad_() for n, x in operands(tokens, width, bias, initial, dtype).items()}
        result = short_conv(**leaves, activation=activation, impl=impl)
        torch.manual_seed(1)
        sum((y * torch.randn_like(y)).sum() for y in result).backward()
        results.append([*result, *(x.grad for x in leaves.values())])
    for ours, law in zip(*results, strict=True):
        assert (ours - law).pow(2).mean().sqrt() <= tolerance * law.pow(2).mean().sqrt()


@pytest.mark.parametrize("initial", [False, True])
def test_split_sequence_is_the_whole(initial):
    x = operands(initial=initial)
    whole = short_conv(**x, activation="silu")
    tail, outs = x.get("initial"), []
    for start, end in itertools.pairwise((0, 1, 3, 10, 23)):
        out, tail = short_conv(
            x=x["x"][:, start:end], weight=x["weight"], bias=x["bias"], activation="silu", initial=tail
        )
        outs.append(out)
    assert (torch.cat(outs, 1) - whole.out).abs().max() <= 1e-15
    assert torch.equal(tail, whole.tail)


def test_causal_and_reach():
    x = operands(initial=False)
    before = short_conv(**x).out
    x["x"] = x["x"].clone()
    x["x"][:, 8] += 1
    changed = (short_conv(**x).out != before).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == [8, 9, 10, 11]


def test_bfloat16_is_summed_in_float32():
    x = operands(dtype=torch.bfloat16)
    exact = short_conv(**{n: y.double() for n, y in x.items()}, activation="silu").out
    result = short_conv(**x, activation="silu")
    assert result.out.dtype == result.tail.dtype == torch.bfloat16
    assert (result.out - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(3, 5)}, "x has 2 dimensions"),
        ({"weight": torch.zeros(4, 4)}, "weight has shape"),
        ({"weight": torch.zeros(5, 0)}, "0 taps"),
        ({"x": torch.zeros(2, 0, 5)}, "0 tokens"),
        ({"bias": torch.zeros(4)}, "bias has shape"),
        ({"initial": torch.zeros(2, 4, 5)}, "initial has shape"),
        ({"activation": "relu"}, "activation is 'relu'"),
        ({"impl": "cuda"}, "impl is 'cuda'"),
    ],
)
def test_bad_operands_are_refused(change, words):
    with pytest.raises(ValueError, match=rf"^short_conv: .*{words}"):
        short_conv(**(operands() | change))
