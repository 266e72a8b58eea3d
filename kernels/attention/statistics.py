"""Per-query statistics of attention: what they are, and the two ways to normalise an entropy.

With p_j over the visible keys of a query (log is natural), s_j the scaled scores, z a learned sink logit and
lse = log(sum exp s_j [+ exp z]):

    entropy    H = -sum p_j log p_j = (1 - pi) lse - sum p_j s_j        pi = exp(z - lse), 0 without learned sinks
    mass       M_n = sum over j in span n of p_j

With learned sinks the p_j sum to 1 - pi. The entropy of the renormalised p_j / (1 - pi) is H / (1 - pi) + log(1 - pi).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class AttentionStatistics(NamedTuple):
    """R query rows; float32, or float64 for float64 operands under impl naive and torch.

    All but argmax and visible are differentiable. `max` has its gradient at the key `argmax`, the first of equals.
    """

    out: Float[Tensor, "B T H V"] | None  # attention's output, value's dtype; None without value or with chosen rows
    lse: Float[Tensor, "B H R"]  # nats, learned sink included
    entropy: Float[Tensor, "B H R"]  # nats, over the keys themselves; see renormalised_entropy for learned sinks
    max: Float[Tensor, "B H R"]  # largest scaled score of a visible key
    argmax: Int[Tensor, "B H R"] | None  # its position; None if not asked for
    sink_mass: Float[Tensor, "B H R"] | None  # pi; None without learned sinks
    mass: Float[Tensor, "B H R N"] | None  # None without spans
    visible: Int[Tensor, "R"]  # number of visible keys, the learned sink not counted


def normalised_entropy(*, entropy: Float[Tensor, "B H R"], visible: Int[Tensor, "R"]) -> Float[Tensor, "B H R"]:
    """entropy / log(visible), 1 for a uniform row; NaN where one key is visible (0 / 0)."""
    several = visible > 1
    largest = torch.where(several, visible, 2).to(entropy.dtype).log()  # no division by 0, also not in backward
    return torch.where(several, entropy / largest, float("nan"))


def renormalised_entropy(
    *, entropy: Float[Tensor, "B H R"], sink_mass: Float[Tensor, "B H R"]
) -> Float[Tensor, "B H R"]:
    """Entropy of p / (1 - pi), the distribution over keys given that the learned sink is not chosen; -inf or NaN at
    sink mass 1."""
    return entropy / (1 - sink_mass) + torch.log1p(-sink_mass)
