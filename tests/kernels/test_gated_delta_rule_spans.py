"""Windows of gated_delta_rule walked span by span, gradients in one launch or two, against the loop."""

import pytest
import torch
import torch.nn.functional as F

from kernels.gated_delta_rule.naive import gated_delta_rule_naive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("out", "state", "d query", "d key", "d value", "d log_decay", "d beta")


@pytest.fixture(autouse=True)
def buffers_of_nan(monkeypatch):
    """What is known where spans begin and end is never written, so it must never be read."""
    from kernels.gated_delta_rule.triton_launch import Problem

    def like_key(self, *shape):
        return self.key.new_full(shape, torch.nan)

    def floats(self, *shape):
        return self.key.new_full(shape, torch.nan, dtype=torch.float32)

    monkeypatch.setattr(Problem, "like_key", like_key)
    monkeypatch.setattr(Problem, "floats", floats)


def operands(size, log_decay=None):
    t, b, h, k, v = size
    torch.manual_seed(0)
    query, value = torch.randn(b, t, h, k), torch.randn(b, t, h, v)
    key = F.normalize(torch.randn(b, t, h, k), dim=-1)
    decay = -0.3 * torch.rand(b, t, h) if log_decay is None else torch.full((b, t, h), log_decay)
    return [x.to(DEVICE) for x in (query, key, value, decay, 2 * torch.rand(b, t, h))]


def results(run, tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, state = run(leaves)
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, dtype=torch.float64).to(x) for x in (out, state)]
    return dict(zip(NAMES, [out, state, *torch.autograd.grad([out, state], leaves, weights)], strict=True))


def compare(tensors, window, bounds=None, **changes):
    from kernels.gated_delta_rule.triton_form import gated_delta_rule_triton
    from kernels.gated_delta_rule.triton_layout import tiles

    widths = tensors[1].shape[-1], tensors[2].shape[-1]
    sizes = tiles(torch.float32, *widths, window)._replace(chunk=16, spanned=1, **changes)
    ours = results(lambda x: gated_delta_rule_triton(*x, None, window, 0.7, 64, bounds, sizes), tensors)
    law = results(lambda x: gated_delta_rule_naive(*x, None, window, 0.7, bounds), [x.double() for x in tensors])
    for name in NAMES:
        size = law[name].pow(2).mean().sqrt().item()
        error = (ours[name].double() - law[name]).pow(2).mean().sqrt().item()
        assert error <= 1e-5 * (size or 1.0), (name, error, size)


# many blocks a chunk, one, and chunks that end short
@pytest.mark.parametrize(("window", "parts"), [(1, 0), (5, 1), (13, 0), (16, 1), (17, 0), (40, 1)])
def test_spans(window, parts):
    compare(operands((50, 1, 1, 12, 6)), window, gradient_parts=parts)


@pytest.mark.parametrize(("tokens", "window"), [(65, 32), (40, 39), (34, 33)])
def test_ends_of_sequences(tokens, window):
    compare(operands((tokens, 1, 1, 6, 8)), window)


@pytest.mark.parametrize("window", [7, 25])
def test_packed(window):
    compare(operands((60, 1, 1, 8, 6)), window, [0, 1, 8, 31, 60])


@pytest.mark.parametrize(("log_decay", "window"), [(-8.0, 3), (-8.0, 20), (0.0, 32)])
def test_strong_and_no_decay(log_decay, window):
    compare(operands((50, 1, 1, 8, 6), log_decay), window)


def test_widths_that_need_several_tiles_of_the_scan():
    compare(operands((40, 1, 1, 20, 40)), 17, carry_rows=16)
