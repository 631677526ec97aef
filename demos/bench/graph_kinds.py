"""Graphs of several kinds with random weights, in which one input takes a core some tens of
milliseconds, and few weights, which are sent over slow links."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.demos.small_nets import Floats, Net

MIDDLE = "middle"
"""The tensor in each graph behind which about half of its time is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A graph that can be written."""

    words: str
    write: Callable[[Path], Path]
    shape: tuple[int, ...]
    """Shape of its only input, x."""

    def inputs(self, seed: int) -> dict[str, Floats]:
        """An input."""
        return {"x": np.random.default_rng(seed).normal(0, 1, self.shape).astype(np.float32)}


class _Layers(Net):
    """Layers with random weights that keep the size of values."""

    def __init__(self) -> None:
        super().__init__()
        self._random = np.random.default_rng(0)

    def weight(self, *shape: int, fan: int) -> Floats:
        return self._random.normal(0, fan**-0.5, shape).astype(np.float32)

    def bytes(self, *shape: int) -> NDArray[np.int8]:
        return self._random.integers(-100, 100, shape).astype(np.int8)

    def conv(self, x: str, wide: int, narrow: int, stride: int = 1, size: int = 3) -> str:
        """To `wide` channels from `narrow`, with an activation."""
        weight = self.weight(wide, narrow, size, size, fan=size * size * narrow // 2)
        pads, bias = [size // 2] * 4, np.zeros(wide, np.float32)
        x = self.add("Conv", x, weight, bias, pads=pads, strides=[stride] * 2)
        return self.add("Relu", x)

    def block(self, x: str, width: int, out: str | None = None) -> str:
        """Two convolutions around which x goes, too."""
        y = self.conv(self.conv(x, width, width), width, width)
        return self.add("Relu", self.add("Add", x, y), out=out)

    def norm(self, x: str, width: int) -> str:
        ones = np.ones(width, np.float32)
        return self.add("LayerNormalization", x, ones, np.zeros_like(ones))

    def product(self, x: str, *shape: int, out: str | None = None) -> str:
        return self.add("MatMul", x, self.weight(*shape, fan=shape[0]), out=out)


def _cnn(path: Path) -> Path:
    """A residual network: stages of 32 to 256 channels, with half of the pixels each way."""
    net = _Layers()
    x, width = net.conv("x", 32, 3, stride=2, size=7), 32
    for number in range(7):
        if number and number % 2 == 0:
            x = net.conv(x, 2 * width, width, stride=2)
            width *= 2
        x = net.block(x, width, MIDDLE if number == 3 else None)
    x = net.add("Flatten", net.add("GlobalAveragePool", x))
    net.product(x, width, 100, out="y")
    return net.write(path, {"x": _CNN}, ["y"])


def _encoder(path: Path, width: int = 192, heads: int = 4, layers: int = 6) -> Path:
    """A transformer encoder over rows that are embedded already."""
    net, count = _Layers(), _ENCODER[1]
    x = "x"
    for layer in range(layers):
        n, parts = net.norm(x, width), []
        for which in range(3):
            part = net.product(n, width, width)
            split = np.array([1, count, heads, width // heads])
            perm = [0, 2, 3, 1] if which == 1 else [0, 2, 1, 3]
            parts.append(net.add("Transpose", net.add("Reshape", part, split), perm=perm))
        scale = np.float32((width // heads) ** -0.5)
        scores = net.add("Mul", net.add("MatMul", parts[0], parts[1]), np.asarray(scale))
        mixed = net.add("MatMul", net.add("Softmax", scores, axis=-1), parts[2])
        mixed = net.add("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = net.add("Reshape", mixed, np.array([1, count, width]))
        x = net.add("Add", x, net.product(mixed, width, width))
        f = net.product(net.norm(x, width), width, 4 * width)
        f = net.product(net.add("Mul", f, net.add("Sigmoid", f)), 4 * width, width)
        x = net.add("Add", x, f, out=MIDDLE if layer == layers // 2 - 1 else None)
    net.add("ReduceMean", x, axes=[1], out="y")
    return net.write(path, {"x": _ENCODER}, ["y"])


def _branches(path: Path, width: int = 64) -> Path:
    """A detector: one stem, and two towers for places and for kinds of things."""
    net = _Layers()
    stem = net.conv(net.conv("x", 32, 3, stride=2, size=5), width, 32, stride=2)
    for tower in ("places", "kinds"):
        x = stem
        for _ in range(3):
            x = net.block(x, width)
        weight = net.weight(8, width, 1, 1, fan=width)
        net.add("Conv", x, weight, out=tower)
        if tower == "places":
            net.add("Identity", tower, out=MIDDLE)
    return net.write(path, {"x": _BRANCHES}, [MIDDLE, "kinds"])


def _recurrent(path: Path, width: int = 192, layers: int = 8) -> Path:
    """LSTMs one after the other."""
    net = _Layers()
    x = "x"
    for layer in range(layers):
        weights = [net.weight(1, 4 * width, width, fan=width) for _ in range(2)]
        x = net.add("LSTM", x, *weights, hidden_size=width)
        x = net.add("Squeeze", x, np.array([1]), out=MIDDLE if layer == layers // 2 - 1 else None)
    net.product(x, width, 8, out="y")
    return net.write(path, {"x": _RECURRENT}, ["y"])


def _quantised(path: Path, width: int = 64, layers: int = 12) -> Path:
    """Convolutions in 8 bits between QuantizeLinear and DequantizeLinear."""
    net = _Layers()
    scale, zero = np.asarray(np.float32(0.05)), np.asarray(np.uint8(128))
    x = net.add("QuantizeLinear", net.conv("x", width, 3, stride=2), scale, zero)
    for layer in range(layers):
        own = np.full(width, 2e-3, np.float32), np.zeros(width, np.int8)
        w = net.add("DequantizeLinear", net.bytes(width, width, 3, 3), *own, axis=0)
        y = net.add("Conv", net.add("DequantizeLinear", x, scale, zero), w, pads=[1] * 4)
        name = MIDDLE if layer == layers // 2 - 1 else None
        x = net.add("QuantizeLinear", net.add("Relu", y), scale, zero, out=name)
    x = net.add("GlobalAveragePool", net.add("DequantizeLinear", x, scale, zero))
    net.product(net.add("Flatten", x), width, 10, out="y")
    return net.write(path, {"x": _QUANTISED}, ["y"])


def _layers(layers: int) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        """Products and activations."""
        net, width = _Layers(), _DENSE[1]
        x = "x"
        for layer in range(layers):
            name = "y" if layer == layers - 1 else MIDDLE if layer == layers // 2 - 1 else None
            x = net.add("Tanh", net.product(x, width, width), out=name)
        return net.write(path, {"x": _DENSE}, ["y"])

    return write


_CNN, _ENCODER, _BRANCHES = (1, 3, 256, 256), (1, 576, 192), (1, 3, 256, 256)
_RECURRENT, _QUANTISED, _DENSE = (400, 1, 192), (1, 3, 128, 128), (128, 256)

KINDS: Mapping[str, Kind] = {
    "cnn": Kind(words="a residual network", write=_cnn, shape=_CNN),
    "encoder": Kind(words="a transformer encoder, 6 layers", write=_encoder, shape=_ENCODER),
    "branches": Kind(words="a stem with two towers", write=_branches, shape=_BRANCHES),
    "recurrent": Kind(words="8 LSTMs over 400 rows", write=_recurrent, shape=_RECURRENT),
    "quantised": Kind(words="12 convolutions in 8 bits", write=_quantised, shape=_QUANTISED),
    "small": Kind(words="60 products of 128 rows", write=_layers(60), shape=_DENSE),
    "tiny": Kind(words="2 products of 128 rows", write=_layers(2), shape=_DENSE),
}


def picture_net(path: Path, width: int = 32, layers: int = 6) -> Path:
    """Convolutions over a picture of any size. A pixel of y depends on `layers` + 1 around it."""
    net = _Layers()
    x = net.conv("x", width, 3)
    for _ in range(layers - 1):
        x = net.conv(x, width, width)
    net.add("Conv", x, net.weight(3, width, 3, 3, fan=9 * width), pads=[1] * 4, out="y")
    return net.write(path, {"x": (1, 3, "height", "width")}, ["y"])


def written(name: str, folder: Path) -> Path:
    """The file of a kind's graph; made if it is not there."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        KINDS[name].write(path)
    return path
