"""llama.cpp's side of reading images, for a Python with gguf, and llama-cpp-python with mtmd.

python llama_pictures.py mmproj CHECKPOINT TARGET [Q8_0 | F32]

writes the vision encoder of a checkpoint of `seeing.py`.

python llama_pictures.py MODEL MMPROJ THREADS

answers lines of JSON on standard input, `{"width": W, "height": H, "seed": N}`, with one line each:
`seconds` to encode an image of random pixels, and the `tiles` and `rows` that were made of it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = (
    ("vision_model.embeddings.patch_embedding", "v.patch_embd"),
    ("vision_model.embeddings.position_embedding", "v.position_embd"),
    ("vision_model.post_layernorm", "v.post_ln"),
    ("vision_model.encoder.layers.", "v.blk."),
    ("layer_norm1", "ln1"),
    ("layer_norm2", "ln2"),
    *((f"self_attn.{each}_proj", f"attn_{each}") for each in "qkv"),
    ("self_attn.out_proj", "attn_out"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("connector.modality_projection.proj", "mm.model.fc"),
)


def make_mmproj(folder: Path, target: Path, form: str = "Q8_0") -> None:
    """Write the vision encoder of the checkpoint in this form, as converters do: patches in F16,
    vectors and positions in F32."""
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vision = config["vision_config"]
    settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(target, "clip")
    writer.add_string("clip.projector_type", "idefics3")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    for key, value in (
        ("projection_dim", config["text_config"]["hidden_size"]),
        ("embedding_length", vision["hidden_size"]),
        ("feed_forward_length", vision["intermediate_size"]),
        ("block_count", vision["num_hidden_layers"]),
        ("attention.head_count", vision["num_attention_heads"]),
        ("image_size", vision["image_size"]),
        ("patch_size", vision["patch_size"]),
        ("preproc_image_size", settings["size"]["longest_edge"]),
        ("projector.scale_factor", config["scale_factor"]),
    ):
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5] * 3)
    for stored, words in _tensors(folder / "model.safetensors"):
        values = (words.astype(np.uint32) << 16).view(np.float32)
        name = functools.reduce(lambda so_far, each: so_far.replace(*each), _NAMES, stored)
        kind = gguf.GGMLQuantizationType.F32
        if name == "v.patch_embd.weight" and form != "F32":
            kind = gguf.GGMLQuantizationType.F16
        elif values.ndim == 2 and "position" not in name:
            kind = getattr(gguf.GGMLQuantizationType, form)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(file: Path) -> Any:
    """Name and bfloat16 words of each tensor of the vision encoder."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    for name, entry in header.items():
        if name.startswith(("model.vision_model.", "model.connector.")):
            offset = 8 + size + entry["data_offsets"][0]
            shape = tuple(entry["shape"])
            words = np.memmap(file, np.uint16, "r", offset=offset, shape=shape)
            yield name.removeprefix("model."), words


class _Reader:
    """The vision encoder behind its text model, which mtmd needs for sizes."""

    def __init__(self, model: str, mmproj: str, threads: int) -> None:
        import llama_cpp
        from llama_cpp import mtmd_cpp

        self._api: Any = mtmd_cpp
        options = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), options)
        chosen = mtmd_cpp.mtmd_context_params_default()
        chosen.use_gpu, chosen.n_threads, chosen.print_timings = False, threads, False
        self._context = mtmd_cpp.mtmd_init_from_file(mmproj.encode(), self._model, chosen)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot read {mmproj}")
        self.version = llama_cpp.__version__

    def read(self, width: int, height: int, seed: int) -> dict[str, float]:
        api = self._api
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
        held = (ctypes.c_uint8 * pixels.size).from_buffer_copy(pixels.tobytes())
        bitmap = api.mtmd_bitmap_init(width, height, held)
        marker = api.mtmd_default_marker()
        text = api.mtmd_input_text()
        text.text, text.text_len, text.add_special, text.parse_special = (
            *(marker, len(marker)), False, True
        )  # fmt: skip
        chunks = api.mtmd_input_chunks_init()
        bitmaps = (api.mtmd_bitmap_p_ctypes * 1)(bitmap)
        if api.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1):
            raise SystemExit("llama.cpp cannot cut the image")
        found = {"seconds": 0.0, "tiles": 0.0, "rows": 0.0}
        for number in range(api.mtmd_input_chunks_size(chunks)):
            chunk = api.mtmd_input_chunks_get(chunks, number)
            if api.mtmd_input_chunk_get_type(chunk) != api.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                continue
            begun = time.perf_counter()
            if api.mtmd_encode_chunk(self._context, chunk):
                raise SystemExit("llama.cpp cannot encode the image")
            found["seconds"] += time.perf_counter() - begun
            found["tiles"] += 1
            found["rows"] += api.mtmd_input_chunk_get_n_tokens(chunk)
        api.mtmd_input_chunks_free(chunks)
        api.mtmd_bitmap_free(bitmap)
        return found


def main() -> None:
    if sys.argv[1] == "mmproj":
        make_mmproj(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
        return
    reader = _Reader(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it tells of every tile
    print(json.dumps({"version": reader.version}), flush=True)
    for line in sys.stdin:
        print(json.dumps(reader.read(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
