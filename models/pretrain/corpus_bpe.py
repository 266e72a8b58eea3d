"""The corpus's own tokenizer: byte-level BPE, digits split singly, `<|endoftext|>` = id 0, no BOS.

Any text round-trips. The trainer breaks ties between equally frequent pairs by their ids, so the same sample gives the
same tokenizer.json whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from models.pretrain.corpus_readers import order_key
from models.pretrain.corpus_sources import CorpusError, Document

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


def bpe_sample(documents: Sequence[Document], seed: int, size: int) -> list[Document]:
    """Documents in a fixed random order until their characters reach `size`."""
    chosen: list[Document] = []
    total = 0
    for document in sorted(documents, key=lambda document: order_key(seed, "bpe", document.source, document.name)):
        if total >= size:
            break
        chosen.append(document)
        total += len(document.text)
    return chosen


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab_size:
        raise CorpusError(
            f"the tokenizer has {size} tokens, expected {vocab_size}: too little text. Lower vocab_size or add sources."
        )
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID, "special tokens come first"
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document], batch: int = 512) -> Iterator[np.ndarray]:
    """uint16 ids of each document, no separator; a literal `<|endoftext|>` in a text is encoded as plain text."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    with tqdm(desc="tokenize", unit="B", unit_scale=True, mininterval=1) as progress:
        for start in range(0, len(documents), batch):
            texts = [document.text for document in documents[start : start + batch]]
            for encoding, text in zip(plain.encode_batch_fast(texts), texts, strict=True):
                progress.update(len(text))
                yield np.array(encoding.ids, np.uint16)
