"""Triton's interpreter, in less than half of its time: the same numbers, with fewer searches.

It is patched in the processes of the tests and in the GPU peers that are forked there
(`tests/support/forked.py`). Its values, and the order in which it computes them, stay.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np


def install() -> None:
    """Look up once which names of the language it replaces, and which type of numpy's is which.

    It goes through all names for every call of a device function, although a launch has replaced
    them already: half of what interpreting takes. A fifth of the rest are sums of integers, taken
    once more as 64 bits, whose overflow it then tells nobody of (its `device_assert` is off).
    Sorting takes exclusive ors along an axis, which it computes one number at a time: numpy does.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def replaced(language: Any) -> list[str]:
        return [name for name, each in inspect.getmembers(language) if tl.core.is_builtin(each)]

    names = functools.cache(replaced)

    def patch_builtin(language: Any, *others: Any) -> None:
        for name in names(language):
            member = getattr(language, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(language, name, member, *others)

    known_modules: set[str] = set()

    def call_within_a_launch(self: Any, *arguments: Any, **named: Any) -> Any:
        """What a function of Triton's own library sees is never put back: once is enough."""
        module = self.fn.__module__
        if module not in known_modules:
            interpreter._patch_lang(self.fn)
            known_modules.add(module)
        return self.rewrite()(*arguments, **named)

    numpy_types: dict[str, np.dtype[Any]] = {}
    numpy_type_of = interpreter._get_np_dtype

    def numpy_type(kind: Any) -> np.dtype[Any]:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type_of(kind)
        return numpy_types[name]

    reduced = interpreter.ReduceOps.apply_impl

    def reduce(self: Any, values: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return reduced(self, values)
        (only,) = values
        found = np.bitwise_xor.reduce(only.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, only.dtype)

    interpreter.ReduceOps.apply_impl = reduce
    interpreter._patch_builtin = patch_builtin
    interpreter.InterpretedFunction.__call__ = call_within_a_launch
    interpreter._get_np_dtype = numpy_type
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _spare_types(tl.core)


def _spare_types(core: Any) -> None:
    """Make each type of a block, and what a tensor says of it, once: a sixth of what is left."""
    made: dict[Any, dict[str, Any]] = {}
    make_type = core.block_type.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        space = getattr(element_ty, "address_space", "")
        key = (element_ty.name, space, *map(core._unwrap_if_constexpr, shape))
        if key not in made:
            make_type(self, element_ty, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    shapes: dict[Any, tuple[Any, Any]] = {}
    make_tensor = core.tensor.__init__

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.shape if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
