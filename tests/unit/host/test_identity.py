"""Which machine it is, and when it must be measured anew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge.host import identity as identity_module
from edge.host.identity import arithmetic_identity, device_identity, host_id, on_battery
from edge.system import processor


def identity(**changes: object) -> str:
    usual = {"backend": "ort", "accelerator": "CPU", "threads": 2, "sample_bytes": 5}
    return device_identity(**{**usual, **changes})  # type: ignore[arg-type]


def test_every_process_of_a_machine_names_it_alike() -> None:
    code = "from edge.host.identity import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_id()


def test_the_number_of_this_boot_is_not_told() -> None:
    assert host_id() not in identity_module._BOOT_ID.read_text()


def test_an_unchanged_device_stays_what_it_is() -> None:
    assert identity() == identity()


@pytest.mark.parametrize(
    "change",
    [{"threads": 3}, {"backend": "triton"}, {"accelerator": "a GPU"}, {"sample_bytes": 6}],
)
def test_a_device_that_is_set_up_otherwise_is_another(change: dict[str, object]) -> None:
    assert identity(**change) != identity()


def test_a_laptop_on_its_battery_is_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    identities = []
    for plugged in (True, False, None):
        battery = SimpleNamespace(power_plugged=plugged)
        monkeypatch.setattr("psutil.sensors_battery", lambda battery=battery: battery)
        identities.append(identity())
    assert identities[0] != identities[1]
    assert identities[0] == identities[2], "not known is not on battery"


def test_a_smaller_share_of_the_processor_is_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = identity()
    monkeypatch.setattr(identity_module, "processors", lambda: 0.25)
    assert identity() != before


@pytest.mark.usefixtures("read_anew")
def test_a_library_of_kernels_that_is_not_used_makes_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for library in (Path("library.bin"), None):
        monkeypatch.setattr("edge.host.block_kernels.library", lambda library=library: library)
        identity_module._versions.cache_clear()
        found.append((identity(), arithmetic_identity(backend="ort", accelerator="")))
    for of_used, of_other in zip(*found, strict=True):
        assert of_used != of_other


@pytest.mark.parametrize("error", [FileNotFoundError("/sys/class/power_supply"), AttributeError()])
def test_a_system_that_tells_nothing_of_its_battery(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr("psutil.sensors_battery", fails)
    assert not on_battery()


@pytest.fixture
def read_anew() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    of_processor = processor._lines, processor.processor_names, processor.processor_kinds
    for each in (*of_processor, identity_module._versions):
        each.cache_clear()


def bits(cpu_info: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a device computes whose kernel tells this of its processor."""
    file = folder / "cpuinfo"
    file.write_text(cpu_info)
    monkeypatch.setattr(processor, "_CPU_INFO", file)
    forget()
    return arithmetic_identity(backend="ort", accelerator="CPU")


@pytest.mark.usefixtures("read_anew")
def test_processors_with_other_instructions_compute_other_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = "processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd08\n"
    more = one.replace("asimd", "asimd asimddp")
    assert bits(one, tmp_path, monkeypatch) != bits(more, tmp_path, monkeypatch)
    other = one.replace("0xd08", "0xd0b")
    assert bits(one, tmp_path, monkeypatch) != bits(other, tmp_path, monkeypatch)
    cores = one + one.replace("processor\t: 0", "processor\t: 1")
    assert bits(one, tmp_path, monkeypatch) == bits(cores, tmp_path, monkeypatch)


def test_another_back_end_computes_other_bits() -> None:
    on_cpu, again = (arithmetic_identity(backend="ort", accelerator="CPU") for _ in range(2))
    assert on_cpu == again != arithmetic_identity(backend="triton", accelerator="CPU")
