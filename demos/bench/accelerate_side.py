"""Accelerate's half of a comparison: runs by itself, where it, transformers and torch are.

python accelerate_side.py CHECKPOINT THREADS LIMIT_BYTES FOLDER

bfloat16; as many layers in memory as leave room for two more, the others in FOLDER on disk. Says
in one line of JSON which version it is. Then answers one request as `llama_cpp_process.py` does.
"""

from __future__ import annotations

import json
import logging
import mmap
import sys
import time
from importlib.metadata import version
from pathlib import Path

BYTES = 2
"""Bytes of a weight."""
WORKING_LAYERS = 2
"""Room for layers on their way through memory."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def places(config: object, room_bytes: int) -> dict[str, str]:
    """The device map: first what is no layer, then the first layers, while there is room."""
    hidden, ffn = config.hidden_size, config.intermediate_size  # type: ignore[attr-defined]
    query = config.num_attention_heads * config.head_dim  # type: ignore[attr-defined]
    key_value = config.num_key_value_heads * config.head_dim  # type: ignore[attr-defined]
    layer = BYTES * hidden * (2 * query + 2 * key_value + 3 * ffn)
    table = BYTES * hidden * config.vocab_size  # type: ignore[attr-defined]
    tables = table if config.tie_word_embeddings else 2 * table  # type: ignore[attr-defined]
    room_bytes -= WORKING_LAYERS * layer
    ends = "cpu" if room_bytes >= tables else "disk"
    if ends == "cpu":
        room_bytes -= tables
    found = {"model.embed_tokens": ends, "lm_head": ends}
    found |= {"model.norm": "cpu", "model.rotary_emb": "cpu"}
    for number in range(config.num_hidden_layers):  # type: ignore[attr-defined]
        is_held = (number + 1) * layer <= room_bytes
        found[f"model.layers.{number}"] = "cpu" if is_held else "disk"
    return found


def main() -> None:
    path, threads, limit_bytes, folder = sys.argv[1:]
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(int(threads))
    config = AutoConfig.from_pretrained(path)
    device_map = places(config, int(limit_bytes) - resident_bytes())
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, device_map=device_map, offload_folder=folder
    )
    on_disk = sum(
        place == "disk" for name, place in device_map.items() if name.startswith("model.layers")
    )
    hello = {"version": version("accelerate"), "vocab": config.vocab_size, "on_disk": on_disk}
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        prompt_tokens, new_tokens, _requests = map(int, line.split())
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, config.vocab_size, (1, prompt_tokens), generator=generator)
        with torch.inference_mode():
            started = time.perf_counter()
            output = model(ids, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
            prefilled = time.perf_counter()
            for _ in range(new_tokens - 1):
                output = model(token, past_key_values=output.past_key_values, use_cache=True)
                token = output.logits[:, -1:].argmax(-1)
            ended = time.perf_counter()
        answer = {"prefill_s": prefilled - started, "decode_s": ended - prefilled}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
