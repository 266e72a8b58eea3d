"""Gradient influence: how far back does the gradient of a prediction reach?

    G(d) = E_x || d s(x) / d e_{t-d} ||_2         e the input embeddings, t the last position read from

(Qiao et al., arXiv:2606.15378, section on gradient influence). `gradient_influence` gives one curve per sample.
"""

from probes.gradient.influence import GradientInfluence, gradient_influence
from probes.gradient.scores import SCORES, Score

__all__ = ["SCORES", "GradientInfluence", "Score", "gradient_influence"]
