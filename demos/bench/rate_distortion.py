"""How little weights could lose at a given number of bits, with the best code that there can be.

python -m edge.demos.bench.rate_distortion --append

Nothing is quantised here. Each matrix is given the noise of Shannon's bound: that of a code which
takes R bits for a Gaussian of variance s^2 and leaves D = s^2 2^(-2R) of it (the Gaussian test
channel: Cover and Thomas, Elements of Information Theory, 10.3). A code of steps takes a quarter of
a bit more for that; and here nothing but codes is counted, no scales.

Where nothing is known of inputs, all weights get R bits. Else the loss of an error E of a matrix is
thought to be tr(G E H E^T) / 2 per token, with H = E[x x^T] of its inputs and the diagonal matrix G
of E[g^2], g the gradients at its outputs (the Fisher information, in the factors of K-FAC: Martens
and Grosse, 2015). In the eigenvectors of H, one water level for all entries of all matrices
(reverse water-filling, the same book, 10.3.3) gives each its rate. That is what bits by matrix and
by row, and error feedback within rows (GPTQ), come to at best. H and G are those of the very text
that is read, which no quantiser knows. Weights that are trained again are not weights with noise;
of those this says nothing.

The model, its text and the loss are those of edge.demos.bench.quality; transformers computes it in
float32. What is looked up in the table of embeddings stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from edge.demos.bench.options import append_option, folder_option
from edge.demos.bench.quality import Logits, against, publish_losses, small_model

QUESTION = "how little weights could lose in so many bits"
BITS = (3.5, 5.46, 3.0, 4.0)
_HEAD = "lm_head"
_DRAWS = 2
"""Draws of what follows each token, from what the model expects: the gradients are of those."""
_SHARE_FOR_ALL = 0.2
"""Share of G that is the same for all outputs: a row of the head that never mattered comes to
matter by its error."""
_STEPS = 32
"""Steps of a doubling: how finely water levels are told apart."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated:
    """A matrix in the eigenvectors of what it is given."""

    entries: Array
    """[rows, columns], less `mean`."""
    by_row: Array
    """[rows], and by_column [columns]: their product is thought to be known as the variance of an
    entry."""
    by_column: Array
    row_weights: Array
    """[rows], and column_weights [columns]: nats for an error of 1 are their product."""
    column_weights: Array
    vectors: Array | None
    """[columns, columns]; None: columns are as they were."""
    mean: Array
    """[columns] of all rows, thought to be known."""

    def doublings(self) -> Array:
        """[rows, columns]: log2 of what is lost by an entry that is not sent at all, in nats."""
        tiny = np.float32(1e-30)
        rows = np.log2(self.by_row * self.row_weights + tiny)
        return np.asarray(rows[:, None] + np.log2(self.by_column * self.column_weights + tiny))

    def noisy(self, rates: Array, random: np.random.Generator) -> Array:
        """The matrix [rows, columns] as codes of these rates, in bits, would leave it."""
        kept = 1 - np.exp2(-2 * rates)
        found = random.standard_normal(self.entries.shape, np.float32)
        found *= np.sqrt(kept * (1 - kept))
        found *= np.sqrt(self.by_row)[:, None] * np.sqrt(self.by_column)
        found += kept * self.entries
        if self.vectors is not None:
            found = found @ self.vectors.T
        return np.asarray(found + self.mean, np.float32)


def rotated(
    weight: Array, inputs: tuple[Array, Array] | None = None, outputs: Array | None = None
) -> Rotated:
    """inputs: eigenvalues and eigenvectors of H; outputs: the diagonal of G. None: not known."""
    rows, columns = weight.shape
    mean = weight.mean(axis=0)
    entries = weight - mean
    row_weights, column_weights = np.full(rows, 0.5, np.float32), np.ones(columns, np.float32)
    vectors: Array | None = None
    if outputs is not None:
        same = _SHARE_FOR_ALL * outputs.mean()
        row_weights = ((1 - _SHARE_FOR_ALL) * outputs + same) / 2
    if inputs is not None:
        values, vectors = inputs
        column_weights = np.maximum(values, 0)
        entries = entries @ vectors
    squares = np.square(entries)
    by_row, by_column = squares.mean(axis=1), squares.mean(axis=0)
    return Rotated(
        entries=entries,
        by_row=by_row,
        by_column=by_column / max(float(by_row.mean()), 1e-30),
        row_weights=row_weights,
        column_weights=column_weights,
        vectors=vectors,
        mean=mean,
    )


def water_levels(matrices: Sequence[Rotated], bits: Sequence[float]) -> list[float]:
    """log2 of what each entry may lose, in nats, where the rates are `bits` bits in the mean."""
    low, high = -150, 50
    edges = np.arange(low, high + 1 / _STEPS, 1 / _STEPS)
    counts = np.zeros(len(edges) - 1, np.int64)
    for each in matrices:
        at = (np.clip(each.doublings(), low, high - 1) - low) * _STEPS
        counts += np.bincount(at.astype(np.int32).ravel(), minlength=len(counts))
    # The rates at an edge are half of how far each entry lies above it.
    above = np.append(np.cumsum(counts[::-1])[::-1], 0)
    height = np.append(np.cumsum(above[:0:-1])[::-1], 0) + above / 2
    mean_rates = height / (2 * _STEPS * counts.sum())
    return [float(np.interp(-each, -mean_rates, edges)) for each in bits]


class Simulation:
    """transformers' model, whose matrices are looked at and replaced."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        import transformers

        library: Any = transformers
        self._torch = torch
        self._model = library.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._model.requires_grad_(False)
        head = self._model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        self._modules: dict[str, Any] = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        self.weights: dict[str, Array] = {
            name: each.weight.numpy().copy() for name, each in self._modules.items()
        }

    def logits(self, tokens: list[int]) -> Logits:
        """float32 [tokens, vocab]."""
        with self._torch.inference_mode():
            found: Logits = self._model(self._torch.tensor([tokens])).logits[0].numpy()
        return found

    def replace(self, name: str, weight: Array) -> None:
        self._modules[name].weight.copy_(self._torch.from_numpy(weight))

    def known(self, windows: Sequence[list[int]]) -> dict[str, Rotated]:
        """Each matrix by its inputs and gradients in a text."""
        grams, squares = self.moments(windows)
        found: dict[str, Rotated] = {}
        for names, gram in grams.items():
            inputs = np.linalg.eigh(gram)
            for name in names:
                found[name] = rotated(self.weights[name], (inputs[0], inputs[1]), squares[name])
        return found

    def written(self, windows: int, tokens: int) -> list[list[int]]:
        """Texts that the model writes at random, from nothing, always the same."""
        torch = self._torch
        torch.manual_seed(0)
        begin = torch.full((windows, 1), self._model.config.bos_token_id)
        with torch.inference_mode():
            found: list[list[int]] = self._model.generate(
                begin,
                attention_mask=torch.ones_like(begin),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=tokens - 1,
                max_new_tokens=tokens - 1,
            ).tolist()
        return found

    def grams(self, windows: Sequence[list[int]]) -> dict[tuple[str, ...], Array]:
        """x^T x, by the names of the matrices that are given the same x."""
        given: dict[int, tuple[Any, list[str]]] = {}
        found: dict[tuple[str, ...], Any] = {}

        def looked_at(name: str) -> Any:
            def hook(_module: Any, arguments: tuple[Any], _result: Any) -> None:
                given.setdefault(id(arguments[0]), (arguments[0], []))[1].append(name)

            return hook

        hooks = [
            each.register_forward_hook(looked_at(name)) for name, each in self._modules.items()
        ]
        for window in windows:
            self.logits(window)
            for x, names in given.values():
                found[tuple(names)] = found.get(tuple(names), 0) + x[0].T @ x[0]
            given.clear()
        for each in hooks:
            each.remove()
        return {names: each.numpy() for names, each in found.items()}

    def moments(
        self, windows: Sequence[list[int]]
    ) -> tuple[dict[tuple[str, ...], Array], dict[str, Array]]:
        """E[x x^T], by the names of the matrices that are given the same; and E[g^2] by name.

        Of the head the second is known without drawing.
        """
        torch = self._torch
        given: dict[int, tuple[Any, list[str]]] = {}
        made: dict[str, Any] = {}
        grams: dict[tuple[str, ...], Any] = {}
        squares: dict[str, Any] = {}

        def looked_at(name: str) -> Any:
            def hook(_module: Any, arguments: tuple[Any], result: Any) -> None:
                given.setdefault(id(arguments[0]), (arguments[0], []))[1].append(name)
                made[name] = result

            return hook

        hooks = [
            each.register_forward_hook(looked_at(name)) for name, each in self._modules.items()
        ]
        random = torch.Generator().manual_seed(0)
        table = self._model.get_input_embeddings()
        for window in windows:
            first = table(torch.tensor([window])).requires_grad_(True)
            logits = self._model(inputs_embeds=first).logits[0]
            for x, names in given.values():
                rows = x.detach()[0]
                grams[tuple(names)] = grams.get(tuple(names), 0) + rows.T @ rows
            expected = logits.detach().softmax(-1)
            squares[_HEAD] = squares.get(_HEAD, 0) + (expected * (1 - expected)).sum(0)
            del made[_HEAD]
            for draw in range(_DRAWS):
                drawn = torch.multinomial(expected, 1, generator=random)[:, 0]
                loss = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
                gradients = torch.autograd.grad(
                    loss, list(made.values()), retain_graph=draw + 1 < _DRAWS
                )
                for name, each in zip(made, gradients, strict=True):
                    squares[name] = squares.get(name, 0) + each[0].square().sum(0) / _DRAWS
            given.clear()
            made.clear()
        for each in hooks:
            each.remove()
        count = sum(map(len, windows))
        return (
            {names: (each / count).numpy() for names, each in grams.items()},
            {name: (each / count).numpy() for name, each in squares.items()},
        )


class Trial:
    """What a model loses to what becomes of its matrices, in `windows`."""

    def __init__(
        self, checkpoint: Path, windows: NDArray[np.int64], *, question: str, keep: bool
    ) -> None:
        self.simulation = Simulation(checkpoint)
        self._windows = windows
        self._reference = np.stack(list(self._logits()))
        self._question = question
        self._keep = keep

    def tell(self, variant: str) -> None:
        """Publish what is lost with the matrices as they are now."""
        found = against(self._reference, self._logits(), self._windows)
        publish_losses(found, question=self._question, variant=variant, keep=self._keep)

    def _logits(self) -> Iterator[Logits]:
        return map(self.simulation.logits, self._windows.tolist())


def disturbed(
    simulation: Simulation,
    matrices: Mapping[str, Rotated],
    bits: float,
    level: float | None,
) -> None:
    """Gives the model the noise of `bits` bits in the mean; level: of the water, None: none."""
    random = np.random.default_rng(0)
    for name, each in matrices.items():
        rates = np.full(each.entries.shape, bits, np.float32)
        if level is not None:
            rates = np.maximum(0, each.doublings() - np.float32(level)) / 2
        simulation.replace(name, each.noisy(rates, random))


@click.command()
@click.option("--bits", type=float, multiple=True, default=BITS, show_default=True)
@folder_option
@append_option
def main(bits: tuple[float, ...], folder: Path, append: bool) -> None:
    """For each number of bits: mean KL, 99 % KL, same top."""
    path, windows = small_model(folder)
    trial = Trial(path, windows, question=QUESTION, keep=append)
    simulation = trial.simulation
    matrices = simulation.known(windows.tolist())
    for rate, level in zip(bits, water_levels(list(matrices.values()), bits), strict=True):
        disturbed(simulation, matrices, rate, level)
        trial.tell(f"{rate:g} bits, by what the text needs")
    matrices = {name: rotated(each) for name, each in simulation.weights.items()}
    for rate in bits:
        disturbed(simulation, matrices, rate, None)
        trial.tell(f"{rate:g} bits, the same for all weights")


if __name__ == "__main__":
    sys.exit(main())
