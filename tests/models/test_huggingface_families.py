"""Every family: transformers' numbers, exact restrictions against brute force, hook points, gradients, decoding."""

import sys
from functools import partial

import pytest
import torch

import hooks
import models
from models.generate import generate
from probes.gradient import gradient_influence
from probes.retrieval import trace

T, W = 23, 4
IDS = torch.randint(3, 97, (2, T), generator=torch.Generator().manual_seed(0))
SOFTMAX = ("full", "swa")


def close(found, expected, tolerance=1e-5):
    assert expected.abs().max() > 0
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= tolerance, error


def paths(model, kinds):
    return [(layer, i) for layer in model.layers for i, path in enumerate(layer.paths) if path.kind in kinds]


@torch.no_grad()
def test_logits_and_layers_are_those_of_transformers(family, plain, wrapped, families):
    hf, model = plain(family), wrapped(family)
    expected = hf(IDS, use_cache=False).logits
    close(model(IDS), expected)
    hidden = model.final_hidden(IDS)
    close(model.unembed(hidden[:, 7]), expected[:, 7])
    close(model.unembed(model.final_hidden(model.embed(IDS))), expected)
    found = [(layer.kind, layer.n_heads, layer.n_kv_heads, layer.window) for layer in model.layers]
    assert found == families[family][1]
    assert len({id(layer.block) for layer in model.layers}) == 4


@torch.no_grad()
def test_every_point_fires_once_and_changes_nothing(family, plain, wrapped):
    """All of them together: listening must not change a logit, but for states, which our kernels make."""
    model = wrapped(family)
    names = [name for name in model.hook_dict if not name.endswith(("hook_ssm_state", "hook_ssm_write"))]
    with hooks.record(model, names) as seen:
        logits = model(IDS)
    close(logits, plain(family)(IDS, use_cache=False).logits, 5e-5)
    for layer in range(4):
        block = {name.split(".", 2)[2]: value for name, value in seen.items() if name.startswith(f"blocks.{layer}.")}
        before, after = block["hook_resid_pre"], block["hook_resid_post"]
        if "hook_resid_mid" in block:
            close(before + block["hook_attn_out"], block["hook_resid_mid"], 1e-6)
            close(block["hook_resid_mid"] + block["hook_mlp_out"], after, 1e-6)
        for name, pattern in block.items():
            if name.endswith("hook_pattern"):
                assert pattern.shape[-2:] == (T, T)
                assert (pattern.triu(1) == 0).all()


@torch.no_grad()
def test_residual_streams_are_the_hidden_states(family, plain, wrapped):
    model = wrapped(family)
    states = plain(family)(IDS, use_cache=False, output_hidden_states=True).hidden_states
    with hooks.record(model, lambda name: name.endswith(("resid_pre", "resid_post"))) as seen:
        model(IDS)
    for layer in range(4):
        close(seen[f"blocks.{layer}.hook_resid_pre"], states[layer], 1e-6)
        if layer < 3:
            close(seen[f"blocks.{layer}.hook_resid_post"], states[layer + 1], 1e-6)


# Softmax layers against transformers' eager arithmetic with a mask that is written out


def brute_force(masks, module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~masks[id(module)], -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    p = scores.softmax(-1)[..., : key.shape[2]]
    return (p @ value).transpose(1, 2).contiguous(), p


def visible(window, sinks=0):
    t = torch.arange(T)
    back = t[:, None] - t
    mask = back >= 0
    return mask if window is None else mask & ((back < window) | (t < sinks))


@torch.no_grad()
@pytest.mark.parametrize("sinks", [0, 2])
def test_restricted_softmax_layers_equal_a_brute_force_mask(family, sinks, plain, wrapped):
    from transformers import AttentionInterface

    hf, model = plain(family), wrapped(family)
    chosen = [(layer, i) for layer, i in paths(model, SOFTMAX) if len(layer.paths) == 1]
    if not chosen:
        pytest.skip("softmax and recurrent paths are parallel; see the test of groups")
    masks = {}
    for layer, i in chosen:
        site = layer.mixers[i].site
        name = next(n for n, m in model.hf.named_modules() if m is site)
        own = visible(layer.paths[i].window) & visible(W, sinks)
        masks[id(hf.get_submodule(name))] = own
    AttentionInterface.register("brute", partial(brute_force, masks))
    before = hf.config._attn_implementation
    try:
        hf.set_attn_implementation("brute")
        expected = hf(IDS, use_cache=False).logits
    finally:
        hf.set_attn_implementation(before)
    with hooks.restrict(model, [layer.index for layer, _ in chosen], window=W, sinks=sinks):
        found = model(IDS)
    close(found, expected)
    assert (found - model(IDS)).abs().max() > 1e-3 * expected.abs().max(), "the restriction did nothing"


# Recurrent layers against the family's own function, run anew for every token on its last W tokens


def by_token(axes, original, *args, **kwargs):
    """original on tokens t-W+1 .. t, its last output, for every t. `axes`: the time axis of each tensor argument."""
    sliced = [*args, *kwargs.values()]
    outs = []
    for t in range(T):
        part = [
            x.narrow(axis, max(0, t - W + 1), min(W, t + 1)) if axis is not None else x
            for x, axis in zip(sliced, [axes(i, x) for i, x in enumerate(sliced)], strict=True)
        ]
        result = original(*part[: len(args)], **dict(zip(kwargs, part[len(args) :], strict=True)))
        out = result[0] if isinstance(result, tuple) else result
        outs.append((out, result))
    return outs


def time_axis(length):
    def find(index, x):
        if not isinstance(x, torch.Tensor) or length not in x.shape:
            return None
        return list(x.shape).index(length)

    return find


def windowed_function(original, *args, **kwargs):
    find = time_axis(T)
    results = by_token(find, original, *args, **kwargs)
    axis = 2 if results[0][0].ndim == 3 else 1  # Mamba-1 is [B, channels, T]
    out = torch.cat([out.narrow(axis, out.shape[axis] - 1, 1) for out, _ in results], axis)
    return (out, None) if isinstance(results[0][1], tuple) else out


FUNCTIONS = {
    "gdn": "torch_chunk_gated_delta_rule",
    "mamba2": "mamba2_chunk_scan",
    "mamba1": "mamba_selective_scan",
    "kda": "chunk_kimi_delta_attention",
    "conv": "causal_conv1d_fn",
}


@torch.no_grad()
def test_restricted_recurrent_layers_equal_the_function_run_on_the_last_tokens(family, plain, wrapped, monkeypatch):
    hf, model = plain(family), wrapped(family)
    chosen = paths(model, tuple(FUNCTIONS))
    if not chosen:
        pytest.skip("no layer with such a function")
    kind = chosen[0][0].paths[chosen[0][1]].kind
    home = sys.modules[type(chosen[0][0].mixers[chosen[0][1]].site).__module__]
    window = W if kind != "conv" else 2
    own = windowed_function if kind != "conv" else shortened
    monkeypatch.setattr(home, FUNCTIONS[kind], partial(own, getattr(home, FUNCTIONS[kind])))
    expected = hf(IDS, use_cache=False).logits
    monkeypatch.undo()
    with hooks.restrict(model, "efficient", window=window):
        found = model(IDS)
    close(found, expected, 5e-5)
    assert (found - model(IDS)).abs().max() > 1e-3 * expected.abs().max(), "the restriction did nothing"
    with hooks.restrict(model, "efficient", window=T):
        close(model(IDS), model(IDS))


def shortened(original, x, weight, bias=None, **kwargs):
    """A convolution that sees two tokens, one at a time."""
    columns = [original(x[..., max(0, t - 1) : t + 1], weight, bias, **kwargs)[..., -1:] for t in range(x.shape[-1])]
    return torch.cat(columns, -1)


def reach(model, layer, restriction):
    """Distances at which the mixer's output at the last position depends on its layer's input."""
    point = f"blocks.{layer.index}.hook_resid_pre"
    ids = IDS[:1]
    held = {}

    def leaf(x):
        held["x"] = x.detach().requires_grad_()
        return held["x"]

    def last(x):
        held["out"] = x
        return x

    out = f"blocks.{layer.index}.hook_attn_out"
    with torch.enable_grad(), hooks.patch(model, {point: leaf, out: last}), restriction:
        model.final_hidden(ids)
        (gradient,) = torch.autograd.grad(held["out"][0, -1].square().sum(), held["x"])
    return gradient[0].norm(dim=-1).flip(0).nonzero().flatten().tolist()


def test_receptive_fields_are_the_declared_ones(family, wrapped):
    """The gradient of the mixer's last output reaches exactly w (+ c - 1 for a convolution before a state) tokens."""
    from contextlib import nullcontext

    model = wrapped(family)
    for layer in model.layers:
        if not layer.paths or f"blocks.{layer.index}.hook_attn_out" not in model.hook_dict:
            continue
        full = reach(model, layer, nullcontext())
        width = layer.window or T
        assert full == list(range(width)), (layer.index, layer.kind, full)
        if len(layer.paths) > 1:
            continue
        conv = layer.mixers[0].conv_width
        limited = reach(model, layer, hooks.restrict(model, [layer.index], window=2))
        assert limited == list(range(2 + conv - 1)), (layer.index, layer.kind, limited)


# Gradients, decoding, padding, analyses


def test_gradient_influence_is_autograd_through_the_familys_own_logits(family, plain, wrapped):
    hf, model = plain(family), wrapped(family)
    embedded = hf.get_input_embeddings()(IDS[:, :-1]).detach().requires_grad_()
    logits = hf(inputs_embeds=embedded, use_cache=False).logits
    total = logits.log_softmax(-1)[:, -5:].gather(-1, IDS[:, -5:, None]).sum() / 5
    (gradient,) = torch.autograd.grad(total, embedded)
    result = gradient_influence(model, IDS, n_targets=5)
    expected = gradient.norm(dim=-1).flip(-1)
    assert (result.norm - expected).norm() <= 5e-5 * expected.norm()


@torch.no_grad()
def test_a_restriction_holds_when_blocks_are_computed_again_in_backward(family, wrapped):
    model = wrapped(family)
    with (
        hooks.restrict(model, range(4), window=2)
        if all(layer.paths for layer in model.layers)
        else hooks.restrict(model, [0, 1, 3], window=2)
    ):
        norm = gradient_influence(model, IDS, n_targets=1).norm
        far = hooks.group_reach(model, [layer.index for layer in model.layers if layer.paths], 2)
    if far is not None and far < T - 1:
        assert (norm[:, far:] == 0).all()
    assert (norm[:, :2] > 0).all()


@torch.no_grad()
def test_decoding_equals_the_whole(family, wrapped):
    model = wrapped(family)
    expected = model(IDS)
    cache = models.Cache()
    parts = [model.final_hidden(IDS[:, :18], cache=cache)]
    parts += [model.final_hidden(IDS[:, t : t + 1], cache=cache) for t in range(18, T)]
    close(model.unembed(torch.cat(parts, 1)), expected, 5e-5)


@torch.no_grad()
@pytest.mark.parametrize("group", ["full", "efficient"])
def test_decoding_equals_the_whole_under_a_restriction(family, group, wrapped):
    model = wrapped(family)
    if not any((path.kind == "full") == (group == "full") for layer in model.layers for path in layer.paths):
        pytest.skip(f"no {group} path")
    with hooks.restrict(model, group, window=3):
        produced = generate(model, IDS[:1], 3)
        whole = torch.cat([IDS[:1], produced], 1)
        assert (model(whole)[:, T - 1 : -1].argmax(-1) == produced).all()
        cache = models.Cache()
        parts = [model.final_hidden(IDS[:, :20], cache=cache), model.final_hidden(IDS[:, 20:21], cache=cache)]
        close(torch.cat(parts, 1), model.final_hidden(IDS[:, :21]), 5e-5)


@torch.no_grad()
def test_left_padding_and_batching_change_nothing(family, wrapped):
    model = wrapped(family)
    if family == "recurrent_gemma":
        pytest.skip("the family's own recurrent block ignores padding")
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), IDS[:1, :-3]], 1)
    mask = torch.ones(2, T, dtype=torch.long)
    mask[0, :3] = 0
    for restriction in (None, 3):
        from contextlib import nullcontext

        ids = [layer.index for layer in model.layers if layer.paths]
        with nullcontext() if restriction is None else hooks.restrict(model, ids, window=restriction):
            found = model(torch.cat([padded, IDS[1:]]), attention_mask=mask)
            close(found[0, 3:], model(IDS[:1, :-3])[0], 5e-5)
            close(found[1], model(IDS[1:])[0], 5e-5)


@torch.no_grad()
def test_heads_are_ablated_where_they_write(family, wrapped):
    """Zeroing every head of a layer makes its mixer's output the projection's bias; one head changes something."""
    model = wrapped(family)
    layer = next(layer for layer in model.layers if layer.paths and not layer.in_series)
    plain = model(IDS)
    with (
        hooks.ablate(model, layers=[layer.index], how="zero"),
        hooks.record(model, f"blocks.{layer.index}.hook_attn_out") as seen,
    ):
        model(IDS)
    assert seen[f"blocks.{layer.index}.hook_attn_out"].std(dim=1).abs().max() < 1e-6
    means = hooks.head_means(model, [IDS])
    with hooks.ablate(model, heads=[(layer.index, 0)], means=means):
        assert (model(IDS) - plain).abs().max() > 1e-5 * plain.abs().max()
    assert torch.equal(model(IDS), plain)


@torch.no_grad()
def test_trace_equals_the_recorded_patterns(family, wrapped):
    model = wrapped(family)
    found = trace(model, IDS, positions=[-1, 7], spans=torch.tensor([[[2, 6]], [[4, 9]]]))
    names = [name for name in model.hook_dict if name.endswith("hook_pattern")]
    with hooks.record(model, names, positions=[T - 1, 7]) as seen:
        model(IDS)
    for name, pattern in seen.items():
        layer = int(name.split(".")[1])
        columns = slice(0, pattern.shape[1])
        close(found.mass[0, layer, columns, :, 0], pattern[0, :, :, 2:6].sum(-1), 5e-5)
        close(found.mass[1, layer, columns, :, 0], pattern[1, :, :, 4:9].sum(-1), 5e-5)
    recurrent = paths(model, ("gdn", "mamba2", "lightning"))
    for layer, i in recurrent:
        first = sum(path.heads for path in layer.paths[:i])
        assert found.mass[:, layer.index, first : first + layer.paths[i].heads].isfinite().all()


@torch.no_grad()
def test_rows_of_recurrent_layers_are_exact(family, wrapped):
    """sum over j of W_tj v_j is what the recurrence gave out, restricted too."""
    model = wrapped(family)
    for layer, i in paths(model, ("gdn", "mamba2", "lightning")):
        prefix = model_prefix(model, layer, i)
        names = [f"{prefix}.hook_{n}" for n in ("q", "k", "v", "log_decay", "recurrence_out")]
        names += [f"{prefix}.hook_beta"] if f"{prefix}.hook_beta" in model.hook_dict else []
        for window in (None, 3):
            from contextlib import nullcontext

            with nullcontext() if window is None else hooks.restrict(model, "efficient", window=window):
                with hooks.record(model, names) as seen:
                    model.final_hidden(IDS)
                given = {n.rsplit("hook_", 1)[1]: x for n, x in seen.items()}
                out, value = given.pop("recurrence_out"), given.pop("v")
                rows = layer.mixers[i].effective_rows(torch.tensor([5, T - 1]), **given)
            close(torch.einsum("bhrt,bthv->brhv", rows, value), out[:, [5, T - 1]], 5e-5)


def model_prefix(model, layer, i):
    names = {id(point): name for name, point in model.hook_dict.items()}
    return names[id(layer.mixers[i].hook_z)].rsplit(".", 1)[0]


@torch.no_grad()
def test_later_layers_alone_continue_a_known_stream(family, wrapped):
    model = wrapped(family)
    with hooks.record(model, "blocks.2.hook_resid_pre") as seen:
        expected = model.final_hidden(IDS)
    first = []
    handle = model.layers[1].block.register_forward_hook(lambda *_: first.append(1))
    found = model.final_hidden_from(IDS, 2, seen["blocks.2.hook_resid_pre"])
    handle.remove()
    close(found, expected, 1e-6)
    changed = model.final_hidden_from(IDS, 2, 2 * seen["blocks.2.hook_resid_pre"] + 1)
    assert (changed - expected).abs().max() > 1e-3 * expected.abs().max()
    assert torch.equal(model.final_hidden(IDS), expected)


@torch.no_grad()
def test_edits_of_the_stream_act_where_they_say(family, wrapped):
    """What is put into resid_mid is what the second half starts from; a silenced mixer adds nothing."""
    model = wrapped(family)
    layer = next((i for i in range(4) if f"blocks.{i}.hook_resid_mid" in model.hook_dict), None)
    if layer is None:
        pytest.skip("blocks without a place between mixer and MLP")
    mid, out, post = (f"blocks.{layer}.hook_{name}" for name in ("resid_mid", "mlp_out", "resid_post"))
    wanted = torch.randn(2, T, 32, generator=torch.Generator().manual_seed(3))
    with hooks.patch(model, {mid: wanted}), hooks.record(model, [out, post]) as seen:
        model.final_hidden(IDS)
    close(seen[post] - seen[out], wanted, 1e-5)
    pre = f"blocks.{layer}.hook_resid_pre"
    with (
        hooks.patch(model, {f"blocks.{layer}.hook_attn_out": torch.zeros_like}),
        hooks.record(model, [pre, mid]) as seen,
    ):
        model.final_hidden(IDS)
    close(seen[mid], seen[pre], 1e-6)


@pytest.mark.parametrize("point", ["hook_q", "hook_recurrence_out"])
def test_an_exception_inside_a_mixer_leaves_nothing_behind(point, wrapped):
    model = wrapped("qwen3_next")
    layer = 3 if point == "hook_q" else 1
    home = sys.modules[type(model.layers[layer].mixers[0].site).__module__]
    names = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn", "apply_rotary_pos_emb")
    functions = [getattr(home, name) for name in names]
    with torch.no_grad():
        before = model(IDS)

    def fail(x):
        assert [getattr(home, name) for name in names] != functions, "nothing was replaced"
        raise RuntimeError("from a hook")

    with pytest.raises(RuntimeError, match="from a hook"), hooks.patch(model, {f"blocks.{layer}.attn.{point}": fail}):
        model(IDS)
    assert [getattr(home, name) for name in names] == functions
    with torch.no_grad():
        assert torch.equal(model(IDS), before)
