"""attention: the loop against a brute-force mask, the torch form against both, and FlexAttention's block masks."""

import functools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from kernels.attention import Band, attention, attention_pattern, attention_plan
from kernels.attention import torch_form as form
from kernels.attention.flex_form import build_plan, flex, stored_plan

# T, S, bands; query blocks are 256 tokens
CASES = [
    (1, 1, ()),
    (1, 600, ()),
    (1, 600, (Band(40, 3),)),
    (63, 63, (Band(1, 0),)),
    (65, 65, ()),
    (300, 300, (Band(7, 0),)),
    (70, 331, ()),
    (130, 601, (Band(29, 5),)),
    (601, 601, (Band(257, 0),)),
    (601, 601, (Band(40, 270),)),
    (530, 530, (Band(100, 2), Band(60, 9))),
    (530, 530, (Band(100, 9), Band(60, 2))),
    (300, 300, (Band(None, 0), Band(50, 0))),
]


def operands(t, s, dtype=torch.float64, h=6, g=2, k=12, v=20, b=2):
    torch.manual_seed(0)
    shapes = {"query": (b, t, h, k), "key": (b, s, g, k), "value": (b, s, g, v)}
    return {name: torch.randn(*shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


@functools.cache
def brute_force_mask(t, s, bands):
    mask = torch.zeros(t, s, dtype=torch.bool)
    for i in range(t):
        at = s - t + i
        for j in range(at + 1):
            mask[i, j] = all(w is None or at - j < w or j < sinks for w, sinks in bands)
    return mask


def brute_force(query, key, value, bands, scale=None):
    """Output and pattern in float64 from the T x S mask."""
    share = query.shape[2] // key.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = (x.double().repeat_interleave(share, 2) for x in (key, value))
    scores = torch.einsum("bthk,bshk->bhts", query.double(), key) * scale
    mask = brute_force_mask(query.shape[1], key.shape[1], bands)
    pattern = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", pattern, value), pattern


def relative(value, reference):
    if not reference.any():
        return value.abs().max().item()
    return ((value.double() - reference).pow(2).mean().sqrt() / reference.pow(2).mean().sqrt()).item()


@pytest.mark.parametrize(("t", "s", "bands"), [*CASES[:5], (40, 131, ()), (20, 140, (Band(29, 5), Band(40, 2)))])
def test_loop_is_the_brute_force_mask(t, s, bands):
    x = operands(t, s)
    assert relative(attention(**x, bands=bands, impl="naive"), brute_force(**x, bands=bands)[0]) <= 1e-14


@pytest.mark.parametrize(("t", "s", "bands"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_torch_form_and_gradients(t, s, bands, dtype, tolerance):
    scale = 1.0 if t % 2 else None
    x = operands(t, s, dtype, k=12, v=12, h=4, b=1 if s > 500 else 2)
    ours = {name: y.clone().requires_grad_() for name, y in x.items()}
    law = {name: y.clone().requires_grad_() for name, y in x.items()}
    out, expected = attention(**ours, bands=bands, scale=scale), brute_force(**law, bands=bands, scale=scale)[0]
    assert out.dtype == dtype
    assert relative(out, expected) <= tolerance
    weight = torch.randn_like(expected)
    (out * weight.to(dtype)).sum().backward()
    (expected * weight.to(dtype)).sum().backward()
    for name in x:
        assert relative(ours[name].grad, law[name].grad.double()) <= tolerance, name


@pytest.mark.parametrize("bands", [(), (Band(30, 3),)])
def test_value_width_differs_from_key_width(bands):
    x = operands(300, 300)
    assert relative(attention(**x, bands=bands), brute_force(**x, bands=bands)[0]) <= 1e-13


@pytest.mark.parametrize(("t", "s", "bands"), [case for case in CASES if case[0] <= 300])
def test_pattern(t, s, bands):
    x = operands(t, s, torch.float32)
    pattern = attention_pattern(**x, bands=bands)
    assert pattern.shape == (2, 6, t, s)
    assert pattern.dtype == torch.float32
    assert relative(pattern, brute_force(**x, bands=bands)[1]) <= 1e-5
    assert not pattern[..., ~brute_force_mask(t, s, bands)].any()


@pytest.mark.parametrize(("h", "g"), [(3, 1), (4, 4), (6, 3)])
@pytest.mark.parametrize("bands", [(), (Band(20, 2),)])
def test_grouped_heads(h, g, bands):
    x = operands(280, 280, h=h, g=g)
    assert relative(attention(**x, bands=bands), brute_force(**x, bands=bands)[0]) <= 1e-13


def test_window_changes_the_output_and_limits_it():
    x = operands(530, 530)
    outs = [attention(**x, bands=(Band(w, 0),)) for w in (100, 101, 200)]
    assert (outs[0] - outs[1])[:, 100:].abs().amax((0, 2, 3)).min() > 1e-9
    assert (outs[0] - outs[1])[:, :100].abs().max() <= 1e-14
    assert (outs[1] - outs[2]).abs().max() > 1e-3
    changed = dict(x, value=x["value"].clone())
    changed["value"][:, 50] += 1
    moved = (attention(**changed, bands=(Band(100, 0),)) - outs[0]).abs().amax((0, 2, 3)) > 1e-12
    assert moved.nonzero().flatten().tolist() == list(range(50, 150))


@pytest.mark.parametrize("band", [Band(300, 0), Band(999, 4), Band(None, 3), Band(5, 300)])
def test_a_band_that_hides_nothing_changes_no_bit(band):
    x = operands(300, 300, torch.float32)
    assert torch.equal(attention(**x, bands=(band,)), attention(**x))
    assert not torch.equal(attention(**x, bands=(Band(299, 0),)), attention(**x))


def test_causal_bit_for_bit():
    x = operands(530, 530, torch.float32)
    for bands in ((), (Band(60, 4),)):
        before = attention(**x, bands=bands)
        changed = {name: y.clone() for name, y in x.items()}
        for y in changed.values():
            y[:, 300:] *= 0.5
        assert torch.equal(attention(**changed, bands=bands)[:, :300], before[:, :300])


@pytest.mark.parametrize("bands", [(), (Band(60, 4),)])
def test_last_queries_are_the_end_of_the_whole(bands):
    x = operands(530, 530)
    whole = attention(**x, bands=bands)
    assert relative(attention(**dict(x, query=x["query"][:, -77:]), bands=bands), whole[:, -77:]) <= 1e-13


@pytest.mark.parametrize("bands", [(), (Band(60, 4),)])
def test_low_precision_and_autocast(bands):
    x = operands(300, 300, torch.bfloat16)
    exact = brute_force(**x, bands=bands)[0]
    out = attention(**x, bands=bands)
    assert out.dtype == torch.bfloat16
    assert relative(out, exact) <= 1e-2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = attention(**{name: y.float() for name, y in x.items()}, bands=bands)
        assert attention_pattern(**x, bands=bands).dtype == torch.float32
    assert mixed.dtype == torch.float32
    assert relative(mixed, exact) <= 1e-2


@pytest.mark.parametrize("bands", [(Band(128, 0),), (Band(128, 200),), ()])
def test_memory_is_linear_in_length(bands, monkeypatch):
    """No mask or score matrix of T x S: the largest mask a block uses does not grow with T."""
    masks = []
    original = form._sdpa

    def watched(q, k, v, scale, causal=False, mask=None):
        masks.append(0 if mask is None else mask.numel())
        return original(q, k, v, scale, causal, mask)

    monkeypatch.setattr(form, "_sdpa", watched)
    sizes = []
    for length in (1024, 4096):
        masks.clear()
        attention(**operands(length, length, torch.float32, h=2, g=1, k=4, v=4, b=1), bands=bands)
        sizes.append(max(masks))
    assert sizes[0] == sizes[1] <= 256 * 1024


def test_compiled_whole():
    x = {name: y.requires_grad_() for name, y in operands(300, 300, torch.float32).items()}
    for bands in ((), (Band(60, 4),)):
        compiled = torch.compile(lambda b: attention(**x, bands=b), backend="aot_eager", fullgraph=True, dynamic=False)
        ours = torch.autograd.grad(compiled(bands).square().sum(), list(x.values()))
        eager = torch.autograd.grad(attention(**x, bands=bands).square().sum(), list(x.values()))
        assert all(relative(a, b.double()) <= 1e-5 for a, b in zip(ours, eager, strict=True))


@pytest.mark.parametrize(
    ("t", "s", "bands"),
    [
        (300, 300, (Band(7, 0),)),
        (256, 256, (Band(200, 3),)),
        (200, 900, (Band(130, 300), Band(400, 5))),
        (600, 600, (Band(300, 140),)),
        (385, 500, (Band(128, 128),)),
    ],
)
def test_block_mask_from_corners_is_the_one_from_the_whole_mask(t, s, bands):
    plan = build_plan(t, s, bands, torch.device("cpu"))
    whole = create_block_mask(plan.mask_mod, None, None, t, s, device="cpu")
    ours, theirs = plan.to_dense().bool(), whole.to_dense().bool()
    assert (ours | theirs).equal(ours)  # a block too many is only masked whole, a block missing would be wrong
    assert (ours & ~theirs).sum() <= 1
    assert torch.equal(plan.full_kv_num_blocks, whole.full_kv_num_blocks)
    rows, columns = torch.arange(t)[:, None], torch.arange(s)[None, :]
    assert torch.equal(plan.mask_mod(0, 0, rows, columns), brute_force_mask(t, s, bands))


def test_plan_is_found_while_tracing_if_made_before():
    q, k, v = (y.transpose(1, 2) for y in operands(300, 300, torch.float32, h=4, k=16, v=16, b=1).values())
    bands, cpu = (Band(33, 2), Band(50, 1)), torch.device("cpu")

    def block(q):
        return flex(q * 2, k, v, stored_plan(q.shape[2], 300, bands, cpu), 0.125)

    torch._dynamo.reset()
    traced = torch.compile(block, backend="eager", fullgraph=True, dynamic=False)
    with pytest.raises(RuntimeError, match="attention_plan before compiling"):
        traced(q)
    assert stored_plan(300, 300, bands, cpu) is stored_plan(300, 300, bands, cpu)
    torch._dynamo.reset()
    assert relative(traced(q), form.by_blocks(q, k, v, bands, 0.25).double()) <= 1e-5


def test_no_plan_where_none_is_used():
    assert attention_plan(4096, 4096, (Band(32, 0),), "cpu") is None
    assert attention_plan(4096, 4096, (Band(None, 0),), "cuda") is None
    assert attention_plan(1, 4096, (Band(32, 0),), "cuda") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": torch.zeros(2, 9, 5, 12)}, "query has 5 heads for G = 2"),
        ({"query": torch.zeros(2, 30, 6, 12)}, "T is 30 queries for S = 20"),
        ({"query": torch.zeros(9, 6, 12)}, "query has 3 dimensions"),
        ({"key": torch.zeros(2, 20, 2, 11)}, "key has shape"),
        ({"value": torch.zeros(2, 19, 2, 20)}, "value has shape"),
        ({"bands": (Band(0, 0),)}, "window=0"),
        ({"bands": (Band(3, -1),)}, "sinks=-1"),
        ({"impl": "cuda"}, "impl is 'cuda'"),
    ],
)
def test_bad_operands_are_refused(change, words):
    for op in (attention, attention_pattern):
        with pytest.raises(ValueError, match=rf"^{op.__name__}: .*{words}"):
            op(**(operands(9, 20) | change))


def check_gradients(ours, law, tolerance):
    """Relative errors. With one visible key the gradients of query and key are zero, in float64 up to rounding: those
    are held against the size of the others, not against that rounding."""
    scale = max(b.abs().max() for b in law)
    for a, b in zip(ours, law, strict=True):
        if b.abs().max() < 1e-12 * scale:
            assert a.abs().max().cpu() <= tolerance * scale
        else:
            assert relative(a.cpu(), b) <= tolerance


def test_the_gradient_check_sees_a_wrong_gradient():
    law = [torch.full((5,), 1e-15, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    check_gradients([torch.full((5,), 1e-7), law[1].float()], law, 1e-4)
    for wrong in ([torch.full((5,), 1e-2), law[1].float()], [law[0].float(), 1.01 * law[1].float()]):
        with pytest.raises(AssertionError):
            check_gradients(wrong, law, 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("t", "s", "bands", "compiled"),
    [
        *((*case, False) for case in CASES),
        *((*case, True) for case in (CASES[5], CASES[8], CASES[10])),  # seconds of compilation each
        (4096, 4096, (Band(128, 4),), True),
    ],
)
def test_on_cuda(t, s, bands, compiled, dtype):
    x = operands(t, s, dtype, h=6, g=2, k=64, v=64, b=1)
    exact = {name: y.double().requires_grad_() for name, y in x.items()}
    expected = attention(**exact, bands=bands)
    weight = torch.randn_like(expected)
    law = torch.autograd.grad((expected * weight).sum(), list(exact.values()))
    leaves = {name: y.cuda().requires_grad_() for name, y in x.items()}
    attention_plan(t, s, bands, "cuda")

    def run(y):
        return attention(**y, bands=bands)

    torch._dynamo.reset()
    out = (torch.compile(run, fullgraph=True, dynamic=False) if compiled else run)(leaves)
    ours = torch.autograd.grad((out.double() * weight.cuda()).sum(), list(leaves.values()))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    assert relative(out.cpu(), expected) <= tolerance
    check_gradients(ours, law, 2 * tolerance)
