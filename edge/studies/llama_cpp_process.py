"""llama.cpp's side of a comparison: a program for a Python with llama-cpp-python and numpy.

python llama_cpp_process.py GGUF THREADS CONTEXT REQUESTS [mapped] [no-flash]

With `mapped` the weights stay in the mapped file, so that a file larger than memory can run; else
llama.cpp repacks some for speed. With `no-flash` attention is computed with its matrix of scores;
else llama.cpp chooses.

Writes its version in one line of JSON. Then answers lines on standard input, `PROMPT_TOKENS
NEW_TOKENS REQUESTS`, with one line of JSON each: the seconds of `prefill_s` (the prompt of the last
request, up to its first token) and of `decode_s` (all further tokens, one of each request at once).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np


class Side:
    """A model in llama.cpp, driven through its C interface with greedy tokens."""

    def __init__(
        self,
        path: str,
        *,
        threads: int,
        context: int,
        requests: int,
        is_mapped: bool = False,
        flash: bool = True,
    ) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        if is_mapped:
            loading.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), loading)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot read {path}")
        terms = llama_cpp.llama_context_default_params()
        terms.n_ctx = context * requests
        terms.n_batch = terms.n_ubatch = max(512, requests)
        terms.n_seq_max = requests
        terms.n_threads = terms.n_threads_batch = threads
        terms.swa_full = False  # as llama-server has it: layers with windows keep these alone
        if not flash:
            terms.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, terms)
        if not self.context:
            raise SystemExit("llama.cpp cannot make a context of this size")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self._batch = llama_cpp.llama_batch_init(terms.n_batch, 0, 1)
        self._largest = terms.n_batch

    def run(self, prompt_tokens: int, new_tokens: int, requests: int) -> dict[str, float]:
        """The times of one comparison; the same prompt for every request."""
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self.context), False)
        prompt = np.random.default_rng(1).integers(3, self.vocab_size, size=prompt_tokens).tolist()
        for request in range(requests):
            started = time.perf_counter()
            for at in range(0, prompt_tokens, self._largest):
                chunk = prompt[at : at + self._largest]
                self._decode([(token, at + i, request) for i, token in enumerate(chunk)])
            token = self._greedy(-1)
        prefilled = time.perf_counter()
        tokens = [token] * requests
        for position in range(prompt_tokens, prompt_tokens + new_tokens - 1):
            self._decode([(each, position, request) for request, each in enumerate(tokens)])
            tokens = [self._greedy(request - requests) for request in range(requests)]
        ended = time.perf_counter()
        return {"prefill_s": prefilled - started, "decode_s": ended - prefilled}

    def _decode(self, entries: list[tuple[int, int, int]]) -> None:
        """(token, position, request) of each row; logits of the last row of each request."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for row, (token, position, request) in enumerate(entries):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, request
            is_last = row + 1 == len(entries) or entries[row + 1][2] != request
            batch.logits[row] = is_last
        if self._api.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp could not compute a batch; its cache may be too small")

    def _greedy(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


def main() -> None:
    path = sys.argv[1]
    threads, context, requests = map(int, sys.argv[2:5])
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
    llama_cpp.llama_log_set(quiet, None)
    words = sys.argv[5:]
    side = Side(
        path, threads=threads, context=context, requests=requests,
        is_mapped="mapped" in words, flash="no-flash" not in words,
    )  # fmt: skip
    print(json.dumps({"version": llama_cpp.__version__, "vocab": side.vocab_size}), flush=True)
    for line in sys.stdin:
        print(json.dumps(side.run(*map(int, line.split()))), flush=True)


if __name__ == "__main__":
    main()
