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

    patched: set[int] = set()
    checks_semantic = tl.core.builtin(len).__code__

    def patch_builtin(language: Any, *_others: Any) -> None:
        """For good: nothing here runs the language but its interpreter."""
        if id(language) not in patched:
            patched.add(id(language))
            for name in names(language):
                member = getattr(language, name)
                if getattr(member, "__code__", None) is checks_semantic:
                    member = member.__wrapped__
                setattr(language, name, _interpreted(member, interpreter.interpreter_semantic))

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
    _spare_comparisons(tl.core.dtype)
    _spare_conversions(type(interpreter.interpreter_semantic))


def _interpreted(member: Any, semantic: Any) -> Any:
    def called(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return member(*arguments, **named)

    return called


def _spare_comparisons(dtype: Any) -> None:
    """Types of numbers are compared, and asked what they are, more often than numbers are added."""
    integers = frozenset(dtype.SINT_TYPES + dtype.UINT_TYPES)
    compare = dtype.__eq__

    def is_equal(self: Any, other: Any) -> Any:
        return self.name == other.name if isinstance(other, dtype) else compare(self, other)

    dtype.__eq__ = is_equal
    dtype.is_int = lambda self: self.name in integers


def _spare_conversions(semantic: Any) -> None:
    """What two types become together is decided once; what is of one shape already stays."""
    together, broadcast = semantic.computation_type_impl, semantic.broadcast_impl_value
    decided: dict[Any, Any] = {}

    def computation_type(self: Any, one: Any, *others: Any) -> Any:
        is_scalar, other, *rest = others
        key = (one.name, is_scalar, other.name, *rest)
        if key not in decided:
            decided[key] = together(self, one, *others)
        return decided[key]

    def broadcast_value(self: Any, one: Any, other: Any) -> Any:
        shape = one.type.is_block() and one.type.sizes
        if shape and other.type.is_block() and shape == other.type.sizes:
            return one, other
        return broadcast(self, one, other)

    semantic.computation_type_impl = computation_type
    semantic.broadcast_impl_value = broadcast_value


def _spare_types(core: Any) -> None:
    """Make each type of a block, and what a tensor says of it, once: a sixth of what is left."""
    made: dict[Any, dict[str, Any]] = {}
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (each if type(each) is int else core._unwrap_if_constexpr(each) for each in shape)
        space = getattr(element_ty, "address_space", "")
        key = (element_ty.name, space, *sizes)
        if key not in made:
            make_type(self, element_ty, shape)
            made[key] = {**vars(self), "sizes": key[2:], "of_tensors": [], "others": {}}
        vars(self).update(made[key])

    def with_element_type(self: Any, scalar: Any) -> Any:
        key = scalar.name, getattr(scalar, "address_space", "")
        if key not in self.others:
            self.others[key] = core.block_type(scalar, [*self.sizes])
        return self.others[key]

    of_scalars: list[Any] = []

    def tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.of_tensors if type.is_block() else of_scalars
        if not known:
            make_tensor(self, handle, type)
            known[:] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    core.block_type.__init__ = block_type
    core.block_type.with_element_ty = with_element_type
    core.tensor.__init__ = tensor
