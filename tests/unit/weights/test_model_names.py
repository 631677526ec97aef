"""What a model's name stands for: paths, and caches as `huggingface_hub` writes them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from edge.errors import CheckpointError, RequestError
from edge.partition.plan.facts import is_name
from edge.weights.checkpoint import Checkpoint
from edge.weights.model_names import (
    NotCached,
    RepositoryName,
    cached_models,
    chosen_gguf,
    find_model,
    wanted_files,
)
from tests.support import gguf_bytes
from tests.support.model_folders import add_to_cache, files_of

MODEL = Path(__file__).parents[3] / "demos" / "model"
OTHER = "f" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


def indexed(*parts: str) -> dict[str, bytes]:
    index = {"weight_map": {f"tensor.{part}": part for part in parts}}
    return {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}


def lacking(found: Path | NotCached) -> str:
    assert isinstance(found, NotCached)
    return found.lacking


@pytest.mark.parametrize(
    "name",
    [
        "org/tiny",
        "hf://org/tiny",
        "hf.co/org/tiny",
        "huggingface.co/org/tiny/",
        "https://huggingface.co/org/tiny",
        Path("https://huggingface.co/org/tiny"),  # as a command line makes it of that
        "org/tiny@main",
    ],
)
def test_a_name_that_is_in_the_cache_opens(cache: Path, name: str | Path) -> None:
    snapshot = add_to_cache(cache, "org/tiny", files_of(MODEL))
    found = find_model(name, hub_cache=cache)
    assert found == snapshot
    with Checkpoint.open(snapshot) as opened:
        assert opened.name == "org/tiny"
        assert opened.spec.num_layers == 6
        assert opened.has_tokenizer


def test_the_folder_of_a_repository_stands_for_what_it_has(cache: Path) -> None:
    snapshot = add_to_cache(cache, "org/tiny", files_of(MODEL))
    assert find_model(cache / "models--org--tiny", hub_cache=Path("elsewhere")) == snapshot
    (snapshot / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks config.json; .* give org/tiny instead"):
        find_model(cache / "models--org--tiny", hub_cache=cache)


def test_a_path_goes_before_a_name(cache: Path) -> None:
    add_to_cache(cache, "org/tiny", files_of(MODEL))
    folder = Path("org/tiny")
    folder.mkdir(parents=True)
    assert find_model("org/tiny", hub_cache=cache) == folder
    assert find_model("hf://org/tiny", hub_cache=cache) != folder
    file = Path("org/model.gguf")
    file.write_bytes(b"")
    assert find_model(file, hub_cache=cache) == file


def test_what_may_be_a_path_is_never_asked_for_elsewhere(cache: Path) -> None:
    Path("models/lama").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"models/llama is not there \(near: models/lama\)"):
        find_model("models/llama", hub_cache=cache)
    with pytest.raises(CheckpointError, match=r"or hf://models/llama to look there"):
        find_model("models/llama", hub_cache=cache)
    snapshot = add_to_cache(cache, "models/llama", files_of(MODEL))  # that is no asking
    assert find_model("models/llama", hub_cache=cache) == snapshot


@pytest.mark.parametrize("name", ["tiny", "./org/tiny", "/org/tiny", "a/b/c", "~/x", "org/tiny:"])
def test_what_is_no_name_of_a_repository_is_not_there(cache: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"is not there.* org/name"):
        find_model(name, hub_cache=cache)


@pytest.mark.parametrize(
    ("folder", "name"), [(b"m\xf6del", "m\\udcf6del"), (b"two\nlines", "two\\nlines")]
)
def test_a_folder_whose_name_cannot_be_read_is_a_model(
    folder: bytes, name: str, tmp_path: Path
) -> None:
    place = tmp_path / os.fsdecode(folder)
    shutil.copytree(MODEL, place)
    with Checkpoint.open(place) as checkpoint:
        assert checkpoint.name == name
    assert is_name(name), "as plans want it"


@pytest.mark.parametrize("name", ["\0", 3, None])
def test_what_is_no_path(cache: Path, name: object) -> None:
    with pytest.raises(RequestError, match="is not a path"):
        find_model(name, hub_cache=cache)  # type: ignore[arg-type]


def test_nothing_of_it_is_there_and_what_is_near(cache: Path) -> None:
    for name in ("TheOrg/Tiny-Llama-Chat", "else/other"):
        add_to_cache(cache, name, {"README.md": b"x"})
    found = find_model("org/tiny-llama-chat@v2:Q8_0", hub_cache=cache)
    assert found == NotCached(
        name=RepositoryName(repository="org/tiny-llama-chat", revision="v2", choice="Q8_0"),
        lacking=f"nothing of it is in the cache {cache}",
        near=" (near: TheOrg/Tiny-Llama-Chat)",
    )
    assert str(found.name) == "org/tiny-llama-chat@v2:Q8_0"
    with pytest.raises(CheckpointError, match=r"\(near: TheOrg/Tiny-Llama-Chat\)"):
        find_model("tiny-llama-chat", hub_cache=cache)


def test_the_commit_that_is_meant(cache: Path) -> None:
    old = add_to_cache(cache, "org/tiny", files_of(MODEL), reference="v1")
    new = add_to_cache(cache, "org/tiny", files_of(MODEL), commit=OTHER)
    assert find_model("org/tiny", hub_cache=cache) == new
    assert find_model("org/tiny@v1", hub_cache=cache) == old
    assert find_model(f"org/tiny@{old.name}", hub_cache=cache) == old
    assert "nothing of it" in lacking(find_model("org/tiny@v2", hub_cache=cache))
    (new / "model.safetensors").unlink()  # only begun
    assert find_model("org/tiny", hub_cache=cache) == old
    (cache / "models--org--tiny" / "refs" / "main").write_text("../../..")
    assert find_model("org/tiny", hub_cache=cache) == old


def test_what_is_not_whole_is_said(cache: Path) -> None:
    parts = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    snapshot = add_to_cache(cache, "org/parts", {**indexed(*parts), parts[0]: b"x"})
    assert lacking(find_model("org/parts", hub_cache=cache)).endswith(f"lacks {parts[1]}")
    (snapshot / parts[1]).write_bytes(b"y")
    assert find_model("org/parts", hub_cache=cache) == snapshot
    (snapshot / "model.safetensors.index.json").unlink()
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}')
    assert "do not use" in lacking(find_model("org/parts", hub_cache=cache))


def test_one_of_several_gguf_files(cache: Path) -> None:
    content = gguf_bytes.sound({})
    add_to_cache(
        cache,
        "org/tiny-GGUF",
        {"tiny-Q4_K_M.gguf": content, "tiny-Q8_0.gguf": content, "mmproj-F16.gguf": b"x"},
    )
    for name, file in (
        ("org/tiny-GGUF", "tiny-Q4_K_M.gguf"),
        ("org/tiny-GGUF:q8_0", "tiny-Q8_0.gguf"),
    ):
        found = find_model(name, hub_cache=cache)
        assert isinstance(found, Path)
        with Checkpoint.open(found) as opened:
            assert opened.name == file


def test_all_parts_of_a_split_file_are_needed(cache: Path) -> None:
    first, second = (f"Q4_0/big-Q4_0-0000{number}-of-00002.gguf" for number in (1, 2))
    snapshot = add_to_cache(cache, "org/big", {first: b"x"})
    assert lacking(find_model("org/big:Q4_0", hub_cache=cache)).endswith(f"lacks {second}")
    (snapshot / second).write_bytes(b"y")
    assert find_model("org/big:Q4_0", hub_cache=cache) == snapshot / first


QUANTS = ("m.Q4_K_S.gguf", "m.Q4_K_M.gguf", "m.IQ4_NL.gguf", "UD/m-UD-Q4_K_XL.gguf")
BOTH = (*QUANTS, "model.safetensors")


@pytest.mark.parametrize(
    ("names", "choice", "chosen"),
    [
        (QUANTS, None, "m.Q4_K_M.gguf"),
        (QUANTS, "q4_k_s", "m.Q4_K_S.gguf"),
        (QUANTS, "IQ4_NL", "m.IQ4_NL.gguf"),
        (QUANTS, "UD-Q4_K_XL", "UD/m-UD-Q4_K_XL.gguf"),
        (QUANTS, "Q4_K_XL", "UD/m-UD-Q4_K_XL.gguf"),
        (QUANTS, "m.Q4_K_S.gguf", "m.Q4_K_S.gguf"),
        (BOTH, None, None),
        (BOTH, "Q4_K_M", "m.Q4_K_M.gguf"),
        (("only-one.gguf", "imatrix.gguf"), None, "only-one.gguf"),
        (("m-00002-of-00002.gguf", "m-00001-of-00002.gguf"), None, "m-00001-of-00002.gguf"),
        (("model.safetensors.index.json",), None, None),
    ],
)
def test_which_file_is_meant(
    names: tuple[str, ...], choice: str | None, chosen: str | None
) -> None:
    assert chosen_gguf(names, choice) == chosen


@pytest.mark.parametrize(
    ("names", "choice", "message"),
    [
        (QUANTS, "Q4_K", r"none of its GGUF models is called Q4_K; .*m\.IQ4_NL\.gguf"),
        (("a-Q4_0.gguf", "b-Q4_0.gguf"), "Q4_0", r"2 of its GGUF models are called Q4_0"),
        (("a-Q4_0.gguf", "b-Q8_0.gguf"), None, r"none of its GGUF models is called Q4_K_M"),
        (("model.safetensors",), "Q4_0", "no GGUF file"),
        (("pytorch_model.bin", "config.json"), None, r"a pickle \(pytorch_model\.bin\)"),
        (("adapter_config.json", "adapter_model.safetensors"), None, "a LoRA adapter"),
        (("README.md",), None, "name a model's repository"),
        ((), None, "name a model's repository"),
    ],
)
def test_choices_that_are_none(names: tuple[str, ...], choice: str | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        chosen_gguf(names, choice)


@pytest.mark.parametrize(
    ("gguf", "wanted"),
    [
        (
            None,
            [
                "config.json",
                "tokenizer.json",
                "chat_template.jinja",
                "additional_chat_templates/tool_use.jinja",
                "model.safetensors",
            ],
        ),
        ("m-00001-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
    ],
)
def test_only_what_is_read_is_wanted(gguf: str | None, wanted: list[str]) -> None:
    listed: Mapping[str, int] = dict.fromkeys(
        [
            *wanted,
            "pytorch_model.bin",
            "modeling_tiny.py",
            "README.md",
            "onnx/model.onnx",
            "original/consolidated.00.pth",
            "tf_model.h5",
        ],
        1,
    )
    assert wanted_files(listed, gguf) == wanted


def test_more_parts_than_any_model_has(cache: Path) -> None:
    add_to_cache(cache, "org/big", {"m-00001-of-99999.gguf": b"x"})
    assert "99999 parts" in lacking(find_model("org/big", hub_cache=cache))


def test_all_models_of_the_cache_by_the_names_that_commands_take(cache: Path) -> None:
    content = gguf_bytes.sound({})
    add_to_cache(cache, "a/folder", files_of(MODEL))
    add_to_cache(cache, "b/one", {"m-Q4_0.gguf": content})
    quants = ("m-1.5-Q4_0.gguf", "m-1.5-Q8_0.gguf", "UD/m-1.5-UD-Q4_0.gguf", "mmproj-m.gguf")
    add_to_cache(cache, "c/many", dict.fromkeys(quants, content))
    add_to_cache(cache, "d/both", {**files_of(MODEL), "m.Q4_K_M.gguf": content})
    add_to_cache(cache, "e/begun", {"big-00001-of-00002.gguf": content})
    add_to_cache(cache, "f/parts", indexed("a.safetensors"))
    (cache / "models--g--empty").mkdir()
    found = dict(cached_models(cache))
    whole = {name: place for name, place in found.items() if isinstance(place, Path)}
    assert whole.keys() == {
        "a/folder",
        "b/one",
        "c/many:1.5-Q4_0",
        "c/many:Q8_0",
        "c/many:UD-Q4_0",
        "d/both",
        "d/both:Q4_K_M",
    }
    for name, place in whole.items():
        assert find_model(name, hub_cache=cache) == place
    assert str(found["e/begun"]).endswith("lacks big-00002-of-00002.gguf")
    assert str(found["f/parts"]).endswith("lacks a.safetensors")
    assert "nothing of it" in str(found["g/empty"])
    assert len(found) == len(whole) + 3


def test_the_vision_encoder_in_the_same_folder_is_read_with_a_gguf_model() -> None:
    names = (
        "m-Q4_0.gguf",
        "mmproj-F32.gguf",
        "mmproj-F16.gguf",
        "UD/m-UD.gguf",
        "m.mmproj-q8.gguf",
    )
    assert wanted_files(names, "m-Q4_0.gguf") == ["m-Q4_0.gguf", "m.mmproj-q8.gguf"]
    assert wanted_files(names[:4], "m-Q4_0.gguf") == ["m-Q4_0.gguf", "mmproj-F16.gguf"]
    assert wanted_files(names, "UD/m-UD.gguf") == ["UD/m-UD.gguf"]
    assert chosen_gguf(names[:3], None) == "m-Q4_0.gguf"
