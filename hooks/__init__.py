"""Reading and editing named points of a model.

`record` reads, `restrict` limits the receptive field, `ablate` and `patch` replace outputs, `mixer_effect` measures.
"""

from hooks.ablate import ablate, head_means
from hooks.effect import mixer_effect
from hooks.patch import patch
from hooks.record import record
from hooks.restrict import group_reach, restrict
from hooks.restriction import Restriction

__all__ = ["Restriction", "ablate", "group_reach", "head_means", "mixer_effect", "patch", "record", "restrict"]
