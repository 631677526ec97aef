"""The quality loss of a weight format: a text is read twice, in two formats.

The reference's logits are in an unnamed file on disk, which never outlives this process.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from edge.concurrency.blocking import run_blocking
from edge.errors import CheckpointError, RequestError
from edge.host.free_memory import format_size
from edge.option_fields import checks_calls, option
from edge.partition import Plan
from edge.planning.load_options import LoadOptions
from edge.progress import Progress
from edge.studies.logit_statistics import Positions, compare, figures, joined
from edge.studies.study import Study
from edge.studies.text_windows import bundled_text, windows_of
from edge.weights.checkpoint import Checkpoint
from edge.weights.format_sizes import bytes_per_weight
from edge.weights.formats import AS_STORED, WeightFormat

DECODE_PROMPT_TOKENS, DECODE_TOKENS = 16, 32
"""The lengths of prompt and reply for the measurement of speed."""

_SPARE_DISK_BYTES = 256 << 20


@checks_calls
@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions:
    """The amount of text to read. Raises RequestError for values out of range."""

    windows: int = option(
        6,
        at_least=1,
        at_most=1024,
        help="Pieces that the text is read in, each from an empty context.",
    )
    window_tokens: int = option(
        384,
        at_least=64,
        at_most=2048,
        help="Length of each.",
    )

    @property
    def positions(self) -> int:
        """The number of predicted tokens: all of a window but its first."""
        return self.windows * (self.window_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatQuality:
    """One model in one format, compared with the reference."""

    model: str
    """Name of the checkpoint's folder."""
    format: str
    perplexity: float
    """exp of the mean negative log probability of the tokens that followed."""
    mean_kl: float
    """Mean of KL(reference || this) over the positions, in nats; 0 for the reference itself."""
    p99_kl: float
    """The 99th percentile of the KL divergence over positions, in nats."""
    same_top: float
    """The share of positions with the reference's most likely token, 0 to 1."""
    bytes_per_weight: float
    """Mean over the matrices that every token is multiplied with, as stored, scales included."""
    tokens_per_s: float
    """Decode speed of one short reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The quality loss of a format on one text."""

    windows: int
    window_tokens: int
    positions: int
    """The number of tokens that both predicted."""
    reference: FormatQuality
    measured: FormatQuality

    def __repr__(self) -> str:
        own, far = self.measured, f"KL {self.measured.mean_kl:.4g} from {self.reference.format}"
        return f"<Quality of {own.model} in {own.format}: {far} over {self.positions} tokens>"

    def to_json(self) -> dict[str, Any]:
        """Built-in types only."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One side of the comparison."""

    path: Path
    options: LoadOptions
    format: str
    bytes_per_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """The checked inputs of a comparison."""

    reference: _Side
    measured: _Side
    windows: tuple[tuple[int, ...], ...]
    vocab_size: int

    @property
    def window_bytes(self) -> int:
        """Bytes of the logits of one window."""
        return (len(self.windows[0]) - 1) * self.vocab_size * np.dtype(np.float32).itemsize


async def measure_quality(study: Study, wanted: QualityOptions, *, against: str | Path) -> Quality:
    """Measure the reference first, then the model with the options; see `AsyncCluster.quality`."""
    task = await run_blocking(partial(_prepare, study, wanted, against=against))
    opening = partial(_open_nameless, study.cache_root, len(task.windows) * task.window_bytes)
    with await run_blocking(opening, discard=lambda file: file.close()) as file:
        reference = await _run(study, task, task.reference, file)
        file.seek(0)
        measured = await _run(study, task, task.measured, file)
    return Quality(
        windows=wanted.windows,
        window_tokens=wanted.window_tokens,
        positions=wanted.positions,
        reference=reference,
        measured=measured,
    )


async def _run(study: Study, task: _Comparison, side: _Side, file: IO[bytes]) -> FormatQuality:
    """Load one side, read all windows, decode a little, and free it."""
    parts: list[Positions] = []
    total = len(task.windows) * task.window_bytes
    async with await study.load(side.path, side.options) as model:
        with study.bars() as on_progress:
            for done, window in enumerate(task.windows):
                on_progress(_progress(done * task.window_bytes, total))
                # No token follows the last one.
                logits = (await model.logits(window))[:-1]
                take = _keep_window if side is task.reference else _compare_window
                parts.append(await run_blocking(partial(take, file, logits, window[1:])))
            on_progress(_progress(total, total))
        reply = await model.generate(
            task.windows[0][:DECODE_PROMPT_TOKENS],
            max_new_tokens=DECODE_TOKENS,
            ignore_eos=True,
        )
        name = model.name
    found = figures(joined(parts))
    return FormatQuality(
        model=name,
        format=side.format,
        perplexity=found.perplexity,
        mean_kl=found.mean_kl,
        p99_kl=found.p99_kl,
        same_top=found.same_top,
        bytes_per_weight=side.bytes_per_weight,
        tokens_per_s=reply.tokens_per_s,
    )


def _progress(done: int, total: int) -> Progress:
    return Progress(phase="evaluate", peer="", done=done, total=total)


def _keep_window(
    file: IO[bytes], logits: NDArray[np.float32], next_tokens: Sequence[int]
) -> Positions:
    """The statistics of one window of the reference; its logits are appended to the file."""
    logits.tofile(file)  # all of it: a plain write ends at 2 GiB
    return compare(None, logits, next_tokens)


def _compare_window(
    file: IO[bytes], logits: NDArray[np.float32], next_tokens: Sequence[int]
) -> Positions:
    """The statistics of one window against the reference's logits from the file."""
    kept = np.fromfile(file, np.float32, logits.size).reshape(logits.shape)
    return compare(kept, logits, next_tokens)


def _open_nameless(folder: Path, nbytes: int) -> IO[bytes]:
    """A file that vanishes when it is closed, or when this process ends in any way."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if nbytes + _SPARE_DISK_BYTES > free:
        raise RequestError(
            f"the reference's logits take {format_size(nbytes)} in {folder}, and "
            f"{format_size(free)} are free there",
            remedy="ask for fewer or shorter windows",
        )
    # Unbuffered, so that numpy reads from the file's position.
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _prepare(study: Study, wanted: QualityOptions, *, against: str | Path) -> _Comparison:
    """Check what can be checked before a load. Raises RequestError and CheckpointError."""
    context_tokens = study.options.context_tokens or wanted.window_tokens
    options = replace(study.options, context_tokens=context_tokens)
    same = against == "float32"
    reference_options = replace(
        options,
        dtype="float32",
        kv_dtype="float32",
        wire="float32",
        lora=options.lora if same else None,
        # A manual plan was made for this format: float32 may not fit it.
        plan="auto" if isinstance(options.plan, Plan) else options.plan,
    )
    with Checkpoint.open(study.path, lora=options.lora) as checkpoint:
        if options.limits(checkpoint.spec).context_tokens < wanted.window_tokens:
            raise RequestError(
                f"windows of {wanted.window_tokens} tokens do not fit a context of "
                f"{options.context_tokens}",
                remedy="ask for shorter ones",
            )
        windows = _windows(checkpoint, study.text, wanted)
        measured = _side(checkpoint, options)
        if same:
            reference = _side(checkpoint, reference_options)
        else:
            with Checkpoint.open(against) as other:
                _require_same_vocabulary(checkpoint, other, windows, study.text, wanted)
                reference_options.limits(other.spec)
                reference = _side(other, reference_options)
        return _Comparison(
            reference=reference,
            measured=measured,
            windows=windows,
            vocab_size=checkpoint.spec.vocab_size,
        )


def _side(checkpoint: Checkpoint, options: LoadOptions) -> _Side:
    weight_format = options.weight_format(checkpoint)
    return _Side(
        path=checkpoint.path,
        options=options,
        format=format_name(weight_format, options),
        bytes_per_weight=bytes_per_weight(checkpoint.spec, weight_format),
    )


def _windows(
    checkpoint: Checkpoint, text: str | None, wanted: QualityOptions
) -> tuple[tuple[int, ...], ...]:
    if not checkpoint.has_tokenizer:
        raise CheckpointError(
            f"{checkpoint.path} has no tokenizer to read a text with",
            remedy="put tokenizer.json there",
        )
    return windows_of(
        checkpoint.tokenizer.encode,
        bundled_text() if text is None else text,
        windows=wanted.windows,
        window_tokens=wanted.window_tokens,
    )


def _require_same_vocabulary(
    checkpoint: Checkpoint,
    other: Checkpoint,
    windows: tuple[tuple[int, ...], ...],
    text: str | None,
    wanted: QualityOptions,
) -> None:
    """Raises RequestError if the two checkpoints differ in a token."""
    if other.spec.vocab_size != checkpoint.spec.vocab_size:
        raise RequestError(
            f"{other.name} has a vocabulary of {other.spec.vocab_size} tokens and "
            f"{checkpoint.name} one of {checkpoint.spec.vocab_size}",
            remedy="compare with a checkpoint of the same vocabulary",
        )
    if other.has_tokenizer and _windows(other, text, wanted) != windows:
        raise RequestError(
            f"{other.name} and {checkpoint.name} make other tokens of the same text",
            remedy="compare with a checkpoint of the same vocabulary",
        )


def format_name(weight_format: WeightFormat, options: LoadOptions) -> str:
    """The options that change results, in words."""
    parts = [weight_format.name]
    if weight_format.recipe.usual.bits is not None:
        if weight_format.name != AS_STORED and options.block_size is not None:
            parts = [f"{weight_format.name} in blocks of {options.block_size}"]
        parts.append(weight_format.accuracy)
    if options.kv_dtype != "float32":
        parts.append(f"KV {options.kv_dtype}")
    if options.wire != "float32":
        parts.append(f"wire {options.wire}")
    return ", ".join(parts)
