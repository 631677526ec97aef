"""The registry of back ends.

Each is a folder of this package with `backend.py`, imported only when it is opened. Planning knows
its name from `edge.protocol.peer_info`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from edge.backends.interface import Backend, ShardWeights, TowerProgram
from edge.errors import RequestError
from edge.host.child_answers import NoAnswerError, answer_of
from edge.host.cuda_driver import num_cuda_devices
from edge.host.gpu_adapters import gpu_adapters, has_webgpu_package
from edge.host.started_again import edge_command
from edge.models.towers.part import TowerPart
from edge.protocol.peer_info import BACKENDS
from edge.weights.formats import WeightFormat

_MOST_S = 60.0
"""Longest time of a measurement of the graphics adapter. A driver compiles kernels in it."""


_Seconds = Annotated[float, Meta(gt=0.0, lt=1e6)]
_Sentence = Annotated[str, Meta(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Seconds of the products of a made-up token (`edge.backends.onnx.speed`)."""

    adapter_s: _Seconds
    processor_s: _Seconds


def usual_backend(*, threads: int) -> tuple[str, str]:
    """The default back end, and a sentence about a graphics adapter that was measured ("" without
    one): CUDA's GPU if it can be used, else the faster one of a graphics adapter and the CPU."""
    if num_cuda_devices():
        backend = _opened("triton", threads=threads)
        if backend.why_not() is None and not backend.is_stand_in:
            return "triton", ""
    if not has_webgpu_package() or not gpu_adapters():
        return "ort", ""
    adapter = f"the graphics adapter ({gpu_adapters()[0].name})"
    try:
        measured = _speeds(threads)
    except NoAnswerError as error:
        return "ort", f"{adapter} is not used, because its measurement failed: {error}"
    ratio = measured.processor_s / measured.adapter_s
    is_used = ratio > 1
    return "webgpu" if is_used else "ort", (
        f"{adapter} computes {ratio:.2g} times as fast as this device's processor, and is "
        f"{'used' if is_used else 'not used'}"
    )


def _speeds(threads: int) -> Speeds:
    """Raises NoAnswerError."""
    command = [*edge_command("edge.backends.adapter_speed"), str(threads)]
    answer = answer_of(command, most_s=_MOST_S)
    try:
        found: Speeds | str = msgspec.json.decode(answer, type=Speeds | _Sentence)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NoAnswerError("its answer makes no sense") from error
    if isinstance(found, str):
        raise NoAnswerError(found)
    return found


def open_backend(name: str, *, threads: int) -> Backend:
    """The back end of this name. Raises RequestError if it is unknown or cannot run here."""
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise RequestError(f"back end {name!r} is not one of {known}", remedy=f"one of {known}")
    backend = _opened(name, threads=threads)
    reason = backend.why_not()
    if reason is not None:
        raise RequestError(f"back end {name} cannot run here: {reason}")
    return backend


def open_tower(
    part: TowerPart,
    weights: ShardWeights,
    weight_format: WeightFormat,
    *,
    backend: str,
    threads: int,
) -> TowerProgram:
    """Load a part of a tower on a device of this back end. GPUs have no kernels for towers: the
    processor beside them computes it, by ONNX Runtime.

    weight_format: of `tower_format`. Raises RequestError if an operator computes wrongly here, and
    CheckpointError for a truncated file.
    """
    name = backend if backend == "null" else "ort"
    opened: Any = _opened(name, threads=threads)
    program: TowerProgram = opened.load_tower(part, weights, weight_format)
    return program


def _opened(name: str, *, threads: int) -> Backend:
    module: Any = importlib.import_module(f"edge.backends.{name}.backend")
    backend: Backend = module.open_backend(threads=threads)
    return backend
