"""Files of pictures are decoded by a process under limits; bad ones are told in a sentence."""

import contextlib
import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from edge.errors import RequestError
from edge.pictures import decoder as decoder_module
from edge.pictures.decoder import PictureDecoder
from edge.pictures.tiling import CropTiling

WIDTH, HEIGHT = 24, 16
COLOURS = Image.fromarray(
    np.random.default_rng(1).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
)


@pytest.fixture
def decoder() -> Iterator[PictureDecoder]:
    """Of tiles with the size of the picture, so its pixels do not change."""
    found = PictureDecoder(CropTiling(width=WIDTH, height=HEIGHT, resample=0), patch=1)
    yield found
    found.close()


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    held = io.BytesIO()
    image.save(held, kind, **options)
    return held.getvalue()


def pixels(decoder: PictureDecoder, file: bytes) -> np.ndarray:
    (tile,) = decoder.picture(file).tiles
    assert (tile.height, tile.width) == (HEIGHT, WIDTH)
    return tile.patches.reshape(HEIGHT, WIDTH, 3)


def read_by_theirs(file: bytes) -> np.ndarray:
    """As `transformers` reads it."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    return np.asarray(convert_to_rgb(image, return_numpy=True))


def with_alpha() -> Image.Image:
    image = COLOURS.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def palette_with_transparency() -> bytes:
    return saved(COLOURS.quantize(16), "PNG", transparency=3)


def frames() -> bytes:
    more = [Image.new("RGB", COLOURS.size, "red")]
    return saved(COLOURS, "GIF", save_all=True, append_images=more)


FILES = {
    "png": lambda: saved(COLOURS, "PNG"),
    "jpeg": lambda: saved(COLOURS, "JPEG"),
    "webp": lambda: saved(COLOURS, "WEBP", quality=60),
    "gif": frames,
    "bmp": lambda: saved(COLOURS, "BMP"),
    "grey": lambda: saved(COLOURS.convert("L"), "PNG"),
    "two colours": lambda: saved(COLOURS.convert("1"), "PNG"),
    "16 bits": lambda: saved(COLOURS.convert("L").convert("I;16"), "PNG"),
    "cmyk": lambda: saved(COLOURS.convert("CMYK"), "JPEG"),
    "alpha": lambda: saved(with_alpha(), "PNG"),
    "alpha in webp": lambda: saved(with_alpha(), "WEBP", lossless=True),
    "grey with alpha": lambda: saved(with_alpha().convert("LA"), "PNG"),
    "palette": palette_with_transparency,
}


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_that_transformers_reads(decoder: PictureDecoder, name: str) -> None:
    file = FILES[name]()
    np.testing.assert_array_equal(pixels(decoder, file), read_by_theirs(file))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_stand_upright(decoder: PictureDecoder, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = COLOURS if orientation < 5 else COLOURS.transpose(Image.Transpose.ROTATE_90)
    file = saved(turned, "JPEG", exif=exif)
    np.testing.assert_array_equal(pixels(decoder, file), read_by_theirs(file))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def large_png(width: int, height: int) -> bytes:
    """A PNG that promises more pixels than it has."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rest = chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + rest


BAD = {
    "nothing": (b"", "not in any of the formats BMP, GIF, JPEG, PNG, WEBP"),
    "text": (b"Hello", "not in any of the formats"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not in any of the formats"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not in any of the formats"),
    "half": (saved(COLOURS, "PNG")[:300], "truncated|broken|unrecognized"),
    "half a photo": (saved(COLOURS, "JPEG")[:-100], "truncated"),
    "few pixels of many": (large_png(6000, 6000), "truncated|broken|unrecognized|incomplete"),
    "too many pixels": (large_png(9000, 9000), "more than 67,108,864 pixels"),
    "far too many pixels": (large_png(90000, 90000), "more than 67,108,864 pixels"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_told_and_lose_nothing(decoder: PictureDecoder, name: str) -> None:
    file, cause = BAD[name]
    assert decoder.picture(saved(COLOURS, "PNG")).tiles
    running = decoder._process._running
    with pytest.raises(RequestError, match=f"the picture cannot be read: .*({cause}).*; give a"):
        decoder.picture(file)
    assert decoder.picture(saved(COLOURS, "PNG")).tiles
    assert decoder._process._running is running is not None, "the process is kept"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_files_are_read_or_refused(decoder: PictureDecoder, kind: str) -> None:
    file = saved(COLOURS, kind)
    random = np.random.default_rng(7)
    for _ in range(60):
        damaged = bytearray(file)
        for place in random.integers(0, len(file), 4):
            damaged[place] = random.integers(0, 256)
        with contextlib.suppress(RequestError):
            assert decoder.picture(bytes(damaged)).tiles[0].patches.shape == (WIDTH * HEIGHT, 3)
    assert decoder.picture(file).tiles


def test_a_file_that_is_too_long_is_not_sent(decoder: PictureDecoder) -> None:
    with pytest.raises(RequestError, match="33,554,433 bytes, and 33,554,432 are the most"):
        decoder.picture(bytes((32 << 20) + 1))
    assert decoder._process._running is None


def test_a_picture_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "_CPU_S", 0.3)
    slow = PictureDecoder(CropTiling(width=4096, height=4096, resample=1), patch=16)
    with pytest.raises(RequestError, match=r"takes more than 0\.3 s"):
        slow.picture(saved(Image.effect_noise((4000, 4000), 80), "JPEG"))
    slow.close()


def test_a_picture_that_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "_MEMORY_BYTES", 200 << 20)
    small = PictureDecoder(CropTiling(width=16, height=16, resample=0), patch=16)
    with pytest.raises(RequestError, match=r"takes too much memory|its decoder ended"):
        small.picture(saved(Image.new("RGB", (8000, 8000)), "PNG"))
    assert small.picture(saved(COLOURS, "PNG")).tiles
    small.close()


def test_a_tile_has_its_patches_row_by_row_with_channels_first() -> None:
    found = PictureDecoder(CropTiling(width=WIDTH, height=HEIGHT, resample=0), patch=8)
    (tile,) = found.picture(saved(COLOURS, "PNG")).tiles
    found.close()
    values = np.asarray(COLOURS)
    assert (tile.height, tile.width) == (2, 3)
    for down in range(2):
        for right in range(3):
            patch = values[8 * down : 8 * down + 8, 8 * right : 8 * right + 8]
            np.testing.assert_array_equal(
                tile.patches[3 * down + right].reshape(3, 8, 8), patch.transpose(2, 0, 1)
            )
