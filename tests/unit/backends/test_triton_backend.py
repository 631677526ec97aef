"""Which back end computes, and what is said where the one asked for cannot."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

import edge
from edge.backends import registry
from edge.backends.registry import open_backend, usual_backend
from edge.errors import RequestError
from edge.host import cuda_driver
from tests.support.processes import PATIENCE_S, edge_process
from tests.support.processes import edge as edge_command


def without_packages(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else found(name)
    )


@pytest.mark.parametrize("missing", [("triton",), ("torch", "triton")])
def test_without_its_packages_it_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    without_packages(monkeypatch, *missing)
    with pytest.raises(RequestError, match=r"pip install edge-inference\[gpu\]") as refused:
        open_backend("triton", threads=1)
    assert f"here: {' and '.join(missing)} cannot be imported" in str(refused.value)


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match=r"no CUDA device; .*--backend ort"):
        open_backend("triton", threads=1)


def test_auto_is_the_cpu_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where kernels could be interpreted: that is only for who asks for it."""
    monkeypatch.setattr(registry, "num_cuda_devices", lambda: 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert usual_backend(threads=1)[0] == "ort"


def test_auto_is_the_cpu_where_a_gpu_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "num_cuda_devices", lambda: 1)
    without_packages(monkeypatch, "torch")
    assert usual_backend(threads=1)[0] == "ort"


def test_auto_is_the_gpu_where_one_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(registry, "num_cuda_devices", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert usual_backend(threads=1)[0] == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert usual_backend(threads=1)[0] == "ort", "nobody asked for the interpreter"


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libcuda-that-is-not-there.so")
    assert cuda_driver.num_cuda_devices.__wrapped__() == 0


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        ("cuda", "backend 'cuda' is not one of auto, ort, triton"),
        (["ort"], "1 values of backend for 2 peers"),
    ],
)
def test_local_peers_take_back_ends_that_exist(backend: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        edge.Cluster.local(peers=2, backend=backend)


def test_a_host_s_memory_is_for_devices_that_have_another() -> None:
    refused = edge_command("peer", "--backend", "ort", "--host-memory", "1GiB", "--no-announce")
    assert "uses the host's memory, which --memory limits; leave out" in refused.sentence()


@pytest.mark.skipif(cuda_driver.num_cuda_devices() > 0, reason="there is a GPU here")
def test_a_daemon_that_cannot_compute_does_not_start() -> None:
    arguments = ("peer", "--backend", "triton", "--listen", "127.0.0.1:0", "--no-announce")
    with edge_process(*arguments, environment={**os.environ, "TRITON_INTERPRET": "0"}) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert out == ""
    assert err.startswith("edge: back end triton cannot run here: PyTorch sees no CUDA device;")
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("named", "gpu", "expected"),
    [
        (None, 1, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ("2,5", 1, {"CUDA_VISIBLE_DEVICES": "5"}),
        (" GPU-7a , GPU-9c,", 0, {"CUDA_VISIBLE_DEVICES": "GPU-7a"}),
    ],
)
def test_a_daemon_sees_the_gpu_it_was_given_alone(
    named: str | None, gpu: int, expected: dict[str, str]
) -> None:
    environment = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    cuda_driver.use_only(gpu, environment)
    assert environment == expected


@pytest.mark.parametrize("named", ["", "0", "0,1"])
def test_a_gpu_that_is_not_among_the_visible_ones_is_refused(named: str) -> None:
    with pytest.raises(RequestError, match="there is no GPU 2 here"):
        cuda_driver.use_only(2, {"CUDA_VISIBLE_DEVICES": named})


@pytest.mark.skipif(cuda_driver.num_cuda_devices() > 0, reason="there is a GPU here")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "1"), "CUDA finds no GPU 1 here; nvidia-smi lists"),
        (("--gpu", "0", "--backend", "ort"), "--gpu names a GPU, and back end ort"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused(options: tuple[str, ...], message: str) -> None:
    arguments = ("peer", "--no-announce", "--listen", "127.0.0.1:0", *options)
    with edge_process(*arguments) as process:
        _out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert message in err
