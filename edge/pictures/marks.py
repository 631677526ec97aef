"""What stands for a picture in a prompt: tokens of its rows, and marks around and between them.

The texts are those of the processors of `transformers`, which put them in the place of the one mark
that a chat template writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edge.pictures.decoder import Picture

Grids = Sequence[tuple[int, int]]
"""The rows of each tile of a picture, in height and width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureMarks:
    """The texts of one family. mark: what its chat template writes for a picture. row: the token
    that stands for a row."""

    mark: str
    row: str
    text: Callable[[Picture, Grids], str]


def marks_of(model_type: str, named: Mapping[str, str]) -> PictureMarks:
    """The marks of a family. named: special tokens of the tokenizer by their names."""
    return _FAMILIES[model_type](named)


def _split(named: Mapping[str, str]) -> PictureMarks:
    around = named.get("fake_image_token", "<fake_token_around_image>")
    whole = named.get("global_image_token", "<global-img>")
    row = named.get("image_token", "<image>")

    def text(picture: Picture, grids: Grids) -> str:
        tiles = [row * (high * wide) for high, wide in grids]
        found = ""
        for number, rows in enumerate(tiles[:-1]):
            down, right = divmod(number, picture.columns)
            found += f"{around}<row_{down + 1}_col_{right + 1}>{rows}"
            found += "\n" if right + 1 == picture.columns else ""
        found += "\n" if picture.rows else ""
        return f"{found}{around}{whole}{tiles[-1]}{around}"

    return PictureMarks(mark=row, row=row, text=text)


def _lines(named: Mapping[str, str]) -> PictureMarks:
    row = named.get("image_token", "[IMG]")
    line_end = named.get("image_break_token", "[IMG_BREAK]")
    end = named.get("image_end_token", "[IMG_END]")

    def text(_picture: Picture, grids: Grids) -> str:
        high, wide = grids[0]
        return line_end.join([row * wide] * high) + end

    return PictureMarks(mark=row, row=row, text=text)


def _plain(named: Mapping[str, str]) -> PictureMarks:
    row = named.get("image_token", "<|image_pad|>")
    return PictureMarks(
        mark=row, row=row, text=lambda _picture, grids: row * (grids[0][0] * grids[0][1])
    )


def _crops(named: Mapping[str, str]) -> PictureMarks:
    begin = named.get("boi_token", "<start_of_image>")
    end = named.get("eoi_token", "<end_of_image>")
    row = named.get("image_token", "<image_soft_token>")

    def text(_picture: Picture, grids: Grids) -> str:
        whole, *crops = (f"\n\n{begin}{row * (high * wide)}{end}\n\n" for high, wide in grids)
        if not crops:
            return whole
        return (
            f"Here is the original image {whole} and here are some crops to help you see better "
            + " ".join(crops)
        )

    return PictureMarks(mark=begin, row=row, text=text)


def _framed(named: Mapping[str, str]) -> PictureMarks:
    begin = named.get("boi_token", "<|image>")
    end = named.get("eoi_token", "<image|>")
    row = named.get("image_token", "<|image|>")

    def text(_picture: Picture, grids: Grids) -> str:
        high, wide = grids[0]
        return f"{begin}{row * (high * wide)}{end}"

    return PictureMarks(mark=row, row=row, text=text)


_FAMILIES: Mapping[str, Callable[[Mapping[str, str]], PictureMarks]] = {
    "idefics3": _split,
    "smolvlm": _split,
    "mistral3": _lines,
    "qwen2_5_vl": _plain,
    "qwen3_vl": _plain,
    "qwen3_5": _plain,
    "qwen3_5_moe": _plain,
    "gemma3": _crops,
    "gemma4": _framed,
}
