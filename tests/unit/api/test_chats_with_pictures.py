"""A conversation with pictures becomes the ids of its prompt, and the tiles of its pictures."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge.answers.terms import GenerationOptions
from edge.api.asking import Asking
from edge.api.loaded_model import LoadedModel
from edge.errors import RequestError
from edge.models.pictures import is_row, row_ids
from edge.pictures.reader import PictureReader
from edge.text import Tokenizer
from edge.weights.picture_files import picture_files
from tests.architecture.test_names import REPOSITORY
from tests.support.small_pictures import FAMILIES, noise, png


class Loaded:
    """A model without peers."""

    name = "small"
    context_tokens = longest_context_tokens = 200
    vocab_size = 1000
    picture_reader: PictureReader | None

    def __init__(self, folder: Path) -> None:
        family = FAMILIES["qwen3_vl"]
        self.required_tokenizer = Tokenizer.open(family.write(folder, "qwen3_vl"))
        self.picture_reader = PictureReader(
            picture_files(folder), family.tower, self.required_tokenizer
        )


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Loaded]:
    found = Loaded(tmp_path)
    reader = found.picture_reader
    assert reader is not None
    yield found
    reader.close()
    found.required_tokenizer.close()


def asked(loaded: Loaded, messages: Any, **given: Any) -> Any:
    asking = Asking(cast(LoadedModel, loaded))
    options = GenerationOptions()
    return asking.chat_prompt(
        messages, options, tools=given.get("tools"), tool_choice="auto", variables=None
    )


def talk(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def test_the_page_of_the_guide_says_it_right(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(REPOSITORY, "docs", "guide", "pictures.md").read_text("utf-8")
    program = page.partition("```python\n")[2].partition("```")[0]
    noise(64, 64).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    found = []

    def chat(messages: Any) -> Any:
        found.append(asked(loaded, messages))
        return SimpleNamespace(text="")

    exec(program, {"model": SimpleNamespace(chat=chat)})
    ((_ids, _options, _schemas, tiles),) = found
    assert len(tiles) == 1


PICTURE = {"type": "image", "image": png(noise(64, 64))}


def test_the_prompt_has_ids_of_rows_and_each_tile_is_there_once(loaded: Loaded) -> None:
    ids, _options, _schemas, tiles = asked(loaded, talk(PICTURE, PICTURE))
    rows = [id for id in ids if is_row(id)]
    (tile,) = tiles
    assert rows == [*row_ids(tile, 4, b"small tower")] * 2
    assert (tile.height, tile.width) == (4, 4)
    begins = Asking(cast(LoadedModel, loaded))
    assert begins.checked_ids(ids, has_pictures=True) == tuple(ids)
    with pytest.raises(RequestError, match="is not one of the model's"):
        begins.checked_ids(ids)


def test_texts_alone_have_no_tiles(loaded: Loaded) -> None:
    ids, _options, _schemas, tiles = asked(loaded, "Hello")
    assert ids == loaded.required_tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    assert tiles == ()


def test_a_template_that_ignores_tools_says_so_with_pictures_too(loaded: Loaded) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(RequestError, match="takes no tools"):
        asked(loaded, talk(PICTURE), tools=[tool])


def test_a_model_that_reads_no_pictures_says_so(loaded: Loaded) -> None:
    loaded.picture_reader, reader = None, loaded.picture_reader
    with pytest.raises(RequestError, match="small reads no images; leave them out, or use a"):
        asked(loaded, talk(PICTURE))
    loaded.picture_reader = reader


def test_videos_are_refused_by_name(loaded: Loaded) -> None:
    for with_picture in ((), (PICTURE,)):
        with pytest.raises(RequestError, match="a part of type 'video', and only text and images"):
            asked(loaded, talk(*with_picture, {"type": "video", "video": "a.mp4"}))
