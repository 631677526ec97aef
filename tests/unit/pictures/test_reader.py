"""Prompts with pictures have the tokens that the processors of `transformers` make of them."""

import base64
import importlib
import io
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer

from edge.errors import CheckpointError, RequestError
from edge.models.pictures import is_row, row_ids
from edge.pictures.decoder import Picture
from edge.pictures.messages import taken_out, with_results_behind
from edge.pictures.reader import PictureReader
from edge.text import Tokenizer
from edge.weights.picture_files import picture_files
from tests.support.slow_cases import repeats_are_slow
from tests.support.small_pictures import FAMILIES, SmallTower, noise, png
from tests.support.small_tokenizers import byte_fallback

PROCESSORS = {
    "smolvlm": ("smolvlm", "SmolVLM", "smolvlm"),
    "idefics3": ("idefics3", "Idefics3", "idefics3"),
    "mistral3": ("pixtral", "Pixtral", "pixtral"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VL", "qwen2_vl"),
    "qwen3_5": ("qwen3_vl", "Qwen3VL", "qwen2_vl"),
    "gemma3": ("gemma3", "Gemma3", "gemma3"),
    "gemma4": ("gemma4", "Gemma4", "gemma4"),
}
"""Of a model type: its processor's module and name, and the module of its image processor."""

SMALL, WIDE, TALL = noise(64, 60), noise(150, 40), noise(30, 100)


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def image(given: Image.Image) -> dict[str, Any]:
    return {"type": "image", "image": given}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


TALKS: dict[str, list[dict[str, Any]]] = {
    "before": [user(image(SMALL), text("What is this?"))],
    "behind": [user(text("What is this? "), image(WIDE))],
    "between": [user(text("Left: "), image(TALL), text("\n\nRight: "), image(WIDE), text("."))],
    "three": [user(image(SMALL), image(WIDE), image(TALL), text("Which one is it?"))],
    "alone": [user(image(WIDE))],
    "two turns": [
        {"role": "system", "content": "Be brief."},
        user(image(SMALL), text("Hello")),
        {"role": "assistant", "content": "A dog."},
        user(text("And this?"), image(WIDE)),
    ],
}


@contextmanager
def opened(
    folder: Path, model_type: str, **given: Any
) -> Iterator[tuple[Tokenizer, PictureReader]]:
    family = FAMILIES[model_type]
    family.write(folder, model_type, **given)
    tokenizer = Tokenizer.open(folder)
    reader = PictureReader(picture_files(folder), family.tower, tokenizer)
    try:
        yield tokenizer, reader
    finally:
        reader.close()
        tokenizer.close()


def encoded(tokenizer: Tokenizer, reader: PictureReader, talk: Sequence[Any]) -> tuple[Any, Any]:
    messages, files = taken_out(talk)
    pictures = reader.read(files)
    return tokenizer.encode_chat(messages, pictures=pictures), pictures


def processor_of(model_type: str, tokenizer: Any) -> tuple[Any, Any]:
    """The processor of `transformers`, of which texts alone are asked, and its image processor.

    Some need torchvision before they begin; none does for its texts.
    """
    module, name, of_images = PROCESSORS[model_type]
    lent = {each: ModuleType(each) for each in ("torchvision", "torchvision.transforms")}
    lent |= {each: ModuleType(each) for each in ("torchvision.transforms.v2",)}
    lent["torchvision.transforms.v2"].functional = None  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for each, value in lent.items():
            patch.setitem(sys.modules, each, value)
        there = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    kind = getattr(there, f"{name}Processor")
    images = importlib.import_module(
        f"transformers.models.{of_images}.image_processing_pil_{of_images}"
    )
    (of_pictures,) = (
        value
        for key, value in vars(images).items()
        if key.endswith("ImageProcessorPil") and value.__module__ == images.__name__
    )
    family = FAMILIES[model_type]
    theirs = object.__new__(kind)
    theirs.tokenizer = tokenizer
    theirs.image_processor = of_pictures(**family.settings)
    theirs.image_token = family.named.get("image_token", "[IMG]")
    theirs.fake_image_token = "<fake_token_around_image>"
    theirs.global_image_tag = theirs.global_image_token = "<global-img>"
    theirs.image_break_token, theirs.image_end_token = "[IMG_BREAK]", "[IMG_END]"
    theirs.boi_token, theirs.eoi_token = (
        family.named.get("boi_token"),
        family.named.get("eoi_token"),
    )
    theirs.image_seq_len, theirs.patch_size, theirs.spatial_merge_size = 4, 14, 2
    rows = theirs.image_token * 4
    theirs.full_image_sequence = f"\n\n{theirs.boi_token}{rows}{theirs.eoi_token}\n\n"
    return theirs, "<start_of_image>" if model_type == "gemma3" else theirs.image_token


def wanted_ids(folder: Path, model_type: str, talk: Sequence[Any]) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs, mark = processor_of(model_type, tokenizer)
    as_parts = [
        {**each, "content": [text(each["content"])]} if isinstance(each["content"], str) else each
        for each in talk
    ]
    prompt = tokenizer.apply_chat_template(as_parts, tokenize=False, add_generation_prompt=True)
    pictures = [
        part["image"] for each in as_parts for part in each["content"] if part["type"] == "image"
    ]
    pieces = prompt.split(mark)
    whole = pieces[0]
    for given, piece in zip(pictures, pieces[1:], strict=True):
        options: dict[str, Any] = {}
        if model_type in ("smolvlm", "idefics3"):
            options = {"return_row_col_info": True}
        elif model_type == "mistral3":
            options = {"patch_size": {"height": 28, "width": 28}}
        inputs = theirs.image_processor(given, **options)
        whole += theirs.replace_image_token(inputs, 0) + piece
    return list(tokenizer(whole, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("model_type", "name"), repeats_are_slow(itertools.product(FAMILIES, TALKS))
)
def test_prompts_are_those_of_transformers(tmp_path: Path, model_type: str, name: str) -> None:
    talk = TALKS[name]
    with opened(tmp_path, model_type) as (tokenizer, reader):
        ids, pictures = encoded(tokenizer, reader, talk)
    row = pictures.row_id
    assert [row if is_row(id) else id for id in ids] == wanted_ids(tmp_path, model_type, talk)
    rows = [id for id in ids if is_row(id)]
    found: list[int] = []
    merged = FAMILIES[model_type].merged ** 2
    for picture in pictures.pictures:
        for tile in picture.tiles:
            found += row_ids(tile, tile.height * tile.width // merged, b"small tower")
    assert rows == found, "tile after tile, row after row"


def test_equal_pictures_have_equal_ids_and_others_do_not(tmp_path: Path) -> None:
    with opened(tmp_path, "qwen3_vl") as (tokenizer, reader):
        ids, pictures = encoded(tokenizer, reader, [user(image(SMALL), image(SMALL), image(WIDE))])
        again, _pictures = encoded(tokenizer, reader, [user(image(SMALL), text("Hi"))])
        other = PictureReader(
            picture_files(tmp_path), SmallTower(merged=2, digest=b"other"), tokenizer
        )
        of_other, _pictures = encoded(tokenizer, other, [user(image(SMALL))])
        other.close()
    assert len(pictures.tiles) == 2
    rows = [id for id in ids if is_row(id)]
    count = len(rows) - len({*rows})
    assert rows[:count] == rows[count : 2 * count] == [id for id in again if is_row(id)]
    assert not {*rows}.intersection(id for id in of_other if is_row(id))


def test_a_picture_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, "qwen3_vl") as (_tokenizer, reader):
        asked: list[int] = []
        decode = reader._decoder.picture

        def counted(file: bytes) -> Picture:
            asked.append(len(file))
            return decode(file)

        monkeypatch.setattr(reader._decoder, "picture", counted)
        first, second = png(SMALL), png(WIDE)
        reader.read([first, second])
        reader.read([second, first])
        assert asked == [len(first), len(second)]
        reader.read([png(noise(40, 40 + more)) for more in range(8)])
        reader.read([first])
        assert len(asked) == 11, "the longest unused ones are forgotten"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_marks_in_texts_are_text(tmp_path: Path, model_type: str) -> None:
    """A user who writes the mark of a picture writes text."""
    family = FAMILIES[model_type]
    said = " ".join(["See", *family.tokens[:3], "here", "<|image_pad|>", "[IMG]"])
    with opened(tmp_path, model_type) as (tokenizer, reader):
        ids, pictures = encoded(tokenizer, reader, [user(text(said), image(SMALL), text(said))])
        plain, _ = encoded(tokenizer, reader, [user(image(SMALL))])
        assert sum(map(is_row, ids)) == sum(map(is_row, plain))
        assert ids.count(pictures.row_id) == 0
        shown = tokenizer.decode([id for id in ids if not is_row(id)], skip_special_tokens=False)
        assert shown.count(said) == 2


def test_marks_that_cannot_be_told_from_texts_are_refused(tmp_path: Path) -> None:
    """A vocabulary that puts a space before each piece of text is encoded in one piece."""
    with opened(tmp_path, "qwen3_vl", tokenizer=byte_fallback()) as (tokenizer, reader):
        ids, _ = encoded(tokenizer, reader, [user(image(SMALL), text("Hello"))])
        assert sum(map(is_row, ids)) == 4
        with pytest.raises(RequestError, match=r"take 1 places of its prompt, which has 2: a text"):
            encoded(tokenizer, reader, [user(image(SMALL), text("<|image_pad|>"))])


def test_a_template_without_a_place_for_pictures_is_told(tmp_path: Path) -> None:
    with opened(tmp_path, "qwen3_vl") as (_tokenizer, reader):
        (tmp_path / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.content }}{% endfor %}"
        )
        plain = Tokenizer.open(tmp_path)
        with pytest.raises(RequestError, match="chat template has no place for pictures; use"):
            encoded(plain, reader, [user(image(SMALL), text("Hello"))])
        plain.close()


def test_pictures_beyond_the_limit_of_the_tower_are_refused(tmp_path: Path) -> None:
    FAMILIES["gemma3"].write(tmp_path, "gemma3")
    tokenizer = Tokenizer.open(tmp_path)
    reader = PictureReader(picture_files(tmp_path), SmallTower(merged=4, max_patches=63), tokenizer)
    with pytest.raises(RequestError, match="a picture has 64 patches, more than the model reads"):
        reader.read([png(SMALL)])
    reader.close()
    reader = PictureReader(picture_files(tmp_path), SmallTower(merged=3), tokenizer)
    with pytest.raises(RequestError, match="8 by 8 patches are not in blocks of 3; give another"):
        reader.read([png(SMALL)])
    reader.close()
    tokenizer.close()


def test_large_pictures_are_made_smaller_where_sizes_are_free(tmp_path: Path) -> None:
    FAMILIES["qwen3_vl"].write(tmp_path, "qwen3_vl")
    tokenizer = Tokenizer.open(tmp_path)
    reader = PictureReader(picture_files(tmp_path), SmallTower(merged=2, max_patches=40), tokenizer)
    ((tile,),) = (each.tiles for each in reader.read([png(noise(300, 300))]).pictures)
    assert (tile.height, tile.width) == (6, 6)
    reader.close()
    tokenizer.close()


def test_a_tokenizer_without_the_token_is_refused(tmp_path: Path) -> None:
    family = replace(FAMILIES["qwen3_vl"], tokens=(), named={})
    tokenizer = Tokenizer.open(family.write(tmp_path, "qwen3_vl"))
    with pytest.raises(CheckpointError, match=r"the tokenizer has no token <\|image_pad\|>"):
        PictureReader(picture_files(tmp_path), family.tower, tokenizer)


def test_texts_alone_are_read_by_templates_that_write_parts_only(tmp_path: Path) -> None:
    with opened(tmp_path, "smolvlm") as (tokenizer, _reader):
        prompt = tokenizer.chat([{"role": "user", "content": "Hello"}])
    assert prompt == "<|begin|>user\nHello<|end|>\nassistant\n"


def test_pictures_of_every_kind_are_taken(tmp_path: Path) -> None:
    file = png(SMALL)
    (tmp_path / "a.png").write_bytes(file)
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    given = [file, memoryview(file), str(tmp_path / "a.png"), tmp_path / "a.png", url, SMALL]
    messages, files = taken_out([user(*({"type": "image", "image": each} for each in given))])
    assert messages == [user(*[{"type": "image"}] * 6)]
    for each in files:
        with opened(tmp_path / "model", "qwen3_vl") as (_tokenizer, reader):
            (tile,) = reader.read([each]).pictures[0].tiles
            assert tile.digest == reader.read([file]).pictures[0].tiles[0].digest
    _messages, (cmyk,) = taken_out([user(image(SMALL.convert("CMYK")))])
    assert Image.open(io.BytesIO(cmyk)).mode == "RGB"


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (None, "must be a path, bytes, a data URL or a PIL.Image, not None; write"),
        (3, "must be a path, bytes"),
        ("nowhere.png", r"the picture nowhere\.png cannot be read \(No such file"),
        ("data:image/png,abc", "a picture's data URL is invalid; write data:image/png;base64"),
        ("data:image/png;base64,ab!c", "not valid base64"),
        ("https://example.org/a.png", "Edge downloads none; download it, and give the file"),
    ],
)
def test_other_pictures_are_refused(given: Any, cause: str) -> None:
    with pytest.raises(RequestError, match=cause):
        taken_out([user({"type": "image", "image": given})])


def test_too_many_pictures_are_refused() -> None:
    with pytest.raises(RequestError, match="may have 64 pictures; leave some out"):
        taken_out([user(*[{"type": "image", "image": b"x"}] * 65)])


def test_pictures_of_results_stand_behind_them_where_templates_leave_them_out() -> None:
    picture = {"type": "image", "image": b"a"}
    words = {"type": "text", "text": "Done."}
    result = {"role": "tool", "content": [words, picture]}
    below = {"type": "text", "text": "(This image is shown below.)"}
    above = {"type": "text", "text": "Images in the results above:"}
    talk: list[Mapping[str, object]] = [
        {"role": "user", "content": "Look."},
        result,
        {"role": "tool", "content": "Nothing."},
        {"role": "user", "content": "And now?"},
        result,
    ]
    assert with_results_behind(talk) == [
        talk[0],
        {"role": "tool", "content": [words, below]},
        talk[2],
        {"role": "user", "content": [above, picture, {"type": "text", "text": "And now?"}]},
        {"role": "tool", "content": [words, below]},
        {"role": "user", "content": [above, picture]},
    ]
    assert with_results_behind(talk[:1]) == talk[:1]
