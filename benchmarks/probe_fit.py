"""Fitting layer-wise probes: the torch form beside scikit-learn's liblinear one-vs-rest (the released classifier).

    python benchmarks/probe_fit.py                                       # small, any machine
    python benchmarks/probe_fit.py --layers 30 --samples 10000 --width 1280 --reference-layers 1

The second: 30 layers, 8,000 training and 2,000 held-out prompts, 8 classes; bars: 10 times faster, accuracies within
0.5 points. Synthetic residual streams: correlated directions (spectrum k^-0.7, as in hidden states) and a class that
grows with depth from invisible to certain. Features are made when read, and that time is taken off; copying them to a
GPU counts. scikit-learn fits one layer after the other, on one core: where it is not given all of them, its time is
that of the layers measured times 30 / their number, and the output says which they were (the middle one first, then
ever more evenly over the depth). The released multi_class="ovr" is OneVsRestClassifier since scikit-learn 1.8.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import torch

from probes.layerwise import LayerwiseResult, fit


class SyntheticStream:
    """[L, N, D] features made layer by layer; the same layer is always the same. Adds up the time it takes."""

    def __init__(self, layers: range, depth: int, samples: int, width: int, classes: int) -> None:
        self.shape = (len(layers), samples, width)
        self.label = np.arange(samples) % classes
        self.seconds = 0.0
        self._layers, self._depth = layers, depth
        rng = np.random.default_rng(0)
        self._mix = (np.arange(1, width + 1) ** -0.7)[:, None] * rng.normal(size=(width, width)) / np.sqrt(width)
        self._mean = rng.normal(size=(classes, width))

    def __getitem__(self, index: int) -> torch.Tensor:
        started = time.perf_counter()
        layer = self._layers[index]
        noise = np.random.default_rng(layer).standard_normal(self.shape[1:], dtype=np.float32)
        strength = 0.6 * layer / max(1, self._depth - 1)
        x = (noise + np.float32(strength) * self._mean[self.label].astype(np.float32)) @ self._mix.astype(np.float32)
        self.seconds += time.perf_counter() - started
        return torch.from_numpy(x)


def timed(stream: SyntheticStream, **settings: object) -> tuple[LayerwiseResult, float]:
    """The result and the seconds it took beside making the features."""
    before, started = stream.seconds, time.perf_counter()
    result = fit(stream, stream.label, layer_axis=0, classifier="one-vs-rest", C=0.1, max_iter=1000, **settings)
    return result, time.perf_counter() - started - (stream.seconds - before)


def lines(options: argparse.Namespace) -> Iterator[str]:
    depth = options.layers
    shape = (depth, options.samples, options.width, options.classes)
    whole = SyntheticStream(range(depth), *shape)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    warm_up = SyntheticStream(range(2), 2, min(options.samples, 2 * options.width), options.width, options.classes)
    timed(warm_up, device=device)
    ours, seconds = timed(whole, device=device, dtype=options.dtype)
    yield f"{depth} layers x {len(ours.row) * 4} training rows x {options.width}, {options.classes} classes, C = 0.1"
    yield f"torch, {name}, {options.dtype}: {seconds:.2f} s, {ours.n_iter.max()} iterations at most, " + (
        "all converged" if ours.converged.all() else f"{(~ours.converged).sum()} layers not converged"
    )
    yield from beside(options, ours, seconds, shape)


def beside(
    options: argparse.Namespace, ours: LayerwiseResult, seconds: float, shape: tuple[int, int, int, int]
) -> Iterator[str]:
    """scikit-learn on some of the layers."""
    depth, measured, total = options.layers, [], 0.0
    differences = []
    for layer in spread(depth)[: options.reference_layers or depth]:
        if measured and total > options.reference_seconds:
            break
        stream = SyntheticStream(range(layer, layer + 1), *shape)
        reference, took = timed(stream, impl="sklearn", tol=1e-4)  # scikit-learn's default, as released
        total += took
        measured.append(layer)
        differences.append(100 * float(ours.accuracy[layer] - reference.accuracy[0]))
        yield f"  scikit-learn, layer {layer}: {took:.1f} s, accuracy {reference.accuracy[0]:.4f}, ours " + (
            f"{ours.accuracy[layer]:.4f} in the {seconds:.2f} s of all layers"
        )
    estimate = total * depth / len(measured)
    how = "all measured" if len(measured) == depth else f"{total:.1f} s for layers {measured}, scaled to {depth}"
    yield f"scikit-learn {reference.settings['versions']['scikit-learn']}, liblinear, CPU: {estimate:.1f} s ({how})"
    yield f"ratio {estimate / seconds:.1f}x; accuracy ours - theirs: {np.round(differences, 2).tolist()} points"
    fast, close = estimate >= 10 * seconds, np.abs(differences).max() <= 0.5
    yield f"bars: 10x {'met' if fast else 'missed'}, 0.5 points {'met' if close else 'missed'} on the layers measured"
    yield f"accuracies by layer: {np.round(ours.accuracy, 3).tolist()}"


def spread(depth: int) -> list[int]:
    """All layers, the middle one first, then halves of what lies between (van der Corput's sequence in base 2)."""
    bits = max(1, (depth - 1).bit_length())
    order = [int(f"{i:0{bits}b}"[::-1], 2) * depth >> bits for i in range(1, 2**bits)]
    return list(dict.fromkeys([*order, 0, *range(depth)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--samples", type=int, default=1250, help="rows before the 80/20 split")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--reference-layers", type=int, default=0, help="layers scikit-learn fits at most; 0 = all")
    parser.add_argument("--reference-seconds", type=float, default=np.inf, help="and starts none after this time")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    for line in lines(parser.parse_args()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
