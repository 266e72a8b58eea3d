"""Value-swap activation patching: which activations carry a needle's value to the token that has to say it?

    swaps = value_swaps(tokenizer, length=1024, n=32, seed=0)            # two prompts that differ in the value only
    found = activation_patching(model, swaps, "denoising")               # logit differences, every layer and head
    share = recovered(found.layers, found.clean, found.corrupt)          # 0: nothing, 1: all of it

Denoising runs the corrupted prompt with activations of the clean one (what suffices?), noising the clean prompt with
those of the corrupted one (what is needed?). Vig et al. 2020 (arXiv:2004.12265), Meng et al. 2022 (arXiv:2202.05262);
practice as in Heimersheim and Nanda 2024 (arXiv:2404.15255).
"""

from probes.patching.activation import (
    COMPONENTS,
    DIRECTIONS,
    Direction,
    Patched,
    activation_patching,
    logit_differences,
    reading,
)
from probes.patching.metric import logit_difference, recovered, separated
from probes.patching.swaps import POSITIONS, ValueSwaps, pair, value_swaps

__all__ = [
    "COMPONENTS",
    "DIRECTIONS",
    "POSITIONS",
    "Direction",
    "Patched",
    "ValueSwaps",
    "activation_patching",
    "logit_difference",
    "logit_differences",
    "pair",
    "reading",
    "recovered",
    "separated",
    "value_swaps",
]
