"""Whether anybody listens to a hook point."""

from __future__ import annotations

from transformer_lens.hook_points import HookPoint


def listened(hook: HookPoint) -> bool:
    """True if somebody reads or edits this point: costly tensors (patterns, states) are made only then."""
    return bool(hook._forward_hooks or hook._backward_hooks or hook._forward_pre_hooks)
