"""Probe fits against scikit-learn run step by step, and against the stationarity of the objective written out here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import StandardScaler

from probes import layerwise

pytestmark = pytest.mark.filterwarnings("error")

KINDS = ("noise", "weak", "separable", "scales", "correlated", "wide", "constant columns")
CLASSIFIERS = ("multinomial", "one-vs-rest")


def labels_of(n, classes, seed=0):
    return np.random.default_rng(seed).permutation(np.arange(n) % classes)


def features_of(kind, label, seed=1):
    """Features of one layer; the class has a mean of its own in all kinds but noise."""
    rng = np.random.default_rng(seed)
    n, width = len(label), 340 if kind == "wide" else 23
    strength = {"noise": 0.0, "separable": 4.0}.get(kind, 0.35)
    x = rng.normal(size=(n, width)) + strength * rng.normal(size=(label.max() + 1, width))[label]
    if kind == "scales":
        x = x * np.logspace(-3, 3, width) + np.logspace(3, -3, width)
    if kind == "correlated":
        x = x * np.arange(1, width + 1) ** -1.5 @ rng.normal(size=(width, width))
    if kind == "constant columns":
        x[:, [2, 7]] = [0.1, -3e4]
    return x


def scikit_learn(x, label, classifier, C):
    """The released pipeline's steps with scikit-learn itself, at a tight tolerance: (fitted, test rows, scaled x)."""
    train, test = train_test_split(np.arange(len(x)), test_size=0.2, random_state=42, stratify=label)
    scaler = StandardScaler().fit(x[train])
    scaled = scaler.transform(x)
    if classifier == "multinomial":
        model = LogisticRegression(C=C, tol=1e-10, max_iter=5000)
    else:
        model = OneVsRestClassifier(LogisticRegression(solver="liblinear", C=C, tol=1e-10, max_iter=5000))
    return model.fit(scaled[train], label[train]), np.sort(test), scaled


def weights_of(model):
    parts = getattr(model, "estimators_", [model])
    return np.concatenate([p.coef_ for p in parts]), np.concatenate([p.intercept_ for p in parts])


@pytest.mark.parametrize("classes", [2, 3, 8])
@pytest.mark.parametrize("classifier", CLASSIFIERS)
@pytest.mark.parametrize("C", [0.1, 10.0])
def test_torch_form_equals_scikit_learn(classifier, classes, C):
    label = labels_of(360, classes)
    features = {kind: features_of(kind, label) for kind in KINDS}
    found = layerwise.fit(features, label, classifier=classifier, C=C, tol=1e-10, dtype="float64", device="cpu")
    assert found.converged.all()
    assert found.n_iter.max() <= (40 if C == 0.1 else 120)  # without L-BFGS pairs or preconditioner: hundreds
    for i, kind in enumerate(KINDS):
        model, test, scaled = scikit_learn(features[kind], label, classifier, C)
        coef, intercept = weights_of(model)
        size = np.abs(coef).max()
        np.testing.assert_array_equal(found.row, test)
        np.testing.assert_allclose(found.probes[i].coef, coef, atol=2e-5 * size, rtol=0, err_msg=kind)
        np.testing.assert_allclose(found.probes[i].intercept, intercept, atol=2e-5 * max(size, 1), rtol=0)
        np.testing.assert_array_equal(found.predicted[i], model.predict(scaled[test]))
        assert found.accuracy[i] == model.score(scaled[test], label[test])
        expected = np.log(model.predict_proba(scaled[test])[np.arange(len(test)), label[test]])
        np.testing.assert_allclose(found.log_p_true[i], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_reference_form_is_scikit_learn(classifier, classes):
    label = labels_of(260, classes)
    features = {kind: features_of(kind, label) for kind in KINDS}
    settings = {"classifier": classifier, "C": 0.3, "tol": 1e-10, "max_iter": 5000, "dtype": "float64"}
    found = layerwise.fit(features, label, impl="sklearn", **settings)
    ours = layerwise.fit(features, label, **settings)
    for i, kind in enumerate(KINDS):
        model, test, scaled = scikit_learn(features[kind], label, classifier, 0.3)
        np.testing.assert_array_equal(found.predicted[i], model.predict(scaled[test]))
        expected = np.log(model.predict_proba(scaled[test])[np.arange(len(test)), label[test]])
        np.testing.assert_allclose(found.log_p_true[i], expected, atol=1e-9)
    np.testing.assert_allclose(ours.objective, found.objective, rtol=1e-10)  # one function scores both solutions
    np.testing.assert_array_equal(ours.n_constant, found.n_constant)
    assert found.n_constant[KINDS.index("constant columns")] == 2


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_the_weights_are_stationary(classifier, classes):
    """The gradient of the objective as the papers write it, by automatic differentiation."""
    label, C, tol = labels_of(150, classes), 2.5, 1e-8
    x = features_of("weak", label)
    found = layerwise.fit({"x": x}, label, classifier=classifier, C=C, tol=tol, dtype="float64", device="cpu")
    train = np.setdiff1d(np.arange(150), found.row)
    z_x = torch.tensor((x[train] - x[train].mean(0)) / x[train].std(0))
    w = torch.tensor(found.probes[0].coef, requires_grad=True)
    b = torch.tensor(found.probes[0].intercept, requires_grad=True)
    z, y = z_x @ w.T + b, torch.tensor(label[train])
    objective = 0.5 * w.square().sum()
    if classifier == "multinomial" and classes > 2:
        objective = objective - C * z.log_softmax(-1)[torch.arange(len(train)), y].sum()
    else:
        columns = [1] if classes == 2 else range(classes)
        signs = torch.stack([2.0 * (y == k) - 1 for k in columns], 1)
        objective = objective + C * torch.log1p(torch.exp(-signs * z)).sum()
    if classifier == "one-vs-rest":
        objective = objective + 0.5 * b.square().sum()
    objective.backward()
    largest = max(float(w.grad.abs().max()), float(b.grad.abs().max())) / (C * len(train))
    assert largest <= tol
    assert abs(largest - found.gradient[0]) <= 1e-12
    assert float(objective.detach()) == pytest.approx(found.objective[0], rel=1e-12)


@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_float32_decides_as_float64(classifier):
    label = labels_of(900, 8)
    features = {kind: features_of(kind, label) for kind in KINDS}
    single, double = (
        layerwise.fit(features, label, classifier=classifier, dtype=d, tol=t, device="cpu")
        for d, t in (("float32", 1e-5), ("float64", 1e-10))
    )
    assert single.converged.all()
    np.testing.assert_array_equal(single.accuracy, double.accuracy)
    np.testing.assert_allclose(single.objective, double.objective, rtol=2e-5)
    np.testing.assert_allclose(single.log_loss, double.log_loss, atol=2e-3)


@pytest.mark.parametrize("C", [1e-3, 1e3, 1e5])
@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_float32_survives_any_penalty(classifier, C):
    """Where float32 cannot reach the tolerance the flag says so, and nothing overflows."""
    label = labels_of(300, 4)
    features = {kind: features_of(kind, label) for kind in KINDS}
    found = layerwise.fit(features, label, classifier=classifier, C=C, tol=1e-7, device="cpu")
    assert np.isfinite(found.log_loss).all()
    np.testing.assert_array_equal(found.converged, found.gradient <= 1e-7)
    assert found.accuracy[KINDS.index("separable")] > 0.95


@pytest.mark.parametrize("impl", ["torch", "sklearn"])
@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_too_few_iterations_are_flagged_not_warned_about(impl, classifier):
    label = labels_of(300, 4)
    features = {"noise": np.zeros((300, 3)), "weak": features_of("weak", label)}
    features["noise"][:, 0] = np.arange(300) % 2
    found = layerwise.fit(features, label, classifier=classifier, C=100.0, tol=1e-12, max_iter=2, impl=impl)
    assert not found.converged[1]
    assert found.n_iter[1] == 2
    assert found.gradient[1] > 1e-12
    assert np.isfinite(found.log_loss).all()


def test_chunks_change_nothing_and_a_rerun_gives_the_same_bits():
    label = labels_of(240, 5)
    rng = np.random.default_rng(3)
    stack = rng.normal(size=(7, 240, 19)) + np.arange(7)[:, None, None] * rng.normal(size=(5, 19))[label]
    runs = [
        layerwise.fit(stack, label, layer_axis=0, dtype="float64", tol=1e-9, layers_at_once=n, device="cpu")
        for n in (1, 1, 3, 7)
    ]
    for run in runs[1:]:
        np.testing.assert_array_equal(run.predicted, runs[0].predicted)
        np.testing.assert_array_equal(run.n_iter, runs[0].n_iter)
        np.testing.assert_allclose(run.log_p_true, runs[0].log_p_true, atol=1e-11)
    np.testing.assert_array_equal(runs[1].log_p_true, runs[0].log_p_true)
    np.testing.assert_array_equal(runs[1].probes[6].coef, runs[0].probes[6].coef)


@pytest.mark.parametrize("classes", [2, 6])
@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_a_probe_applies_to_rows_in_the_units_of_the_features(classifier, classes):
    label = labels_of(300, classes)
    x = features_of("scales", label)
    found = layerwise.fit({"x": x}, label, classifier=classifier, dtype="float64")
    log_p = found.probes[0].log_probabilities(x[found.row])
    np.testing.assert_allclose(np.exp(log_p).sum(1), 1.0, atol=1e-12)
    np.testing.assert_array_equal(log_p.argmax(1), found.predicted[0])
    np.testing.assert_allclose(log_p[np.arange(len(found.row)), found.label], found.log_p_true[0], atol=1e-8)


def test_log_probabilities_do_not_underflow():
    scores = np.array([[-2000.0, -1000.0, -3000.0]])
    for classifier in CLASSIFIERS:
        log_p = layerwise.Probe(np.zeros(1), np.ones(1), np.zeros((3, 1)), scores[0], classifier).log_probabilities(
            np.zeros((1, 1))
        )
        np.testing.assert_allclose(log_p, [[-1000.0, 0.0, -2000.0]])


@pytest.mark.gpu
@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_gpu_equals_cpu(classifier):
    label = labels_of(1000, 8)
    features = {kind: features_of(kind, label) for kind in KINDS}
    cpu = layerwise.fit(features, label, classifier=classifier, dtype="float64", tol=1e-9, device="cpu")
    for dtype, tol, close in (("float64", 1e-9, 1e-6), ("float32", 1e-5, 2e-2)):
        gpu = layerwise.fit(features, label, classifier=classifier, dtype=dtype, tol=tol, device="cuda")
        assert gpu.converged.all()
        np.testing.assert_array_equal(gpu.accuracy, cpu.accuracy)
        np.testing.assert_allclose(gpu.log_p_true, cpu.log_p_true, atol=close, rtol=close)
