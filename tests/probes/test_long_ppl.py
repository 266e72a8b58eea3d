"""Key tokens and LongPPL: planted answers, a float64 loop over explicit contexts, the faults of the PyPI package."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from probes.long_ppl import KeyTokens, aggregate, key_tokens, long_ppl, text_sha256, token_losses

VOCAB, CONTEXT, STRIDE, P_COPY = 150, 20, 6, 0.9
BOS = VOCAB - 1


class Characters:
    """Character c is token ord(c) - 200; every character is one token."""

    def __init__(self, bos_id=None):
        self.bos_id, self.vocab_size = bos_id, VOCAB

    def encode_with_offsets(self, text):
        return [ord(c) - 200 for c in text], [(i, i + 1) for i in range(len(text))]

    def encode(self, text):
        return self.encode_with_offsets(text)[0]

    def decode(self, ids):
        return "".join(chr(200 + i) for i in ids)


class Recorder:
    """Records what a probe asks of a model: the inputs of final_hidden and the positions given to unembed at once."""

    device = torch.device("cpu")

    def __init__(self, tokenizer):
        self.tokenizer, self.inputs, self.rows = tokenizer, [], []

    def final_hidden(self, input_ids):
        self.inputs.append(input_ids.clone())
        return self.hidden(input_ids)

    def unembed(self, hidden):
        self.rows.append(hidden[..., 0].numel())
        return self.logits(hidden)


class CopyModel(Recorder):
    """After y the successor of y's last earlier occurrence gets P_COPY, the others share the rest; else uniform."""

    def hidden(self, input_ids):
        log_p = torch.full((*input_ids.shape, VOCAB), -math.log(VOCAB))
        for row, ids in enumerate(input_ids.tolist()):
            for t, token in enumerate(ids):
                earlier = [s for s in range(t) if ids[s] == token]
                if earlier:
                    log_p[row, t] = math.log((1 - P_COPY) / (VOCAB - 1))
                    log_p[row, t, ids[earlier[-1] + 1]] = math.log(P_COPY)
        return log_p

    def logits(self, hidden):
        return hidden + 1.5  # a shift that softmax must remove


class MeanModel(Recorder):
    """A smooth random model: logits from the mean of position-dependent embeddings of the tokens seen."""

    def __init__(self, tokenizer, seed=0):
        super().__init__(tokenizer)
        generator = np.random.default_rng(seed)
        self.embed = torch.tensor(generator.normal(size=(VOCAB, 11)))
        self.output = torch.tensor(6.0 * generator.normal(size=(11, VOCAB)))

    def hidden(self, input_ids):
        steps = torch.arange(1, input_ids.shape[1] + 1, dtype=torch.float64)[:, None]
        return torch.tanh((self.embed[input_ids] * steps**2).cumsum(1) / (steps**2).cumsum(0))

    def logits(self, hidden):
        return hidden @ self.output


def text_of(ids) -> str:
    return "".join(chr(200 + i) for i in ids)


def planted():
    """70 tokens, all different but for three copies: 5 tokens from far away, 4 from nearby, 3 from far away."""
    ids = list(range(70))
    ids[40:45] = ids[3:8]  # sources 37 back: beyond every short context (20..25)
    ids[50:54] = ids[47:51]  # sources 3 back (50 is itself a copy's start)
    ids[60:63] = ids[20:23]  # 40 back
    return ids


def loop_log_p(model, ids, front, context, stride):
    """Long and short log p of every token, each from its own explicit context."""

    def log_p(before, token):
        if not before:
            return math.nan
        logits = model.logits(model.hidden(torch.tensor([before])))[0, -1].double()
        return float(torch.log_softmax(logits, -1)[token])

    long = [log_p(front + ids[:i], ids[i]) for i in range(len(ids))]
    short = [math.nan] * len(ids)
    for i in range(context, len(ids)):
        start = (i - context) // stride * stride
        short[i] = log_p(front + ids[start:i], ids[i])
    return np.array(long), np.array(short)


def test_planted_copies_are_the_key_tokens():
    ids = planted()
    found = key_tokens(CopyModel(Characters()), text_of(ids), context=CONTEXT, stride=STRIDE)
    expected = [
        41,
        42,
        43,
        44,
        61,
        62,
    ]  # the first token of a copy cannot be predicted, the nearby copy needs no long context
    assert np.flatnonzero(found.is_key).tolist() == expected
    assert found.intervals == ((41, 45), (61, 63))
    np.testing.assert_allclose(found.log_p_long[expected], math.log(P_COPY), atol=1e-4)
    np.testing.assert_allclose(found.log_p_short[expected], -math.log(VOCAB), atol=1e-4)
    assert found.log_p_long[51] > math.log(P_COPY) - 1e-3
    assert not found.is_key[51]
    assert (found.n_key, found.n_tokens, found.n_characters) == (6, 70, 70)


def test_planted_copies_under_the_evaluated_model():
    ids = planted()
    found = key_tokens(CopyModel(Characters()), text_of(ids), context=CONTEXT, stride=STRIDE)
    good = long_ppl(CopyModel(Characters()), text_of(ids), found)
    assert good.positions.tolist() == [41, 42, 43, 44, 61, 62]
    assert good.log_long_ppl == pytest.approx(-math.log(P_COPY), abs=1e-5)
    assert good.log_ppl > good.log_long_ppl + 1
    worse = long_ppl(MeanModel(Characters()), text_of(ids), found)
    assert worse.log_long_ppl > good.log_long_ppl + 1


@pytest.mark.parametrize("bos", ["window", "none"])
@pytest.mark.parametrize(("context", "stride"), [(20, 6), (7, 1), (1, 3), (33, 9)])
def test_equals_a_loop_over_explicit_contexts(context, stride, bos):
    generator = np.random.default_rng(1)
    ids = generator.integers(0, VOCAB - 1, 61).tolist()
    model = MeanModel(Characters(BOS))
    found = key_tokens(
        model, text_of(ids), context=context, stride=stride, bos=bos, alpha=0.3, beta=-20.0, batch_size=3
    )
    long, short = loop_log_p(model, ids, [BOS] if bos == "window" else [], context, stride)
    np.testing.assert_allclose(found.log_p_long, long, atol=6e-5)
    np.testing.assert_allclose(found.log_p_short, short, atol=6e-5)
    with np.errstate(invalid="ignore"):
        sure = np.abs(long - short - 0.3) > 1e-3
        expected = (long - short > 0.3) & (long > -20.0)
    assert (found.is_key == expected)[sure].all()
    assert found.is_key.any()
    assert found.bos is (bos == "window")


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_batches_of_windows_change_nothing(batch_size):
    ids = np.random.default_rng(2).integers(0, VOCAB - 1, 58).tolist()
    one = key_tokens(MeanModel(Characters()), text_of(ids), context=11, stride=4, batch_size=1)
    other = key_tokens(MeanModel(Characters()), text_of(ids), context=11, stride=4, batch_size=batch_size)
    np.testing.assert_array_equal(one.log_p_short, other.log_p_short)


def test_every_window_starts_with_the_evaluators_bos():
    model = MeanModel(Characters(BOS))
    key_tokens(model, text_of(range(60)), context=20, stride=6)
    long, *windows = model.inputs
    assert long.shape == (1, 61)
    assert {window.shape[1] for window in windows} == {27, 1 + 20 + 4}  # the last window is shorter: 60 - 36 tokens
    assert all((batch[:, 0] == BOS).all() and (batch[:, 1:] != BOS).all() for batch in model.inputs)


def test_losses_are_computed_in_chunks_of_positions():
    """The largest logits tensor is [chunk, vocab]; a model whose unembedding is asked for more would show in `rows`."""
    ids = torch.tensor(np.random.default_rng(3).integers(0, VOCAB, (2, 40)))
    positions = [1, 5, 6, 17, 38, 39, 2]
    model = MeanModel(Characters())
    losses = token_losses(model, ids, positions, chunk=4)
    assert model.rows == [4, 4, 4, 2]
    log_p = torch.log_softmax(model.logits(model.hidden(ids)), -1)
    for row in range(2):
        expected = [-float(log_p[row, p - 1, ids[row, p]]) for p in positions]
        np.testing.assert_allclose(losses[row].numpy(), expected, rtol=1e-6)
    found = key_tokens(MeanModel(Characters()), text_of(ids[0].tolist()), context=10, stride=5)
    model.rows.clear()
    long_ppl(model, text_of(ids[0].tolist()), found, chunk=16)
    assert model.rows == [16, 16, 7]


@pytest.mark.parametrize("positions", [[0], [40], [3, -1]])
def test_positions_without_a_prediction_are_refused(positions):
    with pytest.raises(ValueError, match=r"positions .* are outside 1\.\.39"):
        token_losses(MeanModel(Characters()), torch.zeros(1, 40, dtype=torch.long), positions)


def test_no_positions_is_an_empty_answer():
    assert token_losses(MeanModel(Characters()), torch.zeros(3, 9, dtype=torch.long), []).shape == (3, 0)


@pytest.mark.parametrize("context", [70, 71, 500])
def test_context_of_the_whole_text_gives_no_key_token(context):
    ids = planted()
    found = key_tokens(CopyModel(Characters()), text_of(ids), context=context, stride=6)
    assert (found.n_key, found.intervals) == (0, ())
    result = long_ppl(CopyModel(Characters()), text_of(ids), found)
    assert math.isnan(result.log_long_ppl)
    assert (result.n_key, len(result.positions)) == (0, 0)
    assert math.isfinite(result.log_ppl)


def test_length_takes_the_first_tokens_and_scores_only_their_span():
    ids = planted()
    found = key_tokens(CopyModel(Characters()), text_of(ids), context=CONTEXT, stride=STRIDE, length=44)
    assert found.intervals == ((41, 44),)
    assert found.n_characters == found.n_tokens == 44
    assert long_ppl(CopyModel(Characters()), text_of(ids), found).n_tokens == 44


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(length=71), "70 evaluator tokens, fewer than length = 71"),
        (dict(context=0), "context is 0"),
        (dict(stride=0), "stride is 0"),
        (dict(bos="first"), "'window' or 'none'"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        key_tokens(CopyModel(Characters()), text_of(planted()), **{"context": 20, "stride": 6, **settings})


def made(is_key, offsets, text, log_p=None) -> KeyTokens:
    """Key tokens by hand: context 1, so that all but the first evaluator token may be key."""
    long = np.where(is_key, -0.5, -5.0) if log_p is None else np.asarray(log_p)
    short = np.where(is_key, -9.0, long - 0.25)
    short[:1] = np.nan
    return KeyTokens(
        evaluator="by hand",
        context=1,
        stride=1,
        alpha=2.0,
        beta=-2.0,
        bos=False,
        token_ids_sha256="",
        text_sha256=text_sha256(text),
        n_characters=len(text),
        offsets=np.array(offsets),
        log_p_long=long,
        log_p_short=short,
    )


def test_both_thresholds_are_strict():
    text = text_of(range(6))
    base = made([False] * 6, [(i, i + 1) for i in range(6)], text)
    long = np.array([np.nan, -2.0, -1.9999, -1.0, -1.0, -2.0001])
    short = np.array([np.nan, -9.0, -9.0, -3.0, -3.0001, -9.0])
    found = dataclasses.replace(base, log_p_long=long, log_p_short=short)
    assert found.is_key.tolist() == [False, False, True, False, True, False]


def test_a_key_token_at_index_0_needs_a_bos_and_is_never_shifted():
    """The PyPI package shifts it to -1 and reads the loss of the last token."""
    text = text_of(range(12))
    found = made([False, True] + [False] * 10, [(0, 0), (0, 1)] + [(i, i + 1) for i in range(2, 12)], text)
    assert found.intervals == ((0, 1),)
    without = long_ppl(MeanModel(Characters()), text, found)
    assert (without.n_key, without.n_unscored) == (0, 1)
    assert math.isnan(without.log_long_ppl)
    model = MeanModel(Characters(BOS))
    with_bos = long_ppl(model, text, found)
    assert with_bos.positions.tolist() == [0]
    assert with_bos.key_losses[0] == pytest.approx(-loop_log_p(model, list(range(12)), [BOS], 12, 1)[0][0], abs=1e-5)


def test_a_first_text_without_key_tokens_does_not_stop_a_corpus():
    """The PyPI package raises TypeError there. Documents weigh by their key tokens; skipped ones are counted."""
    text, offsets = text_of(range(12)), [(i, i + 1) for i in range(12)]
    keys = [[], [3], [2, 5, 6]]
    results = [long_ppl(MeanModel(Characters()), text, made(np.isin(range(12), k), offsets, text)) for k in keys]
    corpus = aggregate(results)
    losses = -loop_log_p(MeanModel(Characters()), list(range(12)), [], 12, 1)[0]
    assert corpus.log_long_ppl == pytest.approx(np.mean(losses[[3, 2, 5, 6]]), abs=1e-5)
    assert corpus[1:] == (4, 2, 1)
    nothing = aggregate(results[:1])
    assert math.isnan(nothing.log_long_ppl)
    assert nothing[1:] == (0, 0, 1)
    assert aggregate([])[1:] == (0, 0, 0)


def test_the_evaluated_model_gets_its_own_bos():
    """The PyPI package leaves it out. bos='none' does so on request, and says so."""
    text = text_of(range(12))
    found = made([False] * 11 + [True], [(i, i + 1) for i in range(12)], text)
    model = MeanModel(Characters(BOS))
    own, none = long_ppl(model, text, found), long_ppl(model, text, found, bos="none")
    assert [ids[0, 0].item() for ids in model.inputs] == [BOS, 0]
    assert (own.bos, none.bos) == (True, False)
    assert own.positions.tolist() == none.positions.tolist() == [11]
    for result, front in ((own, [BOS]), (none, [])):
        expected = -loop_log_p(model, list(range(12)), front, 12, 1)[0]
        np.testing.assert_allclose(result.losses, expected, atol=1e-5)
    assert abs(own.log_long_ppl - none.log_long_ppl) > 1e-3


def test_another_text_is_refused():
    text = text_of(range(12))
    found = made([True] * 12, [(i, i + 1) for i in range(12)], text)
    with pytest.raises(ValueError, match="not those of the key tokens"):
        long_ppl(MeanModel(Characters()), text_of(range(1, 13)), found)
    assert long_ppl(MeanModel(Characters()), text + "more", found).n_tokens == 12


def test_a_model_that_gives_nan_is_refused():
    class Broken(MeanModel):
        def logits(self, hidden):
            return super().logits(hidden) * torch.tensor(float("nan"))

    text = text_of(range(12))
    with pytest.raises(ValueError, match="evaluator's long-context log p of token 1 is nan"):
        key_tokens(Broken(Characters()), text, context=3, stride=2)
    with pytest.raises(ValueError, match="loss of token 1 is nan"):
        long_ppl(Broken(Characters()), text, made([True] * 12, [(i, i + 1) for i in range(12)], text))


def test_a_model_without_a_tokenizer_is_refused():
    text = text_of(range(12))
    for call in (
        lambda: key_tokens(MeanModel(None), text, context=3, stride=2),
        lambda: long_ppl(MeanModel(None), text, made([True] * 12, [(i, i + 1) for i in range(12)], text)),
    ):
        with pytest.raises(ValueError, match="no tokenizer"):
            call()
