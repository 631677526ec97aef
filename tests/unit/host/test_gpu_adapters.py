"""Graphics adapters: a real one in software, none for each reason, and drivers that fail."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from edge.host import gpu_adapters as module
from edge.host.gpu_adapters import (
    AdapterKind,
    AdapterSearch,
    GpuAdapter,
    gpu_adapters,
    no_adapter,
    why_no_adapter,
)
from edge.system import graphics
from edge.system.graphics import graphics_library
from tests.support.swiftshader import needs_swiftshader, swiftshader_environment

needs_vulkan = pytest.mark.skipif(
    graphics_library() is None, reason="there is no Vulkan loader: not run"
)

CRASH = "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()"

CARD = GpuAdapter(
    name="Card",
    kind="discrete",
    vendor="AMD",
    driver="radv Mesa 25.0.7",
    api="Vulkan",
    memory_bytes=8 << 30,
    free_bytes=7 << 30,
    largest_buffer_bytes=(4 << 30) - 1,
    has_float16=True,
)


@pytest.fixture(autouse=True)
def looked_for_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Adapters are not those of another test, and device files not those of this machine."""
    monkeypatch.setattr(graphics, "_DEVICE_FILES", str(tmp_path))
    module._search.cache_clear()
    yield
    module._search.cache_clear()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes Python code the process that looks for adapters."""

    def use(code: str) -> None:
        monkeypatch.setattr(module, "_command", lambda: [sys.executable, "-c", code])

    return use


def saying(found: AdapterSearch | bytes) -> str:
    """Code of a child with this answer."""
    said = found if isinstance(found, bytes) else msgspec.json.encode(found)
    return f"import sys; sys.stdout.buffer.write({said!r}); sys.stdout.flush()"


@needs_swiftshader
def test_an_adapter_in_software_is_found_and_not_used_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (swiftshader_environment() or {}).items():
        monkeypatch.setenv(name, value)
    (found,) = gpu_adapters(allow_software=True)
    assert found.name.startswith("SwiftShader Device")
    assert (found.kind, found.vendor, found.api) == ("software", "Google", "Vulkan")
    assert found.driver.startswith("SwiftShader")
    assert found.memory_bytes >= 256 << 20
    assert found.free_bytes is None or 0 < found.free_bytes <= found.memory_bytes
    assert found.largest_buffer_bytes >= 128 << 20, "the least that WebGPU promises"
    assert gpu_adapters() == ()
    assert why_no_adapter().startswith("SwiftShader Device")
    assert "--allow-software-adapter" in why_no_adapter()


@needs_vulkan
def test_without_a_driver_one_is_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.setenv(name, str(tmp_path / "none.json"))
    assert gpu_adapters(allow_software=True) == ()
    assert why_no_adapter().startswith("no driver of Vulkan finds a graphics adapter")
    assert "mesa-vulkan-drivers" in why_no_adapter()
    assert not no_adapter().is_fault


def test_without_a_loader_it_is_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libvulkan.so.1").touch()  # found first, and no library
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert gpu_adapters(allow_software=True) == ()
    assert "install libvulkan1 (Debian, Ubuntu)" in why_no_adapter()
    assert not no_adapter().is_fault


def test_a_closed_device_file_is_named(
    child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child(saying(AdapterSearch()))
    (tmp_path / "renderD128").symlink_to("nowhere")  # root may open every file that there is
    assert str(tmp_path / "renderD128") in why_no_adapter()
    assert "usually render" in why_no_adapter()
    assert no_adapter().is_fault


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("import os; os._exit(3)", "ended with exit code 3"),
        (CRASH, "ended with exit code -6"),
        ("print('ERROR: no display')", "its answer makes no sense"),
        ("while True: print('x' * 65536)", "its answer makes no sense"),
        (saying(b'{"adapters": [1'), "its answer makes no sense"),
        (saying(b"\xff"), "its answer makes no sense"),
        (saying(AdapterSearch(adapters=(replace(CARD, memory_bytes=-1),))), "makes no sense"),
        (saying(AdapterSearch(adapters=(replace(CARD, memory_bytes=1 << 64),))), "makes no sense"),
        (saying(AdapterSearch(adapters=(replace(CARD, name="\x1b[2J"),))), "makes no sense"),
        (saying(AdapterSearch(adapters=(replace(CARD, name="x" * 2000),))), "makes no sense"),
        (saying(AdapterSearch(adapters=(CARD,) * 65)), "makes no sense"),
    ],
)
def test_a_driver_that_fails_costs_its_own_process_alone(
    child: Callable[[str], None], code: str, failure: str
) -> None:
    child(code)
    assert gpu_adapters(allow_software=True) == ()
    assert failure in why_no_adapter()
    assert "update the graphics driver" in why_no_adapter()
    assert no_adapter().is_fault


def test_a_driver_that_hangs_is_ended(
    child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    child("import time; time.sleep(3600)")
    monkeypatch.setattr(module, "_MOST_S", 0.5)
    assert gpu_adapters() == ()
    assert "it did not answer within 0.5 s" in why_no_adapter()


def test_what_drivers_print_and_their_end_do_no_harm(child: Callable[[str], None]) -> None:
    child(
        "import atexit, os\n"
        "from edge.host.child_answers import answer_parent\n"
        "from edge.host.gpu_adapters import AdapterSearch\n"
        "atexit.register(lambda: os._exit(9))\n"
        "def search():\n"
        "    os.write(1, b'MESA: warning')\n"
        "    return AdapterSearch(unsuitable=('V3D 4.2',))\n"
        "answer_parent(search)\n"
    )
    assert gpu_adapters() == ()
    assert why_no_adapter().startswith("V3D 4.2 lacks functions that WebGPU needs")


def test_the_fastest_kind_comes_first_and_the_search_is_made_once(
    child: Callable[[str], None],
) -> None:
    kinds: tuple[AdapterKind, ...] = ("software", "virtual", "integrated", "discrete", "discrete")
    adapters = tuple(replace(CARD, name=str(i), kind=kind) for i, kind in enumerate(kinds))
    child(saying(AdapterSearch(adapters=adapters)))
    assert [each.name for each in gpu_adapters()] == ["3", "4", "2", "1"]
    child("import os; os._exit(3)")
    assert [each.name for each in gpu_adapters(allow_software=True)] == ["3", "4", "2", "1", "0"]
