"""The graphics adapters of a Mac by Metal: `python -m edge.host.metal_adapters`.

`edge.host.gpu_adapters` runs it and reads its JSON. It is written from Apple's documentation, and
was not run on a Mac so far.
"""

from __future__ import annotations

import ctypes
import platform
from ctypes import c_bool, c_char_p, c_uint64, c_void_p
from typing import Any

from edge.host.child_answers import answer_parent
from edge.host.gpu_adapters import AdapterSearch, GpuAdapter
from edge.system.graphics import graphics_library

_OBJC = "/usr/lib/libobjc.A.dylib"
_VENDORS = ("Apple", "AMD", "Intel", "NVIDIA")


def search_metal() -> AdapterSearch:
    """The adapters that Metal has."""
    metal = graphics_library()
    if metal is None:
        return AdapterSearch(has_library=False)
    runtime = ctypes.CDLL(_OBJC)
    runtime.sel_registerName.restype = c_void_p
    metal.MTLCopyAllDevices.restype = c_void_p

    def ask(receiver: int, name: str, kind: Any, *arguments: int) -> Any:
        """Send a message without arguments, or with integers."""
        send = ctypes.CFUNCTYPE(kind, c_void_p, c_void_p, *[c_uint64] * len(arguments))
        selector = runtime.sel_registerName(name.encode())
        return send(("objc_msgSend", runtime))(receiver, selector, *arguments)

    devices = metal.MTLCopyAllDevices()
    return AdapterSearch(
        adapters=tuple(
            _adapter(ask, ask(devices, "objectAtIndex:", c_void_p, i))
            for i in range(ask(devices, "count", c_uint64))
        )
    )


def _adapter(ask: Any, device: int) -> GpuAdapter:
    name = ask(ask(device, "name", c_void_p), "UTF8String", c_char_p).decode(errors="replace")
    return GpuAdapter(
        name=name,
        kind="integrated" if ask(device, "hasUnifiedMemory", c_bool) else "discrete",
        vendor=next((each for each in _VENDORS if name.startswith(each)), "unknown vendor"),
        driver=f"macOS {platform.mac_ver()[0]}",
        api="Metal",
        memory_bytes=ask(device, "recommendedMaxWorkingSetSize", c_uint64),
        free_bytes=None,  # Metal tells it of one process only
        largest_buffer_bytes=ask(device, "maxBufferLength", c_uint64),
        has_float16=True,  # in every version of its language
    )


if __name__ == "__main__":
    answer_parent(search_metal)
