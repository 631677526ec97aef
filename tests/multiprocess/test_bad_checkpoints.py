"""Checkpoints that are missing, damaged or unknown: one sentence, exit code 1, nothing left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import edge
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import Daemon
from tests.support.processes import edge as run_edge

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), "--no-announce") as daemon:
        yield daemon
        daemon.await_free()
        assert daemon.messages == ""


@pytest.fixture
def checkpoint(tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_checkpoint("llama").path, tmp_path / "model"))


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def garbage_config(folder: Path) -> None:
    (folder / "config.json").write_text("{ this is not json")


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def binary_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def unknown_family(folder: Path) -> None:
    change_config(folder, model_type="mamba")


def unknown_rope(folder: Path) -> None:
    change_config(folder, rope_parameters={"rope_type": "axial", "rope_theta": 1e4, "factor": 4.0})


def already_quantized(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "hqq", "bits": 4})


def wrong_type_of_size(folder: Path) -> None:
    change_config(folder, hidden_size="64")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_off_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def absent_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = load_file(folder / "model-00001-of-00002.safetensors")
    files = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    files["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def wrong_shape(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"model.norm.weight": np.zeros(63, np.float32)}))


def missing_tensor(folder: Path) -> None:
    change_tensors(folder, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))


def integer_weights(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"model.norm.weight": np.zeros(64, np.int32)}))


def garbage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


@pytest.mark.parametrize(
    ("damage", "cause", "remedy"),
    [
        (no_config, "config.json is missing", "give the folder"),
        (garbage_config, "config.json", "download it again"),
        (list_config, "config.json", "download it again"),
        (binary_config, "config.json", "download it again"),
        (unknown_family, "'mamba' is not a family", "it runs deepseek_v3"),
        (unknown_rope, "rope_type 'axial' is not supported", "llama3, proportional"),
        (already_quantized, "already quantised", "the original float checkpoint"),
        (wrong_type_of_size, "hidden_size must be an integer, not '64'", "config.json"),
        (no_weights, "has neither model.safetensors nor", "give the folder of a downloaded"),
        (pickled_weights, "is a pickle, which is never read", "convert it to safetensors"),
        (cut_off_weights, "lies outside the file", "download the file again"),
        (empty_weights, "only 0 bytes", "download"),
        (absent_file, "names model-00002-of-00002.safetensors", "download the rest"),
        (wrong_shape, "model.norm.weight has shape [63]", "config.json makes it [64]"),
        (missing_tensor, "model.layers.2.mlp.up_proj.weight is missing", "download"),
        (integer_weights, "model.norm.weight is int32", "float32, float16 and bfloat16"),
        (garbage_tokenizer, "tokenizer.json", "download it again"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_damaged_checkpoint_is_refused_with_cause_and_remedy(
    damage: Callable[[Path], None], cause: str, remedy: str, checkpoint: Path, daemon: Daemon
) -> None:
    damage(checkpoint)
    outcome = run_edge("run", checkpoint, "-p", "hi", "--peer", daemon.address)
    sentence = outcome.sentence()
    assert cause in sentence
    assert remedy in sentence
    assert str(checkpoint) in sentence or damage is unknown_family
    assert outcome.out == ""
    assert daemon.describe().models == ()


def too_many_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] |= {f"<{n}>": 95 + n for n in range(40)}
    rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] += [{"id": 134, "content": "<39>", **rules}]
    path.write_text(json.dumps(tokenizer))


def test_tokens_that_the_model_has_no_rows_for_are_refused_in_a_prompt(
    checkpoint: Path, daemon: Daemon
) -> None:
    """And in no other: models are published with a tokenizer that has a few more."""
    too_many_tokens(checkpoint)
    assert run_edge("run", checkpoint, "-p", "hi", "-n", 4, "--peer", daemon.address).code == 0
    outcome = run_edge("run", checkpoint, "-p", "<39>", "--raw", "--peer", daemon.address)
    assert "token id 134 is not one of the model's; ids are 0..127" in outcome.sentence()


def test_a_folder_that_is_not_there(tmp_path: Path, daemon: Daemon) -> None:
    for path in (tmp_path / "none", Path(__file__)):
        outcome = run_edge("run", path, "-p", "hi", "--peer", daemon.address)
        assert "; give the folder of a" in outcome.sentence()


@pytest.mark.parametrize(
    ("dtype", "name", "value"),
    [
        ("float32", "model.layers.1.self_attn.v_proj.weight", np.nan),
        ("int4", "model.layers.1.self_attn.v_proj.weight", np.inf),
        ("int8", "model.embed_tokens.weight", np.nan),
        ("float32", "model.norm.weight", 3e38),
    ],
)
def test_weights_that_are_no_numbers(
    dtype: str, name: str, value: float, checkpoint: Path, daemon: Daemon
) -> None:
    def poison(tensors: dict[str, Any]) -> None:
        tensors[name].reshape(-1)[5] = value

    change_tensors(checkpoint, poison)
    outcome = run_edge("run", checkpoint, "-p", "hi", "--dtype", dtype, "--peer", daemon.address)
    sentence = outcome.sentence()
    assert f"tensor {name} in {checkpoint / 'model.safetensors'}" in sentence
    assert "damaged" in sentence
    assert "fetch it again" in sentence
    assert daemon.await_free().models == ()


def test_without_a_tokenizer_ids_still_work_and_text_says_why_not(
    tiny_checkpoint: Callable[..., TinyCheckpoint], checkpoint: Path, daemon: Daemon
) -> None:
    (checkpoint / "tokenizer.json").unlink()
    prompt = [3, 1, 4]
    expected = tiny_checkpoint("llama").greedy(prompt, 6)
    with edge.Cluster.connect([daemon.address]) as cluster:
        model = cluster.load(checkpoint, dtype="float32")
        reply = model.generate(prompt, max_new_tokens=6)
        assert list(reply.token_ids) == expected
        assert reply.text == ""
        with pytest.raises(edge.RequestError, match=r"no tokenizer\.json; give token ids"):
            model.generate("hi")
    outcome = run_edge("run", checkpoint, "-p", "hi", "--peer", daemon.address)
    assert "has no tokenizer.json" in outcome.sentence()
    daemon.await_free()


def test_nothing_half_written_stays_in_the_caches(
    checkpoint: Path, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that turns out damaged in its last layer: no partial file remains."""

    def poison(tensors: dict[str, Any]) -> None:
        tensors["model.layers.3.mlp.down_proj.weight"][0, 0] = np.nan

    change_tensors(checkpoint, poison)
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    with edge.Cluster.connect([daemon.address]) as cluster:
        for dtype in ("int4", "float32"):
            with pytest.raises(edge.CheckpointError):
                cluster.load(checkpoint, dtype=dtype)
    assert list(tmp_path.rglob("*.partial")) == []
