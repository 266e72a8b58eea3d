"""Cache: prefill and decoding together are one forward over the whole, for every mixer, restricted or not."""

import contextlib

import pytest
import torch

import hooks
import models
from models.cache import Past
from models.config import HybridConfig
from models.hybrid_lm import HybridLM

KINDS = ("swa", "full", "lightning", "mamba2", "gdn", "headwise")
TIME, VOCAB = 41, 37


def build(kinds=KINDS, **settings):
    torch.manual_seed(3)
    config = HybridConfig(
        d_model=24, n_layers=len(kinds), n_heads=4, n_kv_heads=2, d_head=6, d_ffn=40, vocab_size=VOCAB,
        context_length=64, layer_kinds=kinds, window=5, efficient="gdn", rope_base=1e4, mamba2_state=5,
    )  # fmt: skip
    config = HybridConfig(**(config.__dict__ | settings))
    model = HybridLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, 0.25)
    return model.double()


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture
def ids():
    torch.manual_seed(1)
    return torch.randint(VOCAB, (2, TIME))


def in_pieces(model, ids, lengths, cache=None, **options):
    cache = models.Cache() if cache is None else cache
    assert sum(lengths) == ids.shape[1]
    return torch.cat([model(piece, cache=cache, **options) for piece in ids.split(lengths, 1)], 1)


PIECES = {"token by token": [1] * TIME, "prefill and decode": [30] + [1] * 11, "pieces": [3, 7, 1, 16, 14]}
RESTRICTIONS = {
    "none": [],
    "full": [("full", 4, 0)],
    "full with sinks": [("full", 4, 3)],
    "efficient": [("efficient", 3, 0)],
    "efficient to one token": [("efficient", 1, 0)],
    "window with sinks": [([0], 3, 2)],
    "nested": [("full", 9, 0), ([1, 2, 4], 4, 0)],
}


@pytest.mark.parametrize("restriction", RESTRICTIONS)
@pytest.mark.parametrize("pieces", PIECES)
def test_pieces_are_the_whole(model, ids, pieces, restriction):
    with contextlib.ExitStack() as stack:
        for layers, window, sinks in RESTRICTIONS[restriction]:
            stack.enter_context(hooks.restrict(model, layers, window=window, sinks=sinks))
        whole = model(ids)
        assert (in_pieces(model, ids, PIECES[pieces]) - whole).abs().max() <= 1e-12
    if restriction != "none":
        assert (whole - model(ids)).abs().max() > 1e-3


@pytest.mark.parametrize("settings", [{"sinks": 2}, {"rope_on_full": False}])
def test_own_sinks_and_no_positions(ids, settings):
    model = build(**settings)
    assert (in_pieces(model, ids, PIECES["pieces"]) - model(ids)).abs().max() <= 1e-12


@pytest.mark.parametrize(
    "name", ["hook_ssm_state", "hook_ssm_write", "hook_pattern", "hook_resid_mid", "hook_log_decay"]
)
def test_hook_points_see_the_new_tokens_as_in_one_forward(model, ids, name):
    chosen = [point for point in model.hook_dict if point.endswith(name)]
    _, whole = model.run_with_cache(ids, names_filter=chosen)
    cache, parts = models.Cache(), {point: [] for point in chosen}
    for piece in ids.split([30, 1, 10], 1):
        _, seen = model.run_with_cache(piece, names_filter=chosen, cache=cache)
        for point in chosen:
            parts[point].append(seen[point])
    for point in chosen:
        if name == "hook_pattern":
            padded = [torch.nn.functional.pad(part, (0, TIME - part.shape[-1])) for part in parts[point]]
            joined = torch.cat(padded, 2)
        elif name == "hook_log_decay" and whole[point].ndim == 1:
            joined = parts[point][-1]  # fixed per head: no time
        else:
            joined = torch.cat(parts[point], 1)
        assert (joined - whole[point]).abs().max() <= 1e-12, point


def test_an_edited_write_stays_in_the_state(model, ids):
    """The edit is made in the first piece and must be felt in the second."""
    point = next(p for p in model.hook_dict if p.endswith("hook_ssm_write"))

    def edit(write, hook):
        write = write.clone()
        write[:, :5] += 1.0
        return write

    whole = model.run_with_hooks(ids, fwd_hooks=[(point, edit)])
    cache = models.Cache()
    first = model.run_with_hooks(ids[:, :30], fwd_hooks=[(point, edit)], cache=cache)
    second = model(ids[:, 30:], cache=cache)
    assert (torch.cat([first, second], 1) - whole).abs().max() <= 1e-12
    assert (second - model(ids)[:, 30:]).abs().max() > 1e-4


def test_one_prefix_for_several_continuations(model, ids):
    prefix, ends = ids[:1, :25], torch.randint(VOCAB, (3, 6))
    cache = models.Cache()
    model(prefix, cache=cache)
    branch = cache.repeat(3)
    out = model(ends, cache=branch)
    whole = torch.cat([prefix.expand(3, -1), ends], 1)
    assert (out - model(whole)[:, 25:]).abs().max() <= 1e-12
    assert (cache.length, branch.length) == (25, 31)
    again = model(ends, cache=cache.repeat(3))  # the first branch left the trunk as it was
    assert torch.equal(again, out)


@pytest.mark.parametrize("restriction", ["none", "full with sinks", "efficient", "window with sinks"])
def test_a_branch_is_a_repeated_cache_that_keeps_nothing(model, ids, restriction):
    """Its attention layers read the one sequence's keys where they lie; the trunk goes on as if nothing had been."""
    prefix, ends = ids[:1, :25], torch.randint(VOCAB, (3, 6))
    with contextlib.ExitStack() as stack:
        for layers, window, sinks in RESTRICTIONS[restriction]:
            stack.enter_context(hooks.restrict(model, layers, window=window, sinks=sinks))
        cache = models.Cache()
        in_pieces(model, prefix, [20, 5], cache)
        branch = cache.branch(3)
        kept, trunk = (c._pasts[id(model.layers[1].mixers[0])].kept["key"] for c in (branch, cache))
        if restriction in ("none", "window with sinks"):
            assert kept.data_ptr() == trunk.data_ptr()
        out = model(ends, cache=branch)
        assert branch._pasts[id(model.layers[1].mixers[0])].kept["key"].shape[1] <= 25, "nothing was added"
        whole = torch.cat([prefix.expand(3, -1), ends], 1)
        assert (out - model(whole)[:, 25:]).abs().max() <= 1e-12
        with pytest.raises(ValueError, match="is a branch and has had its forward"):
            model(ends, cache=branch)
        with pytest.raises(ValueError, match="holds 3 sequences and the input 2"):
            model(ends[:2], cache=cache.branch(3))
        again = model(ends[:1], cache=cache)
        assert (again - out[:1]).abs().max() <= 1e-12
    with pytest.raises(ValueError, match="holds 3 sequences; expected one"):
        cache.repeat(3).branch(2)


def test_a_window_keeps_only_what_can_still_be_seen(model, ids):
    cache = models.Cache()
    in_pieces(model, ids, PIECES["prefill and decode"], cache)
    kept = [cache._pasts[id(mixer)].kept for layer in model.layers for mixer in layer.mixers]
    assert kept[0]["key"].shape[1] == 4  # window 5
    assert kept[1]["key"].shape[1] == TIME
    assert set(kept[2]) == {"state"}
    assert kept[3]["conv"].shape[1] == model.config.conv_width - 1


def test_appending_does_not_copy_the_past_every_time():
    past, whole, moved = Past(), torch.randn(1, 200, 2), 0
    last = None
    for t in range(200):
        kept = past.append("key", whole[:, t : t + 1])
        moved += last is not None and kept.data_ptr() != last
        last = kept.data_ptr()
    assert torch.equal(kept, whole)
    assert moved <= 9  # doublings


def test_generate_is_greedy_decoding_by_whole_forwards(model, ids):
    expected = ids
    for _ in range(7):
        expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(model.generate(ids, 7), expected[:, TIME:])
    cache = models.Cache()
    first = model.generate(ids, 3, cache=cache)
    assert cache.length == TIME + 2
    assert torch.equal(model.generate(first[:, -1:], 4, cache=cache), expected[:, TIME + 3 :])


def test_generate_samples_and_stops(model, ids):
    greedy = model.generate(ids, 6)
    stop = int(greedy[0, 2])
    out = model.generate(ids[:1], 6, stop_ids=(stop,))
    first = greedy[0].tolist().index(stop)
    assert out.tolist() == [greedy[0, : first + 1].tolist()]
    draws = [model.generate(ids, 6, temperature=5.0, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    short = ids[:, :5]
    logits = model(short)[:, -1]
    many = model.generate(short.repeat(2000, 1), 1, generator=torch.Generator().manual_seed(2), temperature=1.0)
    share = torch.stack([many[i::2, 0].bincount(minlength=VOCAB) / 2000 for i in range(2)])
    assert (share - logits.softmax(-1)).abs().max() < 0.05
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        model.generate(ids, 0)


def test_refusals(model, ids):
    cache = models.Cache()
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="holds 2 sequences and the input 1"):
        model(ids[:1], cache=cache)
    with hooks.restrict(model, "full", window=3), pytest.raises(ValueError, match="under other restrictions"):
        model(ids, cache=cache)
    with pytest.raises(ValueError, match="another model"):
        build()(ids, cache=cache)
    with pytest.raises(ValueError, match="while gradients are recorded"):
        model(model.embed(ids).requires_grad_(), cache=cache)

    def fail(x, hook):
        raise RuntimeError("edit went wrong")

    with pytest.raises(RuntimeError, match="edit went wrong"):
        model.run_with_hooks(ids, fwd_hooks=[("blocks.3.hook_resid_mid", fail)], cache=cache)
    with pytest.raises(ValueError, match="half-written"):
        model(ids, cache=cache)
    assert cache.length == TIME


def test_states_of_a_windowed_cache_are_refused(model, ids):
    with (
        hooks.restrict(model, [4], window=3),
        pytest.raises(ValueError, match=r"a gdn layer .* restricted to 3 tokens"),
    ):
        model.run_with_cache(ids, names_filter=["blocks.4.attn.hook_ssm_state"], cache=models.Cache())


def test_the_effect_of_a_restriction_is_not_measured_on_a_cache(model, ids):
    with hooks.mixer_effect(model, "full", window=3), pytest.raises(ValueError, match="continues a cache"):
        model(ids, cache=models.Cache())
