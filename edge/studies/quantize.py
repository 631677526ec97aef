"""GPTQ quantization of a model, calibrated while the cluster reads, or writes, a text.

Two halves: the cluster observes the inputs of matrices and sums them up in a file; this device then
rounds one matrix after the other. After an interruption, complete sums and finished layers are used
again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edge.concurrency.blocking import StopFlag, held, run_blocking
from edge.errors import RequestError, shown
from edge.models.spec import TABLES, ModelSpec, tensor_shapes
from edge.option_fields import checks_calls, option
from edge.planning.load_options import LoadOptions
from edge.progress import OnProgress, Progress
from edge.studies.observe import ReadingTask, observation_of, observed
from edge.studies.study import Study
from edge.weights.bit_allocation import allocate_bits
from edge.weights.block_matrices import Blocks
from edge.weights.calibrated import rounded_matrix
from edge.weights.checkpoint import Checkpoint
from edge.weights.file_blocks import FileBlocks
from edge.weights.folder_files import other_files
from edge.weights.format_sizes import bytes_per_weight, in_words, num_weights
from edge.weights.formats import DEFAULT_FORMAT, weight_format
from edge.weights.input_statistics import InputStatistics
from edge.weights.partial_folder import PartialFolder, check_free
from edge.weights.quantized_folder import QuantizedFolder
from edge.weights.quantized_store import store_errors_as_edge_errors
from edge.weights.sensitivity import choices_of, least_bytes

MOST_BITS = 16
_METHOD = "GPTQ, 3"
"""Method and version. Raise the number when the same sums make other codes."""


@checks_calls
@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """The options of quantization. Raises RequestError for values out of range."""

    bits: float | None = option(
        None,
        help="Mean bits of a weight, scales included, spread over the matrices by their effect. "
        " [default: as many as --dtype int4]",
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
            raise RequestError(f"bits must be a number up to {MOST_BITS}, not {shown(bits)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A folder that was written."""

    path: Path
    num_bytes: int
    """Bytes of its files of weights."""
    bytes_per_weight: float
    """Mean over the matrices that every token is multiplied with, scales included."""
    words: str
    """The formats of the matrices, in words."""

    def to_json(self) -> dict[str, Any]:
        """Built-in types only."""
        return {**asdict(self), "path": str(self.path)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rounding:
    """The checked inputs of quantization."""

    observation: ReadingTask
    target: Path
    bits: float | None
    packed: bool
    """Whether for ONNX Runtime's own kernels, in place of blocks of files."""
    is_packed_for_peers: bool
    """Whether that follows from the peers, so that a folder goes on as it was begun."""
    made_by: Mapping[str, object]


async def quantize_model(
    study: Study, out: str | Path, wanted: QuantizeOptions, *, has_blocks: bool
) -> Quantized:
    """See `AsyncCluster.quantize`. has_blocks: every device has kernels for blocks of files."""
    task = await run_blocking(partial(_prepare, study, out, wanted, has_blocks))
    stop = StopFlag()
    with store_errors_as_edge_errors():
        async with (
            held(partial(PartialFolder, task.target)) as place,
            observed(study, task.observation) as file,
        ):
            with study.bars() as on_progress:

                def tell(event: Progress) -> None:
                    stop.check()
                    on_progress(event)

                await run_blocking(partial(_round, task, place, file, tell), stop=stop.set)
    return await run_blocking(partial(_described, task.target))


def _prepare(study: Study, out: str | Path, wanted: QuantizeOptions, has_blocks: bool) -> _Rounding:
    """The checked inputs. Raises errors before the work, which may take hours."""
    try:
        target = Path(out).expanduser().absolute()
        target.resolve()  # raises for an invalid path
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise RequestError(
            f"{shown(out)} is not a path ({error})", remedy="give a folder that is not there yet"
        ) from error
    check_free(target)
    packed = study.options.packs_blocks or not has_blocks
    opening = Checkpoint.open(study.path, lora=study.options.lora)
    with opening as checkpoint, store_errors_as_edge_errors():
        if wanted.bits is not None:
            _check_bits(checkpoint.spec, wanted.bits, packed)
        for _name, _content in other_files(checkpoint):
            pass
        observation = observation_of(
            checkpoint,
            study.options,
            text=study.text,
            windows=wanted.windows,
            window_tokens=wanted.window_tokens,
        )
    made_by = {
        "method": _METHOD,
        "text": "its own" if study.text is None else observation.folder,
        **asdict(wanted),
    }
    return _Rounding(
        observation=observation,
        target=target,
        bits=wanted.bits,
        packed=packed,
        is_packed_for_peers=not study.options.packs_blocks,
        made_by=made_by,
    )


def _check_bits(spec: ModelSpec, bits: float, packed: bool) -> None:
    least = 8 * least_bytes(spec, packed) / num_weights(spec)
    if bits < least:
        raise RequestError(
            f"{bits:g} bits a weight are fewer than this model's least, {least:.2f}, scales "
            "included",
            remedy="give more, or take a smaller model"
            + ("" if packed else ", or pack the weights (--compressed-tensors, packs_blocks)"),
        )


def _round(task: _Rounding, place: PartialFolder, file: Path, tell: OnProgress) -> None:
    """Round one matrix after the other."""
    spec, tokens = task.observation.spec, task.observation.tokens
    shapes = tensor_shapes(spec)
    done, total = 0, num_weights(spec)

    def on_matrix(done: int, total: int) -> None:
        tell(Progress(phase="allot", peer="", done=done, total=total))

    def on_weights(count: int) -> None:
        nonlocal done
        done += count
        tell(Progress(phase="quantise", peer="", done=done, total=total))

    with contextlib.ExitStack() as stack:
        observation = task.observation
        opening = Checkpoint.open(observation.path, lora=observation.options.lora)
        checkpoint = stack.enter_context(opening)
        statistics = stack.enter_context(InputStatistics(file, spec))
        packed, begun = task.packed, place.begun()
        same = {"made_by": dict(task.made_by), "checkpoint": checkpoint.store.fingerprint}
        if task.is_packed_for_peers and all(begun.get(key) == value for key, value in same.items()):
            packed = begun.get("packed") is True
        kinds = _usual_kinds(checkpoint, packed)
        if task.bits is not None:
            total_bytes = task.bits / 8 * total
            choices = choices_of(
                checkpoint,
                statistics,
                tokens=tokens,
                total_bytes=total_bytes,
                packed=packed,
                on_matrix=on_matrix,
            )
            allocated = allocate_bits(choices, total_bytes)
            kinds = {role: choice.kind for role, choice in allocated.items()}
        folder = QuantizedFolder(checkpoint, place, kinds, made_by=task.made_by)
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


def _usual_kinds(checkpoint: Checkpoint, packed: bool) -> dict[str, Blocks | FileBlocks]:
    """The bits of the default format, by role of the matrix."""
    made = weight_format(checkpoint.spec, DEFAULT_FORMAT, packs_blocks=packed)
    spec = made.graded(checkpoint.spec)
    kinds: dict[str, Blocks | FileBlocks] = {}
    for role, shape in tensor_shapes(spec).items():
        if len(shape) == 2 and role not in TABLES:
            grade = spec.layer(int(role.split(".")[1])).grade if role.startswith("layers.") else 0
            kind = made.recipe.kind(role, grade)
            assert isinstance(kind, Blocks | FileBlocks)
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
