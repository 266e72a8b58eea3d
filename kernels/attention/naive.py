"""attention as a loop over queries in float64, the law the other forms are tested against.

p_t = softmax over visible s of (scale * q_t . k_s)        o_t = sum over s of p_ts v_s
"""

import torch
from torch import Tensor

from kernels.attention.bands import Band


def attention_naive(query: Tensor, key: Tensor, value: Tensor, bands: tuple[Band, ...], scale: float) -> Tensor:
    dtype, first = value.dtype, key.shape[1] - query.shape[1]
    share = query.shape[2] // key.shape[2]
    query, key, value = query.double(), key.double(), value.double()
    key, value = key.repeat_interleave(share, 2), value.repeat_interleave(share, 2)
    out = []
    for row in range(query.shape[1]):
        t = first + row
        seen = [s for s in range(t + 1) if all(w is None or t - s < w or s < sinks for w, sinks in bands)]
        scores = scale * torch.einsum("bhk,bshk->bhs", query[:, row], key[:, seen])
        out.append(torch.einsum("bhs,bshv->bhv", scores.softmax(-1), value[:, seen]))
    return torch.stack(out, 1).to(dtype)
