"""The Triton faces that treat each row by itself: norm, embedding, gated product, sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.kernels.activation import reference as activation_reference
from edge.kernels.cases import Case
from edge.kernels.embedding import reference as embedding_reference
from edge.kernels.gated_mlp import reference as gated_reference
from edge.kernels.layer_norm import reference as layer_norm_reference
from edge.kernels.logits import reference as logits_reference
from edge.kernels.rms_norm import reference as norm_reference
from edge.kernels.token_inputs import reference as token_reference
from tests.support.operator_face import normal
from tests.support.triton_face import (
    FLOAT_DTYPES,
    array,
    assert_close,
    assert_computed,
    assert_only_inside_written,
    output,
    rounded,
    tensor,
)

FEW = settings(max_examples=12)
EPSILON = 1e-5
seeds = st.integers(0, 2**32 - 2)
sizes = st.integers(1, 70)
dtypes = st.sampled_from(FLOAT_DTYPES)


@FEW
@given(
    seed=seeds, rows=st.integers(1, 5), columns=st.integers(1, 300), dtype=dtypes,
    gain=st.sampled_from([0.0, 1e-4, 1.0, 300.0]),
)  # fmt: skip
def test_rms_norm(seed: int, rows: int, columns: int, dtype: str, gain: float) -> None:
    from edge.kernels.rms_norm.triton import rms_norm

    x = rounded(gain * normal(seed, rows, columns), dtype)
    weights = (normal(seed + 1, columns),)
    assert_computed(
        rms_norm, Case.of(norm_reference.rms_norm, x, weights=weights, epsilon=EPSILON), dtype
    )


@FEW
@given(seed=seeds, rows=st.integers(1, 5), columns=st.integers(1, 300), dtype=dtypes)
def test_add_rms_norm(seed: int, rows: int, columns: int, dtype: str) -> None:
    """The sum is rounded before it is normed, so that both results are of the same sum."""
    from edge.kernels.rms_norm.triton import add_rms_norm

    x, addend = (rounded(normal(seed + i, 1, rows, columns), dtype) for i in range(2))
    weight = rounded(normal(seed + 2, columns), dtype)
    out, total = (output(1, rows, columns, dtype=dtype) for _ in range(2))
    inputs = tensor(x, dtype), tensor(addend, dtype), tensor(weight, dtype)
    add_rms_norm(*inputs, epsilon=EPSILON, out=out, total=total)
    _, sums = norm_reference.add_rms_norm(x, addend, weight, epsilon=EPSILON)
    expected = norm_reference.rms_norm(rounded(sums, dtype), weight, epsilon=EPSILON)
    np.testing.assert_array_equal(array(total), rounded(sums, dtype))
    assert_close(out, expected, dtype)
    for written in (out, total):
        assert_only_inside_written(written)

    in_place = inputs[0].clone()
    again, same = add_rms_norm(in_place, *inputs[1:], epsilon=EPSILON, total=in_place)
    assert same is in_place
    np.testing.assert_array_equal(array(in_place), array(total))
    np.testing.assert_array_equal(array(again), array(out))


@FEW
@given(
    seed=seeds, rows=st.integers(1, 3), columns=st.integers(1, 300), dtype=dtypes,
    mean=st.sampled_from([0.0, 30.0]),
)  # fmt: skip
def test_layer_norm(seed: int, rows: int, columns: int, dtype: str, mean: float) -> None:
    """Also of rows whose mean is far from what is left without it; of one number nothing is."""
    from edge.kernels.layer_norm.triton import layer_norm

    x = rounded(mean + normal(seed, rows, columns), dtype)
    weights = normal(seed + 1, columns), normal(seed + 2, columns)
    case = Case.of(layer_norm_reference.layer_norm, x, weights=weights, epsilon=EPSILON)
    assert_computed(layer_norm, case, dtype, tolerance=1e-4 if dtype == "float32" else None)


@FEW
@given(seed=seeds, rows=st.integers(1, 3), columns=st.integers(2, 300), dtype=dtypes)
def test_add_layer_norm(seed: int, rows: int, columns: int, dtype: str) -> None:
    """The sum is rounded before it is normed, and may lie where it was."""
    from edge.kernels.layer_norm.triton import add_layer_norm

    x, addend = (rounded(normal(seed + i, rows, columns), dtype) for i in range(2))
    weight, bias = normal(seed + 2, columns), normal(seed + 3, columns)
    out, total = (output(rows, columns, dtype=dtype) for _ in range(2))
    total.copy_(tensor(x, dtype))
    add_layer_norm(
        total, tensor(addend, dtype), tensor(weight), tensor(bias),
        epsilon=EPSILON, out=out, total=total,
    )  # fmt: skip
    sums = rounded(x + addend, dtype)
    np.testing.assert_array_equal(array(total), sums)
    expected = layer_norm_reference.layer_norm(sums, weight, bias, epsilon=EPSILON)
    assert_close(out, expected, dtype, tolerance=1e-4 if dtype == "float32" else None)
    for written in (out, total):
        assert_only_inside_written(written)


@FEW
@given(
    seed=seeds, first=st.integers(0, 60), count=st.integers(1, 40), hidden=sizes, dtype=dtypes,
    id_dtype=st.sampled_from(["int32", "int64"]),
)  # fmt: skip
def test_embedding_of_a_slice(
    seed: int, first: int, count: int, hidden: int, dtype: str, id_dtype: str
) -> None:
    """Ids outside the slice give zeros; negative ones too."""
    from edge.kernels.embedding.triton import embedding

    table = rounded(normal(seed, count, hidden), dtype)
    ids = np.random.default_rng(seed).integers(-5, 110, (2, 4))
    out = output(2, 4, hidden)
    embedding(tensor(ids, id_dtype), tensor(table, dtype), first_id=first, out=out)
    expected = embedding_reference.embedding(ids, table, first_id=first)
    np.testing.assert_array_equal(array(out), expected)
    assert_only_inside_written(out)


def test_embedding_has_the_type_of_its_table() -> None:
    from edge.kernels.embedding.triton import embedding

    table = tensor(normal(1, 5, 3), "bfloat16")
    rows = embedding(tensor(np.asarray([4, 0])), table)
    np.testing.assert_array_equal(array(rows), array(table)[[4, 0]])
    assert rows.dtype == table.dtype


@FEW
@given(
    seed=seeds, rows=st.integers(1, 5), columns=sizes, dtype=dtypes,
    activation=st.sampled_from(activation_reference.ACTIVATIONS),
    gain=st.sampled_from([0.0, 1.0, 100]),
)  # fmt: skip
def test_gated(
    seed: int, rows: int, columns: int, dtype: str, activation: Any, gain: float
) -> None:
    """Also where e^−x overflows float32."""
    from edge.kernels.gated_mlp.triton import gated

    gate_up = rounded(gain * normal(seed, rows, 2 * columns), dtype)
    assert_computed(gated, Case.of(gated_reference.gated, gate_up, activation=activation), dtype)


@FEW
@given(
    seed=seeds, rows=st.integers(1, 5), columns=st.integers(1, 700), dtype=dtypes,
    activation=st.sampled_from(activation_reference.ACTIVATIONS),
    gain=st.sampled_from([0.0, 1.0, 100]),
)  # fmt: skip
def test_activated(
    seed: int, rows: int, columns: int, dtype: str, activation: Any, gain: float
) -> None:
    """In place, too, and where a program's numbers end within a row."""
    from edge.kernels.activation.triton import activated

    x = rounded(gain * normal(seed, rows, columns), dtype)
    out = output(rows, columns, dtype=dtype)
    assert activated(out.copy_(tensor(x, dtype)), activation=activation, out=out) is out
    assert_close(out, activation_reference.activated(x, activation=activation), dtype)
    assert_only_inside_written(out)


@FEW
@given(seed=seeds, rows=st.integers(1, 4), size=sizes, dtype=dtypes)
def test_token_inputs(seed: int, rows: int, size: int, dtype: str) -> None:
    """Rows of one layer lie between those of others."""
    from edge.kernels.token_inputs.triton import token_inputs

    made, norm = rounded(normal(seed, rows, size), dtype), normal(seed + 1, size)
    of_all = normal(seed + 2, rows, 3, size)
    out = output(rows, size, dtype=dtype)
    token_inputs(
        tensor(made, dtype), tensor(of_all)[:, 1], tensor(norm),
        hidden_size=24, epsilon=EPSILON, out=out,
    )  # fmt: skip
    expected = token_reference.token_inputs(
        made, of_all[:, 1], norm, hidden_size=24, epsilon=EPSILON
    )
    assert_close(out, expected, dtype)
    assert_only_inside_written(out)


@FEW
@given(
    seed=seeds, rows=st.integers(1, 5), columns=sizes, dtype=dtypes,
    scale=st.sampled_from([1.0, 0.125, 7.0]), soft_cap=st.sampled_from([None, 0.5, 30.0]),
)  # fmt: skip
def test_finish_logits(
    seed: int, rows: int, columns: int, dtype: str, scale: float, soft_cap: float | None
) -> None:
    from edge.kernels.logits.triton import finish_logits

    logits = rounded(20 * normal(seed, rows, columns), dtype)
    x = tensor(logits, dtype)
    assert finish_logits(x, scale=scale, soft_cap=soft_cap) is x
    expected = logits_reference.finish_logits(logits, scale=scale, soft_cap=soft_cap)
    assert_close(x, expected, dtype)


@pytest.mark.parametrize("activation", activation_reference.ACTIVATIONS)
def test_gated_reference_is_that_of_torch(activation: Any) -> None:
    import torch
    from torch.nn import functional

    gate_up = torch.from_numpy(3 * normal(7, 5, 2 * 33))
    gate, up = gate_up.double().chunk(2, dim=-1)
    active: dict[str, Callable[[Any], Any]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }
    found = gated_reference.gated(gate_up.numpy(), activation=activation)
    np.testing.assert_allclose(found, (active[activation](gate) * up).numpy(), rtol=1e-6, atol=1e-6)


@FEW
@given(seed=seeds, rows=st.integers(1, 3), vocabulary=st.integers(1, 300), dtype=dtypes)
def test_greedy_takes_the_first_of_equal_scores(
    seed: int, rows: int, vocabulary: int, dtype: str
) -> None:
    from edge.kernels.sampling.triton import top_k

    logits = rounded(np.rint(2 * normal(seed, rows, vocabulary)), dtype)
    _scores, ids = top_k(tensor(logits, dtype), 1)
    np.testing.assert_array_equal(array(ids)[:, 0], logits.argmax(axis=-1))


@settings(FEW, max_examples=8)
@given(
    seed=seeds, rows=st.integers(1, 2), vocabulary=st.integers(1, 70), share=st.floats(0, 1),
    dtype=dtypes,
)  # fmt: skip
def test_top_k_ranks_by_score_then_by_id(
    seed: int, rows: int, vocabulary: int, share: float, dtype: str
) -> None:
    """Scores of both signs, many of them equal, in one chunk or put together from several."""
    from edge.kernels.sampling import triton as face

    k = 1 + round(share * (min(vocabulary, 4) - 1))
    logits = rounded((np.rint(4 * normal(seed, rows, vocabulary)) / 4).astype(np.float32), dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(face, "CHUNK", 32)
        scores, ids = face.top_k(tensor(logits, dtype), k)
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(array(ids), expected)
    np.testing.assert_array_equal(array(scores), np.take_along_axis(logits, expected, axis=-1))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_token(broken: float) -> None:
    from edge.kernels.sampling.triton import top_k

    logits = normal(3, 3, 16)
    logits[1, 10] = broken
    _scores, ids = top_k(tensor(logits), 1)
    assert array(ids)[:, 0].tolist() == [logits[0].argmax(), -1, logits[2].argmax()]
    scores, ranked = top_k(tensor(logits[1:]), 2)
    assert array(ranked)[0].tolist() == [-1, -1]
    assert np.isnan(array(scores)[0]).all()
    assert np.isfinite(array(scores)[1]).all()


def test_rows_of_logits_may_be_part_of_a_wider_matrix() -> None:
    from edge.kernels.sampling.triton import top_k

    logits = normal(4, 3, 50)
    wide = tensor(np.concatenate([logits, np.full((3, 6), 99, np.float32)], axis=1))
    _scores, ids = top_k(wide[:, :50], 1)
    assert array(ids)[:, 0].tolist() == logits.argmax(axis=-1).tolist()


def test_nothing_is_launched_for_nothing() -> None:
    import torch

    from edge.kernels.embedding.triton import embedding
    from edge.kernels.gated_mlp.triton import gated
    from edge.kernels.rms_norm.triton import rms_norm
    from edge.kernels.sampling.triton import top_k

    none = torch.zeros(0, 8)
    assert rms_norm(none, torch.ones(8), epsilon=EPSILON).shape == (0, 8)
    assert gated(none).shape == (0, 4)
    assert top_k(none, 1)[1].shape == (0, 1)
    assert embedding(torch.zeros(0, dtype=torch.int64), torch.zeros(3, 8)).shape == (0, 8)


def test_what_does_not_fit_is_refused() -> None:
    import torch

    from edge.kernels.embedding.triton import embedding
    from edge.kernels.gated_mlp.triton import gated
    from edge.kernels.rms_norm.triton import add_rms_norm, rms_norm
    from edge.kernels.sampling.triton import top_k

    x, weight = torch.zeros(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match="x is float64; pass float32 or float16 or bfloat16"):
        rms_norm(x.double(), weight, epsilon=EPSILON)
    with pytest.raises(ValueError, match=r"weight has the shape \[8\], not \[7\]"):
        rms_norm(x[:, :7].contiguous(), weight, epsilon=EPSILON)
    with pytest.raises(ValueError, match=r"x is not contiguous; pass x.contiguous\(\)"):
        rms_norm(x[:, ::2], weight[:4], epsilon=EPSILON)
    with pytest.raises(ValueError, match="rows of 1 to 65536 elements"):
        rms_norm(torch.zeros(1, 65537), torch.zeros(65537), epsilon=EPSILON)
    with pytest.raises(ValueError, match=r"out has the shape \[2, 7\], not \[2, 8\]"):
        rms_norm(x, weight, epsilon=EPSILON, out=torch.zeros(2, 7))
    with pytest.raises(ValueError, match="out and total are the same tensor"):
        add_rms_norm(x, x, weight, epsilon=EPSILON, out=x, total=x)
    with pytest.raises(ValueError, match="total is float16; pass float32"):
        add_rms_norm(x, x, weight, epsilon=EPSILON, total=x.half())
    with pytest.raises(ValueError, match="weight is on meta, the other tensors on cpu"):
        rms_norm(x, weight.to("meta"), epsilon=EPSILON)
    with pytest.raises(ValueError, match="token_ids is float32; pass int32 or int64"):
        embedding(x, x)
    with pytest.raises(ValueError, match="two halves"):
        gated(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="'relu' is not one of silu, gelu, gelu_tanh"):
        gated(x, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="k is 9, not 1 to 8"):
        top_k(x, 9)
