"""Calibration: a loaded model reads a text, or writes one; sums of its matrices' inputs are
kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edge.answers.terms import GenerationOptions
from edge.concurrency.blocking import StopFlag, held, run_blocking
from edge.errors import CheckpointError, RequestError
from edge.models.spec import ModelSpec
from edge.offload import note_model
from edge.planning.load_options import LoadOptions
from edge.progress import OnProgress, Progress
from edge.protocol.peer_info import gather_all
from edge.studies.study import StudiedModel, Study
from edge.studies.text_windows import most_windows, windows_of
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import Dtype
from edge.weights.input_statistics import (
    FILE,
    has_statistics,
    statistics_folder,
    statistics_writer,
    write_observed,
)
from edge.weights.observation import RUN_COLUMNS
from edge.weights.quantized_store import store_errors_as_edge_errors
from edge.weights.writer_lock import only_writer

_VERSION = 1
"""The version of the sums. Raise it when the same text makes other sums."""
_DTYPE: Dtype = "int8"
"""The weight format during calibration: as good as floats here, in a quarter of the memory."""
_AT_ONCE = 24

EXPERT_WINDOWS, EXPERT_WINDOW_TOKENS = 12, 256
"""The windows of a text for counting experts, and the tokens of each."""

MOST_COUNTED_TOKENS = EXPERT_WINDOWS * EXPERT_WINDOW_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingTask:
    """The tokens that a model reads or writes for calibration."""

    path: Path
    name: str
    spec: ModelSpec
    windows: tuple[tuple[int, ...], ...]
    """The prompts: windows of the text, or starts for the model's own text."""
    new_tokens: int
    """The number of tokens that it writes after each."""
    options: LoadOptions
    """The options of the load."""
    folder: str
    """The name of the folder in the cache."""

    @property
    def tokens(self) -> int:
        """The number of observed positions; the last token of a window is not computed."""
        return len(self.windows) * (len(self.windows[0]) + self.new_tokens - 1)


def observation_of(
    checkpoint: Checkpoint,
    options: LoadOptions,
    *,
    text: str | None,
    windows: int,
    window_tokens: int,
) -> ReadingTask:
    """The task for GPTQ. options: of the plan and the links. Raises RequestError and
    CheckpointError."""
    spec = checkpoint.spec
    if spec.has_experts:
        raise RequestError(
            f"{checkpoint.path} has experts, whose inputs cannot be observed yet",
            remedy="load it with dtype int4 or int8, which need no text",
        )
    if spec.has_states:
        raise RequestError(
            f"{checkpoint.path} has layers with states in place of keys and values, whose inputs "
            "cannot be observed yet",
            remedy="load it with dtype int4 or int8, which need no text",
        )
    if spec.token_inputs or any(each.keys_of is not None for each in spec.attentions.values()):
        raise RequestError(
            f"{checkpoint.path} has layers with inputs of each token, or with keys of other "
            "layers, whose inputs cannot be observed yet",
            remedy="load it with dtype int4 or int8, which need no text",
        )
    in_int8 = replace(options, dtype=_DTYPE, block_size=None, accuracy="high")
    return _reading(checkpoint, in_int8, text=text, windows=windows, window_tokens=window_tokens)


def expert_observation_of(
    checkpoint: Checkpoint, options: LoadOptions, *, text: str | None
) -> ReadingTask:
    """The task for counting experts, in the model's own weight format. Raises RequestError and
    CheckpointError."""
    spec = checkpoint.spec
    if not spec.has_experts:
        raise RequestError(
            f"{checkpoint.path} has no experts to count",
            remedy="leave the text out: every token goes through all of its weights",
        )
    tokens = min(EXPERT_WINDOW_TOKENS, spec.context_tokens - 1)
    by_columns = replace(options, experts="columns")
    windows = EXPERT_WINDOWS
    if text is not None and checkpoint.has_tokenizer:
        windows = max(1, min(windows, most_windows(checkpoint.tokenizer.encode, text, tokens)))
    return _reading(checkpoint, by_columns, text=text, windows=windows, window_tokens=tokens)


def _reading(
    checkpoint: Checkpoint,
    options: LoadOptions,
    *,
    text: str | None,
    windows: int,
    window_tokens: int,
) -> ReadingTask:
    spec = checkpoint.spec
    if text is not None and not checkpoint.has_tokenizer:
        raise CheckpointError(
            f"{checkpoint.path} has no tokenizer to read a text with",
            remedy="put tokenizer.json there",
        )
    if window_tokens >= spec.context_tokens:
        raise RequestError(
            f"windows of {window_tokens} tokens do not fit the model's context of "
            f"{spec.context_tokens}",
            remedy="give window_tokens below that",
        )
    if text is None:
        before = checkpoint.tokenizer.encode("") if checkpoint.has_tokenizer else ()
        start = tuple(before) or (min(checkpoint.end_ids, default=0),)
        prompts, new_tokens = (start,) * windows, window_tokens - len(start)
    else:
        encode = checkpoint.tokenizer.encode
        prompts = windows_of(encode, text, windows=windows, window_tokens=window_tokens)
        new_tokens = 1
    told = hashlib.sha256(json.dumps([prompts, new_tokens]).encode()).hexdigest()[:16]
    return ReadingTask(
        path=checkpoint.path,
        name=checkpoint.name,
        spec=spec,
        windows=prompts,
        new_tokens=new_tokens,
        options=replace(
            options,
            kv_dtype="float32",
            observes=True,
            share_prefixes=False,
            prefixes_of=None,
            workload=None,
            context_tokens=window_tokens + 1,
            concurrency=min(_AT_ONCE, windows),
        ),
        folder="-".join(
            (
                checkpoint.store.fingerprint,
                told,
                *(_held_in(options) if spec.has_experts else ()),
                f"{options.wire}-{RUN_COLUMNS}-v{_VERSION}",
            )
        ),
    )


def _held_in(options: LoadOptions) -> tuple[str, ...]:
    """The other facts that the routing to experts depends on."""
    return options.dtype, str(options.block_size), options.accuracy


@contextlib.asynccontextmanager
async def observed(study: Study, task: ReadingTask) -> AsyncIterator[Path]:
    """The file of the sums, locked against eviction: from the cache, or observed now.

    Waits for another process that observes the same. Raises the errors of `load`, and CapacityError
    for a full disk.
    """
    root, stop = study.cache_root / "statistics", StopFlag()
    async with contextlib.AsyncExitStack() as stack:
        use = await stack.enter_async_context(
            held(partial(statistics_folder, root, task.folder, task.spec))
        )
        note_model(use.folder, task.name)
        file = use.folder / FILE
        async with contextlib.AsyncExitStack() as writing:
            with study.bars() as on_progress, store_errors_as_edge_errors():

                def while_waiting() -> None:
                    stop.check()
                    on_progress(_progress(task, 0))

                await writing.enter_async_context(
                    held(partial(only_writer, use.folder, while_waiting), stop=stop.set)
                )
            if not await run_blocking(partial(has_statistics, file, task.spec)):
                async with await study.load(task.path, task.options) as model:
                    with study.bars() as on_progress:
                        await _read(model, task, on_progress)
                        await _keep(model, task, file)
        yield file


async def _read(model: StudiedModel, task: ReadingTask, on_progress: OnProgress) -> None:
    done = 0

    async def read(number: int, window: tuple[int, ...]) -> None:
        nonlocal done
        options = GenerationOptions(
            max_new_tokens=task.new_tokens,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            seed=number,
            ignore_eos=True,
        )
        reply = model.stream(window, options)
        async with reply as tokens:
            async for _token in tokens:
                done += 1
                on_progress(_progress(task, done))

    await gather_all(read(number, window) for number, window in enumerate(task.windows))


async def _keep(model: StudiedModel, task: ReadingTask, file: Path) -> None:
    with store_errors_as_edge_errors():
        async with held(partial(statistics_writer, file, task.spec)) as writer:
            async for run, gram in model._observed(task.spec):
                await run_blocking(partial(write_observed, writer, run, gram))


def _progress(task: ReadingTask, done: int) -> Progress:
    total = len(task.windows) * task.new_tokens
    return Progress(phase="observe", peer="", done=done, total=total)
