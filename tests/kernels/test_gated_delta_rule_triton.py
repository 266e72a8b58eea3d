"""gated_delta_rule in Triton against the float64 loop: outputs, states, every gradient; interpreted without a GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from kernels.gated_delta_rule import gated_delta_rule
from kernels.gated_delta_rule.naive import gated_delta_rule_naive
from kernels.gated_delta_rule.torch_form import gated_delta_rule_torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ORDER = ("query", "key", "value", "log_decay", "beta", "initial_state")
gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs CUDA")


def relative(value, reference, floor=0.0):
    """RMS error over the reference's RMS, or over `floor` if that is larger; absolute where the reference is zero."""
    error = (value.double() - reference.double()).pow(2).mean().sqrt().item()
    size = reference.double().pow(2).mean().sqrt().item()
    return error / (max(size, floor) or 1.0)


def operands(size, dtype=torch.float32, initial=0, seed=0):
    """T, B, H, K, V; `initial` states are added if not 0."""
    t, b, h, k, v = size
    torch.manual_seed(seed)
    result = {
        "query": torch.randn(b, t, h, k),
        "key": F.normalize(torch.randn(b, t, h, k), dim=-1),
        "value": torch.randn(b, t, h, v),
        "log_decay": -0.3 * torch.rand(b, t, h),
        "beta": 2 * torch.rand(b, t, h),
    }
    result = {name: x.to(dtype) if name in ORDER[:3] else x for name, x in result.items()}
    if initial:
        result["initial_state"] = torch.randn(initial, h, k, v)
    return {name: x.to(DEVICE) for name, x in result.items()}


def small_segments(tensors, window, **changes):
    """The configuration in use, changed: segments of a few chunks make short inputs take every path."""
    from kernels.gated_delta_rule.triton_layout import tiles

    key, value = tensors["key"], tensors["value"]
    return tiles(key.dtype, key.shape[-1], value.shape[-1], window or 0)._replace(**changes)


def triton_op(tensors, window=None, scale=1.0, bounds=None, **changes):
    from kernels.gated_delta_rule.triton_form import gated_delta_rule_triton

    inputs = [tensors.get(name) for name in ORDER]
    sizes = small_segments(tensors, window, **changes) if changes else None
    return gated_delta_rule_triton(*inputs, window, scale, 64, bounds, sizes)


def law_op(tensors, window=None, scale=1.0, bounds=None):
    """The float64 loop; where the states it keeps for its gradient pass 1 GB, the float64 torch form stands in for it,
    which test_recurrent_ops.py holds to the loop within 1e-12. (A window of 699 would keep 32 GB at 700 tokens.)"""
    inputs = [tensors.get(name) for name in ORDER]
    kept = 8 * tensors["key"].numel() * tensors["value"].shape[-1] * (window or 1)
    if kept <= 1e9:
        return gated_delta_rule_naive(*inputs, window, scale, bounds)
    return gated_delta_rule_torch(*inputs, window, scale, 64, bounds)


def results(op, tensors, double, **options):
    """out, state and gradients under one random cotangent."""
    leaves = {n: (x.double() if double else x).detach().clone().requires_grad_() for n, x in tensors.items()}
    result = op(leaves, **options)
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, dtype=torch.float64).to(DEVICE).to(tensors["value"].dtype) for x in result]
    sum((x.to(w.dtype) * w).sum() for x, w in zip(result, weights, strict=True)).backward()
    return {"out": result.out, "state": result.state, **{f"d {n}": x.grad for n, x in leaves.items()}}


def compare(tensors, tolerance=1e-5, gradient=None, floor=0.0, changes=None, **options):
    """`tolerance` for out and state, `gradient` for gradients (as strict if None)."""
    ours = results(triton_op, tensors, False, **options, **(changes or {}))
    law = results(law_op, tensors, True, **options)
    for name in law:
        assert torch.isfinite(ours[name]).all(), name
        error = relative(ours[name], law[name], floor)
        assert error <= (gradient or tolerance if name[:2] == "d " else tolerance), (name, error)


# T, B, H, K, V
SMALL = [(1, 2, 2, 5, 7), (7, 1, 2, 16, 8), (33, 1, 1, 20, 40), (70, 2, 1, 8, 16)]
LARGE = [
    (t, b, 2, k, v)
    for t, b, k, v in [
        (1, 2, 64, 64), (7, 1, 60, 120), (63, 1, 64, 64), (64, 2, 64, 64), (65, 1, 100, 64), (500, 1, 128, 128),
        (500, 1, 64, 128), (2048, 1, 64, 64), (2048, 2, 128, 128), (300, 1, 256, 96), (300, 1, 33, 256),
    ]
]  # fmt: skip
WINDOWS = [1, 5, 32, 33, 65]


@pytest.mark.parametrize(("size", "initial"), list(zip(SMALL, [2, 0, 1, 2], strict=True)))
def test_forward_and_gradients(size, initial):
    compare(operands(size, initial=initial), scale=0.6)


@pytest.mark.parametrize(("segment", "initial"), [(1, 0), (2, 1)])
def test_segments_are_joined(segment, initial):
    compare(operands((110, 1, 1, 16, 8), initial=initial), changes={"segment": segment})


@pytest.mark.parametrize(
    ("tokens", "options"),
    [(75, {}), (110, {"window": 40}), (140, {"window": 20, "spanned": 1}), (90, {"bounds": [0, 1, 40, 90]})],
)
def test_gradients_in_two_launches(tokens, options):
    """Queries' part comes before the reverse scans and hands them its scores, but for windows in linked segments."""
    options = dict(options)
    changes = {"gradient_parts": 1, "segment": 1, "spanned": options.pop("spanned", 0)}
    initial = 0 if "window" in options else len(options.get("bounds", [0, 1])) - 1
    compare(operands((tokens, 1, 2, 8, 12), initial=initial), scale=0.7, changes=changes, **options)


@pytest.mark.parametrize(("chunk", "window"), [(16, None), (64, 40)])
def test_other_chunks(chunk, window):
    compare(operands((70, 1, 1, 16, 8)), window=window, changes={"chunk": chunk, "segment": 1})


@pytest.mark.parametrize("window", WINDOWS)
def test_window_and_gradients(window):
    compare(operands((70, 1, 1, 12, 6)), window=window, changes={"segment": 1})


@pytest.mark.parametrize(("tokens", "window", "segment"), [(115, 75, 1), (140, 64, 1), (140, 100, 2), (99, 70, 0)])
def test_window_over_chunks_and_segments(tokens, window, segment):
    # wider than a tile of the tail's products
    size = (tokens, 1, 1, 20, 18) if tokens < 100 else (tokens, 1, 1, 8, 6)
    compare(operands(size), window=window, scale=0.7, changes={"segment": segment})


def test_window_of_all_tokens_is_the_unrestricted_operation_bit_for_bit():
    tensors = operands((70, 1, 1, 8, 6))
    free = gated_delta_rule(**tensors, impl="triton")
    for window in (70, 71, 10**9):
        limited = gated_delta_rule(**tensors, impl="triton", window=window)
        assert torch.equal(limited.out, free.out)
        assert torch.equal(limited.state, free.state)
    assert not torch.equal(gated_delta_rule(**tensors, impl="triton", window=69).out, free.out)


@pytest.mark.parametrize("window", [1, 9, 40])
def test_window_sees_nothing_older(window):
    tensors = operands((70, 1, 1, 8, 6))
    at = 25
    before = triton_op(tensors, window=window).out
    tensors = {name: x.clone() for name, x in tensors.items()}
    for x in tensors.values():
        x[:, at] *= 0.5
    changed = (triton_op(tensors, window=window).out - before).abs().amax((0, 2, 3)) > 1e-6
    moved = changed.nonzero().flatten().tolist()
    assert moved[0] == at
    assert moved[-1] == at + window - 1


@pytest.mark.parametrize(
    ("log_decay", "tokens", "window"),
    [(-8.0, 65, None), (-8.0, 38, None), (0.0, 70, None), (-8.0, 55, 40), (-8.0, 40, 3)],
)
def test_constant_decay_strong_and_none(log_decay, tokens, window):
    tensors = operands((tokens, 1, 1, 8, 6), initial=0 if window else 1)
    tensors["log_decay"] = torch.full_like(tensors["log_decay"], log_decay)
    compare(tensors, window=window, changes={"segment": 1})


@pytest.mark.parametrize("window", [None, 10])
def test_huge_decay_stays_finite(window):
    tensors = operands((70, 1, 1, 8, 6))
    tensors["log_decay"] = torch.full_like(tensors["log_decay"], -3000.0)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    out = triton_op(leaves, window=window).out
    write = tensors["key"] * tensors["beta"].unsqueeze(-1)
    assert relative(out, (tensors["query"] * write).sum(-1, keepdim=True) * tensors["value"]) <= 1e-6
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in leaves.values())


@pytest.mark.parametrize(("beta", "window"), [(0.0, 20), (1.0, None), (2.0, None)])
def test_constant_beta(beta, window):
    tensors = operands((70, 1, 1, 8, 6))
    tensors["beta"] = torch.full_like(tensors["beta"], beta)
    compare(tensors, window=window)


@pytest.mark.parametrize(
    ("beta", "noise", "window", "chunk"),
    [
        (1.0, 0.0, None, 32),
        (1.0, 0.0, None, 64),
        (1.0, 0.05, 40, 32),
        (1.9, 0.05, None, 64),
        (2.0, 0.0, None, 32),
        (2.0, 0.05, None, 32),
    ],
)
def test_identical_and_correlated_keys(beta, noise, window, chunk):
    tensors = operands((70, 1, 1, 16, 8))
    keys = tensors["key"][:, :1] + noise * torch.randn(1, 70, 1, 16, device=DEVICE)
    tensors |= {"key": F.normalize(keys, dim=-1), "log_decay": torch.zeros(1, 70, 1, device=DEVICE)}
    tensors["beta"] = torch.full_like(tensors["beta"], beta)
    # Equal keys without decay multiply the float32 rounding of k . k by the tokens of a chunk (the true d log_decay is
    # zero); the float32 configuration takes chunks of 32, and 64 is here because 16-bit operands take it.
    undamped = noise == 0 and (beta > 1 or chunk == 64)
    compare(tensors, 5e-5 if undamped else 1e-5, floor=1.0, window=window, changes={"chunk": chunk})


BOUNDS = [0, 1, 8, 31, 89]


@pytest.mark.parametrize("window", [None, 25, 32])
def test_packed_sequences(window):
    tensors = operands((BOUNDS[-1], 1, 1, 8, 6), initial=0 if window else len(BOUNDS) - 1)
    compare(tensors, window=window, bounds=BOUNDS, changes={"segment": 1})


@pytest.mark.parametrize("impl", ["naive", "torch", "triton"])
@pytest.mark.parametrize("window", [None, 20])
def test_packed_is_each_sequence_alone(impl, window):
    tensors = operands((BOUNDS[-1], 1, 1, 8, 6), initial=0 if window else 4)
    packed = gated_delta_rule(**tensors, cu_seqlens=torch.tensor(BOUNDS, device=DEVICE), window=window, impl=impl)
    assert packed.state.shape == (4, 1, 8, 6)
    for i, (start, end) in enumerate(itertools.pairwise(BOUNDS)):
        alone = {n: x[i : i + 1] if n == "initial_state" else x[:, start:end] for n, x in tensors.items()}
        out, state = gated_delta_rule(**alone, window=window, impl=impl)
        assert relative(packed.out[:, start:end], out) <= 1e-6
        assert relative(packed.state[i : i + 1], state) <= 1e-6


@pytest.mark.parametrize("window", [None, 20])
def test_non_contiguous_and_expanded_operands(window):
    tensors = operands((50, 2, 2, 8, 6))
    # queries and keys shared by the value heads: stride 0 over heads; values with time innermost
    for name in ("query", "key"):
        tensors[name] = tensors[name][:, :, :1]
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    views = leaves | {name: leaves[name].expand(-1, -1, 2, -1) for name in ("query", "key")}
    views["value"] = leaves["value"].transpose(1, 3).contiguous().transpose(1, 3)
    views["log_decay"] = leaves["log_decay"].transpose(0, 2).contiguous().transpose(0, 2)
    assert views["query"].stride(2) == 0
    out = triton_op(views, window=window).out
    out.backward(torch.ones((), device=DEVICE).expand_as(out))
    law = {name: x.double().detach().requires_grad_() for name, x in tensors.items()}
    full = law | {name: law[name].expand(-1, -1, 2, -1) for name in ("query", "key")}
    expected = law_op(full, window=window).out
    expected.sum().backward()
    assert relative(out, expected) <= 1e-6
    assert all(relative(leaves[name].grad, law[name].grad) <= 1e-5 for name in tensors)


def test_only_needed_gradients_and_state_only():
    tensors = operands((40, 1, 1, 8, 6), initial=1)
    tensors["key"].requires_grad_()
    tensors["initial_state"].requires_grad_()
    triton_op(tensors).state.sum().backward()
    law = {name: x.detach().double() for name, x in tensors.items()}
    law["key"].requires_grad_()
    law["initial_state"].requires_grad_()
    law_op(law).state.sum().backward()
    assert all((x.grad is None) == (name not in ("key", "initial_state")) for name, x in tensors.items())
    assert relative(tensors["key"].grad, law["key"].grad) <= 1e-5
    assert relative(tensors["initial_state"].grad, law["initial_state"].grad) <= 1e-5


@pytest.mark.parametrize("window", [None, 20])
def test_causal(window):
    tensors = operands((70, 1, 1, 8, 6))
    before = triton_op(tensors, window=window).out
    later = {name: torch.cat([x[:, :41], 0.3 * x[:, 41:]], 1) for name, x in tensors.items()}
    after = triton_op(later, window=window).out
    assert torch.equal(before[:, :41], after[:, :41])
    assert not torch.equal(before[:, 41], after[:, 41])


def test_split_sequence_is_the_whole():
    tensors = operands((90, 1, 1, 8, 6), initial=1)
    whole = triton_op(tensors)
    state, outs = tensors["initial_state"], []
    for start, end in itertools.pairwise((0, 1, 50, 90)):
        piece = {n: x if n == "initial_state" else x[:, start:end] for n, x in tensors.items()}
        out, state = triton_op(piece | {"initial_state": state})
        outs.append(out)
    assert relative(torch.cat(outs, 1), whole.out) <= 1e-6
    assert relative(state, whole.state) <= 1e-6


@pytest.mark.parametrize("window", [None, 20])
def test_batch_row_is_the_row_alone(window):
    tensors = operands((40, 3, 1, 8, 6))
    alone = {name: x[1:2] for name, x in tensors.items()}
    for row, single in zip(triton_op(tensors, window=window), triton_op(alone, window=window), strict=True):
        assert relative(row[1:2], single) <= 1e-6


@pytest.mark.parametrize("window", [None, 20])
def test_scale(window):
    tensors = operands((40, 1, 1, 8, 6))
    one, half = (triton_op(tensors, window=window, scale=scale) for scale in (1.0, 0.5))
    default = gated_delta_rule(**tensors, window=window, impl="triton")
    assert torch.equal(one.out, default.out)
    assert relative(2 * half.out, one.out) <= 1e-6
    assert torch.equal(half.state, one.state)


def test_half_precision_operands_under_autocast():
    tensors = operands((70, 1, 1, 16, 8), torch.float16)
    plain = gated_delta_rule(**tensors, impl="triton")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        result = gated_delta_rule(**tensors, impl="triton")
    assert (result.out.dtype, result.state.dtype) == (torch.float16, torch.float32)
    assert torch.equal(result.out, plain.out)
    compare(tensors, 2e-3, 3e-3)


def test_mixed_dtypes_come_back_in_values():
    tensors = operands((40, 1, 1, 8, 6))
    tensors["value"] = tensors["value"].half()
    tensors["beta"] = tensors["beta"].half()
    compare(tensors, 1e-3, 2e-3)
    assert gated_delta_rule(**tensors, impl="triton").out.dtype == torch.float16


@pytest.mark.parametrize("window", [None, 20])
def test_compiled_whole(window):
    leaves = {name: x.requires_grad_() for name, x in operands((50, 1, 1, 8, 6), initial=0 if window else 1).items()}

    def run(x):
        return sum(part.square().sum() for part in gated_delta_rule(**x, window=window, impl="triton", scale=0.5))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=False)
    ours = torch.autograd.grad(compiled(leaves), list(leaves.values()))
    eager = torch.autograd.grad(run(leaves), list(leaves.values()))
    assert all(relative(x, y) <= 1e-6 for x, y in zip(ours, eager, strict=True))


@pytest.mark.parametrize(("window", "initial"), [(0, False), (0, True), (20, False)])
def test_custom_operator_is_registered_soundly(window, initial):
    """Schema, fake shapes and strides, and autograd registration, as torch's own checker sees them."""
    from kernels.gated_delta_rule.triton_form import _forward

    tensors = operands((70, 1, 1, 8, 6), initial=int(initial))
    inputs = [tensors[name].requires_grad_() if name in tensors else None for name in ORDER]
    sizes = list(small_segments(tensors, window or None, segment=1))
    torch.library.opcheck(
        _forward,
        (*inputs, [], window, 0.5, sizes),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_two_runs_are_equal_bit_for_bit():
    tensors = operands((40, 1, 1, 8, 6))
    first, second = (results(triton_op, tensors, False, window=20) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x | {"value": x["value"].double()}, "value is torch.float64"),
        (lambda x: x | {"log_decay": x["log_decay"].double()}, "log_decay is torch.float64"),
        (lambda x: x | {"query": x["query"].repeat(1, 1, 1, 40), "key": x["key"].repeat(1, 1, 1, 40)}, "K is 320"),
        (lambda x: x | {"value": x["value"].repeat(1, 1, 1, 50)}, "V is 300"),
        (lambda x: x | {"chunk_size": 40}, "chunk_size is 40"),
        (lambda x: x | {"cu_seqlens": torch.tensor([0, 3, 9])[None]}, "cu_seqlens has 2 dimensions"),
        (lambda x: x | {"cu_seqlens": torch.tensor([0, 3, 8])}, "cu_seqlens is"),
        (
            lambda x: x | {"cu_seqlens": torch.tensor([0, 3, 9]), "initial_state": torch.zeros(1, 1, 8, 6)},
            "initial_state",
        ),
    ],
)
def test_bad_operands_are_refused(change, words):
    with pytest.raises(ValueError, match=rf"^gated_delta_rule: .*{words}"):
        gated_delta_rule(**change(operands((9, 1, 1, 8, 6))), impl="triton")


# On a GPU: the full list of sizes, both precisions, every configuration.
BARS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (5e-3, 1e-2), torch.float16: (2e-3, 3e-3)}


@gpu
@needs_cuda
@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
def test_sizes_on_cuda(size, dtype, window):
    if window and size[0] <= window:
        pytest.skip("the window is the whole")
    compare(operands(size, dtype, initial=0 if window else size[1]), *BARS[dtype], window=window)


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
def test_views_of_one_projection_on_cuda(dtype, window):
    """Rows that begin anywhere: 16-bit tiles loaded element by element are what Triton 3.6 stores wrongly."""
    tensors = operands((300, 1, 2, 64, 64), dtype)
    wide = torch.cat([tensors[name].flatten(2) for name in ORDER[:3]] + [tensors["key"][..., 0]], -1)
    wide = torch.cat([wide[:, :1], wide], 1)[:, 1:]
    views = dict(zip(ORDER, wide.split([128, 128, 128, 2], -1), strict=False))
    views = {name: views[name].unflatten(-1, (2, 64)) for name in ORDER[:3]}
    assert all(x.stride(1) == 386 for x in views.values())
    ours, law = (triton_op(tensors | views, window=window), law_op(tensors, window=window))
    assert relative(ours.out, law.out) <= BARS[dtype][0]
    assert relative(ours.state, law.state) <= BARS[dtype][0]


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2, 17, 32, 63, 64, 65, 128, 129, 200, 256, 500, 699])
def test_windows_on_cuda(dtype, window):
    compare(operands((700, 1, 2, 64, 64), dtype), *BARS[dtype], window=window, changes={"segment": 2})


@gpu
@needs_cuda
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("number", range(15))
def test_every_configuration_on_cuda(width, dtype, window, number):
    from kernels.gated_delta_rule.triton_layout import candidates

    tensors = operands((500, 1, 2, width, width), dtype)
    every = candidates(dtype, width, width, window or 0)
    assert len(every) <= 15
    if number >= len(every):
        pytest.skip("fewer configurations")
    compare(tensors, *BARS[dtype], window=window, changes=every[number]._replace(segment=2)._asdict())


@gpu
@needs_cuda
@pytest.mark.parametrize("log_decay", [-8.0, 0.0])
@pytest.mark.parametrize("tokens", [193, 198, 255])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tail_chunks_on_cuda(log_decay, tokens, dtype):
    tensors = operands((tokens, 1, 2, 64, 64), dtype, initial=1)
    tensors["log_decay"] = torch.full_like(tensors["log_decay"], log_decay)
    if log_decay == 0.0:
        tensors["beta"] = tensors["beta"] / 2  # beta above 1 without decay multiplies 16-bit rounding without bound
    compare(tensors, *BARS[dtype])


@gpu
@needs_cuda
@pytest.mark.parametrize("window", [None, 3000])
def test_long_packed_sequences_on_cuda(window):
    bounds = [0, 3, 4000, 4001, 9000, 16384]
    tensors = operands((16384, 1, 2, 64, 64), torch.bfloat16)
    packed = triton_op(tensors, window=window, bounds=bounds)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        alone = {name: x[:, start:end] for name, x in tensors.items()}
        if window and end - start <= window:  # alone it takes the unrestricted kernel, whose roundings come otherwise
            (out, state), bar = law_op({name: x.double() for name, x in alone.items()}), BARS[torch.bfloat16][0]
        else:
            (out, state), bar = triton_op(alone, window=window), 3e-3
        assert relative(packed.out[:, start:end], out) <= bar
        assert relative(packed.state[i : i + 1], state) <= bar


@gpu
@needs_cuda
@pytest.mark.parametrize("window", [None, 200])
def test_compiled_with_inductor_on_cuda(window):
    leaves = {name: x.requires_grad_() for name, x in operands((700, 1, 2, 64, 64), torch.bfloat16).items()}

    def run(x):
        return gated_delta_rule(**x, window=window, impl="triton").out.float().square().sum()

    ours = torch.autograd.grad(torch.compile(run, fullgraph=True, dynamic=False)(leaves), list(leaves.values()))
    eager = torch.autograd.grad(run(leaves), list(leaves.values()))
    assert all(relative(x, y) <= 1e-2 for x, y in zip(ours, eager, strict=True))
