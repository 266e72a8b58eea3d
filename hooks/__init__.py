"""Reading and editing named points of a model.

`record` reads, `restrict` limits the receptive field, `knockout` hides a span of tokens, `ablate` and `patch` replace
outputs, `mixer_effect` measures.
"""

from hooks.ablate import ablate, head_means
from hooks.effect import mixer_effect
from hooks.knockout import Knockout, knockout
from hooks.patch import patch
from hooks.record import record
from hooks.restrict import group_reach, reach_windows, restrict
from hooks.restriction import Restriction

__all__ = [
    "Knockout",
    "Restriction",
    "ablate",
    "group_reach",
    "head_means",
    "knockout",
    "mixer_effect",
    "patch",
    "reach_windows",
    "record",
    "restrict",
]
