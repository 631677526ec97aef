"""One model with two branches: each is computed on a device of its own, at the same time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import edge
from edge.demos.bundled import require
from edge.demos.small_nets import Floats, Net, placed, trained

_SIDE, _WIDTH = 16, 128
_KINDS = ("rings", "stripes", "squares")


def run() -> None:
    """One branch looks at the pixels, the other at the frequencies. Their last layer is trained
    here."""
    random = np.random.default_rng(0)
    places = np.arange(_SIDE)
    waves = np.cos(np.pi * (2 * places[:, None] + 1) * places / (2 * _SIDE)).astype(np.float32)
    branches = [
        [
            random.normal(0, 1.5 / size**0.5, (size, _WIDTH)).astype(np.float32)
            for size in (_SIDE**2, _WIDTH)
        ]
        for _ in range(2)
    ]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "branches.onnx"
        _written(path, waves, branches, np.zeros((2 * _WIDTH + 1, 3), np.float32))
        pictures, labels = _pictures(random, 1500)
        last = trained(_features(pictures, waves, branches), np.eye(3, dtype=np.float32)[labels])
        _written(path, waves, branches, last)
        pictures, labels = _pictures(random, 64)
        with edge.Cluster.local(peers=2, threads=1) as cluster:
            one, two = (peer.name for peer in cluster.peers)
            fork = placed(path, [(one, "stem"), (one, "pixels"), (two, "frequencies"), (one, None)])
            answers = []
            for plan in (fork, placed(path, [(one, None)])):
                with cluster.load_graph(path, plan=plan, sample={"pictures": pictures}) as graph:
                    answers.append(graph.run({"pictures": pictures})["scores"])
                    for stage in graph.explain()["stages"]:
                        names = f"{stage['first_node']} to {stage['last_node']}"
                        print(f"  {stage['device']}: {names}, {stage['compute_s'] * 1e3:.2f} ms")
                    print(f"  predicted: {graph.estimate.latency_s * 1e3:.2f} ms\n")
    require(
        bool(np.allclose(answers[0], answers[1], atol=1e-3)),
        "two devices should compute what one does",
    )
    found = answers[0].argmax(axis=1)
    right = int((found == labels).sum())
    require(right >= 60, "nearly all pictures should be named right")
    print(
        f"{right} of 64 pictures are {', '.join(_KINDS)} as they should: the same as on one device"
    )


def _pictures(
    random: np.random.Generator, count: int
) -> tuple[Floats, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Pictures [count, side, side] of three kinds with noise, and their kinds."""
    labels = random.integers(0, 3, count)
    grid = np.arange(_SIDE) - _SIDE / 2
    found = []
    for label in labels:
        phase, step = random.random() * 6, 0.9 + 0.4 * random.random()
        across, down = grid[None, :] * step, grid[:, None] * step
        picture = (
            np.sin(np.hypot(across, down) + phase)
            if label == 0
            else np.sin(across + phase + 0 * down)
            if label == 1
            else np.sign(np.sin(across + phase) * np.sin(down + phase))
        )
        found.append(picture + random.normal(0, 0.2, picture.shape))
    return np.stack(found).astype(np.float32), labels


def _features(pictures: Floats, waves: Floats, branches: list[list[Floats]]) -> Floats:
    stem = np.tanh(pictures)
    seen = [stem.reshape(len(stem), -1), np.abs(waves.T @ stem @ waves).reshape(len(stem), -1)]
    hidden = [
        np.tanh(np.maximum(x @ first, 0) @ second)
        for x, (first, second) in zip(seen, branches, strict=True)
    ]
    return np.concatenate(hidden, axis=1)


def _written(path: Path, waves: Floats, branches: list[list[Floats]], last: Floats) -> None:
    net = Net()
    stem = net.add("Tanh", "pictures", out="stem")
    x = net.add("Flatten", stem)
    x = net.add("Relu", net.add("MatMul", x, branches[0][0]))
    pixels = net.add("Tanh", net.add("MatMul", x, branches[0][1]), out="pixels")
    x = net.add("MatMul", net.add("MatMul", np.ascontiguousarray(waves.T), stem), waves)
    x = net.add("Flatten", net.add("Abs", x))
    x = net.add("Relu", net.add("MatMul", x, branches[1][0]))
    frequencies = net.add("Tanh", net.add("MatMul", x, branches[1][1]), out="frequencies")
    x = net.add("Concat", pixels, frequencies, axis=1)
    net.add("Gemm", x, last[:-1], last[-1], out="scores")
    net.write(path, {"pictures": ["n", _SIDE, _SIDE]}, ["scores"])
