"""Lightning's public slope conventions, value by value."""

import math

import pytest
import torch

from models.mixers.lightning import log_decays


def test_alibi_with_and_without_the_shift():
    assert log_decays("alibi", 4, 5, 9).tolist() == pytest.approx([-(2.0**-2), -(2.0**-4), -(2.0**-6), -(2.0**-8)])
    assert log_decays("alibi-from-zero", 4, 5, 9).tolist() == pytest.approx([-1.0, -(2.0**-2), -(2.0**-4), -(2.0**-6)])


def test_minimax_layer_factor_falls_to_nearly_nothing():
    first, last = log_decays("minimax", 4, 0, 30), log_decays("minimax", 4, 29, 30)
    assert torch.allclose(first, log_decays("alibi", 4, 0, 30) * (1 + 1e-5))
    assert last.abs().max() < 1e-5


def test_slowest_head_at_distance_2048():
    # science: without a layer factor 3.4e-4 of its weight is left; with MiniMax's factor S5's layer 28 keeps about 0.76
    plain = log_decays("alibi", 20, 28, 30)[-1].item()
    factored = log_decays("minimax", 20, 28, 30)[-1].item()
    assert math.exp(2048 * plain) == pytest.approx(3.4e-4, rel=0.02)
    assert math.exp(2048 * factored) == pytest.approx(0.76, abs=0.01)


def test_transnormer_head_0_never_decays():
    slopes = log_decays("transnormer", 8, 2, 4)
    assert slopes[0] == 0
    assert slopes[3].item() == pytest.approx(-(8 / 8) * 0.5 * 3)


def test_interleaved_slopes_between_powers_of_two():
    assert torch.equal(log_decays("alibi-interleaved", 8, 1, 4), log_decays("alibi", 8, 1, 4))
    found = log_decays("alibi-interleaved", 6, 1, 4).tolist()
    assert found == pytest.approx([-(2.0**-2), -(2.0**-4), -(2.0**-6), -(2.0**-8), -(2.0**-1), -(2.0**-3)])
