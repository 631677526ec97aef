"""llama.cpp's half of the comparison of formats: runs by itself, where llama-cpp-python is.

python llama_logits.py quantise GGUF TARGET FORMAT
python llama_logits.py encode GGUF TARGET TYPE
python llama_logits.py read GGUF TOKENS.npy LOGITS.npy

`encode` holds all matrices in one type, where `quantise` mixes types as people have them.
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
    "F32": "LLAMA_FTYPE_ALL_F32",
    "Q2_K": "LLAMA_FTYPE_MOSTLY_Q2_K",
    "Q3_K_M": "LLAMA_FTYPE_MOSTLY_Q3_K_M",
    "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "Q4_1": "LLAMA_FTYPE_MOSTLY_Q4_1",
    "IQ4_NL": "LLAMA_FTYPE_MOSTLY_IQ4_NL",
    "Q4_K_M": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
    "Q5_K_M": "LLAMA_FTYPE_MOSTLY_Q5_K_M",
    "Q6_K": "LLAMA_FTYPE_MOSTLY_Q6_K",
    "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
}

TYPES = {
    **{name: f"MOSTLY_{name}" for name in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")},
    **{name: f"MOSTLY_{name}" for name in ("Q2_K", "Q6_K", "IQ3_S", "IQ4_NL", "IQ4_XS")},
    **{name: f"MOSTLY_{name}_M" for name in ("Q3_K", "Q4_K", "Q5_K")},
    "MXFP4": "MOSTLY_MXFP4_MOE",
}
"""The format that is asked for where a type is to be in all matrices."""


def quantise(source: Path, target: Path, name: str, *, pure: bool = False) -> None:
    """The file in another format, or pure: in a type; as llama.cpp's own tool makes it."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{TYPES[name]}" if pure else FORMATS[name])
    options.nthread = 2
    options.allow_requantize = True  # to floats
    if pure:
        kind = getattr(llama_cpp, f"GGML_TYPE_{name}", None)
        options.pure = True
        if kind is not None:
            options.output_tensor_type = options.token_embedding_type = kind
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
    if sys.argv[1] in ("quantise", "encode"):
        pure = sys.argv[1] == "encode"
        quantise(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], pure=pure)
    else:
        print(json.dumps(read(*map(Path, sys.argv[2:]))))
