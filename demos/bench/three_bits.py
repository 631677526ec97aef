"""What codes of 3 bits would lose, which no kernel of ONNX Runtime has.

python -m edge.demos.bench.three_bits --append

Simulated: every matrix is rounded by what it is given, as edge.kernels.matmul_nbits.calibrated does
it (GPTQ), to codes of 2, 3, 4 or 8 bits in blocks with a scale and a zero point. Scales count as
float16, which is less than Edge's own kernels take. First all matrices in 3 bits; then, for a given
mean of bits, each matrix in the kind that pays most. What pays is known better here than `edge
quantize` knows it: by the Fisher information of each output (see edge.demos.bench.rate_distortion),
for which gradients are needed. Last, codes of no fixed length: even steps, the finer the more an
output and its inputs matter, and as many bits as their entropy is. They are of any range, so a
kernel would have to be given 8 bits for each. The model, its text and the loss are those of
edge.demos.bench.quality; inputs and gradients are those of a text that the model writes itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from edge.demos.bench.options import append_option, folder_option
from edge.demos.bench.quality import small_model
from edge.demos.bench.rate_distortion import Trial

QUESTION = "what codes of 3 bits would lose"
BITS = (3.5, 4.0)
_RANGES = (1.0, 0.88, 0.76, 0.64)
"""Parts of a block's range that its codes are tried on."""
_FITS = 2
_DAMPING = 0.05
_CHUNK_ROWS, _SAMPLE_ROWS = 2048, 96
_SHARE_FOR_ALL = 0.2
"""Share of the Fisher information that is the same for all outputs of a matrix."""
_STEP_BLOCK, _CLASSES = 64, 8
"""Columns whose codes have one step in a row; and how many distributions their codes may be of."""
_FIRST_LOSS = 1.5e-8
"""In nats, twelve times that of a weight in even steps, for the first try."""
_OWN_WINDOWS, _OWN_TOKENS = 24, 256

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kind:
    """Codes in blocks of columns, each with a scale of 16 bits and a zero point."""

    bits: int
    block_size: int

    @property
    def bits_per_weight(self) -> float:
        return self.bits + (16 + self.bits) / self.block_size


KINDS = tuple(Kind(bits, size) for bits in (2, 3, 4) for size in (32, 64, 128))
KINDS_WITHOUT_LOSS = (Kind(8, 64),)
"""Next to the others."""


class Inputs:
    """x^T x of what matrices are given, and what follows from it for rounding."""

    def __init__(self, gram: Array) -> None:
        self.gram = gram
        self._found: dict[int, list[tuple[slice, Array, Array, Array]]] = {}
        hessian = gram / np.diagonal(gram).mean(dtype=np.float64)
        hessian += np.eye(len(gram)) * _DAMPING
        self._root = np.linalg.cholesky(hessian[::-1, ::-1])[::-1, ::-1]
        self.importance = np.diagonal(hessian).astype(np.float32)

    def blocks(self, size: int) -> list[tuple[slice, Array, Array, Array]]:
        """For each block: how errors of earlier columns, and of earlier ones within it, are taken
        in by its columns; and its own part of the root."""
        if size not in self._found:
            found = []
            for start in range(0, len(self.gram), size):
                block = slice(start, min(start + size, len(self.gram)))
                own = self._root[block, block]
                before = np.linalg.solve(own.T, self._root[:start, block].T)
                within = np.triu(own / np.diagonal(own), 1)
                found.append((block, _single(before), _single(within), _single(own.T)))
            self._found[size] = found
        return self._found[size]


def _single(values: NDArray[np.float64]) -> Array:
    return np.ascontiguousarray(values, np.float32)


def rounded(weight: Array, inputs: Inputs, kind: Kind) -> Array:
    """What the codes stand for."""
    import torch

    made = np.empty_like(weight)
    importance = torch.from_numpy(inputs.importance)[:, None]
    for start in range(0, len(weight), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        errors = torch.from_numpy(np.ascontiguousarray(weight[rows].T))
        found = torch.empty_like(errors)
        for block, *parts in inputs.blocks(kind.block_size):
            before, within, root = map(torch.from_numpy, parts)
            wanted = errors[block] + before @ errors[: block.start]
            scales, zeros = _fitted(wanted, importance[block], kind.bits)
            codes, targets = torch.empty_like(wanted), wanted / scales
            exact, least, most = targets.clone(), -zeros, 2**kind.bits - 1 - zeros
            for column, code in enumerate(codes):
                torch.minimum(torch.maximum(targets[column].round(), least), most, out=code)
                targets[column + 1 :].addr_(within[column, column + 1 :], exact[column] - code)
            asked, given = root @ wanted, root @ codes
            scales = (asked * given).sum(0) / (given * given).sum(0).clamp(min=1e-20)
            found[block] = codes * scales.half().float()
            errors[block] -= found[block]
        made[rows] = found.T.numpy()
    return made


def _fitted(weights: Any, importance: Any, bits: int) -> tuple[Any, Any]:
    """Scales and zero points [rows] of blocks [columns, rows]."""
    import torch

    last = 2**bits - 1
    low, high = weights.amin(0).clamp(max=0), weights.amax(0).clamp(min=0)
    reach = ((high - low) / last).clamp(min=1e-12)
    zeros = (-low / reach).round().clamp(0, last)
    best, scales = torch.full_like(reach, -1), reach.clone()
    for part in _RANGES:
        scale = reach * part
        for _ in range(_FITS):
            codes = torch.minimum(torch.maximum((weights / scale).round(), -zeros), last - zeros)
            mixed = (weights * codes * importance).sum(0)
            fitted = mixed / (codes * codes * importance).sum(0).clamp(min=1e-20)
            better = mixed * fitted > best
            best = torch.where(better, mixed * fitted, best)
            scales = torch.where(better, fitted, scales)
            scale = torch.maximum(fitted, reach * 0.1)
    return scales, zeros


def in_even_steps(
    weight: Array, inputs: Inputs, squares: Array, loss: float
) -> tuple[Array, float]:
    """What codes of any range stand for, and how many bits all of them are.

    A step of s in row r and column k is thought to lose s^2 G[r] R[k, k]^2 / 24, where R is the
    root of what is known of inputs. `loss`, 12 times that, is the same for all weights. Counted are
    the entropy of codes, for each block in classes of rows, the class of each row, and its scale.
    """
    import torch

    rows_matter = (1 - _SHARE_FOR_ALL) * squares + _SHARE_FOR_ALL * squares.mean()
    unit = float(np.diagonal(inputs.gram).mean(dtype=np.float64))
    by_row = torch.from_numpy(np.sqrt(2 * loss / (rows_matter * unit)).astype(np.float32))
    made, bits = np.empty_like(weight), 0.0
    for start in range(0, len(weight), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        errors = torch.from_numpy(np.ascontiguousarray(weight[rows].T))
        found = torch.empty_like(errors)
        for block, *parts in inputs.blocks(_STEP_BLOCK):
            before, within, root = map(torch.from_numpy, parts)
            steps = by_row[rows] / root.diagonal().log().mean().exp()
            exact = (errors[block] + before @ errors[: block.start]) / steps
            codes, targets = torch.empty_like(exact), exact.clone()
            for column, code in enumerate(codes):
                torch.round(targets[column], out=code)
                targets[column + 1 :].addr_(within[column, column + 1 :], exact[column] - code)
            found[block] = codes * steps
            errors[block] -= found[block]
            order = codes.abs().sum(0).argsort()
            bits += sum(map(_entropy, codes[:, order].chunk(_CLASSES, 1)))
            bits += codes.shape[1] * float(np.log2(_CLASSES))
        made[rows] = found.T.numpy()
    return made, bits + 16 * len(weight)


def _entropy(codes: Any) -> float:
    """Entropy of all of them together, in bits."""
    _values, counts = codes.unique(return_counts=True)
    return float((counts * (codes.numel() / counts).log2()).sum())


def losses_by_kind(weight: Array, inputs: Inputs, squares: Array) -> dict[Kind, float]:
    """Nats that the model is thought to lose by each; squares: of gradients at the outputs."""
    rows = np.linspace(0, len(weight) - 1, min(len(weight), _SAMPLE_ROWS)).astype(np.int64)
    some = np.ascontiguousarray(weight[rows])
    found = dict.fromkeys(KINDS_WITHOUT_LOSS, 0.0)
    for kind in KINDS:
        if weight.shape[1] % kind.block_size == 0:
            error = some - rounded(some, inputs, kind)
            by_row = np.einsum("rc,rc->r", error @ inputs.gram, error)
            found[kind] = 0.5 * float(by_row @ squares[rows]) * len(weight) / len(rows)
    return found


def allotted(
    losses: Mapping[str, Mapping[Kind, float]], sizes: Mapping[str, int], bits: float
) -> dict[str, Kind]:
    """The kinds that together lose least with at most `bits` bits in the mean (by Lagrange)."""
    high = max(max(of.values()) for of in losses.values())
    low, found = 1e-18 * high, dict[str, Kind]()
    for _ in range(100):
        price = (low * high) ** 0.5

        def cost(name: str, kind: Kind, price: float = price) -> float:
            return losses[name][kind] + price * kind.bits_per_weight * sizes[name]

        tried = {name: min(of, key=lambda kind: cost(name, kind)) for name, of in losses.items()}
        if mean_bits(tried, sizes) > bits:
            low = price
        else:
            high, found = price, tried
    return found


def mean_bits(kinds: Mapping[str, Kind], sizes: Mapping[str, int]) -> float:
    """Mean bits of a weight, scales included."""
    total = sum(kind.bits_per_weight * sizes[name] for name, kind in kinds.items())
    return total / sum(sizes.values())


@click.command()
@click.option("--bits", type=float, multiple=True, default=BITS, show_default=True)
@folder_option
@append_option
def main(bits: tuple[float, ...], folder: Path, append: bool) -> None:
    """Mean KL, 99 % KL and same top: with 3 bits everywhere, and for each number of bits."""
    path, windows = small_model(folder)
    trial = Trial(path, windows, question=QUESTION, keep=append)
    simulation = trial.simulation
    grams, squares = simulation.moments(simulation.written(_OWN_WINDOWS, _OWN_TOKENS))
    inputs = {
        name: each for names, gram in grams.items() for each in [Inputs(gram)] for name in names
    }
    sizes = {name: weight.size for name, weight in simulation.weights.items()}

    def tell(how: str, kinds: Mapping[str, Kind]) -> None:
        for name, weight in simulation.weights.items():
            simulation.replace(name, rounded(weight, inputs[name], kinds[name]))
        trial.tell(f"{how}, {mean_bits(kinds, sizes):.2f} bits a weight")

    tell("all in 3 bits, blocks of 64", dict.fromkeys(sizes, Kind(3, 64)))
    losses = {
        name: losses_by_kind(weight, inputs[name], squares[name])
        for name, weight in simulation.weights.items()
    }
    for number in bits:
        tell("2, 3, 4 and 8 bits where they pay most", allotted(losses, sizes, number))
    loss = _FIRST_LOSS

    def coded() -> float:
        """Replaces all; bits of a weight in the mean."""
        total = 0.0
        for name, weight in simulation.weights.items():
            made, several = in_even_steps(weight, inputs[name], squares[name], loss)
            simulation.replace(name, made)
            total += several
        return total / sum(sizes.values())

    loss *= 4 ** (coded() - bits[0])
    trial.tell(f"entropy of even steps, {coded():.2f} bits a weight")


if __name__ == "__main__":
    sys.exit(main())
