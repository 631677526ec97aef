"""The parts of DeepSeek's multi-head latent attention (MLA).

Keys and values of all heads are made of one row for each token: a latent vector, and elements that
turn with the position. Only these rows are kept. A head's query is multiplied with the matrix of
its keys, so that it can be compared with rows, and its matrix of values with the mix of rows that
comes of it (DeepSeek-AI, DeepSeek-V2, 2024: the absorbed form). Every shard has the matrices that
make rows; those of heads are split by heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge.kernels.attention.tiles import LARGEST_HEAD
from edge.models.parts import MatrixSlice, Rows, VectorSlice, check_flags, check_sizes, finite

MOST_ROW = 2 * LARGEST_HEAD
"""Elements of a token's row, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The sizes of latent attention. Queries may have a latent vector of their own; both vectors
    are normed."""

    query_rank: int | None
    """Elements of the queries' latent vector; None: they are made of the hidden state."""
    rank: int
    """Elements of the latent vector of keys and values."""
    shared_size: int
    """The rotary elements of each key, which all heads share."""
    value_size: int
    """Elements of a head's values, at most those of its keys."""
    bias: bool
    """The matrices that make the latent vectors have biases."""
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_sizes(latent_rank=self.rank, shared_size=self.shared_size, value_size=self.value_size)
        check_flags(latent_bias=self.bias)
        if self.query_rank is not None:
            check_sizes(query_rank=self.query_rank)
        if self.rows > MOST_ROW:
            raise ValueError(
                f"latent attention with rows of {self.rows} elements is not computed here; "
                f"{MOST_ROW} at most"
            )
        if not 0 <= finite(self.norm_epsilon) < 1:
            raise ValueError("the epsilon of a latent vector's norm must lie in 0..1")

    @property
    def rows(self) -> int:
        """Elements of a token's row, and rows of the matrix that makes it."""
        return self.rank + self.shared_size

    @property
    def half_row(self) -> int:
        """Elements of half a row: one lies in the place of a key, the other in that of a value."""
        return -(-self.rows // 2)

    def shapes(
        self, hidden_size: int, num_heads: int, head_size: int
    ) -> dict[str, tuple[int, ...]]:
        queries, own = num_heads * head_size, head_size - self.shared_size
        shapes: dict[str, tuple[int, ...]] = {"query.weight": (queries, hidden_size)}
        if self.query_rank is not None:
            shapes = {
                "query_down.weight": (self.query_rank, hidden_size),
                "query_latent_norm": (self.query_rank,),
                "query_up.weight": (queries, self.query_rank),
            }
            if self.bias:
                shapes["query_down.bias"] = (self.query_rank,)
        shapes |= {
            "kv_down.weight": (self.rows, hidden_size),
            "kv_latent_norm": (self.rank,),
            "key_value.weight": (num_heads * (own + self.value_size), self.rank),
            "output.weight": (hidden_size, num_heads * self.value_size),
        }
        if self.bias:
            shapes["kv_down.bias"] = (self.rows,)
        return shapes

    def matrices(
        self, layer: str, hidden_size: int, heads: range, head_size: int
    ) -> Iterator[MatrixSlice]:
        """The slices of all matrices but the output's."""
        down: Rows = ((f"{layer}kv_down.weight", range(self.rows)),)
        query, inputs = f"{layer}query.weight", range(hidden_size)
        if self.query_rank is not None:
            down = ((f"{layer}query_down.weight", range(self.query_rank)), *down)
            query, inputs = f"{layer}query_up.weight", range(self.query_rank)
        yield MatrixSlice(name=f"{layer}latent", parts=down, columns=range(hidden_size))
        parts = tuple((query, rows) for rows in self._queries(heads, head_size))
        yield MatrixSlice(name=f"{layer}query", parts=parts, columns=inputs)
        role, own = f"{layer}key_value.weight", head_size - self.shared_size
        starts = [head * (own + self.value_size) for head in heads]
        for number, start in enumerate(starts):
            yield MatrixSlice(
                name=of_head(layer, "keys", number),
                parts=((role, range(self.rank)),),
                columns=range(start, start + own),
                is_transposed=True,
                is_observed=False,
            )
        for number, start in enumerate(starts):
            yield MatrixSlice(
                name=of_head(layer, "values", number),
                parts=((role, range(start + own, start + own + self.value_size)),),
                columns=range(self.rank),
                is_observed=not number,
            )

    def vectors(self, layer: str, heads: range) -> Iterator[VectorSlice]:
        down: Rows = ((f"{layer}kv_down.bias", range(self.rows)),)
        norms = {"kv_latent_norm": self.rank}
        if self.query_rank is not None:
            norms["query_latent_norm"] = self.query_rank
            down = ((f"{layer}query_down.bias", range(self.query_rank)), *down)
        for name, size in norms.items():
            yield VectorSlice(name=f"{layer}{name}", parts=((f"{layer}{name}", range(size)),))
        if self.bias:
            yield VectorSlice(name=f"{layer}latent.bias", parts=down)

    def _queries(self, heads: range, head_size: int) -> Iterator[range]:
        """The ranges of each head's elements: the rotary ones, which are the last, then the
        others."""
        for head in heads:
            start, stop = head * head_size, (head + 1) * head_size
            yield range(stop - self.shared_size, stop)
            if head_size > self.shared_size:
                yield range(start, stop - self.shared_size)


def of_head(layer: str, what: str, number: int) -> str:
    """Name of the matrix of "keys" or "values" of one of a shard's heads."""
    return f"{layer}{what}_of_head.{number}"


def is_of_further_head(name: str) -> bool:
    """Whether a matrix is that of another head than the shard's first."""
    _layer, is_there, number = name.partition("_of_head.")
    return bool(is_there) and number != "0"
