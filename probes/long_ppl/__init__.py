"""LongPPL (Fang et al., ICLR 2025): key tokens need a long context; LongPPL is the perplexity over them.

i is a key token if log p(x_i | long) - log p(x_i | short) > alpha (LSD) and log p(x_i | long) > beta (LCL), under an
evaluator model; LongPPL = exp(-mean log p(x_i | x_<i)) over the key tokens, under the evaluated model.
"""

from probes.long_ppl.balance import COVARIATES, Covariates, covariates, standardised_differences
from probes.long_ppl.evaluator import key_tokens
from probes.long_ppl.io import KeyTokens, load_key_tokens, save_key_tokens, text_sha256
from probes.long_ppl.score import CorpusLongPPL, LongPPL, aggregate, long_ppl, token_losses
from probes.long_ppl.transfer import MatchedTokens, first_positions, key_positions, matched_tokens

__all__ = [
    "COVARIATES",
    "CorpusLongPPL",
    "Covariates",
    "KeyTokens",
    "LongPPL",
    "MatchedTokens",
    "aggregate",
    "covariates",
    "first_positions",
    "key_positions",
    "key_tokens",
    "load_key_tokens",
    "long_ppl",
    "matched_tokens",
    "save_key_tokens",
    "standardised_differences",
    "text_sha256",
    "token_losses",
]
