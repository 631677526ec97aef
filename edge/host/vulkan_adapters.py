"""The graphics adapters of this machine by Vulkan: `python -m edge.host.vulkan_adapters`.

`edge.host.gpu_adapters` runs it and reads its JSON. Structures and numbers are those of the Vulkan
specification, version 1.1, and of the extensions that are named here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

from edge.host.child_answers import answer_parent
from edge.host.gpu_adapters import AdapterKind, AdapterSearch, GpuAdapter
from edge.system.graphics import graphics_library

_SUCCESS = 0
_VERSION = 1 << 22 | 1 << 12
"""1.1, which Dawn (WebGPU) needs."""

_MOST_DEVICES = 64
_MOST_EXTENSIONS = 4096

_KINDS: dict[int, AdapterKind] = {1: "integrated", 2: "discrete", 4: "software"}

_VENDORS = {
    0x1002: "AMD",
    0x1010: "Imagination",
    0x106B: "Apple",
    0x10DE: "NVIDIA",
    0x13B5: "Arm",
    0x14E4: "Broadcom",
    0x1AE0: "Google",
    0x5143: "Qualcomm",
    0x8086: "Intel",
    0x10005: "Mesa",
}

_NEEDED = (0, 1, 2, 3, 6, 12, 26, 33, 34, 35, 36)
"""Dawn's, by their places in VkPhysicalDeviceFeatures: robustBufferAccess, fullDrawIndexUint32,
imageCubeArray, independentBlend, sampleRateShading, depthBiasClamp, fragmentStoresAndAtomics, and
dynamic indexing of arrays of four kinds."""

_ETC2, _ASTC, _BC = 20, 21, 22
"""Compressed textures, of which Dawn needs the first two or the last."""

_DEVICE_LOCAL = 1


class _Chained(ctypes.Structure):
    """The beginning of structures that can be extended by others."""

    KIND = -1
    _fields_: ClassVar[Sequence[Any]] = (("kind", c_uint32), ("next", c_void_p))

    def __init__(self, following: ctypes.Structure | None = None, **fields: Any) -> None:
        address = None if following is None else ctypes.addressof(following)
        super().__init__(kind=self.KIND, next=address, **fields)
        self.following = following  # which lives as long


class _Application(_Chained):
    KIND = 0
    _fields_ = (
        ("name", c_void_p), ("version", c_uint32),
        ("engine", c_void_p), ("engine_version", c_uint32), ("api_version", c_uint32),
    )  # fmt: skip


class _Instance(_Chained):
    KIND = 1
    _fields_ = (
        ("flags", c_uint32), ("application", c_void_p), ("num_layers", c_uint32),
        ("layers", c_void_p), ("num_extensions", c_uint32), ("extensions", c_void_p),
    )  # fmt: skip


class _Limits(ctypes.Structure):
    _fields_ = (
        ("images", c_uint32 * 7), ("storage_buffer_bytes", c_uint32), ("others", c_uint64 * 59),
    )  # fmt: skip


class _DeviceProperties(ctypes.Structure):
    _fields_ = (
        ("api_version", c_uint32), ("driver_version", c_uint32), ("vendor", c_uint32),
        ("device", c_uint32), ("device_kind", c_uint32), ("name", c_char * 256),
        ("cache_id", c_uint8 * 16), ("limits", _Limits), ("sparse", c_uint32 * 5),
    )  # fmt: skip


class _Properties(_Chained):
    KIND = 1000059001
    _fields_ = (("device", _DeviceProperties),)


class _Driver(_Chained):
    """VK_KHR_driver_properties, empty without it."""

    KIND = 1000196000
    _fields_ = (
        ("driver", c_uint32), ("name", c_char * 256), ("info", c_char * 256),
        ("conformance", c_uint8 * 4),
    )  # fmt: skip


class _Maintenance3(_Chained):
    KIND = 1000168000
    _fields_ = (("descriptors", c_uint32), ("allocation_bytes", c_uint64))


class _Heap(ctypes.Structure):
    _fields_ = (("nbytes", c_uint64), ("flags", c_uint32))


class _Memory(_Chained):
    KIND = 1000059006
    _fields_ = (
        ("num_types", c_uint32), ("types", c_uint32 * 64),
        ("num_heaps", c_uint32), ("heaps", _Heap * 16),
    )  # fmt: skip


class _Budget(_Chained):
    """VK_EXT_memory_budget: what this process may have of each heap, and what it has."""

    KIND = 1000237000
    _fields_ = (("budget", c_uint64 * 16), ("usage", c_uint64 * 16))


class _Features(_Chained):
    KIND = 1000059000
    _fields_ = (("features", c_uint32 * 55),)


class _Float16(_Chained):
    """VK_KHR_shader_float16_int8, zeros without it."""

    KIND = 1000082000
    _fields_ = (("float16", c_uint32), ("int8", c_uint32))


class _Storage16(_Chained):
    KIND = 1000083000
    _fields_ = (
        ("storage", c_uint32), ("uniform_and_storage", c_uint32),
        ("push_constant", c_uint32), ("input_output", c_uint32),
    )  # fmt: skip


class _Extension(ctypes.Structure):
    _fields_ = (("name", c_char * 256), ("version", c_uint32))


def search_vulkan() -> AdapterSearch:
    """The adapters that Vulkan's drivers find. Drivers are loaded into this process."""
    library = graphics_library()
    if library is None or not hasattr(library, "vkGetPhysicalDeviceProperties2"):  # since 1.1
        return AdapterSearch(has_library=False)
    application = _Application(api_version=_VERSION)
    wanted = _Instance(application=ctypes.addressof(application))
    instance = c_void_p()
    if library.vkCreateInstance(byref(wanted), None, byref(instance)) != _SUCCESS:
        return AdapterSearch()  # there is no driver
    count = c_uint32(_MOST_DEVICES)
    devices = (c_void_p * _MOST_DEVICES)()
    if library.vkEnumeratePhysicalDevices(instance, byref(count), devices) < _SUCCESS:
        return AdapterSearch()
    adapters, unsuitable = [], []
    for handle in devices[: count.value]:
        device = c_void_p(handle)
        adapter = _adapter(library, device)
        if _is_suitable(library, device):
            adapters.append(adapter)
        elif adapter.kind != "software":
            unsuitable.append(adapter.name)
    return AdapterSearch(adapters=tuple(adapters), unsuitable=tuple(unsuitable))


def _is_suitable(library: ctypes.CDLL, device: c_void_p) -> bool:
    """Whether Dawn takes the adapter (its `PhysicalDevice::InitializeImpl`)."""
    properties = _Properties()
    library.vkGetPhysicalDeviceProperties2(device, byref(properties))
    found = _Features()
    library.vkGetPhysicalDeviceFeatures2(device, byref(found))
    has = found.features
    has_textures = has[_BC] or (has[_ETC2] and has[_ASTC])
    is_new = properties.device.api_version >= _VERSION
    return bool(is_new and has_textures and all(has[each] for each in _NEEDED))


def _adapter(library: ctypes.CDLL, device: c_void_p) -> GpuAdapter:
    driver, allocation = _Driver(), _Maintenance3()
    driver.next = ctypes.addressof(allocation)
    properties = _Properties(driver)
    library.vkGetPhysicalDeviceProperties2(device, byref(properties))
    own = properties.device

    storage16 = _Storage16()
    float16 = _Float16(storage16)
    library.vkGetPhysicalDeviceFeatures2(device, byref(_Features(float16)))

    memory_bytes, free_bytes = _memory(library, device)
    info = _text(driver.info) or _version(own.driver_version)
    return GpuAdapter(
        name=_text(own.name),
        kind=_KINDS.get(own.device_kind, "virtual"),
        vendor=_VENDORS.get(own.vendor, f"vendor {own.vendor:#x}"),
        driver=f"{_text(driver.name)} {info}".strip(),
        api="Vulkan",
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        largest_buffer_bytes=min(own.limits.storage_buffer_bytes, allocation.allocation_bytes),
        has_float16=bool(float16.float16 and storage16.storage and storage16.uniform_and_storage),
    )


def _memory(library: ctypes.CDLL, device: c_void_p) -> tuple[int, int | None]:
    """The bytes of the largest heap of the device's own, and those that are free.

    Heaps are not added up: a window of the processor into the device's memory is a second heap over
    the same bytes.
    """
    budget = _Budget()
    has_budget = b"VK_EXT_memory_budget" in _extensions(library, device)
    memory = _Memory(budget if has_budget else None)
    library.vkGetPhysicalDeviceMemoryProperties2(device, byref(memory))
    own = [
        i for i, heap in enumerate(memory.heaps[: memory.num_heaps]) if heap.flags & _DEVICE_LOCAL
    ]
    largest = max(own, key=lambda each: memory.heaps[each].nbytes, default=0)
    nbytes = int(memory.heaps[largest].nbytes)
    if not has_budget:
        return nbytes, None
    return nbytes, max(0, min(nbytes, budget.budget[largest]) - budget.usage[largest])


def _extensions(library: ctypes.CDLL, device: c_void_p) -> set[bytes]:
    count = c_uint32(_MOST_EXTENSIONS)
    found = (_Extension * _MOST_EXTENSIONS)()
    library.vkEnumerateDeviceExtensionProperties(device, None, byref(count), found)
    return {each.name for each in found[: min(count.value, _MOST_EXTENSIONS)]}


def _text(value: bytes) -> str:
    return "".join(each for each in value.decode(errors="replace") if each.isprintable())


def _version(number: int) -> str:
    """The usual form of a version; a few drivers have another."""
    return f"{number >> 22}.{number >> 12 & 0x3FF}.{number & 0xFFF}"


if __name__ == "__main__":
    answer_parent(search_vulkan)
