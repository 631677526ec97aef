"""Draws what weight formats cost in quality against how fast they decode, from results.csv.

python -m tests.support.quality_picture

Writes docs/quality.svg, which follows the reader's light or dark scheme. Loss is of SmolLM2, speed
of another model: on so small a one, other things than its weights take the time.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from edge.demos.bench.quality import QUESTION as LOSS_QUESTION
from edge.demos.bench.results import RESULTS

SPEED_QUESTION, YARDSTICK = "how fast a weight format decodes", "Q4_K_M"
"""Speeds are old rows: METHODOLOGY.md says which commit has their script."""

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "quality.svg"
_SAME_KINDS = {"Edge int4, calibrated": "Edge int4, fast"}
"""Formats whose matrices are of the same kinds are as fast."""
_TWICE = "Edge int4 in blocks of 64, fast"
"""What int4 is anyhow."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 470, 64, 24, 20, 56
_LEAST_KL, _MOST_KL = 0.002, 8.0
_LEAST_RATIO, _MOST_RATIO = 0.4, 1.6
_STYLE = """
text { font: 12px sans-serif; fill: #24292f } .axis { stroke: #8c959f } .grid { stroke: #d8dee4 }
.edge { fill: #0969da } .llama { fill: #bc4c00 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .axis { stroke: #6e7681 } .grid { stroke: #30363d }
.edge { fill: #58a6ff } .llama { fill: #f0883e } }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One format: its loss in nats, and how fast it decodes in units of the yardstick."""

    name: str
    mean_kl: float
    ratio: float

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("Edge ")

    @property
    def label(self) -> str:
        short = self.name.removeprefix("Edge ").removeprefix("llama.cpp ").partition(" (")[0]
        short = short.removesuffix(", fast").replace(" in blocks of ", "/")
        return short.replace(", calibrated", " by edge quantize")


def points() -> list[Point]:
    """Points of every format that has both figures, with packed weights: the newest ones."""
    with RESULTS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    first_order = [row for row in rows if "another order" not in row["model"]]
    losses = _newest(first_order, LOSS_QUESTION, "mean KL")
    ratios = _newest(rows, SPEED_QUESTION, f"decode / llama.cpp {YARDSTICK}")
    return [
        Point(name=name, mean_kl=loss, ratio=ratios[twin])
        for name, loss in losses.items()
        if name != _TWICE and (twin := _SAME_KINDS.get(name, name)) in ratios
    ]


def _newest(rows: Iterable[dict[str, str]], question: str, metric: str) -> dict[str, float]:
    return {
        row["variant"]: float(row["p50"])
        for row in rows
        if (row["question"], row["metric"]) == (question, metric)
    }


def _x(ratio: float) -> float:
    share = (ratio - _LEAST_RATIO) / (_MOST_RATIO - _LEAST_RATIO)
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(mean_kl: float) -> float:
    share = math.log(mean_kl / _LEAST_KL) / math.log(_MOST_KL / _LEAST_KL)
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def drawing(found: Iterable[Point]) -> str:
    """An SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        "<title>Loss of weight formats against their decoding speed</title>",
        f"<style>{_STYLE}</style>",
    ]
    for kl in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0):
        y = _y(kl)
        lines.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{kl:g}</text>')
    for tenths in range(4, 17):
        x = _x(tenths / 10)
        lines.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        )
        lines.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
            f"{tenths / 10:g}</text>"
        )
    bottom = _HEIGHT - _BOTTOM
    lines += [
        f'<path class="axis" fill="none" d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}"/>',
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 16}" text-anchor="end">decoding speed of W, '
        f"in units of llama.cpp with {YARDSTICK} (right is better)</text>",
        f'<text x="{_LEFT + 8}" y="{_TOP + 14}">mean KL of SmolLM2, nats (down is better)</text>',
        f'<circle class="edge" cx="{_LEFT + 14}" cy="{_HEIGHT - 20}" r="5"/>',
        f'<text x="{_LEFT + 24}" y="{_HEIGHT - 16}">Edge</text>',
        f'<circle class="llama" cx="{_LEFT + 74}" cy="{_HEIGHT - 20}" r="5"/>',
        f'<text x="{_LEFT + 84}" y="{_HEIGHT - 16}">llama.cpp</text>',
    ]
    for point in found:
        x, y = _x(point.ratio), _y(point.mean_kl)
        kind = "edge" if point.is_ours else "llama"
        lines.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        label_y = y - 9 if point.is_ours else y + 18
        lines.append(
            f'<text x="{x:.1f}" y="{label_y:.1f}" text-anchor="middle">{escape(point.label)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(drawing(points()), encoding="utf-8")


if __name__ == "__main__":
    main()
