"""Retrieval heads: what chosen query positions attend to, head by head, in softmax and in recurrent layers.

    mass     sum over the keys s of a span of a_ts           entropy  H_t = - sum over visible s of a_ts log a_ts
    copy     a head earns 1 / |needle| when the key it attends to most lies in the needle and holds the token produced

Mass and entropy as in Qiao et al., arXiv:2606.15378, the copy score as in Wu et al., arXiv:2404.15574. A recurrent
layer reads o_t = sum over j of W_tj v_j: |W_tj| / sum of |W_tj| takes the place of a_ts. `trace` gives everything in
one forward.
"""

from probes.retrieval.copying import CopyScore, copied_share, copy_score
from probes.retrieval.rows import AttentionRows, attention_rows, entropy, normalised_entropy, span_mass
from probes.retrieval.tracing import Trace, attention_entropy, attention_mass, by_kv_group, trace

__all__ = [
    "AttentionRows",
    "CopyScore",
    "Trace",
    "attention_entropy",
    "attention_mass",
    "attention_rows",
    "by_kv_group",
    "copied_share",
    "copy_score",
    "entropy",
    "normalised_entropy",
    "span_mass",
    "trace",
]
