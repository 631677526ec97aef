"""A folder that is written in blocks or as compressed-tensors: it holds the very codes given."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge.errors import CapacityError, CheckpointError, RequestError
from edge.kernels.matmul_blocks.reference import FORMS, dequantize
from edge.kernels.matmul_nbits.reference import QuantizedMatrix, quantize, unpack
from edge.models.parts import MatrixSlice
from edge.models.spec import tensor_shapes
from edge.offload import MemoryStore, SafetensorsFile, SafetensorsWriter
from edge.weights.block_matrices import Blocks
from edge.weights.block_rounding import BlockRounding
from edge.weights.calibrated import rounded_matrix
from edge.weights.checkpoint import Checkpoint
from edge.weights.encoding import Encoding
from edge.weights.file_blocks import FileBlocks
from edge.weights.formats import weight_format
from edge.weights.partial_folder import PartialFolder
from edge.weights.quantized_folder import Group, QuantizedFolder
from tests.support import gguf_bytes
from tests.support.checkpoints import TinyCheckpoint
from tests.support.packed_folders import gptq, write_packed

MADE_BY = {"method": "rounding", "text": "0123"}

Kinds = dict[str, Blocks]
Make = Callable[..., TinyCheckpoint]


def rounded(checkpoint: Checkpoint, role: str, kind: Blocks) -> QuantizedMatrix:
    return quantize(
        checkpoint.store.read(checkpoint.tensor_name(role)),
        bits=kind.bits,
        block_size=kind.block_size,
        zero_points=kind.zero_points,
    )


def write_groups(
    checkpoint: Checkpoint, folder: QuantizedFolder, groups: Iterable[Group], kinds: Kinds
) -> None:
    for group in groups:
        folder.write(group, {role: rounded(checkpoint, role, kinds[role]) for role in group.coded})


@contextmanager
def begun(
    checkpoint: Checkpoint,
    target: Path,
    kinds: Kinds,
    made_by: Mapping[str, Any] = MappingProxyType(MADE_BY),
) -> Iterator[QuantizedFolder]:
    with PartialFolder(target) as place:
        yield QuantizedFolder(checkpoint, place, kinds, made_by=made_by)


def write_folder(checkpoint: Checkpoint, target: Path, kinds: Kinds) -> Path:
    with begun(checkpoint, target, kinds) as folder:
        write_groups(checkpoint, folder, folder.missing, kinds)
        folder.finish()
    return target


def usual_kinds(checkpoint: Checkpoint, of: Mapping[str, Blocks], head: Blocks | None) -> Kinds:
    """By the role within its layer."""
    kinds = {
        role: of[role.split(".", 2)[2]]
        for role in tensor_shapes(checkpoint.spec)
        if role.startswith("layers.") and role.split(".", 2)[2] in of
    }
    return kinds if head is None else {**kinds, "head": head}


MIXED = {
    "query.weight": Blocks(4, 32, zero_points=True),
    "key.weight": Blocks(8, 128),
    "value.weight": Blocks(8, 64),
    "output.weight": Blocks(4, 64, zero_points=True),
    "up.weight": Blocks(4, 16),
    "gate.weight": Blocks(2, 64, zero_points=True),
    "down.weight": Blocks(8, 64, zero_points=True),
}


def assert_holds(folder: Path, source: Checkpoint, kinds: Kinds) -> None:
    """Codes, scales and zero points to the last bit; all else as the source has it."""
    with Checkpoint.open(folder) as opened:
        own = opened.own_encoding
        assert isinstance(own, Encoding)
        chosen = weight_format(opened.spec, "auto", own=own)
        graded = chosen.graded(opened.spec)
        read = opened.source(
            chosen, cache_root=folder.with_name("cache"), on_progress=lambda progress: None
        )
        for role, shape in tensor_shapes(opened.spec).items():
            if role not in kinds:
                values = opened.store.read(opened.tensor_name(role))
                expected = source.store.read(source.tensor_name(role))
                assert values.dtype == expected.dtype
                np.testing.assert_array_equal(values, expected)
                continue
            grade = graded.layer(int(role.split(".")[1])).grade if role != "head" else 0
            assert chosen.recipe.kind(role, grade) == kinds[role]
            rows, columns = shape
            part = MatrixSlice(
                name="x", parts=((role, range(rows)),), columns=range(columns), grade=grade
            )
            found = kinds[role].matrix(read.matrix(part).__getitem__, columns)
            matrix = rounded(source, role, kinds[role])
            assert found.codes.shape == matrix.codes.shape
            flat, expected = (
                unpack(each.codes.reshape(rows, -1), each.bits) for each in (found, matrix)
            )
            np.testing.assert_array_equal(flat[:, :columns], expected[:, :columns])
            np.testing.assert_array_equal(found.scales, matrix.scales)
            assert (found.zero_points is None) == (matrix.zero_points is None)
            if found.zero_points is not None:
                np.testing.assert_array_equal(found.zero_points, matrix.zero_points)
        read.close()


@pytest.fixture
def source(tiny_checkpoint: Make) -> Iterable[Checkpoint]:
    with Checkpoint.open(tiny_checkpoint("llama_in_blocks").path) as opened:
        yield opened


def test_what_was_given_is_read_back(source: Checkpoint, tmp_path: Path) -> None:
    """Kinds differ by matrix and layer; the head's rows share words of zero points with nobody."""
    kinds = usual_kinds(source, MIXED, Blocks(4, 128, zero_points=True))
    kinds["layers.2.down.weight"] = Blocks(8, 128)
    del kinds["layers.1.up.weight"]
    folder = write_folder(source, tmp_path / "out", kinds)
    assert_holds(folder, source, kinds)
    assert not list(tmp_path.glob("*.partial"))
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        *(f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)),
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_config_names_each_module_once(source: Checkpoint, tmp_path: Path) -> None:
    kinds = usual_kinds(source, MIXED, None)
    kinds["layers.2.down.weight"] = Blocks(8, 128)
    del kinds["layers.1.up.weight"]
    folder = write_folder(source, tmp_path / "out", kinds)
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    assert config.pop("edge_quantize") == MADE_BY
    assert config == json.loads((source.path / "config.json").read_text())
    groups = said["config_groups"].values()
    assert len(groups) == len(set(kinds.values()))
    found: dict[str, Any] = {}
    for role, shape in tensor_shapes(source.spec).items():
        module = source.tensor_name(role).removesuffix(".weight")
        matching = [
            group["weights"]
            for group in groups
            for target in group["targets"]
            if re.match(target.removeprefix("re:"), module)
        ]
        assert len(matching) == (role in kinds)
        if len(shape) == 2 and role != "embedding":
            assert (module in said["ignore"]) == (role not in kinds)
        if matching:
            found[role] = matching[0]
    assert found["layers.2.down.weight"] == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 128,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
    }
    assert not found["layers.3.down.weight"]["symmetric"]


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("qwen2", Blocks(8, 16, zero_points=True)),
        ("llama_with_biases", Blocks(4, 32, zero_points=True)),
        ("mistral", Blocks(4, 16)),
        ("qwen3", Blocks(4, 16, zero_points=True)),
        ("qwen3", None),
    ],
)
def test_sizes_that_divide_by_nothing(
    name: str, head: Blocks | None, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    """Last blocks are not whole, biases and norms of heads are there; qwen3's head is tied."""
    of = {
        "query.weight": Blocks(4, 32, zero_points=True),
        "value.weight": Blocks(8, 16),
        "output.weight": Blocks(4, 16, zero_points=True),
        "down.weight": Blocks(8, 32, zero_points=True),
        "up.weight": Blocks(4, 32),
    }
    path = tiny_checkpoint(name, stored_type="bfloat16").path
    with Checkpoint.open(path) as checkpoint:
        kinds = usual_kinds(checkpoint, of, head)
        folder = write_folder(checkpoint, tmp_path / "out", kinds)
        assert_holds(folder, checkpoint, kinds)
        config = json.loads((folder / "config.json").read_text())
        assert config["tie_word_embeddings"] == (name == "qwen3" and head is None)


def test_an_interrupted_folder_is_gone_on_with(source: Checkpoint, tmp_path: Path) -> None:
    kinds = usual_kinds(source, MIXED, None)
    target, partial = tmp_path / "out", tmp_path / "out.partial"
    with begun(source, target, kinds) as folder:
        assert [group.name for group in folder.groups] == [
            *(f"layers.{number}" for number in range(4)),
            "rest",
        ]
        write_groups(source, folder, folder.groups[:3], kinds)
        assert [group.name for group in folder.missing] == ["layers.3", "rest"]
    damaged = partial / "model-00002-of-00005.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (partial / "model-00004-of-00005.safetensors.partial").write_bytes(b"of a process that died")
    kept = [partial / f"model-0000{number}-of-00005.safetensors" for number in (1, 3)]
    before = [path.stat() for path in kept]
    with begun(source, target, kinds, dict(reversed(MADE_BY.items()))) as folder:
        assert [group.name for group in folder.missing] == ["layers.1", "layers.3", "rest"]
        write_groups(source, folder, folder.missing, kinds)
        after = [path.stat() for path in kept]
        assert [each.st_mtime_ns for each in after] == [each.st_mtime_ns for each in before]
        assert [each.st_ino for each in after] == [each.st_ino for each in before]
        folder.finish()
    assert_holds(target, source, kinds)
    assert not partial.exists()
    assert not list(target.glob(".*"))


def test_what_others_began_is_begun_anew(
    source: Checkpoint, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    kinds = usual_kinds(source, MIXED, None)
    with Checkpoint.open(tiny_checkpoint("larger_llama").path) as other:
        for checkpoint, changed, made_by in (
            (source, kinds, {**MADE_BY, "text": "4567"}),
            (source, {**kinds, "head": Blocks(8, 64)}, MADE_BY),
            (other, kinds, MADE_BY),
        ):
            with begun(source, tmp_path / "out", kinds) as folder:
                write_groups(source, folder, folder.groups[:1], kinds)
            with begun(checkpoint, tmp_path / "out", changed, made_by) as folder:
                assert folder.missing == folder.groups
            assert not list((tmp_path / "out.partial").glob("model*"))


def test_what_is_there_already_is_left_alone(source: Checkpoint, tmp_path: Path) -> None:
    kinds = usual_kinds(source, MIXED, None)
    target, partial = tmp_path / "out", tmp_path / "out.partial"
    target.mkdir()
    with pytest.raises(RequestError, match="out is there already; remove it, or name another"):
        PartialFolder(target)
    assert not partial.exists()
    target.rmdir()
    partial.mkdir()
    for name in ("letter.txt", "letter.partial"):
        (partial / name).write_text("of somebody")
        with pytest.raises(RequestError, match=r"out\.partial, .* holds other files"):
            PartialFolder(target)
        assert [each.name for each in partial.iterdir()] == [name]
        (partial / name).unlink()
    with PartialFolder(target):
        assert partial.exists()
    assert not partial.exists(), "nothing was begun"
    with begun(source, target, kinds) as folder:
        write_groups(source, folder, folder.groups, kinds)
        target.write_text("made meanwhile")
        with pytest.raises(RequestError, match="is there already"):
            folder.finish()
        target.unlink()
        folder.finish()
    assert target.is_dir()


def test_two_writers_and_a_small_disk(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = usual_kinds(source, MIXED, None)
    with (
        PartialFolder(tmp_path / "out"),
        pytest.raises(RequestError, match="is being written by another process"),
    ):
        PartialFolder(tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=256 << 20))
    with (
        PartialFolder(tmp_path / "out") as place,
        pytest.raises(CapacityError, match=r"MiB more, and 256\.0 MiB are free"),
    ):
        QuantizedFolder(source, place, kinds, made_by=MADE_BY)


def test_what_could_not_be_read_again_is_refused(source: Checkpoint, tmp_path: Path) -> None:
    sizes = (16, 32, 64, 128, 256)
    every = [
        Blocks(bits, size, zeros) for zeros in (False, True) for bits in (4, 8) for size in sizes
    ]
    many = dict(zip(usual_kinds(source, MIXED, None), every, strict=False))
    wrong: list[tuple[Kinds, type[Exception], str]] = [
        ({}, RequestError, "no matrix would be quantised"),
        (many, RequestError, "a format cannot describe so many"),
        ({"embedding": Blocks(4, 32)}, ValueError, "'embedding' is not a matrix"),
        ({"final_norm": Blocks(4, 32)}, ValueError, "'final_norm' is not a matrix"),
        ({"head": Blocks(4, 32, offsets=True)}, ValueError, "is not a kind that the layout has"),
    ]
    for kinds, error, words in wrong:
        with (
            PartialFolder(tmp_path / "out") as place,
            pytest.raises(error, match=words),
        ):
            QuantizedFolder(source, place, kinds, made_by=MADE_BY)
    head: Kinds = {"head": Blocks(4, 32)}
    with begun(source, tmp_path / "out", head) as folder:
        for kind in (Blocks(8, 32), Blocks(4, 64), Blocks(4, 32, zero_points=True)):
            with pytest.raises(ValueError, match=r"not .* in 4 bits in blocks of 32"):
                folder.write(folder.groups[-1], {"head": rounded(source, "head", kind)})
        assert len(folder.missing) == 5
    assert not list((tmp_path / "out.partial").glob("*safetensors*"))


def test_a_damaged_weight_is_not_copied(tiny_checkpoint: Make, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("llama_in_blocks").path, tmp_path / "damaged"))
    with Checkpoint.open(path) as checkpoint:
        place = checkpoint.tensor_name("final_norm")
        weights = path / "model.safetensors"
        with SafetensorsFile(weights) as file:
            begin = file.tensors[place].begin
        with weights.open("r+b") as raw:
            raw.seek(begin)
            raw.write(np.float32(np.nan).tobytes())
        head: Kinds = {"head": Blocks(4, 32)}
        with (
            begun(checkpoint, tmp_path / "out", head) as folder,
            pytest.raises(CheckpointError, match="NaN"),
        ):
            write_groups(checkpoint, folder, folder.groups[-1:], head)


def test_a_folder_that_is_quantised_already(tiny_checkpoint: Make, tmp_path: Path) -> None:
    made = tiny_checkpoint("qwen2_in_blocks").path
    write_packed(tmp_path / "gptq", made, gptq())
    with Checkpoint.open(tmp_path / "gptq") as checkpoint:
        kinds = usual_kinds(
            checkpoint, {"up.weight": Blocks(4, 32, zero_points=True)}, Blocks(8, 32)
        )
        folder = write_folder(checkpoint, tmp_path / "out", kinds)
        assert_holds(folder, checkpoint, kinds)


def test_a_gguf_file_becomes_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(gguf_bytes.sound())
    with Checkpoint.open(file) as checkpoint:
        kinds = usual_kinds(
            checkpoint, {"down.weight": Blocks(4, 16)}, Blocks(8, 16, zero_points=True)
        )
        folder = write_folder(checkpoint, tmp_path / "out", kinds)
        assert_holds(folder, checkpoint, kinds)
        with Checkpoint.open(folder) as opened:
            assert opened.end_ids == checkpoint.end_ids
            assert opened.spec.layers == checkpoint.spec.layers
            assert opened.spec.kinds == checkpoint.spec.kinds
            message = [{"role": "user", "content": "hi"}]
            assert opened.tokenizer.chat(message) == checkpoint.tokenizer.chat(message)
            assert opened.tokenizer.encode("the quick") == checkpoint.tokenizer.encode("the quick")
            opened.tokenizer.close()
            checkpoint.tokenizer.close()


def test_links_to_elsewhere_are_not_followed(tiny_checkpoint: Make, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("llama_in_blocks").path, tmp_path / "linked"))
    (tmp_path / "secret").write_text("of somebody")
    (path / "LICENSE").symlink_to(tmp_path / "secret")
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(CheckpointError, match="outside of the checkpoint"),
    ):
        write_folder(checkpoint, tmp_path / "out", {"head": Blocks(4, 32)})


WHOLE_NUMBERS = [name for name, form in FORMS.items() if not form.has_table]


def in_blocks(checkpoint: Checkpoint, kinds: Mapping[str, FileBlocks]) -> dict[str, Any]:
    """The blocks of each matrix by role, as they are given to the folder."""
    found = {}
    for role, kind in kinds.items():
        weight = checkpoint.store.read(checkpoint.tensor_name(role))
        arrays, _largest = BlockRounding(kind.form).rounded(weight)
        found[role] = arrays["blocks"]
    return found


def write_blocks(
    checkpoint: Checkpoint, target: Path, kinds: Mapping[str, FileBlocks]
) -> dict[str, Any]:
    """Writes a folder; its blocks by role."""
    given = in_blocks(checkpoint, kinds)
    with PartialFolder(target) as place:
        folder = QuantizedFolder(checkpoint, place, kinds, made_by=MADE_BY)
        for group in folder.missing:
            folder.write(group, {role: given[role] for role in group.coded})
        folder.finish()
    return given


def kinds_of(checkpoint: Checkpoint, name: str) -> dict[str, FileBlocks]:
    return {
        role: FileBlocks(name)
        for role, shape in tensor_shapes(checkpoint.spec).items()
        if len(shape) == 2 and role != "embedding"
    }


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_blocks_are_read_back(source: Checkpoint, tmp_path: Path, name: str) -> None:
    """To the last bit; packed ones, and floats, as these blocks are; also some rows and columns."""
    kinds = kinds_of(source, name)
    given = write_blocks(source, tmp_path / "out", kinds)
    with Checkpoint.open(tmp_path / "out") as opened:
        own = opened.own_encoding
        assert isinstance(own, Encoding)
        assert own.packed is not None
        for role in ("layers.1.down.weight", "layers.3.query.weight", "head"):
            rows, columns = tensor_shapes(opened.spec)[role]
            expected = dequantize(FORMS[name], given[role])[:, :columns]
            tensor = opened.tensor_name(role)
            np.testing.assert_allclose(
                opened.store.read(tensor, range(3, rows - 5), range(7, columns - 9)),
                expected[3 : rows - 5, 7 : columns - 9],
                rtol=1e-6,
            )
            for packs_blocks, some in ((False, range(16, rows)), (True, range(5, rows - 2))):
                form = weight_format(opened.spec, "auto", own=own, packs_blocks=packs_blocks)
                kind = form.recipe.kind(role, 0)
                assert isinstance(kind, Blocks) == packs_blocks
                first = kind.column_multiple if role.startswith("layers.1") else 0
                with contextlib.closing(
                    opened.source(form, cache_root=tmp_path, on_progress=lambda _progress: None)
                ) as read:
                    stored = read.matrix(
                        MatrixSlice(name="x", parts=((role, some),), columns=range(first, columns))
                    )
                found = kind.floats(stored.__getitem__, columns - first)[: len(some)]
                wanted = expected[some.start : some.stop, first:]
                np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7)


def test_blocks_of_unlike_types_and_partial_ones(tiny_checkpoint: Make, tmp_path: Path) -> None:
    """Columns that are no whole blocks, a head that is the embedding, and matrices of floats."""
    with Checkpoint.open(tiny_checkpoint("qwen2", stored_type="bfloat16").path) as checkpoint:
        kinds = {role: FileBlocks("Q5_1") for role in kinds_of(checkpoint, "Q5_1") if "up" in role}
        kinds |= {
            role: FileBlocks("Q6_K") for role in kinds_of(checkpoint, "Q6_K") if "key" in role
        }
        kinds["head"] = FileBlocks("Q8_0")
        given = write_blocks(checkpoint, tmp_path / "out", kinds)
        with Checkpoint.open(tmp_path / "out") as opened:
            assert not opened.spec.tied_embeddings
            for role, shape in tensor_shapes(opened.spec).items():
                found = opened.store.read(opened.tensor_name(role))
                if role in kinds:
                    floats = dequantize(kinds[role].form, given[role])[:, : shape[1]]
                    np.testing.assert_allclose(found, floats, rtol=1e-6)
                elif role != "embedding":
                    wanted = checkpoint.store.read(checkpoint.tensor_name(role))
                    np.testing.assert_array_equal(found, wanted)


def test_a_folder_is_in_blocks_as_a_whole(source: Checkpoint, tmp_path: Path) -> None:
    mixed: dict[str, Any] = {"head": Blocks(8, 32), "layers.0.up.weight": FileBlocks("Q4_K")}
    with PartialFolder(tmp_path / "out") as place:
        with pytest.raises(ValueError, match="as a whole"):
            QuantizedFolder(source, place, mixed, made_by=MADE_BY)
        folder = QuantizedFolder(source, place, {"head": FileBlocks("Q4_0")}, made_by=MADE_BY)
        (group,) = (each for each in folder.groups if each.coded)
        given = in_blocks(source, {"head": FileBlocks("Q5_0")})
        with pytest.raises(ValueError, match=r"not .* of blocks of Q4_0"):
            folder.write(group, given)


def changed_tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The folder's last file again, with other tensors."""
    (path,) = folder.glob("model-00005-of-*.safetensors")
    with SafetensorsFile(path) as file:
        tensors = {name: file.read(name, ()) for name in file.tensors}
    change(tensors)
    types = {"uint8": "U8", "int64": "I64", "float32": "F32"}
    described = {name: (types[each.dtype.name], each.shape) for name, each in tensors.items()}
    with SafetensorsWriter(path, described) as writer:
        for name, each in tensors.items():
            writer.write_rows(name, 0, each)
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    others = {k: v for k, v in said["weight_map"].items() if v != path.name}
    said["weight_map"] = {**others, **dict.fromkeys(tensors, path.name)}
    index.write_text(json.dumps(said))


def _renamed(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[new] = tensors.pop(old) if old in tensors else tensors["lm_head.weight_shape"]

    return change


BLOCKS_NAME = "lm_head.weight_blocks.Q4_K"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_renamed(BLOCKS_NAME, "lm_head.weight_blocks.IQ4_XS"), "type that `edge quantize` does"),
        (_renamed(BLOCKS_NAME, "lm_head.weight_blocks.x"), "type that `edge quantize` does not"),
        (_renamed(BLOCKS_NAME, "lm_head.weight_blocks.Q5_K"), "are no blocks of"),
        (_renamed("lm_head.weight_shape", "lm_head.other"), "has no lm_head.weight_shape"),
        (_renamed("", "lm_head.weight"), "is there twice"),
        (lambda t: t.update({"lm_head.weight_shape": np.array([1 << 40, 7])}), "are no blocks of"),
        (lambda t: t.update({"lm_head.weight_shape": np.array([-1, -7])}), "are no blocks of"),
        (
            lambda t: t.update({"lm_head.weight_blocks.Q4_0": t[BLOCKS_NAME][..., :18]}),
            "are no blocks of|there twice",
        ),
    ],
)
def test_contradictory_blocks_are_refused(
    source: Checkpoint, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    write_blocks(source, tmp_path / "out", {"head": FileBlocks("Q4_K")})
    changed_tensors(tmp_path / "out", change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path / "out").close()


def test_blocks_of_a_later_version_and_of_no_numbers(source: Checkpoint, tmp_path: Path) -> None:
    write_blocks(source, tmp_path / "out", kinds_of(source, "Q4_K"))
    config = tmp_path / "out" / "config.json"
    said = json.loads(config.read_text())
    changed_tensors(tmp_path / "out", lambda t: t[BLOCKS_NAME][..., :2].fill(0xFF))
    with Checkpoint.open(tmp_path / "out") as opened:
        own = opened.own_encoding
        assert isinstance(own, Encoding)
        rows, columns = tensor_shapes(opened.spec)["head"]
        part = MatrixSlice(name="x", parts=(("head", range(rows)),), columns=range(columns))
        for packs_blocks in (False, True):
            form = weight_format(opened.spec, "auto", own=own, packs_blocks=packs_blocks)
            with (
                contextlib.closing(
                    opened.source(form, cache_root=tmp_path, on_progress=lambda _progress: None)
                ) as read,
                pytest.raises(CheckpointError, match="NaN"),
            ):
                read.matrix(part)
    said["quantization_config"]["version"] = 2
    config.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="version 2 of their layout, and version 1 is read"):
        Checkpoint.open(tmp_path / "out").close()
    del said["quantization_config"]
    config.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"weight_shape .* no quantization_config"):
        Checkpoint.open(tmp_path / "out").close()


def test_weights_past_float16_are_refused(tmp_path: Path) -> None:
    """Before a folder is written that nobody can load."""
    large = np.full((2, 32), 1e9, np.float32)
    large[0, 0] = -1e9
    checkpoint: Any = SimpleNamespace(tensor_name=str, store=MemoryStore({"head": large}))
    statistics: Any = SimpleNamespace(grams=lambda _role: [np.eye(32, dtype=np.float32)])
    for name in WHOLE_NUMBERS:
        with pytest.raises(CheckpointError, match=f"too large for blocks of {name}"):
            rounded_matrix(checkpoint, statistics, "head", FileBlocks(name), lambda _count: None)
