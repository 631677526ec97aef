"""Rounds a model by what its products are given while the cluster reads, or writes, a text.

Two halves: the cluster observes, and keeps sums of inputs in a file; this device rounds one matrix
after the other by them. After an interruption the sums are there, if they were whole, and all
layers that were rounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edge.api.async_model import AsyncModel
from edge.api.progress_bars import progress_bars
from edge.api.quality_text import windows_of
from edge.concurrency.blocking import StopFlag, run_blocking
from edge.errors import CheckpointError, RequestError
from edge.models.spec import ModelSpec, tensor_shapes
from edge.option_fields import option
from edge.planning.load_options import LoadOptions
from edge.progress import OnProgress, Progress
from edge.protocol.peer_info import gather_all
from edge.weights.allotment import Choices, allot, smallest_bytes
from edge.weights.block_matrices import Blocks
from edge.weights.calibrated import rounded_matrix
from edge.weights.checkpoint import Checkpoint
from edge.weights.compressed_folder import CompressedFolder
from edge.weights.format_sizes import bytes_per_weight, in_words, num_weights
from edge.weights.formats import DEFAULT_FORMAT, weight_format
from edge.weights.input_statistics import (
    FILE,
    InputStatistics,
    statistics_folder,
    statistics_writer,
    write_gram,
)
from edge.weights.observation import RUN_COLUMNS
from edge.weights.partial_folder import check_free
from edge.weights.quantized_store import store_errors_as_edge_errors
from edge.weights.sensitivity import choices_of
from offload import FolderUse

_OBSERVED_IN = "int8"
"""What the model is held in meanwhile: as good as floats for it, in a quarter of the memory."""
_AT_ONCE = 24
MOST_BITS = 16
_METHOD = "GPTQ, 1"
"""Raise the number when the same statistics make other codes."""

Load = Callable[[str | Path, LoadOptions], Awaitable[AsyncModel]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """How a model is rounded. Raises RequestError for what is out of range."""

    bits: float | None = option(
        None,
        help="Bits of a weight in the mean, scales included: each matrix is given what pays most. "
        " [default: as much as --dtype int4 takes]",
    )
    windows: int = option(
        24,
        at_least=1,
        at_most=1024,
        help="Pieces of text, each from an empty context.",
    )
    window_tokens: int = option(256, at_least=16, at_most=2048, help="Length of each.")

    def __post_init__(self) -> None:
        bits = self.bits
        if bits is not None and not (type(bits) in (int, float) and 0 < bits <= MOST_BITS):
            raise RequestError(f"bits must be a number up to {MOST_BITS}, not {bits!r:.80}")
        for name, least, most in (("windows", 1, 1024), ("window_tokens", 16, 2048)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise RequestError(f"{name} must be {least} to {most}, not {value!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A folder that was written."""

    path: Path
    num_bytes: int
    """Of its files of weights."""
    bytes_per_weight: float
    """Of the matrices that every token is multiplied with, scales included."""
    words: str
    """What they are in."""

    def to_json(self) -> dict[str, Any]:
        """Built-in types only."""
        return {**asdict(self), "path": str(self.path)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """All that is known before anything is loaded."""

    path: Path
    target: Path
    spec: ModelSpec
    windows: tuple[tuple[int, ...], ...]
    """Prompts: the text, or where the model begins to write by itself."""
    new_tokens: int
    """That it writes after each."""
    bits: float | None
    statistics: str
    """The name of the folder in the cache."""
    tokens: int
    """That they are of."""
    made_by: Mapping[str, object]


async def quantize_model(
    load: Load,
    path: str | Path,
    out: str | Path,
    options: LoadOptions,
    *,
    text: str | None,
    wanted: QuantizeOptions,
    cache_root: Path,
    progress: bool | OnProgress | None,
) -> Quantized:
    """See `AsyncCluster.quantize`; statistics are kept below `cache_root`."""
    task = await run_blocking(partial(_prepare, path, Path(out), text, wanted))
    opening = partial(statistics_folder, cache_root / "statistics", task.statistics, task.spec)
    with await run_blocking(opening, discard=FolderUse.close) as use:
        file = use.folder / FILE
        if not await run_blocking(file.exists):
            options = replace(
                options,
                dtype=_OBSERVED_IN,
                accuracy="high",
                observes=True,
                context_tokens=wanted.window_tokens + 1,
                concurrency=min(_AT_ONCE, wanted.windows),
            )
            async with await load(task.path, options) as model:
                with progress_bars(progress) as on_progress:
                    await _observe(model, task, file, on_progress)
        stop = StopFlag()
        with progress_bars(progress) as on_progress:

            def tell(event: Progress) -> None:
                stop.check()
                on_progress(event)

            await run_blocking(partial(_round, task, file, tell), stop=stop.set)
    return await run_blocking(partial(_described, task.target))


def _prepare(
    path: str | Path,
    target: Path,
    text: str | None,
    wanted: QuantizeOptions,
) -> _Task:
    check_free(target)
    with Checkpoint.open(path) as checkpoint:
        if not checkpoint.has_tokenizer:
            raise CheckpointError(
                f"{checkpoint.path} has no tokenizer, and a text is read to round by; put "
                "tokenizer.json there"
            )
        encode = checkpoint.tokenizer.encode
        if text is None:
            start = tuple(encode("")) or (min(checkpoint.end_ids, default=0),)
            windows = (start,) * wanted.windows
        else:
            windows = windows_of(
                encode, text, windows=wanted.windows, window_tokens=wanted.window_tokens
            )
        new_tokens = wanted.window_tokens - len(windows[0]) if text is None else 1
        told = hashlib.sha256(json.dumps([windows, new_tokens]).encode()).hexdigest()
        made_by = {"method": _METHOD, "text": "its own" if text is None else told, **asdict(wanted)}
        name = f"{checkpoint.store.fingerprint}-{told[:16]}-{RUN_COLUMNS}"
        return _Task(
            path=checkpoint.path,
            target=target.expanduser().absolute(),
            spec=checkpoint.spec,
            windows=windows,
            new_tokens=new_tokens,
            bits=wanted.bits,
            statistics=name,
            tokens=len(windows) * (len(windows[0]) + new_tokens - 1),
            made_by=made_by,
        )


async def _observe(model: AsyncModel, task: _Task, file: Path, on_progress: OnProgress) -> None:
    """Have the model read or write the text, and keep what its products were given."""
    done, total = 0, len(task.windows) * task.new_tokens

    async def read(number: int, window: tuple[int, ...]) -> None:
        nonlocal done
        reply = model.stream(
            window,
            max_new_tokens=task.new_tokens,
            temperature=1.0,
            seed=number,
            ignore_eos=True,
        )
        async with reply as tokens:
            async for _token in tokens:
                done += 1
                on_progress(Progress(phase="observe", peer="", done=done, total=total))

    await gather_all(read(number, window) for number, window in enumerate(task.windows))
    with store_errors_as_edge_errors(), statistics_writer(file, task.spec) as writer:
        async for run, gram in model._observed(task.spec):
            await run_blocking(partial(write_gram, writer, run, gram))


def _round(task: _Task, file: Path, tell: OnProgress) -> None:
    """One matrix after the other."""
    shapes = tensor_shapes(task.spec)
    done, total = 0, num_weights(task.spec)

    def on_matrix(done: int, total: int) -> None:
        tell(Progress(phase="allot", peer="", done=done, total=total))

    def on_weights(count: int) -> None:
        nonlocal done
        done += count
        tell(Progress(phase="quantise", peer="", done=done, total=total))

    with contextlib.ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint.open(task.path))
        statistics = stack.enter_context(InputStatistics(file, task.spec))
        kinds = _usual_kinds(checkpoint)
        if task.bits is not None:
            choices = choices_of(checkpoint, statistics, tokens=task.tokens, on_matrix=on_matrix)
            kinds = _allotted_kinds(choices, task.bits, total)
        folder = stack.enter_context(
            CompressedFolder(checkpoint, task.target, kinds, made_by=task.made_by)
        )
        missing = set(folder.missing)
        done = sum(
            math.prod(shapes[role])
            for group in folder.groups
            if group not in missing
            for role in group.coded
        )
        on_weights(0)
        for group in folder.missing:
            folder.write(
                group,
                {
                    role: rounded_matrix(checkpoint, statistics, role, kinds[role], on_weights)
                    for role in group.coded
                },
            )
        folder.finish()


def _allotted_kinds(choices: Choices, bits: float, num_weights: int) -> dict[str, Blocks]:
    least = 8 * smallest_bytes(choices) / num_weights
    if bits < least:
        raise RequestError(
            f"{bits:g} bits a weight are fewer than this model can have, which is {least:.2f} with "
            "4 bits everywhere, scales included; give more, or take a smaller model"
        )
    allotted = allot(choices, bits / 8 * num_weights)
    return {role: choice.kind for role, choice in allotted.items()}


def _usual_kinds(checkpoint: Checkpoint) -> dict[str, Blocks]:
    """By role, those of the default format."""
    made = weight_format(checkpoint.spec, DEFAULT_FORMAT)
    spec = made.graded(checkpoint.spec)
    kinds: dict[str, Blocks] = {}
    for role, shape in tensor_shapes(spec).items():
        if len(shape) == 2 and role != "embedding":
            grade = spec.layer(int(role.split(".")[1])).grade if role.startswith("layers.") else 0
            kind = made.recipe.kind(role, grade)
            assert isinstance(kind, Blocks)
            kinds[role] = kind
    return kinds


def _described(folder: Path) -> Quantized:
    with Checkpoint.open(folder) as checkpoint:
        made = LoadOptions().weight_format(checkpoint)
        return Quantized(
            path=folder,
            num_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            bytes_per_weight=bytes_per_weight(checkpoint.spec, made),
            words=in_words(checkpoint.spec, made),
        )
