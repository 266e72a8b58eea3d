"""Pretraining: it learns, resumes to the bit, keeps its data order, and leaves a hookable checkpoint behind."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

import hooks
import models
from models.pretrain.config import PretrainConfig, token_count
from models.pretrain.data import TokenStream, prefetched
from models.pretrain.schedule import checkpoint_steps, learning_rate_factor
from models.pretrain.train import Run, pretrain
from models.tokenizer import Tokenizer

CONTEXT = 256


@pytest.fixture(autouse=True)
def _few_validation_sequences(monkeypatch):
    monkeypatch.setattr("models.pretrain.validation.SEQUENCES", 3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    words = [
        "the",
        "hidden",
        "magic",
        "number",
        "of",
        "one",
        "for",
        "is",
        "state",
        "law",
        "river",
        "stone",
        "answer",
        "question",
        "special",
        "what",
        "mentioned",
    ]
    rng = np.random.default_rng(0)
    text = "".join(" ".join(rng.choice(words, 12)) + ".\n" for _ in range(3000))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator([text], trainer)
    backend.save(str(folder / "tokenizer.json"))
    ids = np.array(backend.encode(text).ids, dtype=np.uint16)
    ids[: len(ids) * 3 // 4].tofile(folder / "train.bin")
    ids[len(ids) * 3 // 4 :].tofile(folder / "val.bin")
    return folder


def config(corpus, out, **changes) -> PretrainConfig:
    settings = PretrainConfig(
        preset="nano/gdn-1to3", out=out, corpus=corpus, tokens="6144", batch_size=3, context=CONTEXT, warmup_steps=2,
        checkpoints=3, device="cpu", compile=False, log_every=1, learning_rate=2e-3,
    )  # fmt: skip
    return dataclasses.replace(settings, **changes)


def lines(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_learns_logs_and_writes_loadable_checkpoints(corpus, tmp_path):
    out = tmp_path / "run"
    trained = pretrain(config(corpus, out))
    log = lines(out)
    losses = [line["loss"] for line in log if "loss" in line]
    assert len(losses) == 8
    assert losses[0] == pytest.approx(np.log(4096), abs=0.3)  # uniform over the preset's vocabulary
    assert losses[-1] < losses[0] - 1.0
    final = [line for line in log if "val_loss" in line][-1]
    assert {"val_late_loss", "niah", "niah_digits"} <= set(final)
    assert 0 < final["needles"] < 24
    folders = sorted(path.name for path in out.glob("step_*"))
    assert folders[-1] == "step_00000008"
    loaded = models.load(out / folders[-1], device="cpu")
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the river 12")) == "the river 12"
    training = json.loads((out / folders[-1] / "training.json").read_text())
    assert (training["step"], training["tokens"]) == (8, 8 * 3 * CONTEXT)
    stored = load_file(out / folders[-1] / "model.safetensors")
    assert all(torch.equal(stored[n], p.bfloat16()) for n, p in trained.named_parameters())


def test_embeddings_may_be_as_narrow_as_the_tokenizer(corpus, tmp_path):
    size = Tokenizer.from_file(corpus / "tokenizer.json").vocab_size
    narrow = config(corpus, tmp_path / "narrow", vocabulary=size, tokens="768")
    trained = pretrain(narrow)
    assert trained.embed.weight.shape[0] == trained.unembed.weight.shape[0] == trained.config.vocab_size == size
    assert lines(narrow.out)[0]["loss"] == pytest.approx(np.log(size), abs=0.3)
    with pytest.raises(ValueError, match=rf"has {size} tokens; the model's vocabulary would be {size - 1}\."):
        pretrain(config(corpus, tmp_path / "other", vocabulary=size - 1))


def test_a_killed_run_continues_to_the_same_bits(corpus, tmp_path, monkeypatch):
    whole = pretrain(config(corpus, tmp_path / "whole"))
    broken = config(corpus, tmp_path / "broken")
    update, count = Run._update, 0

    def killed(self, step, rows):
        nonlocal count
        count += 1
        if count == 7:  # after the checkpoint of step 3 or so, before the last
            raise KeyboardInterrupt
        return update(self, step, rows)

    monkeypatch.setattr(Run, "_update", killed)
    with pytest.raises(KeyboardInterrupt):
        pretrain(broken)
    monkeypatch.setattr(Run, "_update", update)
    first_resumed = len(lines(tmp_path / "broken"))
    resumed = pretrain(broken)
    steps = [line["step"] for line in lines(tmp_path / "broken")[first_resumed:]]
    assert 1 < steps[0] < 8, "it must have resumed, not started again"
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_hooks_work_after_compiled_training(corpus, tmp_path, monkeypatch):
    compiled = []
    original = torch.compile

    def eager(function, **options):  # dynamo traces as it does for a GPU; only the code generation is left out
        compiled.append(function)
        return original(function, backend="eager")

    monkeypatch.setattr(torch, "compile", eager)
    model = pretrain(config(corpus, tmp_path / "run", tokens="1536", compile=True, preset="nano/swa-32"))
    assert len(compiled) == 7  # six blocks and the loss
    assert all(block._compiled_call_impl is None for block in model.blocks)
    ids = torch.randint(400, (1, 40))
    with torch.no_grad(), hooks.record(model, "blocks.1.attn.hook_pattern") as seen:
        model(ids)
    assert seen["blocks.1.attn.hook_pattern"].shape == (1, 2, 40, 40)
    expected = model(ids)
    edited = model.run_with_hooks(ids, fwd_hooks=[("blocks.2.hook_attn_out", lambda v, hook: 0 * v)])
    assert (edited - expected).abs().max() > 1e-4


def test_a_graph_needs_a_gpu(corpus, tmp_path):
    with pytest.raises(ValueError, match="--graph on device cpu; expected a CUDA device"):
        pretrain(config(corpus, tmp_path / "run", graph=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["nano/gdn", "nano/mamba2", "nano/lightning", "nano/swa-32", "nano/full"])
def test_replayed_steps_are_the_steps(corpus, tmp_path, preset):
    """Same data, schedule and kernels: the losses are those of plain steps."""
    losses = {}
    for graph in (False, True):
        run = config(
            corpus, tmp_path / f"{graph}", preset=preset, device="cuda", compile=True, graph=graph, tokens="7680",
        )  # fmt: skip
        pretrain(run)
        losses[graph] = [line["loss"] for line in lines(run.out) if "loss" in line]
    assert len(losses[True]) == 10
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)
    assert losses[True][-1] < losses[True][0] - 1.0


def test_another_configuration_in_the_same_folder_is_refused(corpus, tmp_path):
    pretrain(config(corpus, tmp_path / "run", tokens="768"))
    with pytest.raises(ValueError, match="learning_rate = 0.002, not 0.1"):
        Run(config(corpus, tmp_path / "run", tokens="768", learning_rate=0.1))


def test_corpus_that_does_not_fit_is_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.*tokenizer"):
        Run(config(tmp_path / "nowhere", tmp_path / "run"))
    with pytest.raises(ValueError, match="need at least"):
        Run(config(corpus, tmp_path / "run", context=10**6))
    assert not (tmp_path / "run").exists()


def tokenizer_of(corpus):
    return Tokenizer.from_file(corpus / "tokenizer.json")


def test_order_is_a_function_of_seed_and_step(corpus):
    def stream(seed=3):
        return TokenStream(corpus / "train.bin", CONTEXT + 1, seed, 0.3, tokenizer_of(corpus))

    ahead = [rows for rows, _ in prefetched(stream(), 0, 6, 4)]
    for step in (5, 2, 0):  # any order of asking
        assert torch.equal(stream().batch(step, 4)[0], ahead[step])
    again = stream()
    assert torch.equal(again.batch(4, 4)[0], ahead[4])
    assert not torch.equal(stream(4).batch(0, 4)[0], ahead[0])


def test_every_block_once_an_epoch_and_then_anew(corpus):
    stream = TokenStream(corpus / "train.bin", CONTEXT + 1, 0, 0.0, tokenizer_of(corpus))
    ids = np.fromfile(corpus / "train.bin", np.uint16)
    epochs = []
    for epoch in range(2):
        drawn = [stream.sequence(epoch * stream.blocks + i)[0] for i in range(stream.blocks)]
        starts = set()
        for block in drawn:
            matches = [
                s for s in range(len(ids) - CONTEXT) if ids[s] == block[0] and np.array_equal(ids[s : s + 8], block[:8])
            ]
            assert any(np.array_equal(ids[s : s + CONTEXT + 1], block) for s in matches)
            starts.add(block.tobytes())
        assert len(starts) == stream.blocks
        epochs.append(drawn)
    assert not np.array_equal(epochs[0][0], epochs[1][0])


def test_needle_sequences_end_in_the_value_that_stands_in_them(corpus):
    tokenizer = tokenizer_of(corpus)
    stream = TokenStream(corpus / "train.bin", CONTEXT + 1, 0, 1.0, tokenizer)
    ids, (start, end) = stream.sequence(0)
    assert len(ids) == CONTEXT + 1
    value = tokenizer.decode(ids[start:end]).strip()
    assert value.isdigit()
    assert tokenizer.decode(ids).count(value) == 2


def test_needle_prompts_start_anywhere_but_end_at_the_end(corpus):
    tokenizer = tokenizer_of(corpus)
    stream = TokenStream(corpus / "train.bin", CONTEXT + 1, 0, 1.0, tokenizer)
    plain = TokenStream(corpus / "train.bin", CONTEXT + 1, 0, 0.0, tokenizer)
    starts = []
    for index in range(40):
        ids, (start, end) = stream.sequence(index)
        assert (len(ids), end) == (CONTEXT + 1, CONTEXT + 1)
        text = tokenizer.decode(ids)
        announced = text.index("A special magic number is hidden")
        assert text.count(tokenizer.decode(ids[start:end]).strip()) == 2
        before = len(tokenizer.encode(text[:announced]))
        assert np.array_equal(ids[: max(0, before - 1)], plain.sequence(index)[0][: max(0, before - 1)])
        starts.append(announced)
    assert 10 < starts.count(0) < 30
    assert len(set(starts)) > 8
    whole = TokenStream(corpus / "train.bin", CONTEXT + 1, 0, 1.0, tokenizer, whole=1.0)
    assert all(tokenizer.decode(whole.sequence(i)[0]).startswith("A special magic") for i in range(20))


def test_a_failing_stream_raises_in_the_trainer(corpus):
    stream = TokenStream(corpus / "train.bin", CONTEXT + 1, 0, 0.0, tokenizer_of(corpus))
    stream.sequence = lambda index: 1 / 0
    with pytest.raises(ZeroDivisionError):
        next(prefetched(stream, 0, 2, 1))


def test_schedule_warms_up_stays_and_decays_to_zero():
    factors = [learning_rate_factor(step, 100, 8, 0.2) for step in range(1, 101)]
    assert factors[:8] == pytest.approx([i / 8 for i in range(1, 9)])
    assert set(factors[8:80]) == {1.0}
    assert factors[80:] == pytest.approx([1 - i / 20 for i in range(20)])
    assert learning_rate_factor(1, 20, 200, 0.0) == 0.5


def test_checkpoints_are_log_spaced_and_end_at_the_end():
    steps = checkpoint_steps(2000, 8)
    assert steps[0] == 31
    assert steps[-1] == 2000
    ratios = [b / a for a, b in itertools.pairwise(steps)]
    assert max(ratios) / min(ratios) < 1.1
    assert checkpoint_steps(1, 5) == [1]
    assert checkpoint_steps(50, 1) == [50]


@pytest.mark.parametrize(("text", "count"), [("130M", 130_000_000), ("2.5k", 2500), ("1_000", 1000), ("1B", 10**9)])
def test_token_counts(text, count):
    assert token_count(text) == count


@pytest.mark.parametrize("text", ["", "x", "-5", "0", "1e6"])
def test_bad_token_counts(text):
    with pytest.raises(ValueError, match="positive number"):
        token_count(text)
