"""llama.cpp's side of a conversation, for a Python with llama-cpp-python.

python llama_turns.py GGUF THREADS CONTEXT

Answers lines of JSON on standard input, `{"prompt": [ids], "new_tokens": N}`, with one line each:
`first_s`, `seconds` from the first token of the answer to the last, and `tokens`. It finds the
beginning of the prompt in its own cache.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    import llama_cpp

    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = llama_cpp.Llama(
        path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        begun = time.perf_counter()
        tokens: list[int] = []
        times: list[float] = []
        for token in model.generate(asked["prompt"], temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            times.append(time.perf_counter())
            if len(tokens) == asked["new_tokens"]:
                break
        told = {"first_s": times[0] - begun, "seconds": times[-1] - times[0], "tokens": tokens}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
