"""When the learning rate rises and falls (warm-up, stable, decay), and when checkpoints are due (log-spaced)."""

from __future__ import annotations


def learning_rate_factor(step: int, steps: int, warmup_steps: int, decay_share: float) -> float:
    """Factor of the peak for the update that ends `step` (1 .. steps): linear up, flat, linear to zero at the end."""
    warmup = max(1, min(warmup_steps, steps // 10))
    decay = round(steps * decay_share)
    rising = min(1.0, step / warmup)
    falling = 1.0 if decay == 0 else min(1.0, (steps - step + 1) / decay)
    return min(rising, falling)


def checkpoint_steps(steps: int, count: int) -> list[int]:
    """At most `count` increasing steps, equal ratios apart, from 1/64 of the run to its end."""
    first = max(1, steps // 64)
    if count == 1 or first == steps:
        return [steps]
    ratio = (steps / first) ** (1 / (count - 1))
    return sorted({min(steps, round(first * ratio**index)) for index in range(count)} | {steps})
