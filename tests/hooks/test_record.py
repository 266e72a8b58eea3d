"""Recording: exactly what was asked for, checked names and counts, the caller's hooks untouched."""

import pytest
import torch

import hooks
from models.config import HybridConfig
from models.hybrid_lm import HybridLM

TIME = 17


@pytest.fixture
def model():
    torch.manual_seed(3)
    return HybridLM(
        HybridConfig(
            d_model=18,
            n_layers=3,
            n_heads=3,
            n_kv_heads=1,
            d_head=6,
            d_ffn=22,
            vocab_size=29,
            context_length=64,
            layer_kinds=("swa", "full", "gdn"),
            window=4,
            rope_base=1e4,
        )
    ).eval()


@pytest.fixture
def ids():
    return torch.randint(29, (2, TIME))


def test_equals_run_with_cache_at_the_positions_asked_for(model, ids):
    names = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_pattern", "blocks.2.attn.hook_ssm_state"]
    _, cache = model.run_with_cache(ids, names_filter=names)
    with hooks.record(model, names, positions=[-1, 3]) as seen:
        model(ids)
    assert list(seen) == names
    assert torch.equal(seen[names[0]], cache[names[0]][:, [-1, 3]])
    assert torch.equal(seen[names[1]], cache[names[1]][:, :, [-1, 3]])
    assert torch.equal(seen[names[2]], cache[names[2]][:, [-1, 3]])
    assert not seen[names[0]].requires_grad


def test_one_name_one_position_slice_and_predicate(model, ids):
    with hooks.record(model, "ln_final.hook_normalized", positions=-1) as seen:
        model(ids)
    assert seen["ln_final.hook_normalized"].shape == (2, 1, 18)
    with hooks.record(model, lambda name: name.endswith("hook_attn_out"), positions=slice(4, 9)) as seen:
        model(ids)
    assert {name: value.shape[1] for name, value in seen.items()} == {f"blocks.{i}.hook_attn_out": 5 for i in range(3)}


def test_records_are_copies(model, ids):
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value.zero_())
    with hooks.record(model, "hook_embed") as seen:
        model(ids)
    assert seen["hook_embed"].abs().max() > 0


def test_half_precision_becomes_fp32(model, ids):
    with hooks.record(model.bfloat16(), "hook_embed") as seen:
        model(ids)
    assert seen["hook_embed"].dtype == torch.float32


def test_unknown_names_and_positions(model, ids):
    with pytest.raises(ValueError, match=r"blocks.0.hook_resid_pots.*blocks.0.hook_resid_post"):
        with hooks.record(model, "blocks.0.hook_resid_pots"):
            pass
    with pytest.raises(ValueError, match="no hook point is named"), hooks.record(model, lambda name: False):
        pass
    with pytest.raises(ValueError, match="17 positions; position 17"), hooks.record(model, "hook_embed", positions=17):
        model(ids)
    assert not any(point._forward_hooks for point in model.hook_dict.values())


@pytest.mark.parametrize("passes", [0, 2])
def test_a_point_that_does_not_fire_once_is_an_error(model, ids, passes):
    def record_passes():
        with hooks.record(model, "hook_embed"):
            for _ in range(passes):
                model(ids)

    with pytest.raises(ValueError, match=f"hook_embed fired {passes} times"):
        record_passes()


def test_the_callers_hooks_survive(model, ids):
    calls = []
    model.add_hook("hook_embed", lambda value, hook: calls.append(hook.name))
    with pytest.raises(RuntimeError), hooks.record(model, "hook_embed"):
        raise RuntimeError
    with hooks.record(model, "hook_embed"):
        model(ids)
    model(ids)
    assert calls == ["hook_embed"] * 2
    assert len(model.hook_dict["hook_embed"].fwd_hooks) == 1
