"""What ways to round keys and values would cost in quality, simulated, also those without a kernel.

python -m edge.demos.bench.kv_schemes --append

The model, its text and the loss are those of edge.demos.bench.quality; transformers computes it in
float32, and every layer's attention is given keys and values as a cache of the scheme would hold
them. Newest and first keys and values that a scheme leaves in floats are those of each query: so
the loss is that of answers token by token, whatever the chunks. Scales that are fixed beforehand
are chosen from the tokens that a peer measures while it loads; or from the text itself, which no
peer could know: what fixed scales lose at the very least.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from edge.demos.bench.options import append_option, folder_option
from edge.demos.bench.quality import WANTED, Logits, against, publish_losses, small_model
from edge.engine.kv_calibration import calibration_step
from edge.kernels.kv_cache import channel_cache, token_cache
from edge.kernels.rope.reference import rope
from edge.planning.load_options import CHUNK_TOKENS
from edge.protocol.step import StepLimits
from edge.weights.checkpoint import Checkpoint

QUESTION = "what ways to round keys and values would cost"
_GROUP = 32
_SHIFTS = 8
_ATTENTION = "edge_rounded"

Heads = NDArray[np.float32]
"""[KV heads, tokens, head size]."""
Round = Callable[[int, Heads], Heads]
"""By layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How keys and values are rounded, and how many of the newest and first tokens are not."""

    name: str
    keys: Round
    values: Round
    newest: int = 0
    first: int = 0


def as_they_are(_layer: int, x: Heads) -> Heads:
    return x


def per_token(bits: int) -> Round:
    """One scale for each token's head, as GPU peers have."""

    def rounded(_layer: int, x: Heads) -> Heads:
        codes, scales = token_cache.quantize_heads(x, bits=bits, group_size=x.shape[-1])
        return token_cache.dequantize_heads(codes, scales)

    return rounded


def in_ranges(bits: int, *, along_tokens: bool) -> Round:
    """Runs of 32 numbers go from their least to their largest: of a channel, or of a token.

    KIVI (Liu et al., 2024) has keys in runs of a channel, and values in runs of a token.
    """

    def rounded(_layer: int, x: Heads) -> Heads:
        along = x.swapaxes(1, 2) if along_tokens else x
        result = np.empty_like(along)
        for first in range(0, along.shape[-1], _GROUP):
            run = along[..., first : first + _GROUP]
            low, high = run.min(-1, keepdims=True), run.max(-1, keepdims=True)
            step = np.maximum((high - low) / (2**bits - 1), np.float32(1e-9))
            result[..., first : first + _GROUP] = np.rint((run - low) / step) * step + low
        return result.swapaxes(1, 2) if along_tokens else result

    return rounded


@dataclass(slots=True, kw_only=True)
class FixedScales:
    """One scale for each channel, chosen beforehand, as CPU peers have.

    rotated: channels are mixed before, so that none is much larger than others (QuaRot, Ashkboos et
    al., 2024). twice: of this number of channels of a head, those that lose most, the remainder has
    codes of its own, as a kernel could be given it in more channels.
    """

    bits: int
    may_clip: bool
    samples: Mapping[int, Heads]
    """By layer, what is measured."""
    rotated: bool = False
    twice: int = 0
    _scales: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    _in_two: dict[int, NDArray[np.bool_]] = field(default_factory=dict)

    def __call__(self, layer: int, x: Heads) -> Heads:
        if layer not in self._scales:
            sample = self._mixed(self.samples[layer]).swapaxes(0, 1)
            scales = channel_cache.choose_scales(sample, bits=self.bits, may_clip=self.may_clip)
            error = np.square(self._rounded(sample, scales) - sample).sum(axis=0)
            least = np.sort(error, axis=-1)[:, -self.twice, None] if self.twice else np.inf
            self._scales[layer], self._in_two[layer] = scales, error >= least
        scales, whole = self._scales[layer], self._mixed(x).swapaxes(0, 1)
        rounded = self._rounded(whole, scales)
        remainder = self._rounded(whole - rounded, scales / np.float32(14))
        rounded += np.where(self._in_two[layer], remainder, 0)
        return self._mixed(rounded.swapaxes(0, 1))

    def _rounded(self, x: Heads, scales: NDArray[np.float32]) -> NDArray[np.float32]:
        codes = channel_cache.quantize(x, scales, bits=self.bits)
        return channel_cache.dequantize(codes, scales, bits=self.bits)

    def _mixed(self, x: Heads) -> Heads:
        """By a Hadamard matrix, which is its own inverse."""
        if not self.rotated:
            return x
        matrix = np.ones((1, 1), np.float32)
        while len(matrix) < x.shape[-1]:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        return np.asarray(x @ (matrix / np.sqrt(len(matrix))), np.float32)


class Simulation:
    """transformers' model with an attention whose keys and values are rounded by a scheme."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        import transformers

        library: Any = transformers
        self._torch = torch
        self._scheme: Scheme | None = None
        self._seen: dict[int, tuple[Heads, Heads]] | None = None
        library.AttentionInterface.register(_ATTENTION, self._attend)
        self._model = library.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation=_ATTENTION
        )

    def seen(self, tokens: list[int]) -> dict[int, tuple[Heads, Heads]]:
        """Keys and values of each layer."""
        self._seen = {}
        self.logits(tokens, None)
        seen, self._seen = self._seen, None
        return seen

    def logits(self, tokens: list[int], scheme: Scheme | None) -> Logits:
        """float32 [tokens, vocab]."""
        self._scheme = scheme
        with self._torch.inference_mode():
            found: Logits = self._model(self._torch.tensor([tokens])).logits[0].numpy()
        return found

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, _mask: Any, **named: Any
    ) -> tuple[Any, None]:
        torch, layer = self._torch, module.layer_idx
        if self._seen is not None:
            self._seen[layer] = key[0].numpy(), value[0].numpy()
        tokens, group = query.shape[2], query.shape[1] // key.shape[1]
        at = torch.arange(tokens)
        later = at[None, :] > at[:, None]
        scheme = self._scheme or Scheme(name="", keys=as_they_are, values=as_they_are)
        exact = (at[None, :] > at[:, None] - scheme.newest) | (at[None, :] < scheme.first)
        rounded = (
            torch.from_numpy(np.ascontiguousarray(one(layer, x[0].numpy())))[None]
            for one, x in ((scheme.keys, key), (scheme.values, value))
        )
        key, value, coarse_key, coarse_value = (
            x.repeat_interleave(group, 1) for x in (key, value, *rounded)
        )
        scores = torch.where(
            exact, query @ key.transpose(-1, -2), query @ coarse_key.transpose(-1, -2)
        )
        weights = (named["scaling"] * scores).masked_fill(later, float("-inf")).softmax(-1)
        mixed = (weights * exact) @ value + (weights * ~exact) @ coarse_value
        return mixed.transpose(1, 2).contiguous(), None


def elsewhere(keys: Heads, frequencies: Sequence[float]) -> Heads:
    """Keys as they are, and turned to other places in the context, as peers measure them."""
    shifts = np.linspace(0, WANTED.window_tokens - keys.shape[1], _SHIFTS).astype(np.int64)
    angles = np.multiply.outer(shifts, np.asarray(frequencies, np.float32))[:, None]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    heads = keys.swapaxes(0, 1)
    turned = [rope(heads, c, s) for c, s in zip(cos, sin, strict=True)]
    return np.concatenate(turned).swapaxes(0, 1)


def schemes(
    simulation: Simulation,
    calibration: list[int],
    frequencies: Sequence[float],
    windows: list[list[int]],
) -> list[Scheme]:
    """What is compared; fixed scales are measured here. windows: the text itself."""
    seen = {
        layer: (elsewhere(keys, frequencies), values)
        for layer, (keys, values) in simulation.seen(calibration).items()
    }

    texts = [simulation.seen(window) for window in windows]
    known = {
        layer: tuple(np.concatenate(several, axis=1) for several in zip(*arrays, strict=True))
        for layer, arrays in {layer: [text[layer] for text in texts] for layer in seen}.items()
    }

    def fixed(
        bits: int,
        by: Mapping[int, tuple[Heads, ...]] = seen,
        *,
        rotated: bool = False,
        twice: int = 0,
    ) -> tuple[FixedScales, FixedScales]:
        keys, values = (
            FixedScales(
                bits=bits,
                may_clip=bool(number),
                samples={layer: arrays[number] for layer, arrays in by.items()},
                rotated=rotated,
                twice=twice,
            )
            for number in range(2)
        )
        return keys, values

    fixed_8, fixed_4 = fixed(8), fixed(4)
    rotated_4 = fixed(4, rotated=True)
    best_4, best_rotated_4 = fixed(4, known), fixed(4, known, rotated=True)
    best_6 = fixed(4, known, twice=32)
    by_channel, by_token = in_ranges(4, along_tokens=True), in_ranges(4, along_tokens=False)

    def in_both(name: str, *, newest: int = 0, first: int = 0) -> Scheme:
        return Scheme(name=name, keys=by_channel, values=by_token, newest=newest, first=first)

    return [
        Scheme(name="int8, a fixed scale for each channel", keys=fixed_8[0], values=fixed_8[1]),
        Scheme(name="int4, a fixed scale for each channel", keys=fixed_4[0], values=fixed_4[1]),
        *(
            Scheme(
                name="int4, a fixed scale for each channel, but "
                + (f"the newest {newest} and the first token" if newest else "the first token"),
                keys=fixed_4[0], values=fixed_4[1], newest=newest, first=1,
            )
            for newest in (0, 32, 64, 128)
        ),
        Scheme(
            name="int8 keys and int4 values, a fixed scale for each channel",
            keys=fixed_8[0], values=fixed_4[1],
        ),
        Scheme(
            name="int4, a fixed scale for each channel of rotated heads",
            keys=rotated_4[0], values=rotated_4[1],
        ),
        Scheme(
            name="int4, fixed scales of the text itself", keys=best_4[0], values=best_4[1]
        ),
        Scheme(
            name="values alone in int4, fixed scales of the text itself",
            keys=as_they_are, values=best_4[1],
        ),
        Scheme(
            name="values alone in int4, rotated, fixed scales of the text itself",
            keys=as_they_are, values=best_rotated_4[1],
        ),
        Scheme(
            name="6 bits, half of the channels twice in int4, fixed scales of the text itself",
            keys=best_6[0], values=best_6[1],
        ),
        Scheme(
            name="values alone in 6 bits, half of the channels twice in int4, fixed scales of the "
            "text itself",
            keys=as_they_are, values=best_6[1],
        ),
        Scheme(name="int4, a scale for each token's head", keys=per_token(4), values=per_token(4)),
        Scheme(name="int8 keys and int4 values, by token", keys=per_token(8), values=by_token),
        in_both("int4, in ranges"),
        in_both("int4, in ranges, but the first token", first=1),
        in_both("int4, in ranges, but the newest 32", newest=32),
        in_both("int4, in ranges, but the newest 32 and the first token", newest=32, first=1),
    ]  # fmt: skip


@click.command()
@click.option("--only", multiple=True, help="Schemes of these names.  [default: all]")
@folder_option
@append_option
def main(only: tuple[str, ...], folder: Path, append: bool) -> None:
    """A line for each scheme: mean KL, 99 % KL, same top."""
    path, windows = small_model(folder)
    with Checkpoint.open(path) as checkpoint:
        limits = StepLimits(
            context_tokens=WANTED.window_tokens,
            chunk_tokens=CHUNK_TOKENS,
            requests=1,
            cached_tokens=WANTED.window_tokens,
        )
        (entry,) = calibration_step(checkpoint.spec, limits).entries
        rotary = checkpoint.spec.attention.rotary
    simulation = Simulation(path)
    reference = np.stack([simulation.logits(window, None) for window in windows.tolist()])
    for scheme in schemes(
        simulation, list(entry.tokens), rotary.inverse_frequencies, windows.tolist()
    ):
        if only and scheme.name not in only:
            continue
        found = against(
            reference,
            (simulation.logits(window, scheme) for window in windows.tolist()),
            windows,
        )
        publish_losses(found, question=QUESTION, variant=scheme.name, keep=append)


if __name__ == "__main__":
    sys.exit(main())
