"""A document page: one device finds where its digits are, another one reads them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import edge
from edge.demos.bundled import require
from edge.demos.small_nets import Floats, Net, placed, trained, with_one

_GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111", "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip
_ROWS, _COLUMNS, _HIGH, _WIDE = 6, 20, 7, 5
_NOISE = 0.15
_HIDDEN = 96


def run() -> None:
    """Both networks are trained here, on made-up digits, and written as ONNX files."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        finder, reader = _finder(Path(place), random), _reader(Path(place), random)
        with edge.Cluster.local(peers=2, threads=1) as cluster:
            one, two = (peer.name for peer in cluster.peers)
            page, _text = _page(random)
            crops = np.zeros((_ROWS * _COLUMNS, _HIGH * _WIDE), np.float32)
            with (
                cluster.load_graph(
                    finder, plan=placed(finder, [(one, None)]), sample={"page": page}
                ) as finds,
                cluster.load_graph(
                    reader, plan=placed(reader, [(two, None)]), sample={"crops": crops}
                ) as reads,
            ):
                pages = [_page(random) for _ in range(5)]
                found = finds.stream({"page": page} for page, _text in pages)

                def digits() -> Iterator[dict[str, Floats]]:
                    """What was found of a page goes on to be read, while the next one is looked
                    at."""
                    for (page, _text), result in zip(pages, found, strict=True):
                        assert isinstance(result, dict)
                        yield {"crops": _crops(page, result["inked"])}

                for (_pixels, text), result in zip(pages, reads.stream(digits()), strict=True):
                    assert isinstance(result, dict)
                    read = "".join(str(each) for each in result["scores"].argmax(axis=1))
                    print(f"  {read}")
                    require(read == text, f"the page says {text}")
    print(f"\n{one} found the digits of 5 pages, and {two} read all of them right")


def _glyph(digit: int) -> Floats:
    return np.array([[float(c) for c in row] for row in _GLYPHS[digit].split()], np.float32)


def _page(random: np.random.Generator) -> tuple[Floats, str]:
    """A page [1, 1, rows, columns] with digits in some places of a grid, and its digits."""
    page = np.zeros((1, 1, _ROWS * _HIGH, _COLUMNS * _WIDE), np.float32)
    text = ""
    for row in range(_ROWS):
        for column in range(_COLUMNS):
            if random.random() < 0.4:
                digit = int(random.integers(10))
                text += str(digit)
                top, left = row * _HIGH, column * _WIDE
                page[0, 0, top : top + _HIGH, left : left + _WIDE] = _glyph(digit)
    return (page + random.normal(0, _NOISE, page.shape)).astype(np.float32), text


def _crops(page: Floats, inked: Floats) -> Floats:
    """The places of the grid that have ink: [digits, pixels]."""
    cells = page[0, 0].reshape(_ROWS, _HIGH, _COLUMNS, _WIDE).transpose(0, 2, 1, 3)
    found: Floats = cells.reshape(-1, _HIGH * _WIDE)[inked.reshape(-1) > 0.5]
    return found


def _finder(folder: Path, random: np.random.Generator) -> Path:
    """How much ink a place of the grid has, made a yes or no by a trained line."""
    pages = [_page(random) for _ in range(20)]
    sums, wanted = [], []
    for page, _text in pages:
        cells = page[0, 0].reshape(_ROWS, _HIGH, _COLUMNS, _WIDE).mean(axis=(1, 3)).reshape(-1)
        sums.append(cells)
        wanted.append(cells > 0.2)
    line = trained(
        np.concatenate(sums)[:, None], np.concatenate(wanted)[:, None].astype(np.float32)
    )
    net = Net()
    mean = np.full((1, 1, _HIGH, _WIDE), 1 / (_HIGH * _WIDE), np.float32)
    x = net.add("Conv", "page", mean, strides=[_HIGH, _WIDE])
    net.add("Add", net.add("Mul", x, line[0]), line[1], out="inked")
    shape = [1, 1, _ROWS * _HIGH, _COLUMNS * _WIDE]
    return net.write(folder / "finder.onnx", {"page": shape}, ["inked"])


def _reader(folder: Path, random: np.random.Generator) -> Path:
    """Random features of a digit's pixels, and a trained last layer."""
    digits = random.integers(0, 10, 4000)
    pixels = np.stack([_glyph(int(each)).reshape(-1) for each in digits])
    pixels = (pixels + random.normal(0, _NOISE, pixels.shape)).astype(np.float32)
    first = random.normal(0, 0.4, (_HIGH * _WIDE + 1, _HIDDEN)).astype(np.float32)
    hidden = np.maximum(with_one(pixels) @ first, 0)
    last = trained(hidden, np.eye(10, dtype=np.float32)[digits])
    net = Net()
    x = net.add("Relu", net.add("Gemm", "crops", first[:-1], first[-1]))
    net.add("Gemm", x, last[:-1], last[-1], out="scores")
    return net.write(folder / "reader.onnx", {"crops": ["digits", _HIGH * _WIDE]}, ["scores"])
