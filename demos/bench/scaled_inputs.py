"""Whether inputs that are scaled before a matrix is rounded (AWQ) lose less, with GPTQ or without.

python -m edge.demos.bench.scaled_inputs --append

AWQ (Lin et al., 2023) multiplies the columns of a matrix by what their inputs are like to some
power, rounds, and divides the inputs by it: in the norm before, in the rows of "up" and in those of
"value", at no cost. The power is the one of which sampled rows lose least. Simulated: a matrix here
has its columns divided again, so that all of a model is what it would be.

Kinds of matrices are those of int4. The model, its text and the loss are those of
edge.demos.bench.quality; transformers computes it in float32. What inputs are like is summed up
over a text that the model writes at random, as `edge quantize` has it do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from edge.demos.bench.options import append_option, folder_option
from edge.demos.bench.quality import small_model
from edge.demos.bench.rate_distortion import Trial
from edge.kernels.matmul_nbits.calibrated import quantize_calibrated
from edge.kernels.matmul_nbits.reference import dequantize, quantize
from edge.models.attention import Attention
from edge.models.spec import TABLES, ModelSpec, tensor_shapes
from edge.weights.block_matrices import Blocks
from edge.weights.checkpoint import Checkpoint
from edge.weights.integer_formats import int4

QUESTION = "whether scaling inputs as AWQ does loses less"
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
_SAMPLE_ROWS = 256
_OWN_WINDOWS, _OWN_TOKENS = 12, 256

Array = NDArray[np.float32]


def kinds_of(checkpoint: Checkpoint) -> dict[str, Blocks]:
    """What int4 holds each matrix in, by the name of its module."""
    spec = checkpoint.spec
    encoding = int4(spec, None)
    found: dict[str, Blocks] = {}
    for role, shape in tensor_shapes(spec).items():
        if len(shape) == 2 and role not in TABLES:
            grade = encoding.grades[int(role.split(".")[1])] if role.startswith("layers.") else 0
            kind = encoding.recipe.kind(role, grade)
            assert isinstance(kind, Blocks)
            name = "lm_head" if role == "head" else checkpoint.tensor_name(role)
            found[name.removesuffix(".weight")] = kind
    return found


def rounded(weight: Array, kind: Blocks, gram: Array | None) -> Array:
    """gram: of its inputs, for who knows them."""
    bits, block_size, zero_points = kind.bits, kind.block_size, kind.zero_points
    if gram is None:
        made = quantize(weight, bits=bits, block_size=block_size, zero_points=zero_points)
    else:
        made = quantize_calibrated(
            weight, [gram], bits=bits, block_size=block_size, zero_points=zero_points
        )
    return dequantize(made)


def factors(squares: Array, power: float) -> Array:
    """Factors of columns whose inputs have these mean squares."""
    least = 1e-6 * float(squares.mean())
    return np.asarray(np.maximum(squares, least) ** (power / 2), np.float32)


def best_factors(
    weights: Mapping[str, Array], kinds: Mapping[str, Blocks], gram: Array, spec: ModelSpec
) -> Array:
    """Those that these matrices, which are given the same, lose least with when rounded alone."""
    squares = np.diagonal(gram).copy()
    if any(name.endswith("o_proj") for name in weights):
        # Rows of "value" take them in, which the query heads of a group share.
        mixer = spec.kinds[0].mixer
        assert isinstance(mixer, Attention)
        heads = squares.reshape(mixer.num_kv_heads, -1, mixer.head_size)
        heads[:] = heads.mean(axis=1, keepdims=True)

    def loss(power: float) -> float:
        by = factors(squares, power)
        total = 0.0
        for name, weight in weights.items():
            some = weight[:: max(1, len(weight) // _SAMPLE_ROWS)]
            error = some - rounded(some * by, kinds[name], None) / by
            total += float(np.vdot(error @ gram, error)) * len(weight) / len(some)
        return total

    return factors(squares, min(POWERS, key=loss))


@click.command()
@folder_option
@append_option
def main(folder: Path, append: bool) -> None:
    """Mean KL, 99 % KL and same top, of rounding with and without scales, alone and by inputs."""
    path, windows = small_model(folder)
    with Checkpoint.open(path) as checkpoint:
        kinds, spec = kinds_of(checkpoint), checkpoint.spec
    trial = Trial(path, windows, question=QUESTION, keep=append)
    simulation = trial.simulation
    grams = simulation.grams(simulation.written(_OWN_WINDOWS, _OWN_TOKENS))
    found = {
        names: best_factors({name: simulation.weights[name] for name in names}, kinds, gram, spec)
        for names, gram in grams.items()
    }
    for by_inputs in (False, True):
        for is_scaled in (False, True):
            for names, gram in grams.items():
                by = found[names] if is_scaled else np.ones(len(gram), np.float32)
                known = gram / np.outer(by, by) if by_inputs else None
                for name in names:
                    made = rounded(simulation.weights[name] * by, kinds[name], known)
                    simulation.replace(name, made / by)
            variant = "by inputs, as edge quantize" if by_inputs else "alone, as int4"
            variant += ", inputs scaled" if is_scaled else ""
            trial.tell(variant)


if __name__ == "__main__":
    sys.exit(main())
