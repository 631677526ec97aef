"""What a folder of sentence-transformers says of embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge.api.embedding import rows_for
from edge.errors import CheckpointError, RequestError
from edge.weights.pooling import MakersPooling, read_pooling

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")


def module(kind: str, path: str) -> dict[str, Any]:
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{kind}"}


MODULES = [module("Transformer", ""), module("Pooling", "1_Pooling"), module("Normalize", "2_N")]


def folder(
    path: Path, *modes: str, modules: object = MODULES, at: str = "1_Pooling", **more: object
) -> Path:
    (path / at).mkdir()
    values = {f"pooling_mode_{mode}": mode in modes for mode in MODES}
    values |= {"word_embedding_dimension": 32, "include_prompt": True, **more}  # type: ignore[dict-item]
    (path / at / "config.json").write_text(json.dumps(values))
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
    return path


def test_it_says_which(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == MakersPooling()
    assert read_pooling(folder(tmp_path, "lasttoken")) == MakersPooling(kind="last")


@pytest.mark.parametrize("at", ["1_Pooling", "7_Pool"])
def test_the_file_is_where_the_modules_say(at: str, tmp_path: Path) -> None:
    modules = [module("Transformer", ""), module("Pooling", at)]
    assert read_pooling(folder(tmp_path, "mean_tokens", modules=modules, at=at)).kind == "mean"


def test_without_modules_the_usual_place_counts(tmp_path: Path) -> None:
    assert read_pooling(folder(tmp_path, "mean_tokens", modules=None)).kind == "mean"


def test_a_mode_may_be_a_word(tmp_path: Path) -> None:
    assert read_pooling(folder(tmp_path, pooling_mode="lasttoken")).kind == "last"


@pytest.mark.parametrize(
    ("modes", "modules", "said"),
    [
        (("cls_token",), MODULES, "'cls_token'"),
        (("mean_tokens", "lasttoken"), MODULES, "'mean_tokens and lasttoken'"),
        ((), MODULES, "'nothing'"),
        (("mean_tokens",), [*MODULES, module("Dense", "3_Dense")], "module 'Dense'"),
    ],
)
def test_what_is_not_computed_is_named_unless_another_is_asked_for(
    modes: tuple[str, ...], modules: object, said: str, tmp_path: Path
) -> None:
    found = read_pooling(folder(tmp_path, *modes, modules=modules))
    with pytest.raises(RequestError, match=said) as told:
        rows_for(None, found, name="gte")
    assert str(told.value).startswith("Edge cannot pool the embeddings of gte as")
    assert rows_for("last", found, name="gte") == "last state"


def test_who_says_nothing_has_the_mean() -> None:
    assert rows_for(None, MakersPooling(), name="m") == "states"
    assert rows_for(None, MakersPooling(kind="last"), name="m") == "last state"
    with pytest.raises(RequestError, match="'mean' or 'last', not 'cls'"):
        rows_for("cls", MakersPooling(), name="m")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ({}, "no list of modules"),
        ([1], "no type, or no path"),
        ([{"type": "Pooling"}], "no type, or no path"),
        ([module("Pooling", "../elsewhere")], "leads out of the folder"),
        ([module("Pooling", "/etc")], "leads out of the folder"),
        ([module("Pooling", "y" * 300)], r"'y+…?y*.*cannot be used"),
    ],
)
def test_what_is_no_list_of_modules_is_refused(modules: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_pooling(folder(tmp_path, "mean_tokens", modules=modules))
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_pooling(tmp_path)
