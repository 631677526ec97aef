"""Triton's interpreter, in less than half of its time: the same numbers, with fewer searches.

It is patched in the processes of the tests and in the GPU peers that are forked there
(`tests/support/forked.py`). Its values, and the order in which it computes them, stay.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
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
            if language is tl.core.tensor:
                _spare_operators(tl.core, interpreter)
                _spare_casts(tl.core, interpreter)
            if language is tl or language is tl.core:
                setattr(language, "load", _quick_load(tl.core, interpreter, language.load))  # noqa: B010

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

    # What numpy computes is of the size that its type has.
    interpreter.TensorHandle.__post_init__ = lambda _self: None
    interpreter.InterpretedFunction.run = functools.partialmethod(_launched, interpreter)
    tl.str_to_ty = functools.cache(tl.str_to_ty)
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


_INTEGERS = ("int32", "int64")
_NUMBERS = ("fp32", *_INTEGERS)


def _quotient(one: Any, other: Any) -> Any:
    return (one - np.fmod(one, other)) // other


_OPERATORS: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...], bool]] = {
    "add": (np.add, _NUMBERS, False),
    "sub": (np.subtract, _NUMBERS, False),
    "mul": (np.multiply, _NUMBERS, False),
    "truediv": (np.divide, ("fp32",), False),
    "floordiv": (_quotient, _INTEGERS, False),
    "mod": (np.fmod, _INTEGERS, False),
    "and": (np.bitwise_and, ("int1", *_INTEGERS), False),
    "or": (np.bitwise_or, ("int1", *_INTEGERS), False),
    "lt": (np.less, _NUMBERS, True),
    "le": (np.less_equal, _NUMBERS, True),
    "gt": (np.greater, _NUMBERS, True),
    "ge": (np.greater_equal, _NUMBERS, True),
    "eq": (np.equal, _NUMBERS, True),
    "ne": (np.not_equal, _NUMBERS, True),
}
"""What numpy does for each, on numbers of which types, and whether it answers with yes or no."""


def _launched(
    self: Any, interpreter: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any
) -> None:
    """What a kernel takes is asked of it once; and its tensors are in main memory already."""
    if warmup:
        return
    known = vars(self).get("known")
    if known is None:
        executor = interpreter.GridExecutor(self.rewrite(), self.arg_names, None)
        interpreter._patch_lang(executor.fn)  # and never puts it back
        known = self.known = executor.fn, frozenset(executor.constexprs)
    function, constants = known
    assert len(arguments) <= len(self.arg_names), f"{self.fn.__name__} takes {self.arg_names}"
    given = dict(zip(self.arg_names, arguments, strict=False))
    given |= {name: value for name, value in named.items() if name in self.arg_names}
    assert given.keys() == set(self.arg_names), f"{self.fn.__name__} takes {self.arg_names}"
    values = {
        name: given[name] if name in constants else interpreter._implicit_cvt(given[name])
        for name in self.arg_names
    }
    places = grid(values) if callable(grid) else grid
    places = (*places, *(1,) * (3 - len(places)))
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(*places)
    for place in itertools.product(*map(range, places)):
        builder.set_grid_idx(*place)
        try:
            function(**values)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error


def _spare_casts(core: Any, interpreter: Any) -> None:
    """What has the type already stays; and whole numbers become longer."""
    tensor, make_handle, usual = core.tensor, interpreter.TensorHandle, core.tensor.to

    def to(self: Any, dtype: Any, *others: Any, **named: Any) -> Any:
        if not others and not named and type(dtype) is core.dtype:
            own = self.dtype.name
            if own == dtype.name:
                return self
            if (own, dtype.name) == _INTEGERS:
                kind = self.type
                result = kind.with_element_ty(dtype) if kind.is_block() else dtype
                return tensor(make_handle(self.handle.data.astype(np.int64), dtype), result)
        return usual(self, dtype, *others, **named)

    core.tensor.to = to


def _quick_load(core: Any, interpreter: Any, usual: Callable[..., Any]) -> Callable[..., Any]:
    """Blocks of usual numbers are read at once; where they are in a cache is nobody's concern."""
    tensor, make_handle = core.tensor, interpreter.TensorHandle
    types = {"fp32": np.float32, "int32": np.int32, "int64": np.int64, "int8": np.int8}
    types |= {"uint8": np.uint8, "fp16": np.float16}

    def load(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
        element = pointer.dtype.element_ty
        if (
            type(mask) is not tensor
            or type(other) not in (float, int)
            or not pointer.type.is_block()
            or not mask.type.is_block()
            or mask.type.sizes != pointer.type.sizes
            or element.name not in types
        ):
            return usual(pointer, mask, other, **named)
        places = pointer.handle.data
        lacking = np.full(places.shape, other, types[element.name])
        found = interpreter._interpreter.load(places, mask.handle.data, lacking, lacking.dtype)
        return tensor(make_handle(found, element), pointer.type.with_element_ty(element))

    return load


def _spare_operators(core: Any, interpreter: Any) -> None:
    """Operators on usual numbers ask numpy at once, which makes shapes and integers alike as the
    language does; all others, and whatever is to be refused, are left to the interpreter."""
    for name, (compute, names, compares) in _OPERATORS.items():
        kinds = {each: getattr(core, {"fp32": "float32"}.get(each, each)) for each in names}
        for is_turned in (False, True) if hasattr(core.tensor, f"__r{name}__") else (False,):
            method = f"__{'r' * is_turned}{name}__"
            usual = getattr(core.tensor, method)
            if name == "add":
                usual = _added_to_pointers(core, interpreter, usual)
            quick = _operator(core, interpreter, usual, compute, kinds, compares, is_turned)
            setattr(core.tensor, method, quick)


def _operator(
    core: Any,
    interpreter: Any,
    usual: Callable[..., Any],
    compute: Callable[[Any, Any], Any],
    kinds: dict[str, Any],
    compares: bool,
    is_turned: bool,
) -> Callable[..., Any]:
    tensor, constant, make_handle = core.tensor, core.constexpr, interpreter.TensorHandle
    decided: dict[Any, Any] = {}

    def decide(one: Any, other: Any) -> Any:
        """The types of the numbers that are computed with and of the result, if they are usual."""
        if isinstance(other, type):
            if one.scalar.name not in (_NUMBERS if other is int else ("fp32",)):
                return None
            other = one
        names = {one.scalar.name, other.scalar.name}
        if not names <= kinds.keys() or (len(names) > 1 and not names <= set(_INTEGERS)):
            return None
        kind = kinds["int64" if len(names) > 1 else names.pop()]
        sizes = [each.sizes if each.is_block() else () for each in (one, other)]
        element = core.int1 if compares else kind
        shape = [*np.broadcast_shapes(*sizes)]
        return kind, core.block_type(element, shape) if shape else element

    def called(self: Any, other: Any, **named: Any) -> Any:
        if type(other) is constant:
            other = other.value
        of = type(other)
        if of is tensor:
            key = self.type.name, other.type.name
            numbers = other.handle.data
        elif (of is int and -0x80000000 <= other < 0x80000000) or (
            of is float and -1e38 < other < 1e38
        ):
            key, numbers = (self.type.name, of), None
        else:
            return usual(self, other, **named)
        if key not in decided:
            decided[key] = decide(self.type, other.type if of is tensor else of)
        if decided[key] is None:
            return usual(self, other, **named)
        kind, result = decided[key]
        own = self.handle.data
        if numbers is None:
            numbers = np.array([other], own.dtype)
        found = compute(numbers, own) if is_turned else compute(own, numbers)
        if kind is core.int1:  # masks keep the type of what was compared
            kind = (other if is_turned else self).handle.dtype.scalar
        return tensor(make_handle(found, kind), result)

    return called


def _added_to_pointers(
    core: Any, interpreter: Any, usual: Callable[..., Any]
) -> Callable[..., Any]:
    tensor, make_handle = core.tensor, interpreter.TensorHandle

    def called(self: Any, other: Any, **named: Any) -> Any:
        pointer = self.dtype
        if type(other) is not tensor or not pointer.is_ptr() or other.dtype.name not in _INTEGERS:
            return usual(self, other, **named)
        own, kind = self.type, other.type
        if not kind.is_block():
            result = own
        elif not own.is_block():
            result = kind.with_element_ty(pointer)
        elif own.sizes == kind.sizes:
            result = own
        else:
            return usual(self, other, **named)
        nbytes = max(1, pointer.element_ty.primitive_bitwidth // 8)
        places = self.handle.data + nbytes * other.handle.data.astype(np.uint64)
        return tensor(make_handle(places, pointer), result)

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
