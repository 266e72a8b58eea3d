"""Receptive-field restriction: exact for every mixer, by group, list, sinks and nesting; nothing is left behind.

The law: a model whose every mixer recomputes each position from its last w tokens only, token by token, in float64.
"""

import pytest
import torch

import hooks
from models.config import HybridConfig
from models.hybrid_lm import HybridLM

KINDS = ("full", "swa", "lightning", "mamba2", "gdn")
VOCAB, TIME, CONV = 31, 41, 4


def build(*kinds: str, **changes) -> HybridLM:
    torch.manual_seed(5)
    fields = dict(
        d_model=20, n_layers=len(kinds), n_heads=2, n_kv_heads=1, d_head=10, d_ffn=28, vocab_size=VOCAB,
        context_length=64, layer_kinds=kinds, window=6, rope_base=1e4, mamba2_state=7,
    )  # fmt: skip
    model = HybridLM(HybridConfig(**{**fields, **changes})).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.35)
            if name.endswith("dt_bias"):
                parameter.fill_(-1.0)  # decays that do not underflow within the sequence
            if name.endswith("A_log"):
                parameter.fill_(-2.0)
    return model


def ids(seed: int = 0, batch: int = 2) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, TIME), generator=torch.Generator().manual_seed(seed))


def last_tokens_only(model: HybridLM, layer: int, x: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
    """Mixer output with each position recomputed from its visible tokens alone.

    Softmax: the mixer on the visible tokens at their own positions. Recurrent: the short convolution sees its true
    past, so the mixer runs on the last w + conv - 1 tokens with the writes of the first conv - 1 of them silenced.
    """
    mixer = model.blocks[layer].attn
    outputs = []
    for t in range(x.shape[1]):
        if mixer.kind in ("full", "swa"):
            own = mixer.window or TIME
            seen = [s for s in range(t + 1) if (t - s < window or s < sinks) and t - s < own]
            positions = torch.tensor(seen)
            outputs.append(mixer(x[:, seen], positions)[:, -1])
        else:
            outputs.append(_recurrent_from_last(mixer, x, t, window))
    return torch.stack(outputs, dim=1)


def _recurrent_from_last(mixer, x, t, window):
    first = max(0, t - window + 1)  # first token that may write into the state
    start = max(0, first - (mixer.conv_width - 1))
    silenced = first - start

    def silence(value, hook):
        value = value.clone()
        value[:, :silenced] = 0
        return value

    handles = []
    if silenced:  # v is what enters the state; k must be silent too for the delta rule's erasure
        for name in ("hook_v", "hook_k"):
            handles.append(getattr(mixer, name).register_forward_hook(lambda m, a, o: silence(o, m)))
    try:
        return mixer(x[:, start : t + 1], torch.arange(start, t + 1))[:, -1]
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("window", [1, 2, 5, 13, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_loop_over_last_tokens(kind, window):
    model = build(kind)
    x = torch.randn(2, TIME, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = last_tokens_only(model, 0, x, window, sinks=0)
        free = model.blocks[0].attn(x, torch.arange(TIME))
        with hooks.restrict(model, [0], window=window):
            out = model.blocks[0].attn(x, torch.arange(TIME))
    assert (out - expected).abs().max() < 1e-12
    if window < (6 if kind == "swa" else 40):
        assert (out - free).abs().max() > 1e-6, "the restriction must have mattered"


@pytest.mark.parametrize("sinks", [1, 4, 9])
@pytest.mark.parametrize("kind", ["full", "swa"])
def test_sinks_equal_the_loop(kind, sinks):
    model = build(kind)
    x = torch.randn(1, TIME, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), hooks.restrict(model, [0], window=3, sinks=sinks):
        out = model.blocks[0].attn(x, torch.arange(TIME))
        assert (out - _free(model, last_tokens_only, x, sinks)).abs().max() < 1e-12


def _free(model, law, x, sinks):
    mixer = model.blocks[0].attn
    kept, mixer.restrictions = mixer.restrictions, ()
    try:
        return law(model, 0, x, 3, sinks)
    finally:
        mixer.restrictions = kept


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_reach_of_the_stack_to_the_token(kind, window):
    model = build(kind, kind, kind)
    extra = CONV - 1 if kind in ("mamba2", "gdn") else 0
    reach = 1 + 3 * (window - 1 + extra)
    assert hooks.group_reach(model, [0, 1, 2], window) == reach
    base = ids(batch=1)
    with torch.no_grad(), hooks.restrict(model, [0, 1, 2], window=window):
        expected = model(base)[0, -1]
        for distance, moves in ((reach, False), (reach + 1, False), (reach - 1, True)):
            changed = base.clone()
            changed[0, TIME - 1 - distance] = (changed[0, TIME - 1 - distance] + 1) % VOCAB
            moved = (model(changed)[0, -1] - expected).abs().max().item()
            assert (moved > 0) == moves, (distance, moved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [TIME, TIME + 1, 10_000])
def test_window_of_the_whole_sequence_changes_nothing(kind, window):
    model = build(kind, "full")
    with torch.no_grad():
        expected = model(ids())
        with hooks.restrict(model, [0, 1], window=window):
            assert torch.equal(model(ids()), expected)


def test_leaving_restores_bit_for_bit_also_after_an_exception():
    model = build(*KINDS)
    with torch.no_grad():
        expected = model(ids())
        with hooks.restrict(model, "full", window=2, sinks=1), hooks.restrict(model, "efficient", window=3):
            assert not torch.equal(model(ids()), expected)
        assert torch.equal(model(ids()), expected)
        with pytest.raises(RuntimeError, match="mine"), hooks.restrict(model, [0, 2, 4], window=2):
            raise RuntimeError("mine")
        assert torch.equal(model(ids()), expected)
    assert all(mixer.restrictions == () for layer in model.layers for mixer in layer.mixers)


def test_nested_restrictions_intersect_in_any_order():
    model = build(*KINDS)
    softmax, x = [0, 1], ids()
    with torch.no_grad():
        with hooks.restrict(model, range(5), window=4):
            narrow = model(x)
        for first, second in ((4, 9), (9, 4)):
            with hooks.restrict(model, range(5), window=first), hooks.restrict(model, range(5), window=second):
                assert torch.equal(model(x), narrow)
        # {last 4} or {first 2}, and {last 9}: neither alone
        with hooks.restrict(model, softmax, window=4, sinks=2):
            sunk = model(x)
            with hooks.restrict(model, softmax, window=9):
                both = model(x)
        with hooks.restrict(model, softmax, window=9), hooks.restrict(model, softmax, window=4, sinks=2):
            assert torch.equal(model(x), both)
        assert not torch.equal(both, sunk)


def test_interleaved_exits_remove_their_own():
    model = build("full", "gdn")
    outer, inner = hooks.restrict(model, [0], window=5), hooks.restrict(model, [0], window=5)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert len(model.layers[0].mixers[0].restrictions) == 1
    inner.__exit__(None, None, None)
    assert model.layers[0].mixers[0].restrictions == ()


def test_groups_select_paths_not_layers():
    model = build("headwise", "headwise", efficient="gdn")
    with hooks.restrict(model, "full", window=3):
        assert [[len(m.restrictions) for m in layer.mixers] for layer in model.layers] == [[1, 0], [1, 0]]
    with hooks.restrict(model, [1], window=3):
        assert [[len(m.restrictions) for m in layer.mixers] for layer in model.layers] == [[0, 0], [1, 1]]


def test_reach_is_split_over_the_group():
    model = build("full", "gdn", "full", "full")
    with hooks.restrict(model, "full", reach=12):
        windows = [layer.mixers[0].restrictions[0].window for layer in model.layers if layer.kind == "full"]
    assert windows == [5, 5, 4]
    assert 1 + sum(w - 1 for w in windows) == 12
    with hooks.restrict(model, "full", reach=1):
        assert {layer.mixers[0].restrictions[0].window for layer in model.layers if layer.kind == "full"} == {1}


@pytest.mark.parametrize(
    ("kinds", "layers", "reach", "windows"),
    [
        (("full", "full", "full"), "full", 12, [5, 5, 4]),
        (("gdn", "full", "mamba2"), "efficient", 12, [4, 3]),  # 11 = 2 (c - 1) + 3 + 2
        (("gdn", "full"), "efficient", 4, [1]),
        (("swa", "full", "full"), [0, 1, 2], 30, [6, 13, 13]),  # what a window of 6 cannot use goes to the others
        (("swa", "swa"), "efficient", 30, [6, 6]),  # 11 tokens are all that they can reach
        (("full", "full", "full"), "full", 2, [2, 1, 1]),
    ],
)
def test_a_reach_is_spent_to_the_last_token(kinds, layers, reach, windows):
    model = build(*kinds)
    assert hooks.reach_windows(model, layers, reach) == windows
    chosen = [0, 1, 2] if isinstance(layers, list) else [
        i for i, kind in enumerate(kinds) if (kind == "full") == (layers == "full")
    ]  # fmt: skip
    extra = sum(CONV - 1 for i in chosen if kinds[i] in ("gdn", "mamba2"))
    total = 1 + sum(w - 1 for w in windows) + extra
    assert total == min(reach, hooks.group_reach(model, layers, None) or reach)


@pytest.mark.parametrize("kinds", [("full", "full"), ("gdn", "gdn"), ("swa", "full", "mamba2")])
def test_the_stack_reaches_exactly_the_budget(kinds):
    model, base = build(*kinds), ids(batch=1)
    for reach in (15, 22):
        with torch.no_grad(), hooks.restrict(model, list(range(len(kinds))), reach=reach):
            expected = model(base)[0, -1]
            for distance, moves in ((reach - 1, True), (reach, False), (reach + 1, False)):
                changed = base.clone()
                changed[0, TIME - 1 - distance] = (changed[0, TIME - 1 - distance] + 1) % VOCAB
                assert ((model(changed)[0, -1] - expected).abs().max().item() > 0) == moves, (reach, distance)


def test_group_reach_counts_convolutions_and_own_windows():
    model = build("swa", "full", "gdn", "mamba2")
    assert hooks.group_reach(model, "efficient", 5) == 1 + (5 - 1) + 2 * (5 + CONV - 2)
    assert hooks.group_reach(model, [0], None) == 6
    assert hooks.group_reach(model, [0], 100) == 6
    assert hooks.group_reach(model, "full", None) is None
    sunk = build("swa", sinks=2)
    assert hooks.group_reach(sunk, [0], None) is None
    assert hooks.group_reach(sunk, [0], 20) == 20
    with torch.no_grad(), hooks.restrict(sunk, [0], window=20):
        for length, moves in ((20, True), (21, False)):  # token 0 is a sink of the layer, 19 or 20 tokens back
            base = ids(batch=1)[:, :length]
            changed = base.clone()
            changed[0, 0] = (changed[0, 0] + 1) % VOCAB
            assert (not torch.equal(sunk(base)[0, -1], sunk(changed)[0, -1])) == moves


@pytest.mark.parametrize(
    ("layers", "options", "says"),
    [
        ("full", {"window": 0}, "window is 0"),
        ("full", {"window": 2.5}, "window is 2.5"),
        ("full", {}, "either window or reach"),
        ("full", {"window": 3, "reach": 3}, "either window or reach"),
        ("full", {"reach": 0}, "reach is 0"),
        ("efficient", {"reach": 3}, "reach is 3, but the convolutions of these layers alone reach 4"),
        ("full", {"window": 3, "sinks": -1}, "sinks is -1"),
        ("efficient", {"window": 3, "sinks": 4}, "layers.1 is gdn; a recurrent state has no sink"),
        ([7], {"window": 3}, "layer 7 does not exist.*0 to 1"),
        ([-1], {"window": 3}, "layer -1 does not exist"),
        ([], {"window": 3}, "layers is empty"),
        ("odd", {"window": 3}, "'full', 'efficient'"),
    ],
)
def test_bad_requests_change_nothing(layers, options, says):
    model = build("full", "gdn")
    with pytest.raises(ValueError, match=says), hooks.restrict(model, layers, **options):
        pass
    assert all(mixer.restrictions == () for layer in model.layers for mixer in layer.mixers)


def test_a_group_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no efficient path"), hooks.restrict(build("full"), "efficient", window=3):
        pass


def test_gradients_stop_at_the_reach():
    model = build("gdn", "full", "lightning")
    x = model.embed(ids(batch=1)).detach().requires_grad_()
    with hooks.restrict(model, [0, 1, 2], window=3):
        model(x)[0, -1].sum().backward()
    reach = 1 + 3 * 2 + (CONV - 1)
    norms = x.grad[0].norm(dim=-1).flip(0)
    assert (norms[:reach] > 0).all()
    assert (norms[reach:] == 0).all()
