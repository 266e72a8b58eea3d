"""Reading and editing named points of a model: `record`, `restrict` (receptive field), `mixer_effect`."""

from hooks.effect import mixer_effect
from hooks.record import record
from hooks.restrict import group_reach, restrict
from hooks.restriction import Restriction

__all__ = ["Restriction", "group_reach", "mixer_effect", "record", "restrict"]
