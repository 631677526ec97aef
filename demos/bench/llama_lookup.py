"""llama.cpp's side of comparisons of answers, for a Python with llama-cpp-python.

python llama_lookup.py GGUF THREADS CONTEXT

Answers lines of JSON on standard input, `{"prompt": [ids], "new_tokens": N}`, with one line each:
`first_s`, `seconds` from the first token of the answer to the last, and `tokens`. With `"looks_up":
true`, it guesses tokens by its own prompt lookup, with its usual options. With `"goes_on": true`,
the model of the line before goes on, which finds the beginning of the prompt in its own cache.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def loaded(**options: Any) -> Any:
        return llama_cpp.Llama(
            path,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            **options,
        )

    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    model = None
    for line in sys.stdin:
        asked = json.loads(line)
        # Drafts need the logits of all tokens; without the option there is room for a batch only.
        draft = {"draft_model": LlamaPromptLookupDecoding(), "logits_all": True}
        if model is None or not asked.get("goes_on"):
            if model is not None:
                model.close()
            model = loaded(**draft if asked.get("looks_up") else {})
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
