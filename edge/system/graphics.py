"""How this system is asked for its graphics adapters."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

GRAPHICS_API: Final = "Metal" if sys.platform == "darwin" else "Vulkan"
"""The interface to graphics adapters that programs use on this system."""

_DEVICE_FILES = "/dev/dri"


def graphics_library() -> ctypes.CDLL | None:
    """The library of GRAPHICS_API: Metal, or the loader of Vulkan's drivers; None: there is none.

    Drivers run in the process that calls it, and may crash there.
    """
    name = "libvulkan.so.1"
    if sys.platform == "win32":
        name = "vulkan-1.dll"
    elif sys.platform == "darwin":
        name = "/System/Library/Frameworks/Metal.framework/Metal"
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def graphics_remedy(*, has_library: bool) -> str:
    """How to install drivers of graphics adapters, and their loader if there is none."""
    if sys.platform == "darwin":
        return "update macOS"
    if sys.platform == "win32":
        return "install the driver of the adapter's vendor"
    driver = (
        "mesa-vulkan-drivers (AMD, Intel and others) or NVIDIA's driver; give a container the "
        "adapter's device (--device /dev/dri)"
    )
    if has_library:
        return f"install {driver}"
    return (
        "install libvulkan1 (Debian, Ubuntu), vulkan-loader (Fedora) or vulkan-icd-loader (Arch), "
        f"and {driver}"
    )


def closed_graphics_device() -> str | None:
    """The file of a graphics adapter that this user may not open; None: there is none.

    Only Linux has such files.
    """
    files = sorted(Path(_DEVICE_FILES).glob("renderD*"))
    closed = (str(each) for each in files if not os.access(each, os.R_OK | os.W_OK))
    return next(closed, None)
