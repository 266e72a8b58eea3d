"""Layer-wise logistic probes: where along the depth of a model does something become linearly readable?

    result = fit(features, labels, groups=prompt_ids)       # features: {name: [N, D]}, or [N, L, D] with layer_axis=1
    result.accuracy, result.accuracy_interval(), result.log_loss, result.converged, result.reason
    gains = layer_gains(result)                             # per layer, split into mixer and MLP, paired intervals
    share_of_gain(result, is_full)                          # the share in full-attention layers, permutation test

Controls are results of the same type, on the same split:
    fit(features, labels, shuffled=True)                    # shuffled labels: chance at every layer, or there is a leak
    fit({"embedding": e, "position": p}, labels)            # what is readable without any layer (bin positions one-hot:
                                                            # a probe is linear)
    gain_over(result, fit(untrained_features, labels))      # the same architecture with random weights

The paper's released classifier is fit(..., classifier="one-vs-rest", C=0.1, max_iter=1000); see `reference`.
"""

from probes.layerwise.fitting import fit
from probes.layerwise.gains import Gain, LayerGains, gain_over, layer_gains
from probes.layerwise.probe import Probe
from probes.layerwise.result import LayerwiseResult
from probes.layerwise.settings import Settings
from probes.layerwise.share import ShareOfGain, share_of_gain

__all__ = [
    "Gain",
    "LayerGains",
    "LayerwiseResult",
    "Probe",
    "Settings",
    "ShareOfGain",
    "fit",
    "gain_over",
    "layer_gains",
    "share_of_gain",
]
