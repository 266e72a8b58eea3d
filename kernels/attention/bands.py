"""Bands of visible keys.

A band lets query t see key s iff s <= t and (window is None or t - s < window or s < sinks); several bands intersect.
Positions are absolute: with T queries and S keys the queries are the last T of S positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

FLEX_BLOCK = 128


class Band(NamedTuple):
    """The last `window` keys (self included; None: all) and the first `sinks` keys."""

    window: int | None
    sinks: int = 0


def binding(bands: tuple[Band, ...], s: int) -> tuple[Band, ...]:
    """The bands that hide anything among S keys; () means full causal attention."""
    return tuple(band for band in bands if band.window is not None and band.window < s and band.sinks < s)


def staircase(bands: tuple[Band, ...]) -> tuple[Band, ...]:
    """Bands with rising windows and falling sinks for the same visible keys: those that another implies go."""
    kept: list[Band] = []
    for window, sinks in sorted((band.window, band.sinks) for band in bands if band.window is not None):
        if not kept or sinks < kept[-1].sinks:
            kept.append(Band(window, sinks))
    return tuple(kept)


def visible_count(query_at: Tensor, bands: tuple[Band, ...]) -> Tensor:
    """[T] number of keys each of the absolute positions query_at [T] sees: the lengths of its intervals, as int64."""
    steps = staircase(bands)[::-1]
    zero, stop = torch.zeros_like(query_at), query_at + 1
    firsts = [zero, *(stop - band.window for band in steps if band.window is not None)]
    stops = [*(stop.clamp(max=band.sinks) for band in steps), stop]
    count, done = zero, zero
    for first, end in zip(firsts, stops, strict=True):
        count = count + (end - torch.maximum(first, done)).clamp(min=0)
        done = torch.maximum(done, end)
    return count


def visible(query_at: Tensor, key_at: Tensor, bands: tuple[Band, ...]) -> Tensor:
    """[T, S] bool mask of absolute positions query_at [T] and key_at [S]."""
    query_at, key_at = query_at[:, None], key_at[None, :]
    mask = key_at <= query_at
    for window, sinks in bands:
        if window is not None:
            mask = mask & ((query_at - key_at < window) | (key_at < sinks))
    return mask


def attention_plan(t: int, s: int, bands: tuple[Band, ...], device: torch.device | str) -> BlockMask | None:
    """The stored block mask a compiled `attention` uses on CUDA for T queries, S keys and these bands; None if none.

    Call it once before a compiled region that calls `attention` with the same sizes, so that the mask is made outside
    the graph. A plan holds (T / 128) (S / 128) integers a few times, and is kept.
    """
    device = torch.device(device)
    bands = binding(tuple(Band(*band) for band in bands), s)
    if device.type != "cuda" or not bands or t < FLEX_BLOCK:
        return None
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    from kernels.attention.flex_form import stored_plan

    return stored_plan(t, s, bands, device)
