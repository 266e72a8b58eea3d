"""linear_decay's Triton kernels against the float64 loop: in Triton's interpreter without a GPU, compiled with one."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from kernels.linear_decay import linear_decay

pytest.importorskip("triton")
from kernels.linear_decay import triton_form
from kernels.linear_decay.triton_form import Config, configs, linear_decay_triton

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs CUDA")]
# Small tiles and several segments, so that few tokens take every path.
SMALL = Config(16, 16, 16, 4, 1, 16, 16, 4, 1, segment=2)
WIDE = Config(16, 32, 32, 4, 1, 32, 32, 4, 1, segment=2)
# Other tiles and chunks backwards.
UNEVEN = Config(16, 16, 16, 4, 1, 32, 16, 4, 1, segment=2, back_chunk=32, gate_chunk=64)
LIMITS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (5e-3, 1e-2), torch.float16: (2e-3, 2e-3)}


def relative(value, reference, floor=0.0):
    """RMS error over the reference's RMS, or over `floor` if that is larger; absolute where the reference is zero."""
    error = (value.detach().cpu().double() - reference.double()).pow(2).mean().sqrt().item()
    return error / (max(reference.double().pow(2).mean().sqrt().item(), floor) or 1.0)


def operands(size, *, dtype=torch.float32, fixed=False, initial=0, log_decay=None, seed=0):
    """Operands whose values `dtype` represents exactly, on the CPU in float64; initial = number of states."""
    b, t, h, k, v = size
    torch.manual_seed(seed)
    decay = -0.3 * torch.rand(h if fixed else (b, t, h)) if log_decay is None else None
    result = {
        "query": torch.randn(b, t, h, k).to(dtype),
        "key": F.normalize(torch.randn(b, t, h, k), dim=-1).to(dtype),
        "value": torch.randn(b, t, h, v).to(dtype),
        "log_decay": torch.full((h,) if fixed else (b, t, h), log_decay) if decay is None else decay,
    }
    if initial:
        result["initial_state"] = torch.randn(initial, h, k, v)
    return {name: x.double() for name, x in result.items()}


def law(tensors, dtype=torch.float32, **options):
    """Outputs and gradients of the float64 loop under one random cotangent, and the cotangents.

    d out is representable in `dtype`: autograd hands the kernel no other.

    The loop keeps every state of every step of a window for its gradient; beyond 2 GB the torch form in float64 stands
    in for it, which test_recurrent_ops.py holds to the loop within 1e-12.
    """
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    kept = 8 * tensors["key"].numel() * tensors["value"].shape[-1] * (options.get("window") or 1)
    result = linear_decay(**leaves, impl="naive" if kept < 2e9 else "torch", **options)
    torch.manual_seed(1)
    cotangents = [torch.randn(x.shape, dtype=torch.float64) for x in result]
    cotangents[0] = cotangents[0].to(dtype).double()
    sum((x * w).sum() for x, w in zip(result, cotangents, strict=True)).backward()
    named = {"out": result.out, "state": result.state} | {f"d {n}": x.grad for n, x in leaves.items()}
    return {n: x.detach() for n, x in named.items()}, cotangents


def compare(tensors, dtype=torch.float32, config=None, floor=0.0, constant=False, **options):
    """`constant`: the decay gets no gradient, as in Lightning."""
    cut = options.get("cu_seqlens")
    expected, cotangents = law(tensors, dtype, **options)
    low = ("query", "key", "value")
    leaves = {n: x.to(DEVICE, dtype if n in low else torch.float32).requires_grad_() for n, x in tensors.items()}
    leaves["log_decay"].requires_grad_(not constant)
    result = linear_decay_triton(
        *(leaves[n] for n in (*low, "log_decay")), leaves.get("initial_state"), options.get("window"),
        options.get("scale", 1.0), None if cut is None else cut.to(DEVICE), config,
    )  # fmt: skip
    assert result.out.dtype == dtype
    assert result.state.dtype == torch.float32
    loss = sum((x.float() * w.to(DEVICE).float()).sum() for x, w in zip(result, cotangents, strict=True))
    loss.backward()
    ours = {"out": result.out, "state": result.state} | {f"d {n}": x.grad for n, x in leaves.items()}
    assert (ours["d log_decay"] is None) == constant
    for name, reference in expected.items():
        if constant and name == "d log_decay":
            continue
        assert torch.isfinite(ours[name]).all(), name
        error = relative(ours[name], reference, floor)
        assert error <= LIMITS[dtype][name.startswith("d ")], (name, error)


CASES = [  # size, options, configuration
    ((1, 1, 1, 5, 7), {}, None),
    ((2, 35, 1, 8, 17), {"initial": 2, "scale": 0.7}, SMALL),
    ((1, 20, 2, 20, 5), {"initial": 1, "fixed": True}, SMALL._replace(segment=1)),
    ((1, 20, 1, 8, 9), {"window": 7, "scale": 0.7}, SMALL),
    ((1, 40, 1, 8, 16), {"window": 34, "fixed": True}, SMALL),
    ((1, 50, 1, 8, 16), {"window": 34}, SMALL),
    ((1, 40, 1, 8, 16), {"initial": 4, "cu_seqlens": [0, 1, 18, 20, 40]}, SMALL._replace(segment=1)),
    ((1, 40, 1, 8, 16), {"window": 20, "cu_seqlens": [0, 1, 18, 40]}, SMALL),
    ((2, 99, 1, 8, 20), {"initial": 2, "scale": 0.7}, UNEVEN._replace(segment=1)),
    ((1, 99, 1, 20, 8), {"initial": 3, "cu_seqlens": [0, 1, 66, 99]}, UNEVEN._replace(segment=1)),
    ((1, 120, 1, 20, 8), {"window": 100}, UNEVEN),
    ((1, 70, 1, 8, 20), {"window": 34}, UNEVEN),
]
BLOCKS = [  # the same where a window is cut into blocks
    ((1, 38, 1, 8, 5), {"window": 18, "scale": 0.7}),
    ((1, 30, 1, 8, 5), {"window": 18, "fixed": True}),
    ((1, 29, 1, 8, 5), {"window": 18, "cu_seqlens": [0, 3, 29]}),
    ((1, 80, 1, 8, 20), {"window": 66}),
]


def given(options):
    options = dict(options)
    made = {name: options.pop(name) for name in ("initial", "fixed", "log_decay") if name in options}
    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.tensor(options["cu_seqlens"])
    return made, options


@pytest.mark.parametrize(("size", "options", "config"), CASES)
def test_outputs_and_gradients(size, options, config):
    made, options = given(options)
    compare(operands(size, **made), config=config, **options)


@pytest.mark.parametrize("together", [0, 1])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((2, 35, 1, 8, 16), {"initial": 2, "scale": 0.7}),
        ((1, 40, 2, 16, 5), {"fixed": True}),
        ((1, 40, 1, 8, 16), {"initial": 4, "cu_seqlens": [0, 1, 18, 20, 40]}),
    ],
)
def test_gradients_beside_a_constant_decay(size, options, together):
    made, options = given(options)
    compare(operands(size, **made), config=SMALL._replace(together=together, segment=1), constant=True, **options)


@pytest.mark.parametrize(("size", "options"), BLOCKS)
def test_windows_cut_into_blocks(size, options, monkeypatch):
    monkeypatch.setattr(triton_form, "BAND_CHUNKS", 1)
    # memory that nothing has written is full of NaN: what no neighbour adds to must not be read
    monkeypatch.setattr(
        triton_form, "_float32", lambda shape, like: like.new_full(shape, torch.nan, dtype=torch.float32)
    )
    made, options = given(options)
    config = UNEVEN if options["window"] > 64 else SMALL
    compare(operands(size, **made), config=config._replace(segment=1), **options)


@pytest.mark.parametrize(("tokens", "log_decay"), [(17, -8.0), (22, -8.0), (31, -8.0), (22, 0.0)])
def test_strong_and_no_decay_with_short_tails(tokens, log_decay):
    tensors = operands((1, tokens, 1, 8, 4), fixed=log_decay == 0, log_decay=log_decay, initial=1)
    compare(tensors, config=SMALL._replace(segment=1))


@pytest.mark.parametrize(("window", "band"), [(None, 1), (9, 1), (18, 1)])
def test_huge_decay_stays_finite(window, band, monkeypatch):
    monkeypatch.setattr(triton_form, "BAND_CHUNKS", band)
    tensors = operands((1, 40, 1, 8, 6), log_decay=-3000.0)
    leaves = {n: x.float().to(DEVICE).requires_grad_() for n, x in tensors.items()}
    out = linear_decay_triton(*leaves.values(), None, window, 1.0, None, SMALL).out
    own = (tensors["query"] * tensors["key"]).sum(-1, keepdim=True) * tensors["value"]
    assert relative(out, own) <= 1e-6
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in leaves.values())


def test_only_the_state_and_only_some_gradients():
    """The final state alone has a cotangent; value and log_decay need no gradient."""
    tensors = operands((1, 40, 1, 8, 16), initial=1)
    wanted = {"key": None, "initial_state": None}
    for impl in ("naive", "triton"):
        leaves = {n: x.clone() if impl == "naive" else x.float().to(DEVICE) for n, x in tensors.items()}
        for name in wanted:
            leaves[name].requires_grad_()
        linear_decay(**leaves, impl=impl).state.square().sum().backward()
        assert leaves["value"].grad is None
        for name in wanted:
            if impl == "naive":
                wanted[name] = leaves[name].grad
            else:
                assert relative(leaves[name].grad, wanted[name]) <= 1e-5, name


def run(tensors, config=SMALL, **options):
    tensors = {n: x.float().to(DEVICE) for n, x in tensors.items()}
    named = [tensors[n] for n in ("query", "key", "value", "log_decay")]
    return linear_decay_triton(
        *named, tensors.get("initial_state"), options.get("window"), options.get("scale", 1.0), None, config
    )


def test_window_of_all_tokens_is_the_unrestricted_operation_bit_for_bit():
    tensors = operands((1, 50, 1, 8, 6))
    free = run(tensors)
    for window in (50, 10**6):
        limited = run(tensors, window=window)
        assert torch.equal(limited.out, free.out)
        assert torch.equal(limited.state, free.state)
    assert not torch.equal(run(tensors, window=49).out, free.out)


@pytest.mark.parametrize("band", [1, 4])
def test_window_sees_nothing_older_and_nothing_newer(band, monkeypatch):
    monkeypatch.setattr(triton_form, "BAND_CHUNKS", band)
    window = 20
    tensors = operands((1, 62, 1, 8, 6))
    at, changes = 30, {}
    before = run(tensors, window=window).out
    for name in ("query", "key", "value", "log_decay"):
        changes[name] = tensors[name].clone()
        changes[name][:, at] *= 0.5
    changed = (run(changes, window=window).out - before).abs().amax((0, 2, 3)) > 1e-6
    assert changed.nonzero().flatten().tolist() == list(range(at, at + window))


def test_causal_bit_for_bit():
    tensors = operands((1, 60, 1, 8, 6))
    before = run(tensors).out
    for name in tensors:
        tensors[name] = tensors[name].clone()
        tensors[name][:, 37:] *= 0.3
    after = run(tensors).out
    assert torch.equal(before[:, :37], after[:, :37])
    assert not torch.equal(before[:, 37], after[:, 37])


def test_split_sequence_is_the_whole_and_packed_is_alone():
    tensors = operands((1, 41, 1, 8, 6), initial=1)
    whole = run(tensors)
    state, outs = tensors["initial_state"], []
    for start, end in itertools.pairwise((0, 1, 32, 41)):
        piece = {n: x if n == "initial_state" else x[:, start:end] for n, x in tensors.items()}
        out, state = run(piece | {"initial_state": state})
        outs.append(out)
    assert relative(torch.cat(outs, 1), whole.out.cpu()) <= 1e-6
    assert relative(state, whole.state.cpu()) <= 1e-6
    del tensors["initial_state"]
    packed = linear_decay_triton(
        *(x.float().to(DEVICE) for x in tensors.values()), None, None, 1.0,
        torch.tensor([0, 1, 20, 41]).to(DEVICE), SMALL,
    )  # fmt: skip
    for n, (start, end) in enumerate(itertools.pairwise((0, 1, 20, 41))):
        alone = run({name: x[:, start:end] for name, x in tensors.items()})
        assert relative(packed.out[:, start:end], alone.out.cpu()) <= 1e-6
        assert relative(packed.state[n : n + 1], alone.state.cpu()) <= 1e-6


@pytest.mark.parametrize("window", [None, 10])
def test_batch_row_is_the_row_alone_and_runs_are_equal(window):
    tensors = operands((2, 20, 1, 8, 6))
    both, again = run(tensors, window=window), run(tensors, window=window)
    alone = run({n: x[1:] for n, x in tensors.items()}, window=window)
    for x, y, z in zip(both, again, alone, strict=True):
        assert torch.equal(x, y)
        assert relative(x[1:], z.cpu()) <= 1e-6


@pytest.mark.parametrize("window", [None, 10])
def test_strided_and_expanded_operands(window):
    """Query and key with stride 0 over heads as in Mamba-2, value and log_decay transposed, cotangent one number."""
    tensors = operands((2, 18, 3, 8, 6))
    shared = {n: tensors[n][:, :, :1] for n in ("query", "key")}
    results = []
    for impl in ("naive", "triton"):
        kind = {"dtype": torch.float64} if impl == "naive" else {"dtype": torch.float32, "device": DEVICE}
        leaves = {n: (shared | tensors | shared)[n].to(**kind).clone().requires_grad_() for n in tensors}
        call = {n: x.expand(-1, -1, 3, -1) if n in shared else x for n, x in leaves.items()}
        call["value"] = leaves["value"].transpose(0, 3).contiguous().transpose(0, 3)
        call["log_decay"] = leaves["log_decay"].transpose(1, 2).contiguous().transpose(1, 2)
        out = linear_decay(**call, window=window, impl=impl).out
        out.backward(torch.ones((), **kind).expand_as(out))
        results.append({"out": out} | {n: x.grad for n, x in leaves.items()})
    for name, reference in results[0].items():
        assert relative(results[1][name], reference.detach()) <= 1e-5, name


@pytest.mark.parametrize("window", [None, 10])
def test_compiled_whole_and_under_autocast(window):
    tensors = {n: x.float().to(DEVICE).requires_grad_() for n, x in operands((1, 20, 1, 8, 6)).items()}

    def call(x):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            result = linear_decay(**x, window=window, impl="triton")
        return result.out.float().square().sum() + result.state.square().sum()

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
    ours = torch.autograd.grad(compiled(tensors), list(tensors.values()))
    eager = torch.autograd.grad(call(tensors), list(tensors.values()))
    expected, _ = law({n: x.detach().cpu().double() for n, x in tensors.items()}, window=window)
    assert relative(linear_decay(**tensors, window=window, impl="triton").out, expected["out"]) <= 1e-5
    assert all(torch.equal(x, y) for x, y in zip(ours, eager, strict=True))


def test_compiled_once_for_windows_that_differ(monkeypatch):
    """A number that changed is a symbol for the compiler, and so is what a plan makes of it."""
    monkeypatch.setattr(triton_form, "BAND_CHUNKS", 0)
    tensors = {n: x.float().to(DEVICE) for n, x in operands((1, 20, 1, 8, 6)).items()}
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, window: linear_decay(**x, window=window, impl="triton").out, backend="aot_eager", fullgraph=True
    )
    for window in (10, 12, 15):
        assert torch.equal(compiled(tensors, window), linear_decay(**tensors, window=window, impl="triton").out)


@pytest.mark.parametrize("impl", ["naive", "torch"])
@pytest.mark.parametrize("window", [None, 4, 9])
@pytest.mark.parametrize("fixed", [False, True])
def test_packed_sequences_are_the_sequences_alone(impl, window, fixed):
    bounds = [0, 1, 14, 16, 25]
    tensors = operands((1, 25, 2, 5, 6), fixed=fixed, initial=0 if window else 4)
    packed = linear_decay(**tensors, window=window, impl=impl, cu_seqlens=torch.tensor(bounds))
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        piece = {m: x[:, start:end] if x.ndim > 1 else x for m, x in tensors.items() if m != "initial_state"}
        if not window:
            piece["initial_state"] = tensors["initial_state"][n : n + 1]
        alone = linear_decay(**piece, window=window, impl=impl)
        assert torch.equal(packed.out[:, start:end], alone.out)
        assert torch.equal(packed.state[n : n + 1], alone.state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x | {"query": x["query"].double()}, "query is torch.float64 with impl 'triton'"),
        (lambda x: x | {"log_decay": x["log_decay"].double()}, "log_decay is torch.float64 with impl 'triton'"),
        (lambda x: x | {"cu_seqlens": torch.tensor([0, 5, 5, 9])}, "cu_seqlens is"),
        (lambda x: x | {"cu_seqlens": torch.tensor([0, 4, 9]), "initial_state": torch.zeros(1, 2, 8, 6)}, "N, H, K, V"),
    ],
)
def test_bad_operands_are_refused(change, words):
    tensors = {n: x.float() for n, x in operands((1, 9, 2, 8, 6)).items()}
    with pytest.raises(ValueError, match=rf"^linear_decay: .*{words}"):
        linear_decay(**change(tensors), impl="triton")


def test_cpu_tensors_are_refused_outside_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton_form, "INTERPRETED", False)
    tensors = {n: x.float() for n, x in operands((1, 9, 2, 8, 6)).items()}
    with pytest.raises(ValueError, match=r"^linear_decay: query is on cpu with impl 'triton'; expected a CUDA device"):
        linear_decay(**tensors, impl="triton")


@pytest.mark.parametrize(
    ("tokens", "window", "packed", "config"),
    [
        (1, 0, 0, SMALL),
        (999, 0, 0, SMALL),
        (999, 70, 0, SMALL),
        (999, 0, 5, SMALL),
        (999, 70, 5, WIDE),
        (999, 0, 0, UNEVEN),
    ],
)
def test_plan_covers_all_tokens(tokens, window, packed, config):
    size = config.chunk
    cut = triton_form.plan(config._replace(segment=0), size, 2 if not packed else 1, tokens, 3, 1, window, packed, 132)
    block = window or tokens
    assert cut.chunk <= config.chunk
    assert cut.chunk * cut.chunks * (cut.per_block if window or packed else cut.per_sequence) >= (
        0 if packed else block
    )
    if packed:
        bounds = torch.linspace(0, tokens, packed + 1).long()
        ends = triton_form.segment_ends(bounds, cut)
        assert ends[-1] <= cut.segments


# ---- on a GPU: every size, dtype and configuration -------------------------------------------------------------------

SIZES = [(1, 1, 2, 64, 64), (2, 7, 2, 60, 100), (1, 63, 2, 64, 128), (1, 64, 2, 128, 64), (2, 65, 1, 100, 60),
         (1, 500, 2, 128, 128), (1, 500, 1, 128, 256), (1, 500, 1, 256, 40), (1, 2048, 2, 64, 64)]  # fmt: skip
WINDOWS = [1, 2, 63, 64, 65, 128, 256, 257, 300, 499, 700]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
class TestOnGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("size", SIZES, ids=str)
    @pytest.mark.parametrize("fixed", [False, True])
    @pytest.mark.parametrize("initial", [False, True])
    def test_sizes(self, size, fixed, initial, dtype):
        compare(operands(size, dtype=dtype, fixed=fixed, initial=size[0] * initial), dtype, scale=size[3] ** -0.5)

    @pytest.mark.parametrize("size", SIZES, ids=str)
    @pytest.mark.parametrize("fixed", [False, True])
    def test_gradients_beside_a_constant_decay(self, size, fixed, dtype):
        tensors = operands(size, dtype=dtype, fixed=fixed, initial=size[0])
        compare(tensors, dtype, scale=size[3] ** -0.5, constant=True)

    @pytest.mark.parametrize("window", WINDOWS)
    @pytest.mark.parametrize("fixed", [False, True])
    def test_windows(self, window, fixed, dtype):
        compare(operands((1, 900, 2, 64, 128), dtype=dtype, fixed=fixed), dtype, window=window, scale=0.125)

    @pytest.mark.parametrize("index", range(16))
    @pytest.mark.parametrize("options", [{"initial": 1}, {"window": 100}, {"window": 333}], ids=str)
    @pytest.mark.parametrize("segment", [0, 2])
    def test_every_configuration(self, index, options, segment, dtype):
        if index >= len(configs(dtype)):
            pytest.skip("fewer configurations for this dtype")
        made, options = given(options)
        config = configs(dtype)[index]._replace(segment=segment)
        compare(operands((1, 700, 2, 64, 128), dtype=dtype, **made), dtype, config, scale=0.125, **options)
        compare(operands((1, 700, 2, 128, 128), dtype=dtype, fixed=True, **made), dtype, config, scale=0.1, **options)

    @pytest.mark.parametrize("window", [None, 40, 400])
    def test_packed(self, window, dtype):
        cu_seqlens = torch.tensor([0, 1, 65, 129, 1000, 1500])
        tensors = operands((1, 1500, 2, 64, 64), dtype=dtype, initial=0 if window else 5)
        compare(tensors, dtype, window=window, cu_seqlens=cu_seqlens, scale=0.125)

    @pytest.mark.parametrize("log_decay", [-8.0, -1.0, -0.01, 0.0])
    @pytest.mark.parametrize("fixed", [False, True])
    @pytest.mark.parametrize("tokens", [193, 198, 255, 600])
    def test_constant_decay(self, log_decay, fixed, tokens, dtype):
        tensors = operands((1, tokens, 2, 64, 64), dtype=dtype, fixed=fixed, log_decay=log_decay, initial=1)
        compare(tensors, dtype, scale=0.125)

    def test_runs_are_equal_bit_for_bit(self, dtype):
        tensors = {n: x.to(DEVICE, dtype) for n, x in operands((2, 3000, 4, 64, 64), initial=2).items()}
        runs = []
        for _ in range(2):
            leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
            result = linear_decay(**leaves, impl="triton")
            (result.out.float().square().sum() + result.state.square().sum()).backward()
            runs.append([*result, *(x.grad for x in leaves.values())])
        assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))

    def test_more_numbers_than_int32_counts(self, dtype):
        """Offsets beyond 2^31: a long row of an expanded key with a large stride, only its end is looked at."""
        tokens, heads, width = 2**15 + 5, 513, 128
        if torch.cuda.mem_get_info()[0] < 40 * 2**30:
            pytest.skip("needs 40 GiB")
        value = torch.zeros(1, tokens, heads, width, dtype=torch.bfloat16, device=DEVICE)
        value[:, -100:, -1] = torch.randn(100, width, device=DEVICE).bfloat16()
        key = torch.randn(1, tokens, 1, 16, device=DEVICE).bfloat16().expand(-1, -1, heads, -1)
        decay = torch.full((heads,), -0.1, device=DEVICE)
        whole = linear_decay(query=key, key=key, value=value, log_decay=decay, impl="triton")
        end = {"query": key[:, -300:, -1:], "key": key[:, -300:, -1:], "value": value[:, -300:, -1:]}
        part = linear_decay(**end, log_decay=decay[-1:], impl="triton")
        assert relative(whole.out[:, -300:, -1:].float(), part.out.float().cpu()) <= 5e-3
        assert whole.out[:, :-100].float().abs().max() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs CUDA")
@pytest.mark.parametrize("window", [None, 100, 1000])
def test_compiled_by_inductor(window):
    tensors = {n: x.float().to(DEVICE).requires_grad_() for n, x in operands((1, 2000, 2, 64, 64)).items()}

    def call(x):
        return linear_decay(**x, window=window, impl="triton").out.square().sum()

    ours = torch.autograd.grad(torch.compile(call, fullgraph=True)(tensors), list(tensors.values()))
    eager = torch.autograd.grad(call(tensors), list(tensors.values()))
    assert all(relative(x, y.cpu()) <= 1e-6 for x, y in zip(ours, eager, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs CUDA")
@pytest.mark.parametrize("window", [None, 5000])
def test_long_weak_decay_keeps_float32_accuracy(window):
    """At 16,384 tokens a float32 running sum of log decays would be off by 1e-4. The law: torch in float64."""
    tensors = operands((1, 16384, 2, 64, 64), log_decay=-0.002)
    leaves = {n: x.to(DEVICE).requires_grad_() for n, x in tensors.items()}
    results = []
    for dtype, impl in ((torch.float64, "torch"), (torch.float32, "triton")):
        call = {n: x.detach().to(dtype).requires_grad_() for n, x in leaves.items()}
        result = linear_decay(**call, impl=impl, window=window, scale=0.125)
        result.out.square().sum().backward()
        results.append([*result, *(x.grad for x in call.values())])
    for law_, ours in zip(*results, strict=True):
        assert relative(ours, law_.detach().cpu()) <= 1e-5
