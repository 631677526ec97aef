"""Which models are run in how little memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from edge.demos.shapes import SHAPES
from edge.weights.formats import Dtype

CONTEXT_TOKENS = 64

STORED_BITS = {"int4-pure": 4.5, "float32": 32.0}
"""Bits of a weight: in Q4_0, in int4-pure with blocks of 128 as it is packed, and as it is."""

Kind = Literal["alone", "two peers", "sliding window", "lending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model in one limit: what a peer takes without a model, and a share of the weights."""

    name: str
    shape: str
    share: Fraction
    new_tokens: int
    """Tokens of each reply; as many as take a few seconds."""
    kind: Kind = "alone"
    dtype: Dtype = "int4-pure"
    context_tokens: int = CONTEXT_TOKENS
    """That the peer keeps memory for; a reply has fewer."""
    budget_bytes: int | None = None
    """In place of the share."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights on disk: what budgets are shares of, for every program the same."""
        return int(SHAPES[self.shape].num_parameters * STORED_BITS[self.dtype] / 8)

    @property
    def others_tokens(self) -> int:
        """What other programs are asked for: some take seconds for each."""
        return max(4, self.new_tokens // 4)

    @property
    def words(self) -> str:
        what = {
            "alone": "in turn with other programs in the same limit",
            "two peers": "two peers of this size against one, a disk of its own for each",
            "sliding window": "what fits stays, against a window that all layers go through",
            "lending": "memory that steps leave unused holds layers, against the same left idle",
        }
        size = f"{self.share} of the weights"
        if self.budget_bytes is not None:
            size = f"{self.budget_bytes >> 20} MiB, context of {self.context_tokens} tokens"
        return f"{self.shape} {self.dtype}, {size}: {what[self.kind]}"


_QUICK = Case(name="quick", shape="small", share=Fraction(1, 2), new_tokens=8)

CASES = (
    *(
        Case(
            name=f"{shape}-{share.numerator}-{share.denominator}",
            shape=shape,
            share=share,
            new_tokens=new_tokens,
        )
        for shape, new_tokens in (("W", 16), ("T", 8))
        for share in (Fraction(3, 4), Fraction(1, 2), Fraction(1, 4))
    ),
    Case(
        name="W-lent",
        shape="W",
        share=Fraction(1),
        new_tokens=24,
        kind="lending",
        context_tokens=2048,
        budget_bytes=500 << 20,
    ),
    Case(name="E-1-4", shape="E", share=Fraction(1, 4), new_tokens=48),
    # Of the model, both together have room for a quarter.
    Case(name="E-pair", shape="E", share=Fraction(1, 8), new_tokens=32, kind="two peers"),
    Case(name="W-pair", shape="W", share=Fraction(1, 4), new_tokens=12, kind="two peers"),
    Case(
        name="W-float32",
        shape="W",
        share=Fraction(1, 2),
        new_tokens=8,
        kind="sliding window",
        dtype="float32",
    ),
    _QUICK,
    replace(_QUICK, name="quick-pair", kind="two peers"),
    replace(_QUICK, name="quick-float32", kind="sliding window", dtype="float32"),
    replace(_QUICK, name="quick-lent", kind="lending", context_tokens=512),
)

QUICK = ("quick", "quick-pair", "quick-float32", "quick-lent")
"""Shows that everything runs; its figures say nothing."""
