"""Graphics adapters: which device computes, and errors that WebGPU only writes into its log."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge.backends import registry
from edge.backends.registry import open_backend, usual_backend
from edge.backends.webgpu.errors import ErrorLog
from edge.errors import CapacityError, DeviceLostError, PeerLostError, RequestError
from edge.host import gpu_adapters
from edge.protocol.error_codec import Failed
from tests.support.slow_cases import shown_in_parts
from tests.support.swiftshader import needs_swiftshader, webgpu_environment

ROOT = Path(__file__).parents[3]
LOST = b"2026 [E:onnxruntime] WebGPU device lost (1): VK_ERROR_DEVICE_LOST\n"
NO_MEMORY = b"WebGPU device error(3): vkAllocateMemory failed\n - While calling\n"
INVALID = b"WebGPU device error(2): [Invalid Buffer] is invalid\n"


@pytest.fixture
def log() -> ErrorLog:
    return ErrorLog()


@pytest.mark.parametrize(
    ("written", "error", "why"),
    [
        (LOST, DeviceLostError, "failed: VK_ERROR_DEVICE_LOST"),
        (NO_MEMORY + INVALID, CapacityError, "has no memory left: vkAllocateMemory failed; end"),
        (b"a warning\n" + INVALID, DeviceLostError, r"\(tiny\) failed: \[Invalid Buffer\]"),
    ],
)
def test_an_error_in_the_log_is_raised(
    log: ErrorLog, written: bytes, error: type[Exception], why: str
) -> None:
    """The first one, which brings the others; also of a context in another one."""
    with pytest.raises(error, match=why), log.watched("tiny"), log.watched("tiny"):
        os.write(2, written)
    with log.watched("tiny"):
        """It was the earlier context's."""


def test_what_else_is_written_is_passed_on(
    log: ErrorLog, capfd: pytest.CaptureFixture[str]
) -> None:
    with log.watched("tiny"):
        os.write(2, b"two ")
    with pytest.raises(FileNotFoundError), log.watched("tiny"):
        Path(os.write(2, b"lines\n") * "/nowhere").stat()
    assert capfd.readouterr().err == "two lines\n"


def test_an_adapter_that_failed_is_a_lost_peer_to_the_coordinator() -> None:
    failed = Failed.of(DeviceLostError("the graphics adapter (tiny) failed"))
    error = failed.as_error("attic")
    assert isinstance(error, PeerLostError)
    assert error.peer == "attic"
    assert "(tiny) failed" in str(error)


def test_without_its_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(RequestError, match=r"pip install edge-inference\[webgpu\]"):
        open_backend("webgpu", threads=1)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VK_DRIVER_FILES", "/nowhere.json")
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nowhere.json")
    gpu_adapters._search.cache_clear()
    yield
    gpu_adapters._search.cache_clear()


@pytest.mark.usefixtures("no_driver")
def test_without_an_adapter_it_says_what_to_install() -> None:
    assert usual_backend(threads=1) == ("ort", "")
    with pytest.raises(RequestError, match=r"back end webgpu cannot run here: .*driver"):
        open_backend("webgpu", threads=1)


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[str, str]]:
    """`usual_backend` of a host with an adapter, whose measurement is this code."""

    def chosen(code: str) -> tuple[str, str]:
        command = [sys.executable, "-c", code]
        monkeypatch.setattr(registry, "edge_command", lambda _module: command)
        monkeypatch.setattr(registry, "num_cuda_devices", lambda: 0)
        monkeypatch.setattr(registry, "has_webgpu_package", lambda: True)
        monkeypatch.setattr(registry, "gpu_adapters", lambda: [SimpleNamespace(name="Radeon")])
        return usual_backend(threads=1)

    return chosen


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, "webgpu"), (2.0, "ort")])
def test_auto_takes_the_faster_device_and_says_so(
    measuring: Callable[[str], tuple[str, str]], seconds: float, chosen: str
) -> None:
    backend, sentence = measuring(f'print(\'{{"adapter_s": {seconds}, "processor_s": 1.0}}\')')
    assert backend == chosen
    times = {"webgpu": "2 times as fast", "ort": "0.5 times as fast"}[chosen]
    used = {"webgpu": "and is used", "ort": "and is not used"}[chosen]
    assert sentence.startswith(f"the graphics adapter (Radeon) computes {times}")
    assert sentence.endswith(used)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os._exit(3)", "its process ended with exit code 3"),
        ("print('hello')", "its answer makes no sense"),
        ('print(\'{"adapter_s": 0.0, "processor_s": 1.0}\')', "its answer makes no sense"),
        ("print('\"no memory left\"')", "no memory left"),
    ],
)
def test_an_adapter_that_cannot_be_measured_is_not_used(
    measuring: Callable[[str], tuple[str, str]], code: str, why: str
) -> None:
    """And the peer starts: it computes on its processor."""
    adapter = "the graphics adapter (Radeon)"
    sentence = f"{adapter} is not used, because its measurement failed: {why}"
    assert measuring(code) == ("ort", sentence)


ON_AN_ADAPTER = """
import numpy as np
from edge.backends.registry import open_backend
from edge.backends.onnx.speed import decode_seconds
from edge.backends.webgpu.device import Device
from edge.errors import CapacityError
from edge.kernels.onnx_graph import WEBGPU
backend = open_backend("webgpu", threads=1)
assert backend.is_stand_in and not backend.has_own_memory
assert "SwiftShader" in backend.device_name
assert 0 < decode_seconds(Device(1).session, provider=WEBGPU, size=64)
device = Device(1)
assert device.copy_bytes_per_s() > 0
row = np.arange(6, dtype=np.float32)
there = device.put(row)
device.write(there, row + 1)
assert (device.read(there) == row + 1).all()
most = device.adapter.largest_buffer_bytes
for nbytes, sentence in ((most + 1, "larger than the graphics adapter"), (most, "no memory left")):
    try:
        device.empty((nbytes,), np.uint8)
    except CapacityError as error:
        assert sentence in str(error), error
    else:
        raise AssertionError("nothing was raised")
"""


@needs_swiftshader
def test_memory_that_ends_is_noticed() -> None:
    """ONNX Runtime goes on with a buffer that was not made, and says nothing."""
    _run_on_an_adapter(ON_AN_ADAPTER)


OF_A_PROGRAM = """
import gc, sys
from dataclasses import replace
from pathlib import Path
import pytest
from edge.backends.onnx.runtime import ort
from edge.backends.onnx.self_check import SelfCheck
from edge.backends.webgpu import backend, bindings
from edge.errors import DeviceLostError
from tests.support.program_contract import LIMITS, Kind, chunk, compute, decode
folder = Path(sys.argv[1])
# Daemons of e2e/test_webgpu_peers.py check themselves; here that is most of the time.
checked = SelfCheck(of_chunks=False, of_pairs=False, of_single=False)
backend.run_self_check = lambda *_, **__: checked
def arrays_of_caches():
    return [each for each in gc.get_objects()
            if isinstance(each, ort.OrtValue) and len(each.shape()) == 4]
with Kind("webgpu", folder).program() as program:
    for path in folder.glob("*/weights"):
        path.unlink()
    for tokens in (1, 2):  # a binding for each number
        compute(program, chunk("a", tuple(range(tokens)), rows=tokens))
        program.release("a")
    assert not arrays_of_caches()
    # A graph of another size, without the file of weights.
    compute(program, decode(("a", 1, 0), ("b", 2, 0)))
    program.release("a")
    found = len(arrays_of_caches())
    assert found == 6, f"{found} arrays, and one request has three layers"
    def refuses(*arguments):
        raise RuntimeError("mapping failed")
    bindings.ort.OrtValue.numpy = refuses
    with pytest.raises(DeviceLostError, match="mapping failed"):
        program.put_rows("c", 0, program.new_rows(1))
"""


@needs_swiftshader
@shown_in_parts("contract/test_stage_program.py")
def test_a_program_keeps_nothing_of_requests_that_ended(tmp_path: Path) -> None:
    """Bindings held their arrays. Graphs of other sizes are made when the file of weights may be
    gone, and what ONNX Runtime raises is an error of the adapter."""
    _run_on_an_adapter(OF_A_PROGRAM, tmp_path)


def _run_on_an_adapter(script: str, *arguments: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env={**os.environ, **webgpu_environment()},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
