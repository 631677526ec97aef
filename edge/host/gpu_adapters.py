"""The graphics adapters of this machine that WebGPU can use.

ONNX Runtime's provider tells neither the memory nor the driver of an adapter, so the system is
asked. Its drivers run in a process of their own (`vulkan_adapters`, `metal_adapters`): one that
crashes or hangs costs this process nothing but time. On Windows, WebGPU computes by D3D12; the
drivers of Vulkan describe the same adapters.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from edge.host.child_answers import NoAnswerError, answer_of
from edge.host.started_again import edge_command
from edge.system.graphics import (
    GRAPHICS_API,
    closed_graphics_device,
    graphics_remedy,
)

_MOST_S = 20.0
"""Longest time of a search. Loading a driver for the first time after a start takes seconds."""

WEBGPU_PACKAGE = "onnxruntime_ep_webgpu"

_ALLOW_SOFTWARE = "EDGE_ALLOW_SOFTWARE_ADAPTER"

AdapterKind = Literal["discrete", "integrated", "virtual", "software"]
_KINDS = get_args(AdapterKind)

_Text = Annotated[str, Meta(max_length=1024, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
_Bytes = Annotated[int, Meta(ge=0, lt=1 << 62)]
_MOST_ADAPTERS = Meta(max_length=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAdapter:
    """A graphics adapter as its driver describes it."""

    name: _Text
    kind: AdapterKind
    """virtual: of a virtual machine, or unknown. software: its driver computes on the processor."""
    vendor: _Text
    driver: _Text
    """Name and version."""
    api: Literal["Vulkan", "Metal"]
    memory_bytes: _Bytes
    """The largest memory of the device's own; of an integrated one, what the driver lets it have of
    the system's."""
    free_bytes: _Bytes | None
    """What a process could have had of it when the adapters were looked for; None: not known."""
    largest_buffer_bytes: _Bytes
    """The largest buffer that shaders can use."""
    has_float16: bool
    """Whether shaders can compute with float16, and buffers hold it. Dawn makes no use of it by
    default where NVIDIA's Vulkan driver has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSearch:
    """The result of a search for adapters."""

    adapters: Annotated[tuple[GpuAdapter, ...], _MOST_ADAPTERS] = ()
    unsuitable: Annotated[tuple[_Text, ...], _MOST_ADAPTERS] = ()
    """Names of adapters without functions that WebGPU needs; no software ones."""
    has_library: bool = True
    failure: _Text | None = None
    """Why the search failed; None: it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAdapter:
    """Why there is no adapter to use."""

    cause: str
    remedy: str
    is_fault: bool
    """False: this machine may simply have none."""


def has_webgpu_package() -> bool:
    """Whether ONNX Runtime's provider for graphics adapters is installed."""
    return importlib.util.find_spec(WEBGPU_PACKAGE) is not None


def allows_software() -> bool:
    """Whether an adapter in software may compute in this process."""
    return os.environ.get(_ALLOW_SOFTWARE) == "1"


def allow_software_adapters() -> None:
    """Let adapters in software compute in this process and those that it starts."""
    os.environ[_ALLOW_SOFTWARE] = "1"


def gpu_adapters(*, allow_software: bool = False) -> tuple[GpuAdapter, ...]:
    """The adapters, in the order of WebGPU's preference for performance; the first one is used.

    They are looked for once in the life of this process, which takes some tenths of a second.
    """
    found = (each for each in _search().adapters if allow_software or each.kind != "software")
    return tuple(sorted(found, key=lambda each: _KINDS.index(each.kind)))


def why_no_adapter() -> str:
    """Why `gpu_adapters` finds none, and what helps, in one sentence."""
    why = no_adapter()
    return f"{why.cause}: {why.remedy}"


def no_adapter() -> NoAdapter:
    """Why `gpu_adapters` finds none, of what is missing on this system."""
    found = _search()
    if found.failure is not None:
        return NoAdapter(
            cause=f"a graphics driver failed when it was asked for adapters ({found.failure})",
            remedy="update the graphics driver, or remove one that is not used",
            is_fault=True,
        )
    if not found.has_library:
        return NoAdapter(
            cause=f"there is no library of {GRAPHICS_API} for graphics adapters",
            remedy=graphics_remedy(has_library=False),
            is_fault=False,
        )
    if (closed := closed_graphics_device()) is not None:
        return NoAdapter(
            cause=f"this user may not open {closed}, a graphics adapter",
            remedy="make the user a member of the file's group (usually render), and log in again",
            is_fault=True,
        )
    if found.unsuitable:
        return NoAdapter(
            cause=f"{', '.join(found.unsuitable)} lacks functions that WebGPU needs",
            remedy="update its driver, or use another adapter",
            is_fault=False,
        )
    if found.adapters:
        return NoAdapter(
            cause=f"{found.adapters[0].name} computes in software, and is the only graphics "
            "adapter",
            remedy=f"{graphics_remedy(has_library=True)}, or use it for tests by "
            "--allow-software-adapter",
            is_fault=False,
        )
    return NoAdapter(
        cause=f"no driver of {GRAPHICS_API} finds a graphics adapter",
        remedy=f"if there is one, {graphics_remedy(has_library=True)}",
        is_fault=False,
    )


def _command() -> list[str]:
    return edge_command(f"edge.host.{GRAPHICS_API.lower()}_adapters")


@functools.cache
def _search() -> AdapterSearch:
    """The result of another process, checked."""
    try:
        return msgspec.json.decode(answer_of(_command(), most_s=_MOST_S), type=AdapterSearch)
    except NoAnswerError as error:
        return AdapterSearch(failure=str(error))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return AdapterSearch(failure="its answer makes no sense")
