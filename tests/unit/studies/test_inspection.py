"""What a checkpoint is said to be: by its header alone, whether or not it runs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import edge
from edge.api.known_models import inspect
from edge.host import block_kernels
from edge.memory.baseline import USUAL_BASELINE_BYTES
from edge.memory.model_sizes import model_facts
from edge.memory.shard_memory import most_overhead
from edge.memory.windows import with_windows
from edge.models.attention import Attention
from edge.offload import GgufFile, SafetensorsFile
from edge.partition import Plan, Stage, Workload, memory_use
from edge.partition.plan.shard import whole_shard
from edge.planning.load_options import LoadOptions
from edge.studies import inspection
from edge.studies.inspection import Inspection, describe
from edge.weights.checkpoint import Checkpoint
from edge.weights.format_sizes import bytes_per_weight
from edge.weights.formats import AUTO, DTYPES, KV_DTYPES
from edge.weights.header import read_header
from tests.support import gguf_bytes
from tests.support.checkpoints import TinyCheckpoint, make_checkpoint
from tests.support.family_sizes import FAMILIES, MORE_FAMILIES
from tests.support.gguf_files import Type, write_gguf
from tests.support.packed_folders import gptq, write_packed
from tests.support.small_tokenizers import CHAT_TEMPLATE, byte_level
from tests.unit.offload.test_gguf_store import write_parts
from tests.unit.weights.test_gguf_checkpoints import unlike_layers

DEMO = Path(__file__).parents[3] / "demos" / "model"

Make = Callable[..., TinyCheckpoint]


@pytest.mark.parametrize("name", [*sorted(FAMILIES), "phi3"])
def test_a_folder_of_each_family(name: str, tiny_checkpoint: Make) -> None:
    checkpoint = tiny_checkpoint(name)
    spec, weights = checkpoint.spec, load_file(checkpoint.path / "model.safetensors")
    found = inspect(checkpoint.path)
    assert (found.name, found.path, found.form) == (checkpoint.path.name, checkpoint.path, "folder")
    assert (found.problem, found.tokenizer_problem) == (None, None)
    assert found.family == {**FAMILIES, **MORE_FAMILIES}[name][0]
    assert found.parameters == sum(each.size for each in weights.values())
    assert (found.hidden_size, found.vocab_size) == (spec.hidden_size, spec.vocab_size)
    assert found.context_tokens == found.default_context_tokens == 512
    assert found.tied_embeddings == (name == "qwen3")
    assert found.num_layers == 4
    mixers = [each.mixer for each in spec.kinds if isinstance(each.mixer, Attention)]
    assert [replace_layers(kind) for kind in found.layers] == [
        (
            mixer.num_heads,
            mixer.num_kv_heads,
            mixer.head_size,
            kind.feed_forward.columns,
            mixer.window,
            mixer.qkv_bias,
            mixer.output_bias,
            kind.feed_forward.bias,
            mixer.query_key_norm,
        )
        for kind, mixer in zip(spec.kinds, mixers, strict=True)
    ]
    (stored,) = found.stored
    assert (stored.type, stored.tensors) == ("F32", len(weights))
    assert stored.weights == found.parameters
    assert (stored.nbytes, stored.bits_per_weight) == (4 * stored.weights, 32)
    assert found.stored_bytes == stored.nbytes
    assert found.tokenizer is not None
    assert (found.tokenizer.kind, found.tokenizer.vocab_size) == ("BPE, byte level", 95)


def replace_layers(kind: inspection.LayerKind) -> tuple[Any, ...]:
    return tuple(getattr(kind, name) for name in inspection.LayerKind.__slots__[1:-1])


def test_layers_of_linear_attention(tiny_checkpoint: Make) -> None:
    found = inspect(tiny_checkpoint("qwen3_5").path)
    linear, attention = found.layers
    assert (linear.layers, linear.is_linear) == ((0, 1, 3), True)
    assert (linear.num_heads, linear.num_kv_heads, linear.head_size) == (10, 5, 20)
    assert (attention.layers, attention.is_linear) == ((2,), False)


def test_layers_of_two_kinds_and_scaled_positions(tiny_checkpoint: Make) -> None:
    whole, windowed = inspect(tiny_checkpoint("qwen2").path).layers
    assert (whole.layers, whole.window) == ((0, 1), None)
    assert (windowed.layers, windowed.window) == ((2, 3), 6)
    rope = inspect(tiny_checkpoint("llama").path).rope
    assert rope is not None
    assert (rope.theta, rope.scaling, rope.factor) == (10000.0, "llama3", 8.0)


@pytest.mark.parametrize(
    ("kind", "types", "held"),
    [
        (Type.F32, {"F32"}, "int4"),
        (Type.F16, {"F32", "F16"}, "int4"),
        (Type.Q8_0, {"F32", "Q8_0"}, "as stored"),
        (Type.Q4_K, {"F32", "Q4_K"}, "as stored"),
        (lambda name: Type.Q6_K if "ffn_down" in name else Type.Q5_K,
         {"F32", "Q5_K", "Q6_K"}, "as stored"),
    ],
)  # fmt: skip
def test_a_gguf_file(
    kind: Any, types: set[str], held: str, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("llama_in_blocks").path
    path = tmp_path / "model.gguf"
    write_gguf(path, folder, kind=kind)
    found = inspect(path)
    assert (found.name, found.path, found.form) == ("model.gguf", path, "GGUF")
    assert (found.family, found.problem) == ("llama", None)
    assert replace(found.layers[0], layers=()) == replace(inspect(folder).layers[0], layers=())
    assert found.parameters == inspect(folder).parameters
    assert {each.type for each in found.stored} == types
    with GgufFile(path) as file:
        for each in found.stored:
            own = [tensor for tensor in file.tensors.values() if tensor.type.name == each.type]
            assert each.tensors == len(own)
            assert each.weights == sum(math.prod(tensor.shape) for tensor in own)
            assert each.nbytes == sum(tensor.end - tensor.begin for tensor in own)
            block = own[0].type
            assert each.bits_per_weight == 8 * block.block_bytes / block.block_size
    auto = found.held[0]
    assert (auto.dtype, auto.format) == (AUTO, held)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "blocks"])
def test_sizes_are_those_that_plans_count(name: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    if name == "blocks":
        path = tmp_path / "model.gguf"
        write_gguf(path, tiny_checkpoint("llama_in_blocks").path, kind=Type.Q4_K)
    else:
        path = tiny_checkpoint(name).path
    found = inspect(path)
    assert tuple(each.dtype for each in found.held) == DTYPES
    with Checkpoint.open(path) as opened:
        spec = opened.spec
        for each in found.held:
            options = LoadOptions(dtype=each.dtype)
            made, limits = options.weight_format(opened), options.limits(spec)
            assert each.format == made.name
            assert each.bytes_per_weight == bytes_per_weight(spec, made)
            held = with_windows(made.graded(spec), limits)
            facts = model_facts(held, made, name="m", embedding_itemsize=opened.embedding_itemsize)
            use = memory_of(facts, 512)
            assert each.weight_bytes == use.weight_bytes
            beside = most_overhead(
                spec,
                limits,
                may_split=False,
                stream=False,
                kv_dtype="float32",
                has_tiles=block_kernels.library() is not None,
            )
            assert each.total_bytes == use.total + beside + USUAL_BASELINE_BYTES
        assert tuple(each.dtype for each in found.kv) == KV_DTYPES
        for kv in found.kv:
            facts = model_facts(spec, made, name="m", embedding_itemsize=4, kv_dtype=kv.dtype)
            assert kv.token_bytes == memory_of(facts, 1).kv_bytes
            limits = LoadOptions(kv_dtype=kv.dtype).limits(spec)
            held = with_windows(spec, limits)
            facts = model_facts(held, made, name="m", embedding_itemsize=4, kv_dtype=kv.dtype)
            use = memory_of(facts, 512)
            remainders = (kind.num_kv_heads * kind.state_bytes for kind in facts.kinds)
            windows = 0 if any(remainders) else use.state_bytes
            assert kv.default_bytes == kv.longest_bytes == use.kv_bytes + windows
            assert (kv.default_bytes < 512 * kv.token_bytes) == bool(limits.windows)


def memory_of(facts: Any, tokens: int) -> Any:
    shard = whole_shard("a", facts, vocab=range(facts.vocab_size))
    plan = Plan(
        model="m", version=0, stages=(Stage(layers=range(facts.num_layers), shards=(shard,)),)
    )
    return memory_use(plan, facts, Workload(prompt_tokens=tokens, output_tokens=0))["a"]


def test_what_fits_depends_on_the_memory(tiny_checkpoint: Make) -> None:
    header = read_header(tiny_checkpoint("larger_llama").path)
    sizes = {each.dtype: each.total_bytes for each in describe(header, usable_bytes=0).held}
    assert not any(each.fits for each in describe(header, usable_bytes=0).held)
    found = describe(header, usable_bytes=sizes["int8"])
    assert found.usable_bytes == sizes["int8"]
    assert {each.dtype: each.fits for each in found.held} == {
        AUTO: True, "float32": False, "int8": True, "int4": True, "int4-pure": True,
        "int3": True, "int2": True,
    }  # fmt: skip


def test_no_weight_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    for store in (SafetensorsFile, GgufFile):
        monkeypatch.setattr(store, "read", read)
    monkeypatch.setattr(GgufFile, "blocks", read)
    assert inspect(DEMO).problem is None
    metadata = {**gguf_bytes.METADATA, **gguf_bytes.byte_pieces()}
    tensors = gguf_bytes.tensors()
    del tensors["rope_freqs.weight"]  # a few numbers of the description, where there are any
    infos, data = gguf_bytes.placed(tensors)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes.header(metadata, infos) + data)
    assert inspect(tmp_path / "m.gguf").problem is None


def test_from_python_and_as_json() -> None:
    found = edge.inspect(str(DEMO))
    assert isinstance(found, edge.Inspection)
    value = json.loads(json.dumps(found.to_json()))
    assert value["name"] == "model"
    assert value["parameters"] == 1304192
    assert value["num_layers"] == 6
    assert value["layers"][0]["layers"] == [0, 1, 2, 3, 4, 5]
    assert value["stored"] == [
        {
            "type": "BF16",
            "tensors": 57,
            "weights": 1304192,
            "nbytes": 2608384,
            "bits_per_weight": 16,
        }
    ]
    assert [each["dtype"] for each in value["held"]] == list(DTYPES)
    assert [each["dtype"] for each in value["kv"]] == list(KV_DTYPES)
    assert value["tokenizer"]["end_tokens"] == [{"id": 2, "token": "<|end|>"}]
    assert value["tokenizer"]["special_tokens"]["bos_token"] == "<|begin|>"
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    assert value["tokenizer"]["chat_templates"] == {"default": len(settings["chat_template"])}
    told = found.to_json(template=True)["tokenizer"]["chat_templates"]
    assert told == {"default": settings["chat_template"]}


def test_the_tokenizer_of_a_file_and_of_what_lies_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes.sound())
    tokenizer = inspect(path).tokenizer
    assert tokenizer is not None
    assert (tokenizer.kind, tokenizer.file) == ("BPE, byte fallback", path)
    assert tokenizer.vocab_size == len(gguf_bytes.byte_pieces()["tokenizer.ggml.tokens"])
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    assert tokenizer.end_tokens == {2: "</s>"}
    assert tokenizer.chat_templates == {"default": CHAT_TEMPLATE}

    unknown = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "of tomorrow"}
    path.write_bytes(gguf_bytes.sound(unknown))
    found = inspect(path)
    assert (found.problem, found.tokenizer) == (None, None)
    assert found.tokenizer_problem is not None
    assert "put the model's tokenizer.json beside the file" in found.tokenizer_problem
    byte_level().save(str(path.with_name("tokenizer.json")))
    found = inspect(path)
    assert found.tokenizer is not None
    assert found.tokenizer.file.name == "tokenizer.json"
    assert found.tokenizer_problem is not None  # it has more tokens than the model
    assert "belong to different checkpoints" in found.tokenizer_problem


def copy(checkpoint: TinyCheckpoint, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint.path, folder / "model"))


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_an_unknown_family(tiny_checkpoint: Make, tmp_path: Path) -> None:
    folder = copy(tiny_checkpoint("llama"), tmp_path)
    change_config(folder, model_type="granitemoe", num_local_experts=8)
    found = inspect(folder)
    assert found.problem is not None
    assert "'granitemoe' is not a family Edge runs: the nearest is granite" in found.problem
    assert (found.family, found.num_experts) == ("granitemoe", 8)
    assert (found.hidden_size, found.vocab_size, found.context_tokens) == (64, 128, 512)
    (kind,) = found.layers
    assert (kind.layers, kind.num_heads, kind.num_kv_heads) == ((0, 1, 2, 3), 8, 2)
    assert kind.qkv_bias is None
    assert found.parameters == inspect(tiny_checkpoint("llama").path).parameters
    assert found.stored[0].type == "F32"
    assert (found.held, found.kv) == ((), ())
    assert found.tokenizer is not None


def test_a_text_model_within_another(tiny_checkpoint: Make, tmp_path: Path) -> None:
    folder = copy(tiny_checkpoint("llama"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "text_config": config}))
    found = inspect(folder)
    assert (found.hidden_size, found.num_layers) == (64, 4)
    assert found.problem is not None


def test_a_quantised_folder_that_runs(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "llama_in_blocks")
    folder = tmp_path / "model"
    write_packed(folder, made.path, gptq(group=64))
    found = inspect(folder)
    assert (found.problem, found.quantized_by) == (None, "gptq")
    assert {"I32", "F16"} <= {each.type for each in found.stored}
    held = next(each for each in found.held if each.dtype == AUTO)
    assert "4 bits in blocks of 64" in held.words


def test_weights_that_others_quantised(tiny_checkpoint: Make, tmp_path: Path) -> None:
    folder = copy(tiny_checkpoint("llama"), tmp_path)
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    tensors: dict[str, Any] = {"model.layers.0.mlp.up_proj.qweight": np.zeros((8, 96), np.int32)}
    save_file(tensors, folder / "model.safetensors")
    found = inspect(folder)
    assert found.problem is not None
    assert "up_proj.scales" in found.problem
    assert found.quantized_by == "gptq"
    assert [each.type for each in found.stored] == ["I32"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_download_that_is_not_complete(name: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    folder = copy(tiny_checkpoint("llama"), tmp_path)
    (folder / name).unlink()
    found = inspect(folder)
    assert found.problem is not None
    assert name in found.problem
    if name == "config.json":
        assert (found.family, found.layers, found.num_files) == (None, (), 1)
        assert found.parameters == inspect(tiny_checkpoint("llama").path).parameters
    else:
        assert (found.num_layers, found.stored, found.num_files) == (4, (), 0)
        assert [each.dtype for each in found.kv] == list(KV_DTYPES)
    json.dumps(found.to_json())


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    first, second, _third = write_parts(tmp_path)
    whole = inspect(tmp_path)
    assert (whole.num_files, whole.problem) == (3, None)
    second.unlink()
    found = inspect(first)
    assert found.problem is not None
    assert f"{second.name} is missing" in found.problem
    assert (found.num_files, found.family, found.num_layers) == (1, "llama", 1)
    assert 0 < found.stored_bytes < whole.stored_bytes


def gguf(path: Path, metadata: Mapping[str, Any], **types: int) -> Inspection:
    infos, data = gguf_bytes.placed(gguf_bytes.tensors())
    for name, number in types.items():
        (place,) = (each for each in infos if each[0] == name.replace("__", "."))
        place[2] = number
    told = {**gguf_bytes.METADATA, **gguf_bytes.byte_pieces(), **metadata}
    path.write_bytes(gguf_bytes.header(told, infos) + data)
    return inspect(path)


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    found = gguf(tmp_path / "m.gguf", {}, blk__0__attn_v__weight=24)
    assert found.problem is not None
    assert "is of type I8, which is not read here; fetch the model in one of" in found.problem
    assert {each.type for each in found.stored} == {"F32", "I8"}
    assert (found.num_layers, found.layers[0].head_size, found.held) == (1, 4, ())


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    own = {key.replace("llama.", "gemma7."): value for key, value in gguf_bytes.METADATA.items()}
    found = gguf(tmp_path / "m.gguf", {**own, "general.architecture": "gemma7"})
    assert found.problem is not None
    assert "architecture 'gemma7' is not one that Edge runs" in found.problem
    assert (found.family, found.hidden_size, found.num_layers) == ("gemma7", 8, 1)
    assert found.vocab_size == gguf_bytes.VOCABULARY
    assert found.tokenizer is not None


def test_layers_that_are_all_held_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(unlike_layers(100))
    found = inspect(path)
    assert (found.problem, found.num_layers, len(found.held)) == (None, 100, len(DTYPES))


def test_where_there_is_nothing_to_describe(tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_text("hello")
    (tmp_path / "empty\x1b[2J").mkdir()
    for name, cause in (
        ("none", "is not there; give the folder of"),
        ("notes.gguf", "does not begin with GGUF"),
        ("empty\x1b[2J", r"empty\\x1b\[2J/config.json is missing"),
    ):
        with pytest.raises(edge.CheckpointError, match=cause):
            inspect(tmp_path / name)
    with pytest.raises(edge.RequestError, match="is not a path"):
        inspect(None)  # type: ignore[arg-type]
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_bytes(gguf_bytes.sound())
    with pytest.raises(edge.CheckpointError, match="holds 2 GGUF models"):
        inspect(tmp_path / "two")


def test_what_is_told_is_bounded(tmp_path: Path) -> None:
    """However much a file says of itself."""
    templates = {f"tokenizer.chat_template.{n}": "x" for n in range(100)}
    settings = {
        "tokenizer.chat_templates": [str(number) for number in range(100)],
        "tokenizer.chat_template": "x" * (inspection.MAX_TEMPLATE_CHARACTERS + 5),
        **templates,
    }
    tokens = gguf_bytes.byte_pieces()["tokenizer.ggml.tokens"]
    found = gguf(
        tmp_path / "m.gguf",
        {**settings, "tokenizer.ggml.tokens": [tokens[0], "<s>" * 1000, "e" * 9000, *tokens[3:]]},
    )
    assert found.tokenizer is not None
    assert len(found.tokenizer.chat_templates) == inspection.MAX_TEMPLATES
    lengths = map(len, found.tokenizer.chat_templates.values())
    assert max(lengths) == inspection.MAX_TEMPLATE_CHARACTERS
    assert max(map(len, found.tokenizer.special_tokens.values())) == 100
    assert found.tokenizer.end_tokens == {2: "e" * 100}
