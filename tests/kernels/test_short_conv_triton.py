"""short_conv's Triton kernels against the float64 loop: in Triton's interpreter without a GPU, compiled with one."""

import itertools

import pytest
import torch

from kernels.short_conv import short_conv

pytest.importorskip("triton")
from kernels.short_conv import triton_form
from kernels.short_conv.triton_form import configs, short_conv_triton

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs CUDA")]
LIMITS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (5e-3, 1e-2), torch.float16: (2e-3, 2e-3)}
PACKED = [0, 2, 35, 36, 61]


def relative(value, reference):
    """RMS error over the reference's RMS; absolute where the reference is zero."""
    if reference.numel() == 0:
        return 0.0 if value.shape == reference.shape else float("inf")
    error = (value.detach().cpu().double() - reference).pow(2).mean().sqrt().item()
    return error / (reference.pow(2).mean().sqrt().item() or 1.0)


def operands(batch, tokens, channels, width, *, bias=True, initial=0, dtype=torch.float32):
    """Operands whose values `dtype` represents exactly, on the CPU in float64; initial = number of sequences."""
    torch.manual_seed(0)
    result = {"x": torch.randn(batch, tokens, channels), "weight": torch.randn(channels, width)}
    if bias:
        result["bias"] = torch.randn(channels)
    if initial:
        result["initial"] = torch.randn(initial, width - 1, channels)
    return {name: x.to(dtype).double() for name, x in result.items()}


def compare(tensors, dtype=torch.float32, bounds_on=DEVICE, **options):
    results, cut = [], options.pop("cu_seqlens", None)
    for impl in ("naive", "triton"):
        kind = {"dtype": torch.float64} if impl == "naive" else {"dtype": dtype, "device": DEVICE}
        leaves = {n: x.to(**kind).clone().requires_grad_() for n, x in tensors.items()}
        bounds = None if cut is None else torch.tensor(cut, device="cpu" if impl == "naive" else bounds_on)
        result = short_conv(**leaves, impl=impl, cu_seqlens=bounds, **options)
        torch.manual_seed(1)
        sum((y.cpu().double() * torch.randn(y.shape).double()).sum() for y in result).backward()
        results.append({"out": result.out, "tail": result.tail} | {f"d {n}": x.grad for n, x in leaves.items()})
    for name, reference in results[0].items():
        error = relative(results[1][name], reference.detach())
        assert error <= LIMITS[dtype][name.startswith("d ")], (name, error)
    assert results[1]["out"].dtype == results[1]["tail"].dtype == dtype


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(
    ("batch", "tokens", "channels", "width", "bias", "initial"),
    [
        (2, 3, 5, 4, True, 2),
        (1, 40, 130, 4, False, 0),
        (1, 19, 6, 1, True, 1),
        (1, 9, 7, 8, True, 1),
        (1, 12, 5, 3, True, 0),
    ],
)
def test_outputs_and_gradients(activation, batch, tokens, channels, width, bias, initial):
    compare(operands(batch, tokens, channels, width, bias=bias, initial=initial), activation=activation)


@pytest.mark.parametrize("shortest", [1, 16])
@pytest.mark.parametrize(("width", "initial"), [(4, 4), (3, 0)])
def test_no_tap_reaches_over_a_boundary(width, initial, shortest, monkeypatch):
    monkeypatch.setattr(triton_form, "SHORTEST", shortest)
    compare(operands(1, 61, 5, width, initial=initial), activation="silu", cu_seqlens=PACKED)


@pytest.mark.parametrize(("width", "index"), [(w, i) for w in (4, 7, 9) for i in range(len(configs(w)))])
def test_every_configuration_walks_right(width, index, monkeypatch):
    """In runs shorter than the window and in longer ones; a run's ends lie anywhere in a batch."""
    monkeypatch.setattr(triton_form, "SHORTEST", 1)
    tensors, config = operands(1, 70, 5, width, initial=1), configs(width)[index]
    results = []
    for impl in ("naive", "triton"):
        leaves = [x.to(DEVICE, torch.float32).requires_grad_() for x in tensors.values()]
        if impl == "naive":
            leaves = [x.clone().requires_grad_() for x in tensors.values()]
            out = short_conv(**dict(zip(tensors, leaves, strict=True)), activation="silu", impl="naive").out
        else:
            out, _ = short_conv_triton(*leaves[:3], "silu", leaves[3], config=config)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for reference, ours in zip(*results, strict=True):
        assert relative(ours, reference.detach()) <= 1e-5


@pytest.mark.parametrize("impl", ["naive", "torch", "triton"])
@pytest.mark.parametrize("initial", [0, 4])
def test_packed_sequences_are_the_sequences_alone(impl, initial):
    tensors = {n: x.float().to(DEVICE) for n, x in operands(1, 61, 5, 4, initial=initial).items()}
    packed = short_conv(**tensors, activation="silu", impl=impl, cu_seqlens=torch.tensor(PACKED, device=DEVICE))
    for n, (start, end) in enumerate(itertools.pairwise(PACKED)):
        piece = tensors | {"x": tensors["x"][:, start:end]}
        if initial:
            piece["initial"] = tensors["initial"][n : n + 1]
        alone = short_conv(**piece, activation="silu", impl=impl)
        assert (packed.out[:, start:end] - alone.out).abs().max() <= 1e-6
        assert torch.equal(packed.tail[n : n + 1], alone.tail)


def test_split_sequence_is_the_whole():
    tensors = {n: x.float().to(DEVICE) for n, x in operands(2, 23, 5, 4, initial=2).items()}
    whole = short_conv(**tensors, activation="silu", impl="triton")
    tail, outs = tensors["initial"], []
    for start, end in itertools.pairwise((0, 1, 3, 10, 23)):
        piece = tensors | {"x": tensors["x"][:, start:end], "initial": tail}
        out, tail = short_conv(**piece, activation="silu", impl="triton")
        outs.append(out)
    assert (torch.cat(outs, 1) - whole.out).abs().max() <= 1e-6
    assert torch.equal(tail, whole.tail)


def test_causal_and_reach():
    tensors = {n: x.float().to(DEVICE) for n, x in operands(2, 23, 5, 4).items()}
    before = short_conv(**tensors, impl="triton").out
    tensors["x"][:, 8] += 1
    changed = (short_conv(**tensors, impl="triton").out != before).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("place", ["x", "initial", "out"])
def test_not_a_number_spreads_as_in_the_law_and_over_no_boundary(place):
    """NaN in x, in an initial state or in the cotangent, of one channel of one packed sequence."""
    tensors = operands(1, 61, 5, 4, initial=4)
    tensors["cotangent"] = torch.ones(1, 61, 5, dtype=torch.float64)
    if place == "initial":
        tensors["initial"][2, 1, 3] = float("nan")  # the sequence of one token, 35
    else:
        tensors["x" if place == "x" else "cotangent"][0, 34, 3] = float("nan")  # the last before it
    results = []
    for impl in ("naive", "triton"):
        kind = {"dtype": torch.float64} if impl == "naive" else {"dtype": torch.float32, "device": DEVICE}
        leaves = {n: x.to(**kind).requires_grad_() for n, x in tensors.items()}
        cotangent = leaves.pop("cotangent").detach()
        bounds = torch.tensor(PACKED, device=cotangent.device)
        out = short_conv(**leaves, activation="silu", impl=impl, cu_seqlens=bounds).out
        results.append([x.isnan().cpu() for x in (out, *torch.autograd.grad(out, leaves.values(), cotangent))])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert any(x.any() for x in results[1])
    assert not results[1][1][0, 36:].any()


def test_second_derivatives_are_refused():
    x = torch.randn(1, 9, 5, device=DEVICE, requires_grad=True)
    out = short_conv(x=x, weight=torch.randn(5, 4, device=DEVICE), impl="triton").out
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_strided_operands_and_expanded_cotangent():
    tensors, results = operands(2, 21, 5, 4), []
    for impl in ("naive", "triton"):
        kind = {"dtype": torch.float64} if impl == "naive" else {"dtype": torch.float32, "device": DEVICE}
        leaves = {n: x.to(**kind).clone().requires_grad_() for n, x in tensors.items()}
        call = leaves | {"x": leaves["x"].transpose(0, 2).contiguous().transpose(0, 2)}
        call["weight"] = leaves["weight"].T.contiguous().T
        out = short_conv(**call, activation="silu", impl=impl).out
        out.backward(torch.ones((), **kind).expand_as(out))
        results.append({"out": out} | {n: x.grad for n, x in leaves.items()})
    for name, reference in results[0].items():
        assert relative(results[1][name], reference.detach()) <= 1e-5, name


def test_only_the_needed_gradients():
    tensors = {n: x.float().to(DEVICE) for n, x in operands(1, 21, 5, 4, initial=1).items()}
    everything = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    short_conv(**everything, activation="silu", impl="triton").out.square().sum().backward()
    for wanted in tensors:
        leaves = {n: x.clone().requires_grad_(n == wanted) for n, x in tensors.items()}
        short_conv(**leaves, activation="silu", impl="triton").out.square().sum().backward()
        for name, x in leaves.items():
            assert (x.grad is not None) == (name == wanted)
        assert relative(leaves[wanted].grad, everything[wanted].grad.cpu().double()) <= 1e-6


def test_compiled_whole_and_under_autocast():
    tensors = {n: x.float().to(DEVICE).requires_grad_() for n, x in operands(1, 21, 5, 4, initial=1).items()}

    def call(x):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return short_conv(**x, activation="silu", impl="triton").out.float().square().sum()

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
    ours = torch.autograd.grad(compiled(tensors), list(tensors.values()))
    eager = torch.autograd.grad(call(tensors), list(tensors.values()))
    exact = {n: x.detach().cpu().double().requires_grad_() for n, x in tensors.items()}
    loss = short_conv(**exact, activation="silu", impl="naive").out.square().sum()
    expected = torch.autograd.grad(loss, list(exact.values()))
    assert all(torch.equal(x, y) for x, y in zip(ours, eager, strict=True))
    assert all(relative(x, y) <= 1e-5 for x, y in zip(ours, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x | {"x": x["x"].double()}, "x is torch.float64 with impl 'triton'"),
        (lambda x: x | {"cu_seqlens": torch.tensor([0, 5, 8])}, "cu_seqlens is"),
        (lambda x: x | {"cu_seqlens": torch.tensor([0, 4, 9])}, r"initial has shape .*N, W-1, C"),
        (lambda x: {n: torch.cat([y, y]) if n in ("x", "initial") else y for n, y in x.items()}
         | {"cu_seqlens": torch.tensor([0, 4, 9])}, "B is 2"),
    ],
)  # fmt: skip
def test_bad_operands_are_refused(change, words):
    tensors = {n: x.float() for n, x in operands(1, 9, 5, 4, initial=1).items()}
    with pytest.raises(ValueError, match=rf"^short_conv: .*{words}"):
        short_conv(**change(tensors), impl="triton")


def test_cpu_tensors_are_refused_outside_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton_form, "INTERPRETED", False)
    tensors = {n: x.float() for n, x in operands(1, 9, 5, 4).items()}
    with pytest.raises(ValueError, match=r"^short_conv: x is on cpu with impl 'triton'; expected a CUDA device"):
        short_conv(**tensors, impl="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
class TestOnGPU:
    pytestmark = gpu

    @pytest.mark.parametrize(("width", "activation"), [*((w, "silu") for w in range(1, 9)), (1, None), (4, None)])
    @pytest.mark.parametrize("tokens", [1, 7, 64, 65, 500, 2048])
    def test_sizes(self, width, activation, tokens, dtype):
        channels = 200 + 8 * (width % 2)  # loads are wide where 16 divides C, and narrow elsewhere
        compare(operands(2, tokens, channels, width, initial=2, dtype=dtype), dtype, activation=activation)

    @pytest.mark.parametrize(("width", "index"), [(w, i) for w in (3, 4, 8, 12) for i in range(len(configs(w)))])
    def test_every_configuration(self, width, index, dtype, monkeypatch):
        """Of the configurations that `width` may get; C a multiple of 16 but not of the tiles, runs of many batches."""
        monkeypatch.setattr(triton_form, "SHORTEST", 40)
        tensors = {n: x.to(DEVICE, dtype) for n, x in operands(2, 1500, 304, width, dtype=dtype).items()}
        leaves = [x.requires_grad_() for x in tensors.values()]
        out, _ = short_conv_triton(*leaves, "silu", None, None, configs(width)[index])
        results = [out, *torch.autograd.grad(out.float().square().sum(), leaves)]
        exact = [x.detach().double().cpu().requires_grad_() for x in leaves]
        law = short_conv(x=exact[0], weight=exact[1], bias=exact[2], activation="silu", impl="naive")
        expected = [law.out, *torch.autograd.grad(law.out.square().sum(), exact)]
        for n, (ours, reference) in enumerate(zip(results, expected, strict=True)):
            assert relative(ours, reference.detach()) <= LIMITS[dtype][n > 0]

    @pytest.mark.parametrize(("initial", "bounds_on"), [(0, "cuda"), (6, "cpu")])
    @pytest.mark.parametrize("channels", [70, 144])
    def test_packed(self, initial, bounds_on, channels, dtype):
        bounds = [0, 1, 3, 300, 301, 2000, 2601]
        tensors = operands(1, 2601, channels, 4, initial=initial, dtype=dtype)
        compare(tensors, dtype, bounds_on, activation="silu", cu_seqlens=bounds)

    def test_runs_are_equal_bit_for_bit(self, dtype):
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in operands(2, 9000, 304, 4, dtype=dtype).values()]
        runs = []
        for _ in range(2):
            out, _ = short_conv_triton(*leaves, "silu", None)
            runs.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
        assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


class TestBeyond32Bits:
    """Offsets over 2^31: the last tokens of a long input are what they are alone."""

    pytestmark = gpu

    def test_elements(self):
        channels, last = 2048, 100
        weight = torch.randn(channels, 4, device=DEVICE, dtype=torch.bfloat16)
        x = torch.randn(1, 2**20 + 300, channels, device=DEVICE, dtype=torch.bfloat16)
        self.same(x, weight, last)

    def test_strides(self):
        """Few tokens, far apart in memory."""
        store = torch.randn(2**31 + 2**29 + 64, device=DEVICE, dtype=torch.bfloat16)
        x = store.as_strided((1, 6, 64), (0, 2**29, 1))
        self.same(x, torch.randn(64, 4, device=DEVICE, dtype=torch.bfloat16), 2)

    @staticmethod
    def same(x, weight, last):
        results = []
        for part in (x, x[:, -last - 3 :]):
            leaf = part.detach().requires_grad_()
            out = short_conv(x=leaf, weight=weight, activation="silu", impl="triton").out[:, -last:]
            (gradient,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
            results.append([out.detach(), gradient[:, -last:].clone()])
            del gradient, leaf
        assert results[0][0].any()
        assert all(relative(x, y.cpu().double()) <= 1e-3 for x, y in zip(*results, strict=True))
