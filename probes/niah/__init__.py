"""Needle-in-a-haystack prompts of exact token length, for evaluation (`build`) and for training streams (`insert`).

    prompts = build(tokenizer, length=4096, n=1000, seed=0, haystack="essay", depth=[0.0, 0.5, 1.0], values="easy")
    for sample in prompts:                                   # built one by one; values="numbers": random ones
        logits = model(torch.from_numpy(sample.input_ids)[None])
        score = accuracy(logits[0].argmax(-1), sample)       # .all_correct, .per_digit

A prompt is an announcement, the haystack with a needle line "One of the special magic numbers for KEY is: VALUE.", a
question, and VALUE itself (teacher forcing): input_ids == (BOS +) encode(text), spans in tokens, depth as asked for
and as it came out. `sample.probe` is the token at which the class `sample.label` is to be read: the next token tells
the classes apart there, or the value set is refused. Shape of the task: RULER (Hsieh et al. 2024, arXiv:2404.06654).
"""

from probes.niah.classes import (
    ClassSetError,
    answer_tokens,
    given_tokens,
    next_token_distinct,
    shared_answer_tokens,
)
from probes.niah.prompts import Prompts, Settings, build
from probes.niah.sample import Accuracy, NIAHSample, accuracy
from probes.niah.stream import Inserter, insert
from probes.niah.wording import EASY, HARD, VALUE_SETS, Template

__all__ = [
    "EASY",
    "HARD",
    "VALUE_SETS",
    "Accuracy",
    "ClassSetError",
    "Inserter",
    "NIAHSample",
    "Prompts",
    "Settings",
    "Template",
    "accuracy",
    "answer_tokens",
    "build",
    "given_tokens",
    "insert",
    "next_token_distinct",
    "shared_answer_tokens",
]
