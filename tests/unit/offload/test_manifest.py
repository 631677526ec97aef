"""A manifest has one layout and one text; everything else is refused."""

import hashlib
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from edge.offload import (
    PIECE_BYTES,
    Manifest,
    ManifestBuilder,
    StoreCorruptError,
    TensorPiece,
    numpy_dtype,
)
from edge.offload.files.manifest import MAX_JSON_BYTES, MAX_TENSORS, MAX_TOTAL_BYTES

random = np.random.default_rng(0)
BIG = random.integers(0, 256, (PIECE_BYTES // 1000 + 7, 2000), dtype=np.uint8)
CONTENT: dict[str, Any] = {
    "norm": np.arange(10, dtype=np.float32),
    "big": BIG,
    "half": np.ones((3, 5), ml_dtypes.bfloat16),
    "empty": np.zeros((0, 4), np.int8),
    "raw": b"seven..",
    "page": np.zeros(70_000, np.uint8),
}


def built() -> Manifest:
    builder = ManifestBuilder()
    for name, content in CONTENT.items():
        builder.add(name, content)
    return builder.build()


def test_places_types_and_shapes() -> None:
    entries = {entry.name: entry for entry in built().tensors}
    assert list(entries) == list(CONTENT)
    assert [entry.offset % 64 for entry in entries.values()] == [0] * len(entries)
    assert entries["big"].offset == 4096
    assert entries["page"].offset % 4096 == 0
    assert entries["half"].offset == -(-(4096 + BIG.nbytes) // 64) * 64
    assert entries["half"].dtype == "bfloat16"
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    assert entries["half"].shape == (3, 5)
    assert entries["raw"].dtype == "uint8"
    assert entries["raw"].shape == (7,)
    assert entries["empty"].pieces == ()
    assert built().total_bytes == entries["page"].offset + 70_000


def test_pieces_are_the_hashed_runs_of_the_tensor() -> None:
    big = next(entry for entry in built().tensors if entry.name == "big")
    content = BIG.tobytes()
    assert [piece.nbytes for piece in big.pieces] == [
        PIECE_BYTES, PIECE_BYTES, BIG.nbytes - 2 * PIECE_BYTES
    ]  # fmt: skip
    for index, piece in enumerate(big.pieces):
        part = content[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
        assert piece.digest == hashlib.sha256(part).hexdigest()


def test_placements_cover_each_tensor_in_order() -> None:
    manifest = built()
    placements = list(manifest.placements())
    assert [offset for offset, _ in placements] == sorted(offset for offset, _ in placements)
    assert [piece for _, piece in placements] == [
        piece for tensor in manifest.tensors for piece in tensor.pieces
    ]
    assert (4096 + PIECE_BYTES, manifest.tensors[1].pieces[1]) in placements


def test_the_text_says_everything() -> None:
    manifest = built()
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert Manifest.from_json(manifest.to_json().encode()) == manifest
    assert Manifest.from_json(ManifestBuilder().build().to_json()).total_bytes == 0


def test_the_digest_is_stable_and_follows_every_fact() -> None:
    assert built().digest == built().digest
    small = ManifestBuilder()
    small.add("a", b"content")
    # Written down so that a change of the text is noticed: peers of two versions would part.
    piece = hashlib.sha256(b"content").hexdigest()
    told = '{"total_bytes":7,"tensors":[["a","uint8",[7],0,["' + piece + '"]]]}'
    expected = hashlib.sha256(told.encode()).hexdigest()
    assert small.build().digest == expected
    others = []
    for name, content in (
        ("b", b"content"),
        ("a", b"Content"),
        ("a", np.frombuffer(b"content", np.int8)),
        ("a", np.frombuffer(b"content", np.uint8).reshape(1, 7)),
    ):
        builder = ManifestBuilder()
        builder.add(name, content)
        others.append(builder.build().digest)
    assert len({expected, *others}) == 5


def test_a_builder_hashes_arrays_that_are_not_contiguous() -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    builder = ManifestBuilder()
    assert builder.add("a", array.T).pieces == builder.add("b", array.T.copy()).pieces


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("taken", b"x"),
        ("", b"x"),
        ("n" * 1001, b"x"),
        ("complex", np.zeros(2, np.complex64)),
        ("axes", np.zeros((1,) * 9, np.int8)),
    ],
)
def test_what_a_builder_refuses(name: str, content: Any) -> None:
    builder = ManifestBuilder()
    builder.add("taken", b"x")
    with pytest.raises(ValueError, match="cannot be described"):
        builder.add(name, content)
    assert [entry.name for entry in builder.build().tensors] == ["taken"]


DIGEST = "0" * 64


def entry(**changes: object) -> list[object]:
    fields: dict[str, object] = {
        "name": "t", "dtype": "uint8", "shape": [10], "offset": 0, "digests": [DIGEST]
    }  # fmt: skip
    return list((fields | changes).values())


def text(*entries: object, total_bytes: object = 10) -> str:
    return json.dumps({"total_bytes": total_bytes, "tensors": list(entries)})


def test_the_entry_the_refusals_vary_is_accepted() -> None:
    manifest = Manifest.from_json(text(entry()))
    assert manifest.tensors[0].pieces == (TensorPiece(digest=DIGEST, nbytes=10),)


HUGE = [MAX_TOTAL_BYTES // 2 + 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a table"),
        ("{}", "not a table"),
        ('{"total_bytes":0,"tensors":[],"more":1}', "not a table"),
        ('{"total_bytes":0,"tensors":{}}', "no list"),
        (text(total_bytes=-1), "end at 0"),
        (text(total_bytes=0.0), "end at 0"),
        (text(total_bytes=False), "end at 0"),
        (text(entry(), total_bytes=11), "end at 10"),
        (text(entry(), total_bytes=9), "end at 10"),
        (text({"name": "t"}), "not a tensor"),
        (text(entry()[:4]), "not a tensor"),
        (text(entry(name=5)), "without a name"),
        (text(entry(name="")), "without a name"),
        (text(entry(), entry(offset=64), total_bytes=74), "'t' twice"),
        (text(entry(dtype="object")), "unknown type"),
        (text(entry(dtype=8)), "no type"),
        (text(entry(shape=10)), "no shape"),
        (text(entry(shape=[-10])), "no shape"),
        (text(entry(shape=[10.0])), "no shape"),
        (text(entry(shape=[True])), "no shape"),
        (text(entry(shape=[1 << 41])), "no shape"),
        (text(entry(shape=[1 << 40] * 8)), "larger than"),
        (text(entry(offset=64), total_bytes=74), "not at 0"),
        (text(entry(offset=-64)), "not at 0"),
        (text(entry(offset="0")), "not at 0"),
        (text(entry(offset=False)), "not at 0"),
        (text(entry(), entry(name="u"), total_bytes=10), "not at 64"),
        (text(entry(), entry(name="u", offset=10), total_bytes=20), "not at 64"),
        (text(entry(shape=[5000], digests=[DIGEST] * 2)), "not in 1 pieces"),
        (text(entry(digests=[])), "not in 1 pieces"),
        (text(entry(digests="0")), "not in 1 pieces"),
        (text(entry(digests=["0" * 63])), "without a digest"),
        (text(entry(digests=["A" * 64])), "without a digest"),
        (text(entry(digests=["0" * 64 + "\n"])), "without a digest"),
        (text(entry(digests=[0])), "without a digest"),
        (text(entry(), entry(name="u", shape=[9], offset=64)), "two sizes"),
        (text(entry(shape=HUGE, digests=[DIGEST])), "pieces"),
    ],
)
def test_what_a_reader_refuses(content: str | bytes, message: str) -> None:
    with pytest.raises(StoreCorruptError, match=message):
        Manifest.from_json(content)


def test_counts_are_limited_before_anything_is_built() -> None:
    with pytest.raises(StoreCorruptError, match="at most 100,000 tensors"):
        Manifest.from_json(text(*[0] * (MAX_TENSORS + 1)))
    with pytest.raises(StoreCorruptError, match="more than a manifest has"):
        Manifest.from_json(b" " * (MAX_JSON_BYTES + 1))
