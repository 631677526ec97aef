"""A voice detector with state hears a stream. A peer is killed, and nothing is forgotten."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import edge
from edge.demos.bundled import require
from edge.demos.fleet import Fleet
from edge.demos.small_nets import Floats, Net, placed, trained, with_one

_BANDS, _WIDTH, _FRAMES, _KILLED_AT = 8, 48, 400, 150
STATE = {"new_short": "short", "new_long": "long"}


def run() -> None:
    """Two recurrent layers, one on each peer, whose last layer is trained here."""
    logging.getLogger("edge.runs.graphs").setLevel(logging.ERROR)  # the loss is no surprise here
    random = np.random.default_rng(0)
    weights = [
        random.normal(0, scale, shape).astype(np.float32)
        for scale, shape in (
            (0.6, (_BANDS, _WIDTH)), (0.9 / _WIDTH**0.5, (_WIDTH, _WIDTH)),
            (0.6 / _WIDTH**0.5, (_WIDTH, _WIDTH)), (0.9 / _WIDTH**0.5, (_WIDTH, _WIDTH)),
        )
    ]  # fmt: skip
    sound, speaks = _sound(random, 4000)
    last = trained(_heard(sound, weights), speaks[:, None])
    sound, speaks = _sound(random, _FRAMES)
    expected = with_one(_heard(sound, weights)) @ last
    with (
        tempfile.TemporaryDirectory() as place,
        Fleet(("attic", "cellar"), Path(place)) as fleet,
        edge.Cluster.connect(list(fleet.addresses.values())) as cluster,
    ):
        path = _written(Path(place), weights, last)
        plan = placed(path, [("attic", "new_short"), ("cellar", None)])
        with cluster.load_graph(
            path, plan=plan, state=STATE, sample={"frame": sound[:1]}
        ) as detector:

            def frames() -> Iterator[dict[str, Floats]]:
                for number, frame in enumerate(sound):
                    if number == _KILLED_AT:
                        fleet.kill("cellar")
                    yield {"frame": frame[None]}

            results = list(detector.stream(frames()))
            devices = ", ".join(detector.plan.devices)
    heard = np.array([each["voice"][0, 0] for each in results if isinstance(each, dict)])
    line = "".join("#" if each > 0.5 else "." for each in heard[::4])
    print(f"  {line}\n  {''.join('#' if each else '.' for each in speaks[::4])} is right")
    require(len(heard) == _FRAMES, "each frame should have one result")
    require(bool(np.allclose(heard, expected[:, 0], atol=1e-3)), "nothing should be forgotten")
    share = float(np.mean((heard > 0.5) == (speaks > 0.5)))
    require(share > 0.9, "the detector should be right nearly always")
    print(
        f"\ncellar was killed at frame {_KILLED_AT}; {devices} went on: {_FRAMES} results in "
        f"order, the same as without the loss, {share:.0%} right"
    )


def _sound(random: np.random.Generator, frames: int) -> tuple[Floats, Floats]:
    """Energies [frames, bands], and whether somebody speaks: some frames in a row that are loud in
    the lower bands. Pauses of one frame, and single loud frames, are no change."""
    speaks = np.zeros(frames, np.float32)
    place = 10
    while place < frames:
        length = int(random.integers(15, 40))
        speaks[place : place + length] = 1
        place += length + int(random.integers(15, 40))
    loud = speaks.copy()
    flips = random.random(frames) < 0.08
    loud[flips] = 1 - loud[flips]
    shape = np.linspace(1.5, 0.1, _BANDS, dtype=np.float32)
    noise = random.normal(0, 0.3, (frames, _BANDS))
    return (loud[:, None] * shape + noise).astype(np.float32), speaks


def _heard(sound: Floats, weights: list[Floats]) -> Floats:
    """Both layers after each frame: [frames, 2 * width]."""
    short, long = np.zeros(_WIDTH, np.float32), np.zeros(_WIDTH, np.float32)
    found = []
    for frame in sound:
        short = np.tanh(frame @ weights[0] + short @ weights[1])
        long = np.tanh(short @ weights[2] + long @ weights[3])
        found.append(np.concatenate([short, long]))
    return np.stack(found)


def _written(folder: Path, weights: list[Floats], last: Floats) -> Path:
    net = Net()
    x = net.add("MatMul", "frame", weights[0])
    x = net.add("Add", x, net.add("MatMul", "short", weights[1]))
    short = net.add("Tanh", x, out="new_short")
    x = net.add("MatMul", short, weights[2])
    x = net.add("Add", x, net.add("MatMul", "long", weights[3]))
    long = net.add("Tanh", x, out="new_long")
    x = net.add("Concat", short, long, axis=1)
    net.add("Gemm", x, last[:-1], last[-1], out="voice")
    inputs: dict[str, list[int | str]] = {
        "frame": ["n", _BANDS],
        "short": ["n", _WIDTH],
        "long": ["n", _WIDTH],
    }
    return net.write(folder / "voice.onnx", inputs, ["voice", *STATE])
