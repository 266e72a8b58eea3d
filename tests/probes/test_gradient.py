"""Gradient influence: finite differences, exact zeros beyond the reach, batches, recomputation, stopped groups."""

import contextlib
import gc
import math

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import hooks
from models.config import HybridConfig
from models.hybrid_lm import HybridLM
from probes.gradient import gradient_influence

VOCAB = 29


def build(kinds, seed=4, **settings):
    torch.manual_seed(seed)
    config = dict(
        d_model=20, n_layers=len(kinds), n_heads=2, n_kv_heads=1, d_head=10, d_ffn=24, vocab_size=VOCAB,
        context_length=128, layer_kinds=kinds, window=5, rope_base=1e4, mamba2_state=6, efficient="gdn",
    )  # fmt: skip
    model = HybridLM(HybridConfig(**(config | settings))).eval().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3)
            if name.endswith(("dt_bias", "A_log")):
                parameter.fill_(-1.5)  # decays near 1: what is beyond the reach must be zero, not small
    return model


@pytest.fixture
def ids():
    torch.manual_seed(0)
    return torch.randint(VOCAB, (3, 33))


def score_of(model, embedded, input_ids, score, where):
    """s from whole logits, the plain way."""
    logits = model(embedded)
    if score == "log_prob":
        return logits.log_softmax(-1)[:, where].gather(-1, input_ids[:, where + 1, None])[..., 0].mean(1)
    if score == "logit_sum":
        return logits[:, where].sum(-1).mean(1)
    return logits[:, where].mean(1).max(-1).values


@pytest.mark.parametrize("score", ["log_prob", "logit_sum", "argmax_logit"])
@pytest.mark.parametrize("keep_bytes", [0, math.inf])
def test_equals_the_gradient_through_all_logits_and_finite_differences(ids, score, keep_bytes):
    model = build(("gdn", "full"))
    read = ids[:, :-1] if score == "log_prob" else ids
    where = torch.arange(read.shape[1] - 6, read.shape[1])
    embedded = model.embed(read).detach().requires_grad_()
    s = score_of(model, embedded, ids, score, where)
    (gradient,) = torch.autograd.grad(s.sum(), embedded)
    result = gradient_influence(model, ids, score=score, n_targets=6, keep_bytes=keep_bytes)
    assert torch.allclose(result.score, s.detach(), rtol=1e-9)
    assert torch.allclose(result.norm, gradient.norm(dim=-1).flip(-1), rtol=1e-8, atol=1e-14)
    direction, step = torch.randn_like(embedded[:1, 3]), 1e-5
    with torch.no_grad():
        moved = []
        for sign in (1, -1):
            x = embedded[:1].clone()
            x[:, 3] += sign * step * direction
            moved.append(score_of(model, x, ids[:1], score, where))
    assert torch.allclose((moved[0] - moved[1]) / (2 * step), (gradient[0, 3] * direction[0]).sum(), rtol=1e-5)


def test_a_set_of_targets(ids):
    model = build(("swa", "full"))
    chosen = gradient_influence(model, ids, targets=[7, 20])
    single = [gradient_influence(model, ids[:, : t + 2], n_targets=1) for t in (7, 20)]
    assert torch.allclose(chosen.score, (single[0].score + single[1].score) / 2)
    assert not chosen.norm[:, : 31 - 20].any()  # after the last target
    many = gradient_influence(model, ids.repeat(1, 5), n_targets=140)  # several chunks of targets
    assert torch.isfinite(many.norm).all()


REACH = {
    "sliding": (("swa", "swa", "swa"), None, 3 * 4),
    "restricted full": (("full", "full"), ("full", 6), 2 * 5),
    "restricted gdn with its convolution": (("gdn", "gdn"), ("efficient", 4), 2 * (4 + 4 - 2)),
    "restricted mamba2 with its convolution": (("mamba2", "mamba2"), ("efficient", 3), 2 * (3 + 4 - 2)),
    "restricted lightning": (("lightning", "lightning"), ("efficient", 5), 2 * 4),
    "restricted head-wise": (("headwise",), ([0], 4), 4 + 4 - 2),
}


@pytest.mark.parametrize("case", REACH)
@pytest.mark.parametrize("n_targets", [1, 4])
def test_exactly_zero_beyond_the_reach_and_nonzero_within(case, n_targets):
    """G(d) = 0 for d > n (w - 1) + (n_q - 1), and a convolution of width c adds c - 1 per layer (docs of restrict)."""
    kinds, restriction, reach = REACH[case]
    model = build(kinds)
    torch.manual_seed(1)
    ids = torch.randint(VOCAB, (2, 60))
    with hooks.restrict(model, *restriction[:1], window=restriction[1]) if restriction else contextlib.nullcontext():
        norm = gradient_influence(model, ids, score="logit_sum", n_targets=n_targets).norm
    assert not norm[:, reach + n_targets :].any()
    assert (norm[:, : reach + n_targets] > 0).all()


def test_unrestricted_states_reach_everything(ids):
    assert (gradient_influence(build(("gdn", "mamba2")), ids).norm > 0).all()


def test_samples_do_not_touch_each_other(ids):
    model = build(("gdn", "full", "swa"))
    together = gradient_influence(model, ids, layers=True)
    for i in range(3):
        alone = gradient_influence(model, ids[i : i + 1], layers=True)
        for a, b in zip(together[:3], alone[:3], strict=True):
            assert torch.allclose(a[i : i + 1], b, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("keep_bytes", [0, math.inf])
def test_layer_resolved(ids, keep_bytes):
    model = build(("gdn", "full", "mamba2"))
    result = gradient_influence(model, ids, layers=True, keep_bytes=keep_bytes)
    assert torch.allclose(result.layers[:, 0], result.norm)
    seen = {}
    handles = []
    for index, block in enumerate(model.blocks):

        def keep(module, args, index=index):
            args[0].register_hook(lambda g: seen.__setitem__(index, g))

        handles.append(block.register_forward_pre_hook(keep))
    embedded = model.embed(ids[:, :-1]).detach().requires_grad_()
    score_of(model, embedded, ids, "log_prob", torch.arange(12, 32)).sum().backward()
    for handle in handles:
        handle.remove()
    for index in range(3):
        assert torch.allclose(result.layers[:, index], seen[index].norm(dim=-1).flip(-1), rtol=1e-8, atol=1e-14)


def saved_by(model, ids, keep_bytes):
    """Calls of each block's mixer, numbers saved for backward outside recomputation, norms."""
    calls, handles, saved = [0] * len(model.blocks), [], 0

    def pack(x):
        nonlocal saved
        saved += x.numel()
        return x

    for index, block in enumerate(model.blocks):

        def called(*_, index=index):
            calls[index] += 1

        handles.append(block.attn.register_forward_hook(called))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = gradient_influence(model, ids, keep_bytes=keep_bytes)
    for handle in handles:
        handle.remove()
    assert all("forward" not in vars(block) for block in model.blocks)
    return calls, saved, result.norm


def test_recomputation_keeps_one_block_and_works_in_eval_mode(ids):
    """Saved tensors outside a block: its inputs only, whatever is inside."""
    model = build(("gdn", "full", "mamba2", "swa"))
    again, saved, norm = saved_by(model, ids, 0)
    once, saved_all, norm_all = saved_by(model, ids, math.inf)
    assert (again, once) == ([2] * 4, [1] * 4)
    assert saved < saved_all / 3
    assert torch.allclose(norm, norm_all, rtol=1e-10, atol=1e-15)


def test_the_first_blocks_keep_what_they_are_allowed_to(ids):
    """Four equal blocks; what one of them saves, parameters and views apart, is what the allowance counts."""
    model = build(("full",) * 4)
    kept, plain = {}, model.blocks[0]
    parameters = {parameter.untyped_storage().data_ptr() for parameter in plain.parameters()}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        embedded = model.embed(ids[:, :-1]).detach().requires_grad_()
        model.requires_grad_(False)
        plain(embedded, torch.arange(32))
    one = sum(kept.values())
    assert one > 10 * embedded.numel()
    expected = gradient_influence(model, ids).norm
    for blocks, keep_bytes in ((1, 1), (1, 1.9 * one), (2, 2.1 * one), (3, 3.1 * one), (4, 9 * one)):
        calls, _, norm = saved_by(model, ids, keep_bytes)
        assert calls == [1] * blocks + [2] * (4 - blocks)
        assert torch.allclose(norm, expected, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("keep_bytes", [0, 1e9, math.inf])
def test_nothing_of_a_forward_outlives_its_call(ids, keep_bytes):
    """Where gradients are stopped no backward runs, which is what otherwise frees a graph."""
    model = build(("gdn", "full", "mamba2", "lightning"))
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    seen = []

    def note(module, args, output):
        if isinstance(output, torch.Tensor) and output.untyped_storage().data_ptr() not in own:
            seen.append(StorageWeakRef(output.untyped_storage()))

    handles = [module.register_forward_hook(note) for block in model.blocks for module in block.modules()]
    stop = [f"blocks.{layer}.attn.hook_z" for layer in range(4)]
    result = gradient_influence(model, ids, stop_at=stop, layers=True, keep_bytes=keep_bytes)
    for handle in handles:
        handle.remove()
    gc.collect()
    assert len(seen) > 100
    assert not [ref for ref in seen if not ref.expired()]
    assert torch.isfinite(result.norm).all()


def test_vectors_are_the_gradients_whose_norms_are_given(ids):
    result = gradient_influence(build(("swa", "full")), ids, vectors=True)
    assert torch.allclose(result.gradient.norm(dim=-1), result.norm)
    assert gradient_influence(build(("swa", "full")), ids).gradient is None


@pytest.mark.parametrize("keep_bytes", [0, math.inf])
def test_stopped_groups(ids, keep_bytes):
    """With the full mixers stopped only windows carry, so the reach is theirs; with all stopped nothing does."""
    model = build(("swa", "full", "swa"))
    full = ["blocks.1.attn.hook_z"]
    efficient = ["blocks.0.attn.hook_z", "blocks.2.attn.hook_z"]
    plain = gradient_influence(model, ids, n_targets=1, keep_bytes=keep_bytes).norm
    windows = gradient_influence(model, ids, n_targets=1, stop_at=full, keep_bytes=keep_bytes).norm
    assert not windows[:, 9:].any()
    assert (windows[:, :9] > 0).all()
    only_full = gradient_influence(model, ids, n_targets=1, stop_at=efficient, keep_bytes=keep_bytes).norm
    assert (only_full[:, 9:] > 0).all()
    assert not torch.allclose(only_full, plain)
    none = gradient_influence(model, ids, n_targets=1, stop_at=full + efficient, keep_bytes=keep_bytes).norm
    assert not none[:, 1:].any()
    assert torch.equal(gradient_influence(model, ids, n_targets=1, keep_bytes=keep_bytes).norm, plain)


def test_parameters_and_hooks_are_left_as_they_were(ids):
    model = build(("swa", "full"))
    model.embed.weight.requires_grad_(False)
    gradient_influence(model, ids, layers=True, stop_at=["blocks.1.attn.hook_z"])
    assert not model.embed.weight.requires_grad
    assert model.unembed.weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_centred_unembedding_is_refused_for_the_sum(ids, dtype, bias):
    """Rounded to bfloat16 the rows no longer sum to nothing, only to what rounding leaves."""
    model = build(("full",), vocab_size=1000).to(dtype)
    gradient_influence(model, ids, score="logit_sum")
    with torch.no_grad():
        centred = model.unembed.weight.double()
        model.unembed.weight.copy_(centred - centred.mean(0))
    if bias:
        model.unembed.bias = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
    with pytest.raises(ValueError, match="unembedding is centred"):
        gradient_influence(model, ids, score="logit_sum")
    assert (gradient_influence(model, ids).norm > 0).all()


class Capped(torch.nn.Module):
    def __init__(self, inner, cap):
        super().__init__()
        self.inner, self.cap = inner, cap

    def forward(self, x):
        return self.cap * torch.tanh(self.inner(x) / self.cap)


@pytest.mark.parametrize("cap", [3, 30, 1000])
def test_soft_capped_logits_are_summed_themselves(ids, cap):
    """Also where the cap bends none but logits far beyond those of a small probe."""
    model = build(("full",))
    with torch.no_grad():
        model.ln_final.weight.mul_(cap)  # logits that are bent
    model.unembed = Capped(model.unembed, cap)
    where = torch.arange(13, 33)
    embedded = model.embed(ids).detach().requires_grad_()
    s = score_of(model, embedded, ids, "logit_sum", where)
    (gradient,) = torch.autograd.grad(s.sum(), embedded)
    result = gradient_influence(model, ids, score="logit_sum")
    assert torch.allclose(result.norm, gradient.norm(dim=-1).flip(-1), rtol=1e-8, atol=1e-14)


def test_an_unembedding_with_a_bias_is_summed_without_it(ids):
    model = build(("full",))
    expected = gradient_influence(model, ids, score="logit_sum")
    model.unembed.bias = torch.nn.Parameter(torch.linspace(-1, 3, VOCAB, dtype=torch.float64))
    result = gradient_influence(model, ids, score="logit_sum")
    assert torch.allclose(result.norm, expected.norm, rtol=1e-10, atol=1e-15)


def test_a_gradient_that_is_not_finite_names_sample_and_layer(ids):
    model = build(("swa", "full", "swa"))

    def poison(z):
        z.register_hook(lambda g: torch.where(torch.arange(3)[:, None, None, None] == 1, torch.nan, g))
        return z

    with hooks.patch(model, {"blocks.1.attn.hook_z": poison}), pytest.raises(ValueError, match="sample 1 .* block 1"):
        gradient_influence(model, ids, layers=True, keep_bytes=math.inf)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"score": "logits"}, "score is 'logits'"),
    ({"n_targets": 33}, "n_targets is 33 for 32 positions"),
    ({"n_targets": 0}, "n_targets is 0"),
    ({"targets": [32]}, r"targets is \[32\]; expected positions from 0 to 31"),
    ({"targets": []}, r"targets is \[\]"),
    ({"keep_bytes": -1}, "keep_bytes is -1; expected 0"),
    ({"stop_at": ["blocks.9.attn.hook_z"]}, "no hook point 'blocks.9.attn.hook_z'"),
])  # fmt: skip
def test_bad_arguments(ids, arguments, words):
    with pytest.raises(ValueError, match=words):
        gradient_influence(build(("full",)), ids, **arguments)
