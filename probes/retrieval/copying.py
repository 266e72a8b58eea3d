"""The copy score of Wu et al. 2024 (arXiv:2404.15574): does a head attend to the token it makes the model say?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from probes.retrieval.tracing import trace


class CopyScore(NamedTuple):
    score: Float[Tensor, "L H"]
    """Mean over successful samples of the share of needle tokens a head copied; NaN without such a head or success."""
    per_sample: Float[Tensor, "B L H"]
    success: Bool[Tensor, " B"]
    """The greedy continuation holds the whole needle value, in order."""
    n_scored: int
    """Successful samples: only these count. 0 leaves every score undefined (NaN)."""
    generated: Int[Tensor, "B N"]


@torch.no_grad()
def copy_score(
    model: Any, prompts: Int[Tensor, "B T"], needle: Int[Tensor, "B 2"], max_new_tokens: int | None = None
) -> CopyScore:
    """Greedy decoding after `prompts` (which end before the answer), and which softmax heads did the copying.

    needle[b] is the token range [first, stop) of the value in its prompt; all have one length n. While a token is
    produced, a head earns 1/n if the key it attends to most lies in the needle and holds that token, once for each
    needle position. max_new_tokens None is n: a model that says something before the value needs more. Raises
    ValueError for ranges outside the prompts or of different lengths.
    """
    lengths = (needle[:, 1] - needle[:, 0]).tolist()
    if needle.shape != (prompts.shape[0], 2) or len(set(lengths)) != 1 or lengths[0] < 1:
        raise ValueError(
            f"needle has shape {list(needle.shape)} and lengths {sorted(set(lengths))[:5]}; expected [B, 2] with "
            f"B = {prompts.shape[0]} and one length of at least 1. Score prompts of different value lengths apart."
        )
    size = lengths[0]
    produced = model.generate(prompts, max_new_tokens or size)
    # the cache is exact, so the rows of one forward over prompt and continuation are those of the decoding steps
    whole = torch.cat([prompts, produced], 1)
    steps = range(prompts.shape[1] - 1, whole.shape[1] - 1)
    found = trace(model, whole, steps, needle[:, None], recurrent=False)
    values = torch.stack([row[first:stop] for row, (first, stop) in zip(prompts, needle.tolist(), strict=True)])
    success = (produced.unfold(1, size, 1) == values[:, None]).all(-1).any(-1).cpu()
    per_sample = copied_share(found.largest, whole, needle, steps)
    per_sample = torch.where(torch.tensor(found.softmax), per_sample, torch.nan)
    scored = per_sample[success]
    score = scored.mean(0) if len(scored) else torch.full(per_sample.shape[1:], torch.nan)
    return CopyScore(score, per_sample, success, int(success.sum()), produced)


def copied_share(
    largest: Int[Tensor, "B L H N"], tokens: Int[Tensor, "B T"], needle: Int[Tensor, "B 2"], steps: Sequence[int]
) -> Float[Tensor, "B L H"]:
    """Share of the needle's positions that each head copied at these N steps: 1 / |needle| for each.

    `largest` is the key with most weight of the query at each step, which produces the token behind it; what the model
    was given there must be what it would have said, or a decoding never comes to that step.
    """
    tokens, at = tokens.cpu(), torch.as_tensor(list(steps))
    produced = tokens[:, at + 1][:, None, None, :]
    first, stop = (needle.cpu()[:, i, None, None, None] for i in (0, 1))
    inside = (largest >= first) & (largest < stop)
    attended = tokens[torch.arange(len(tokens))[:, None, None, None], largest.clamp(min=0)]
    right = inside & (attended == produced)
    place = torch.nn.functional.one_hot((largest - first).clamp(min=0) * right, int((stop - first).max()))
    return (place * right[..., None]).amax(-2).sum(-1) / (stop - first)[..., 0]
