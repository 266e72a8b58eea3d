"""Layer-wise logistic probes: one linear classifier a feature, the same held-out prompts for all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import sklearn
import torch

from probes.layerwise.batched import fit_chunk
from probes.layerwise.features import Features
from probes.layerwise.labels import Design, design
from probes.layerwise.probe import Fit, log_probabilities, predict
from probes.layerwise.reference import fit_reference
from probes.layerwise.result import NOT_FITTED, LayerwiseResult
from probes.layerwise.settings import Settings, resolve_device


def fit(
    features: Mapping[str, Any] | Any,
    labels: Iterable[Hashable],
    *,
    groups: Iterable[Hashable] | None = None,
    names: Sequence[str] | None = None,
    layer_axis: int | None = None,
    classifier: str = "multinomial",
    C: float = 0.1,
    max_iter: int = 1000,
    tol: float = 1e-5,
    test_size: float = 0.2,
    seed: int = 42,
    shuffled: bool = False,
    impl: str = "torch",
    dtype: str = "float32",
    device: str | torch.device | None = None,
    layers_at_once: int | None = None,
) -> LayerwiseResult:
    """Fits a probe to every feature on the training prompts and scores it on the held-out ones.

    features: {name: [N, D]} (widths may differ), or one array with layer_axis=0 for [L, N, D], 1 for [N, L, D], and
    names if wanted. NumPy, torch and h5py are read lazily, one feature at a time. labels: N hashables. groups: N prompt
    ids; rows of one prompt are never on both sides of the split. layers_at_once: fitted together; None: 1 on a CPU,
    what fits into half the free memory on CUDA. Other arguments: see `Settings`.

    A feature with NaN or inf gets NaN and the reason; ValueError if no feature is left, or if labels, groups and
    features do not go together. Same input, settings, device and chunks: same bits.
    """
    settings = Settings(
        classifier, C, max_iter, tol, test_size, seed, shuffled, impl, dtype, resolve_device(device, impl)
    )
    source = Features(features, names, layer_axis)
    found = design(labels, groups, source.n, test_size=test_size, seed=seed, shuffled=shuffled)
    return _fit_all(source, found, settings, layers_at_once)


def _fit_all(source: Features, found: Design, settings: Settings, layers_at_once: int | None) -> LayerwiseResult:
    fit_indices = fit_reference if settings.impl == "sklearn" else fit_chunk
    fits: list[Fit] = []
    for indices in _chunks(source, found, settings, layers_at_once):
        fits += fit_indices(source, indices, found, settings)
    if all(one.reason for one in fits):
        raise ValueError(f"no feature can be fitted; {source.names[0]!r}: {fits[0].reason}")
    return _result(source, found, settings, fits)


def _chunks(source: Features, found: Design, settings: Settings, at_once: int | None) -> Iterator[list[int]]:
    """Runs of features of one width, at most `at_once` long."""
    if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
        raise ValueError(f"layers_at_once is {at_once!r}; expected None or an integer >= 1")
    chunk: list[int] = []
    limit = 0
    for index, width in enumerate(source.widths):
        if chunk and (width != source.widths[chunk[0]] or len(chunk) >= limit):
            yield chunk
            chunk = []
        if not chunk:
            limit = at_once or _fitting_layers(source.n, width, len(found.classes), settings)
        chunk.append(index)
    yield chunk


def _fitting_layers(rows: int, width: int, classes: int, settings: Settings) -> int:
    """How many layers fit into half the free memory of a CUDA device; 1 on a CPU, which gains nothing from more."""
    if torch.device(settings.device).type != "cuda":
        return 1
    size = 4 if settings.dtype == "float32" else 8
    inner = min(rows, width)
    copies = 1 if width <= rows else 3  # wider features are turned into N dimensions
    layer = size * (copies * rows * width + 3 * inner**2 + 12 * rows * classes + 24 * width * classes)
    one_at_a_time = 3 * 8 * rows * width  # raw values, float64 moments, a scaled copy for the preconditioner
    free = torch.cuda.mem_get_info(settings.device)[0] // 2
    return max(1, (free - one_at_a_time) // layer)


def _result(source: Features, found: Design, settings: Settings, fits: Sequence[Fit]) -> LayerwiseResult:
    label = found.label[found.test]
    predicted = np.full((len(fits), len(label)), NOT_FITTED, dtype=np.int64)
    log_p_true = np.full(predicted.shape, np.nan)
    for i, one in enumerate(fits):
        if not one.reason:
            predicted[i] = predict(one.scores)
            log_p_true[i] = log_probabilities(one.scores, settings.classifier)[np.arange(len(label)), label]
    versions = {"torch": torch.__version__, "scikit-learn": sklearn.__version__, "numpy": np.__version__}
    return LayerwiseResult(
        names=source.names,
        classes=found.classes,
        row=np.flatnonzero(found.test),
        prompt=found.prompt[found.test],
        label=label,
        frequencies=found.frequencies,
        predicted=predicted,
        log_p_true=log_p_true,
        converged=np.asarray([one.converged for one in fits]),
        n_iter=np.asarray([one.n_iter for one in fits]),
        gradient=np.asarray([one.gradient for one in fits]),
        objective=np.asarray([one.objective for one in fits]),
        n_constant=np.asarray([one.n_constant for one in fits]),
        reason=tuple(one.reason for one in fits),
        settings=asdict(settings) | {"stratified": found.stratified, "versions": versions},
        probes=tuple(one.probe for one in fits),
    )
