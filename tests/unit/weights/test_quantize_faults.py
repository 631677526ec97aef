"""The quantised cache when processes are killed, files are damaged and disks are full."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from edge.errors import CheckpointError
from edge.kernels.matmul_nbits.reference import quantize
from edge.offload import SafetensorsStore
from edge.weights.quantize import open_quantized
from edge.weights.quantized_store import QuantizedFormat
from tests.support.quantized import MATRICES, TENSORS, assert_same, files, open_here

REPOSITORY = Path(__file__).parents[3]  # the children import from it


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: bytes | None) -> None:
    open_here(tmp_path).close()
    first = files(tmp_path)
    path = next(tmp_path.glob("*/model.layers.0-*"))
    if damage is None:
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.write_bytes(damage)
    with open_here(tmp_path) as store:
        whole = quantize(TENSORS["model.layers.0.up"], bits=4, block_size=32)
        assert_same(store.rows("model.layers.0.up", range(48)), whole)
    again = files(tmp_path)
    assert again.keys() == first.keys()
    assert [name for name in first if again[name] != first[name]] == [path.name]


def test_a_file_cut_short_while_open_is_an_error(tmp_path: Path) -> None:
    with open_here(tmp_path) as store:
        os.truncate(next(tmp_path.glob("*/head-*")), 500)
        with pytest.raises(CheckpointError, match="damaged"):
            store.rows("head", range(70))


CHILD = """
import os, signal, sys
from pathlib import Path
import numpy as np
from edge.weights import quantize
from edge.weights.quantized_store import QuantizedFormat
from edge.offload import SafetensorsStore
from edge.offload.files import durable

source, root, kill_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
real, written = durable.write_at, 0

def dying_write(descriptor, data, offset):
    global written
    written += 1
    if written == kill_at:
        real(descriptor, data[: len(data) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(descriptor, data, offset)

durable.write_at = dying_write
with SafetensorsStore(source) as store:
    names = [name for name in store.names() if name not in {"norm", "ids"}]
    rounding = QuantizedFormat(bits=4, block_size=32)
    quantize.open_quantized(store, names, rounding, cache_root=root).close()
"""


def child(source: Path, root: Path, kill_at: int) -> "subprocess.Popen[bytes]":
    arguments = [str(source), str(root), str(kill_at)]
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], cwd=REPOSITORY)


FULL_DISK = """
import sys
from pathlib import Path
import numpy as np
from edge.offload import SafetensorsWriter, StoreFullError

path = Path(sys.argv[1]) / "big.safetensors"
try:
    with SafetensorsWriter(path, {"t": ("F32", (2_000_000,))}):
        raise SystemExit("a file larger than the disk was begun")
except StoreFullError as error:
    assert "disk is full" in str(error), error
assert not list(path.parent.iterdir())
with SafetensorsWriter(path, {"t": ("F32", (500_000,))}) as writer:
    (path.parent / "other").write_bytes(bytes(2_000_000))  # its room is kept for it meanwhile
    writer.write_rows("t", 0, np.ones(500_000, np.float32))
assert path.stat().st_size > 2_000_000
"""


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=4m none "$1" && exec "$2" -c "$3" "$1"'
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], check=False).returncode
    ):
        pytest.skip("a small disk needs user namespaces, which this system forbids")
    subprocess.run(
        [*unshare, "sh", "-c", script, "sh", str(tmp_path), sys.executable, FULL_DISK],
        check=True,
        cwd=REPOSITORY,
    )


def check_all(source: Path, root: Path) -> None:
    with (
        SafetensorsStore(source) as floats,
        open_quantized(
            floats, MATRICES, QuantizedFormat(bits=4, block_size=32), cache_root=root
        ) as store,
    ):
        for name in MATRICES:
            whole = quantize(TENSORS[name], bits=4, block_size=32)
            assert_same(store.rows(name, range(len(whole.codes))), whole)


def test_a_killed_process_leaves_whole_files_and_no_lock(tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    source.mkdir()
    save_file(TENSORS, source / "model.safetensors")
    # A file is one write of its header and two per matrix; head has one, layer 0 two: the tenth
    # write is in the third file.
    with child(source, root, 10) as process:
        assert process.wait() == -signal.SIGKILL
    kept = files(root)
    assert len(kept) == 2
    assert len(list(root.glob("*/*.partial"))) == 1
    check_all(source, root)
    assert files(root).items() > kept.items()
    assert not list(root.glob("*/*.partial"))


def test_two_processes_at_once(tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    source.mkdir()
    save_file(TENSORS, source / "model.safetensors")
    with child(source, root, -1) as one, child(source, root, -1) as two:
        assert one.wait() == two.wait() == 0
    made = files(root)
    assert len(made) == 4
    check_all(source, root)
    assert files(root) == made
