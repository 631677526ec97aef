"""A GGUF file is a checkpoint: where it is found, what it yields, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from edge.errors import CheckpointError, EdgeError
from edge.models.families import read_family
from edge.models.gguf_architectures import ARCHITECTURES
from edge.models.spec import MAX_KINDS, tensor_shapes
from edge.weights.checkpoint import Checkpoint
from edge.weights.encoding import Encoding
from edge.weights.formats import weight_format
from edge.weights.layout import whole_layout
from edge.weights.pooling import MakersPooling
from tests.support import gguf_bytes
from tests.support.checkpoints import make_checkpoint
from tests.support.family_sizes import EXPERTS_IN_BLOCKS, FAMILIES, IN_BLOCKS
from tests.support.gguf_files import Type, write_gguf
from tests.support.small_tokenizers import CHAT_TEMPLATE, byte_fallback, write_checkpoint
from tests.unit.offload.test_gguf_store import write_parts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "tiny.gguf"
    file.write_bytes(gguf_bytes.sound())
    return file


def test_what_a_file_yields(path: Path) -> None:
    with Checkpoint.open(path) as opened:
        assert (opened.name, opened.path) == ("tiny.gguf", path)
        assert opened.spec.family == "llama"
        assert opened.spec.tied_embeddings
        assert opened.end_ids == {2}
        assert opened.embedding_itemsize == 4
        assert opened.tensor_name("head") == opened.tensor_name("embedding")
        table = opened.store.read(opened.tensor_name("embedding"))
        np.testing.assert_array_equal(table, gguf_bytes.tensors()["token_embd.weight"])
        assert opened.tokenizer is opened.tokenizer
        ids = opened.tokenizer.encode("the quick")
        assert ids[0] == 1
        assert opened.tokenizer.decode(ids) == "the quick"
        assert opened.tokenizer.chat([{"role": "user", "content": "hi"}]).startswith("<s><|user|>")
        opened.tokenizer.close()


def test_where_a_file_is_found(path: Path, tmp_path: Path) -> None:
    """By its path, by a link as Hugging Face caches have them, by its folder, without its ending"""
    blob = tmp_path / "models--a--b" / "blobs" / "0123"
    blob.parent.mkdir(parents=True)
    shutil.copy(path, blob)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "linked.gguf").symlink_to(blob)
    for place, name in (
        (path, "tiny.gguf"),
        (str(path), "tiny.gguf"),
        (path.parent, "tiny.gguf"),
        (snapshot / "linked.gguf", "linked.gguf"),
        (snapshot, "linked.gguf"),
        (blob, "0123"),
    ):
        with Checkpoint.open(place) as opened:
            assert opened.path.name == name
            assert opened.spec.num_layers == 1


def test_a_folder_with_parts(tmp_path: Path) -> None:
    write_parts(tmp_path)
    with Checkpoint.open(tmp_path) as opened:
        assert opened.path.name == "tiny-00001-of-00003.gguf"
        assert len(opened.store.names()) == 12
    (tmp_path / "tiny-00001-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"cannot open .*tiny-00001-of-00003\.gguf"):
        Checkpoint.open(tmp_path)


def test_folders_that_hold_several_models_or_link_to_elsewhere(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, path.with_name("other.gguf"))
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models \(other.gguf, tiny.gguf"):
        Checkpoint.open(path.parent)
    folder = tmp_path / "hostile"
    folder.mkdir()
    (folder / "model.gguf").symlink_to(path)
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        Checkpoint.open(folder)


def test_safetensors_go_first(path: Path, tmp_path: Path) -> None:
    model = Path(__file__).parents[3] / "demos" / "model"
    both = Path(shutil.copytree(model, tmp_path / "both"))
    shutil.copy(path, both)
    with Checkpoint.open(both) as opened:
        assert opened.path == both


def write(path: Path, **changes: object) -> None:
    metadata = {key.replace("__", "."): value for key, value in changes.items()}
    path.write_bytes(gguf_bytes.sound(metadata))


def test_a_tokenizer_that_is_not_known_comes_from_beside_the_file(path: Path) -> None:
    write(path, tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="of tomorrow")
    with Checkpoint.open(path) as opened:
        assert opened.has_tokenizer
        with pytest.raises(CheckpointError, match=r"put the model's tokenizer\.json beside"):
            _ = opened.tokenizer
    original = byte_fallback()
    original.save(str(path.with_name("tokenizer.json")))
    with Checkpoint.open(path) as opened:
        assert opened.tokenizer.vocab_size == original.get_vocab_size()


def test_a_file_without_a_tokenizer(path: Path) -> None:
    infos, data = gguf_bytes.placed(gguf_bytes.tensors())
    path.write_bytes(gguf_bytes.header(gguf_bytes.METADATA, infos) + data)
    with Checkpoint.open(path) as opened:
        assert not opened.has_tokenizer
        with pytest.raises(CheckpointError, match=r"has no tokenizer; put tokenizer\.json"):
            _ = opened.tokenizer
    write_checkpoint(path.parent, byte_fallback(num_bytes=128))
    (path.parent / "config.json").unlink()
    with Checkpoint.open(path) as opened:
        assert opened.tokenizer.encode("fox")
        assert opened.tokenizer.chat([{"role": "user", "content": "hi"}])  # the file's own template
        opened.tokenizer.close()
    settings = {"chat_template": CHAT_TEMPLATE.replace("assistant", "helper")}
    path.with_name("tokenizer_config.json").write_text(json.dumps(settings))
    with Checkpoint.open(path) as opened:
        assert "helper" in opened.tokenizer.chat([{"role": "user", "content": "hi"}])
        opened.tokenizer.close()


@pytest.mark.parametrize(
    ("name", "change", "cause"),
    [
        ("blk.0.ffn_up.weight", None, r"tensor blk\.0\.ffn_up\.weight is missing, so .*; download"),
        (
            "blk.0.ffn_up.weight",
            (12, 9),
            r"has shape \[12, 9\]; the file itself makes it \[12, 8\]",
        ),
        ("blk.0.attn_q.weight", (5, 8), r"attn_q\.weight has shape \[5, 8\]"),
        ("token_embd.weight", (289, 8), r"token_embd\.weight has shape \[289, 8\]"),
        ("rope_freqs.weight", (2, 2), "not one number for each frequency; download"),
        ("rope_freqs.weight", (3,), "factors must be 2 positive numbers"),
        ("output.scale", (1,), "output.scale is the scale of a whole tensor, .* not read"),
        ("blk.0.attn_sinks.weight", (2,), r"attn_sinks\.weight has no place in a model of family"),
    ],
)
def test_tensors_that_do_not_fit(
    name: str, change: tuple[int, ...] | None, cause: str, path: Path
) -> None:
    tensors = gguf_bytes.tensors()
    if change is None:
        del tensors[name]
    else:
        tensors[name] = np.ones(change, np.float32)
    infos, data = gguf_bytes.placed(tensors)
    metadata = {**gguf_bytes.METADATA, **gguf_bytes.byte_pieces()}
    path.write_bytes(gguf_bytes.header(metadata, infos) + data)
    with pytest.raises(CheckpointError, match=cause) as caught:
        Checkpoint.open(path)
    assert str(path) in str(caught.value)


def test_a_type_that_is_not_read_names_those_that_are(path: Path) -> None:
    infos, data = gguf_bytes.placed(gguf_bytes.tensors())
    (place,) = (each for each in infos if each[0] == "blk.0.attn_v.weight")
    place[2] = 24  # I8
    path.write_bytes(gguf_bytes.header(gguf_bytes.METADATA, infos) + data)
    with pytest.raises(CheckpointError, match=r"attn_v\.weight in .* is of type I8, .*Q4_K"):
        Checkpoint.open(path)


def test_what_is_neither(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "not.gguf").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name, cause in (
        ("notes.txt", "is neither a folder nor a GGUF file; give the folder of .* or a GGUF file"),
        ("none.gguf", "is not there; give the folder of .* or a GGUF file"),
        ("not.gguf", "does not begin with GGUF"),
        ("empty", "config.json is missing"),
    ):
        with pytest.raises(EdgeError, match=cause):
            Checkpoint.open(tmp_path / name)


def test_a_file_whose_layers_are_all_held_otherwise(tmp_path: Path) -> None:
    """More kinds of layers than models have: it is rounded like one of floats."""
    path = tmp_path / "odd.gguf"
    path.write_bytes(unlike_layers(100))
    with Checkpoint.open(path) as opened:
        assert opened.spec.num_layers == 100
        assert opened.own_encoding is None
    path.write_bytes(unlike_layers(MAX_KINDS))
    with Checkpoint.open(path) as opened:
        assert isinstance(opened.own_encoding, Encoding)
        assert len(set(opened.own_encoding.grades)) == MAX_KINDS


EXPERTS = {"llama.expert_count": 3, "llama.expert_used_count": 2}


def with_experts(layout: str, *left_out: str) -> bytes:
    """The same model with experts, which lie in one of several ways."""
    tensors = gguf_bytes.tensors()
    chance = np.random.default_rng(1)
    parts = {"gate": (12, 8), "up": (12, 8), "down": (8, 12)}
    experts = {
        part: chance.uniform(-1, 1, (3, *shape)).astype(np.float32) for part, shape in parts.items()
    }
    for part in parts:
        del tensors[f"blk.0.ffn_{part}.weight"]
    tensors["blk.0.ffn_gate_inp.weight"] = np.ones((3, 8), np.float32)
    if layout == "one by one":
        for part, stacked in experts.items():
            tensors |= {f"blk.0.ffn_{part}.{n}.weight": each for n, each in enumerate(stacked)}
    elif layout == "fused":
        whole = np.concatenate([experts.pop("gate"), experts.pop("up")], axis=1)
        tensors["blk.0.ffn_gate_up_exps.weight"] = whole
    if layout != "one by one":
        tensors |= {f"blk.0.ffn_{part}_exps.weight": each for part, each in experts.items()}
    if layout == "too many":
        whole = experts["up"]
        tensors["blk.0.ffn_up_exps.weight"] = np.concatenate([whole, whole])
    for name in left_out:
        del tensors[name]
    infos, data = gguf_bytes.placed(tensors)
    return gguf_bytes.header({**gguf_bytes.METADATA, **EXPERTS}, infos) + data


def test_experts_however_they_lie(path: Path) -> None:
    found = []
    for layout in ("stacked", "one by one", "fused"):
        path.write_bytes(with_experts(layout))
        with Checkpoint.open(path) as opened:
            assert opened.spec.family == "mixtral"
            found.append(
                {
                    role: opened.store.read(opened.tensor_name(role))
                    for role in tensor_shapes(opened.spec)
                }
            )
    for others in found[1:]:
        for role, values in found[0].items():
            np.testing.assert_array_equal(values, others[role], err_msg=role)
    assert len({values.tobytes() for role, values in found[0].items() if "experts" in role}) == 9


@pytest.mark.parametrize(
    ("layout", "left_out", "cause"),
    [
        ("stacked", "blk.0.ffn_up_exps.weight", r"tensor blk\.0\.ffn_up_exps\.weight is missing"),
        ("one by one", "blk.0.ffn_down.2.weight", r"ffn_down_exps\.weight is missing"),
        ("stacked", "blk.0.ffn_gate_inp.weight", r"blk\.0\.ffn_gate_inp\.weight is missing"),
        ("too many", None, r"ffn_up_exps\.weight has shape \[6, 12, 8\], and .* 3 x 12 rows"),
    ],
)
def test_experts_that_do_not_fit(path: Path, layout: str, left_out: str | None, cause: str) -> None:
    path.write_bytes(with_experts(layout, *([] if left_out is None else [left_out])))
    with pytest.raises(CheckpointError, match=cause) as caught:
        Checkpoint.open(path)
    assert str(path) in str(caught.value)


def unlike_layers(count: int) -> bytes:
    """A file in which each layer has other matrices in Q8_0, and the rest as float32."""
    metadata = {**gguf_bytes.METADATA, "llama.block_count": count, "llama.vocab_size": 64}
    for key in ("embedding_length", "feed_forward_length"):
        metadata[f"llama.{key}"] = 32
    metadata["llama.rope.dimension_count"] = 16
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64,
        "num_hidden_layers": count, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    _family, spec = read_family(config, source="")
    infos: list[list[object]] = []
    end = 0
    for role, shape in tensor_shapes(spec).items():
        parts = role.split(".")
        is_matrix = len(parts) > 2 and len(shape) == 2
        in_blocks = is_matrix and int(parts[1]) >> MATRICES.index(parts[2]) & 1
        infos.append(
            [
                ARCHITECTURES["llama"].tensor_name(role),
                list(reversed(shape)),
                8 if in_blocks else 0,
                end,
            ]
        )
        end += math.prod(shape) // 32 * 34 if in_blocks else 4 * math.prod(shape)
        end += -end % gguf_bytes.ALIGNMENT
    return gguf_bytes.header(metadata, infos) + bytes(end)


MATRICES = ("query", "key", "value", "output", "gate", "up", "down")


@pytest.mark.parametrize(
    "name",
    [
        *(*FAMILIES, *IN_BLOCKS, *EXPERTS_IN_BLOCKS, "gemma4", "gemma4_moe", "glm4", "glm4_moe"),
        *("granite", "ministral3", "mixtral", "olmo2", "olmo3"),
    ],
)
def test_the_weights_of_every_family_are_those_of_its_own_file(name: str, tmp_path: Path) -> None:
    """Turned, stacked, in another order or less by 1 there: in float16, to the bit."""
    made = make_checkpoint(tmp_path / "made", name, layers=2)
    meant = write_gguf(tmp_path / "it.gguf", made.path, kind=Type.F16)
    with Checkpoint.open(tmp_path / "it.gguf") as file, Checkpoint.open(meant.path) as folder:
        layout = whole_layout(meant.spec)
        found, expected = (
            each.source(
                weight_format(meant.spec, "float32"),
                cache_root=tmp_path,
                on_progress=lambda _event: None,
            )
            for each in (file, folder)
        )
        for matrix in layout.matrices:
            (one,), (other,) = (each.matrix(matrix).values() for each in (found, expected))
            np.testing.assert_array_equal(one, other, err_msg=matrix.name)
        for vector in layout.vectors:
            np.testing.assert_array_equal(
                found.vector(vector), expected.vector(vector), err_msg=vector.name
            )
        found.close()
        expected.close()


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        (None, MakersPooling()),
        (0, MakersPooling()),
        (1, MakersPooling(kind="mean")),
        (3, MakersPooling(kind="last")),
    ],
)
def test_embeddings_are_pooled_as_the_file_says(
    kind: int | None, pooling: MakersPooling, path: Path
) -> None:
    write(path, **({} if kind is None else {"llama__pooling_type": kind}))
    with Checkpoint.open(path) as opened:
        assert opened.pooling == pooling


@pytest.mark.parametrize("kind", [2, 4, 9, -1, "last", True])
def test_pooling_that_is_not_computed_is_named(kind: object, path: Path) -> None:
    write(path, llama__pooling_type=kind)
    with Checkpoint.open(path) as opened:
        assert opened.pooling.kind is None
        assert "the file pools by" in opened.pooling.why_not
