"""What Triton's interpreter needs to run these kernels without a GPU, for tests.

Knows nothing of operators.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np


@functools.cache
def interpret_bfloat16() -> None:
    """Make Triton's interpreter compute as a GPU does, in this process.

    Triton 3.6 to 3.9 interpret products, sums and tl.dot of bfloat16 as those of the integers with
    their bits, cut off what float32 has beyond bfloat16 instead of rounding it, and lose numbers
    below the normal ones.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    interpreted_dot, interpreted_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        wide = [
            self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        ]
        return interpreted_dot(self, *wide, *others)

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            bits = source.data.astype(ml_dtypes.bfloat16).view(np.uint16)
            return TensorHandle(bits, tl.bfloat16)
        if source.dtype.scalar == tl.bfloat16 and kind.scalar == tl.float32:
            return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return interpreted_cast(self, source, kind)

    def as_float32(compute: Any) -> Any:
        def computed(self: Any, a: Any, b: Any) -> Any:
            if a.dtype.scalar != tl.bfloat16:
                return compute(self, a, b)
            wide = [self.cast_impl(x, tl.float32) for x in (a, b)]
            return self.cast_impl(compute(self, *wide), tl.bfloat16)

        return computed

    for name in ("create_fadd", "create_fsub", "create_fmul"):
        setattr(InterpreterBuilder, name, as_float32(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
