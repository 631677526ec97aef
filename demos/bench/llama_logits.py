"""llama.cpp's half of the comparison of formats: runs by itself, where llama-cpp-python is.

python llama_logits.py quantise GGUF TARGET FORMAT
python llama_logits.py read GGUF TOKENS.npy LOGITS.npy

`read` takes token ids [windows, tokens] and writes logits float32 [windows, tokens, vocab], each
window from an empty context. It says in one line of JSON which version of llama-cpp-python it is,
how many weights there are, and their bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

FORMATS = {
    "Q3_K_M": "LLAMA_FTYPE_MOSTLY_Q3_K_M",
    "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "Q4_1": "LLAMA_FTYPE_MOSTLY_Q4_1",
    "IQ4_NL": "LLAMA_FTYPE_MOSTLY_IQ4_NL",
    "Q4_K_M": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
    "Q5_K_M": "LLAMA_FTYPE_MOSTLY_Q5_K_M",
    "Q6_K": "LLAMA_FTYPE_MOSTLY_Q6_K",
    "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
}


def quantise(source: Path, target: Path, name: str) -> None:
    """The file in another format, as llama.cpp's own tool makes it."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, FORMATS[name])
    options.nthread = 2
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), options)
    if failed:
        raise SystemExit(f"llama.cpp cannot make {name} of {source}")


def read(model: Path, tokens: Path, target: Path) -> dict[str, Any]:
    """Writes the logits after each token; what there is to say of the file."""
    import llama_cpp

    windows = np.load(tokens)
    length = windows.shape[1]
    llama = llama_cpp.Llama(
        str(model), n_ctx=length, n_batch=length, n_threads=2, logits_all=True, verbose=False
    )
    found = np.empty((*windows.shape, llama.n_vocab()), np.float32)
    for number, window in enumerate(windows):
        llama.reset()
        llama.eval(window.tolist())
        found[number] = llama.scores[:length]
    np.save(target, found)
    return {
        "version": llama_cpp.__version__,
        "nbytes": llama_cpp.llama_model_size(llama.model),
        "num_weights": llama_cpp.llama_model_n_params(llama.model),
    }


if __name__ == "__main__":
    if sys.argv[1] == "quantise":
        quantise(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        print(json.dumps(read(*map(Path, sys.argv[2:]))))
