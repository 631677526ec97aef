"""Decodes pictures for `decoder.py`: a separate program under limits of the kernel.

Files of pictures come from anywhere, and their decoders are written in C. So they run in a process
that writes no files, starts no processes, and has limits of memory and time.

A request is a line of JSON and the bytes of a file. The line has the tiling: {"tiling": its name,
its fields …}. A reply is a line with one word, and after it the cause of "refused", or of "cut" a
line of JSON and the pixels of each tile: {"sizes": [[width, height], …], "rows": …, "columns": …}.

Imports almost nothing of Edge: it starts in 0.1 s, most of which is Pillow's.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from typing import Any

from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

if __name__ == "__main__":
    sys.path.append(sys.argv[4])  # the folder of Edge's package, which may be no usual one

from edge.pictures.tiling import TILINGS, CutPicture
from edge.system.confinement import serve

_PLUGINS = (
    BmpImagePlugin,
    GifImagePlugin,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)
"""Registered by their import. Which of them reads a file is decided by its first bytes."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")  # a phone's MPO begins with a JPEG
MOST_PIXELS = 1 << 26
_LONGEST_CAUSE = 500
_TILINGS = {each.__name__: each for each in TILINGS}


def main() -> None:
    Image.preinit()
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS
    warnings.simplefilter("ignore")
    serve(_reply)


def _reply(request: bytes) -> bytes:
    asked, _, file = request.partition(b"\n")
    tiling: dict[str, Any] = json.loads(asked)
    try:
        cut = _TILINGS[tiling.pop("tiling")](**tiling).cut(decoded(file))
    except UnidentifiedImageError:
        return b"refused\nit is not in any of the formats " + ", ".join(FORMATS).encode()
    except MemoryError:
        return b"refused\nit takes too much memory"
    except Image.DecompressionBombError:
        return _refused(f"it has more than {MOST_PIXELS:,} pixels")
    except Exception as error:  # decoders and tilings fail in many ways
        return _refused(str(error) or type(error).__name__)
    return _written(cut)


def _refused(cause: str) -> bytes:
    return b"refused\n" + cause[:_LONGEST_CAUSE].encode("utf-8", "replace")


def _written(cut: CutPicture) -> bytes:
    sizes = [each.size for each in cut.tiles]
    head = json.dumps({"sizes": sizes, "rows": cut.rows, "columns": cut.columns}).encode()
    return b"\n".join((b"cut", head, b"".join(each.tobytes() for each in cut.tiles)))


def decoded(file: bytes) -> Image.Image:
    """The first picture of a file, upright, with red, green and blue; on white where it is
    transparent."""
    with Image.open(io.BytesIO(file), formats=FORMATS) as opened:
        if opened.width * opened.height > MOST_PIXELS:
            raise ValueError(f"it has more than {MOST_PIXELS:,} pixels")
        opened.load()
        ImageOps.exif_transpose(opened, in_place=True)
        if "A" not in opened.getbands() and opened.info.get("transparency") is None:
            return opened.convert("RGB")
        with_alpha = opened.convert("RGBA")
    background = Image.new("RGBA", with_alpha.size, (255, 255, 255, 255))
    return Image.alpha_composite(background, with_alpha).convert("RGB")


if __name__ == "__main__":
    main()
