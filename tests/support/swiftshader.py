"""SwiftShader, the Vulkan device in software that Chromium brings: a graphics adapter for tests."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import pytest

_FOLDERS = ("/usr/lib/chromium", "/usr/lib64/chromium-browser", "/opt/google/chrome")
"""Of Debian's and Fedora's Chromium, and of Chrome."""


@functools.cache
def swiftshader_environment() -> dict[str, str] | None:
    """Variables with which the Vulkan loader finds SwiftShader and no other driver.

    None: there is no SwiftShader, or no Vulkan loader. Set them before a process loads Vulkan for
    the first time.
    """
    drivers = (Path(folder, "vk_swiftshader_icd.json") for folder in _FOLDERS)
    driver = next(filter(Path.is_file, drivers), None)
    if driver is None:
        return None
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return None
    return {"VK_DRIVER_FILES": str(driver), "VK_ICD_FILENAMES": str(driver)}  # new name, and old


def webgpu_environment() -> dict[str, str]:
    """Variables with which a process computes on SwiftShader by WebGPU; only where it is there."""
    if _IS_REAL:
        return {}
    found = swiftshader_environment()
    assert found is not None
    return {**found, "EDGE_ALLOW_SOFTWARE_ADAPTER": "1"}


_IS_REAL = os.environ.get("EDGE_TESTED_ADAPTER") == "real"
"""Whether tests that compute run on the system's own adapter."""

needs_swiftshader = pytest.mark.skipif(
    swiftshader_environment() is None and not _IS_REAL,
    reason="there is no SwiftShader (of Chromium), or no Vulkan loader: not run",
)
