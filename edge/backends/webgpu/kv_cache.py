"""Keys, values and states of requests on the adapter: arrays of its own for each request.

A graph reads the arrays of the requests of its step, in any order, so nothing moves when requests
come and go. Keys and values grow with their request, in pieces. A kernel may not write the array
that it reads, so each state has two arrays that change places after a step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.kv_pool import WithoutWindows
from edge.backends.onnx.runtime import ort
from edge.backends.webgpu.device import Device
from edge.errors import RequestError
from edge.kernels.kv_cache.cache_size import cache_row
from edge.kernels.onnx_graph import WEBGPU, OnnxGraph
from edge.offload import KVLayer, KVShape
from edge.protocol.step import Step, StepLimits
from edge.weights.layout import ShardLayout

_PIECE_TOKENS = 256
"""Keys and values have room for a multiple of this, so that they rarely grow."""

_GROWTH = 1.25
"""Least growth of keys and values, so that a long answer copies them a few times only."""

Rows = NDArray[Any]


@dataclass(slots=True)
class _Pair:
    """One layer's keys and values, each [1, num_kv_heads, room, elements]; None: not on the
    adapter."""

    keys: ort.OrtValue | None = None
    values: ort.OrtValue | None = None


@dataclass(slots=True)
class _Held:
    """The arrays of one request."""

    layers: list[_Pair]
    length: int = 0
    """Number of tokens."""
    states: list[ort.OrtValue] | None = None
    """States so far, each [1, …]."""
    next_states: list[ort.OrtValue] = field(default_factory=list)
    """Arrays for the states after the next graph."""
    arriving: dict[int, tuple[Rows, Rows]] = field(default_factory=dict)
    """Keys and values of layers that were read and are not on the adapter yet."""

    def arrays(self) -> list[ort.OrtValue | None]:
        pairs = [each for pair in self.layers for each in (pair.keys, pair.values)]
        return [*pairs, *(self.states or ()), *self.next_states]


class DeviceCache(WithoutWindows):
    """The caches of all requests. See `edge.backends.kv_pool.Pool`."""

    def __init__(self, layout: ShardLayout, limits: StepLimits, device: Device) -> None:
        self._limits = limits
        self._device = device
        caches = layout.caches
        self._heads = [
            (each.num_kv_heads, cache_row(each.cached_size, None)[1]) for each in caches.values()
        ]
        self._is_read_whole = device.long_steps.attends_by_nodes or any(
            each.soft_cap is not None or each.latent is not None for each in caches.values()
        )
        self.shape = KVShape(
            layers=tuple(
                KVLayer(num_kv_heads=count, row_bytes=elements * 4)
                for count, elements in self._heads
            ),
            context_tokens=limits.context_tokens,
        )
        """The shape of one request's keys and values in a tier."""
        numbers = {layer: number for number, layer in enumerate(caches)}
        self.numbers = {layer: numbers[layout.cache_layer(layer)] for layer in layout.attentions}
        """The index of the cache that each layer uses."""
        self._state_names = [
            f"{name}_{layer}" for layer, part in layout.states.items() for name in part.state_names
        ]
        self._state_shapes = [
            shape for part in layout.states.values() for shape in part.state_shapes
        ]
        self._slots: dict[str, int] = {}
        self._held: dict[int, _Held] = {}
        self._places: dict[int, list[ort.OrtValue]] = {}
        """Saved states by place."""
        self._moves = _Moves(device)
        self.let_go: Callable[[Collection[int]], None] = lambda _arrays: None
        """Called with the `id` of arrays that are freed: bindings that hold them end."""

    @property
    def num_requests(self) -> int:
        return len(self._slots)

    @property
    def can_cut(self) -> bool:
        return not self._state_shapes

    @property
    def num_tokens(self) -> int:
        return sum(each.length for each in self._held.values())

    def __contains__(self, request: str) -> bool:
        return request in self._slots

    def open(self, request: str) -> int:
        if request not in self._slots:
            free = set(range(self._limits.caches)).difference(self._held)
            if not free:
                raise KeyError(f"all {self._limits.caches} places are taken")
            held = _Held([_Pair() for _ in self._heads])
            self._give_states(
                held, [np.zeros((1, *each), np.float32) for each in self._state_shapes]
            )
            slot = min(free)
            self._slots[request], self._held[slot] = slot, held
        return self._slots[request]

    def length(self, slot: int) -> int:
        return self._held[slot].length

    def wrote(self, slot: int, length: int) -> None:
        self._held[slot].length = length

    def shrink(self, slot: int, length: int) -> None:
        held = self._held[slot]
        if length < held.length:
            held.length = length
            room = self._room(length)
            for index, pair in enumerate(held.layers):
                if pair.keys is None or int(pair.keys.shape()[2]) > room:
                    self._resize(held, index, room)

    def rename(self, request: str, to: str) -> None:
        self._slots[to] = self._slots.pop(request)

    def release(self, request: str) -> None:
        slot = self._slots.pop(request, None)
        if slot is not None:
            with self._device.used():
                self._let_go(self._held.pop(slot).arrays())

    def place(self, step: Step) -> list[int]:
        """Make room for the step's tokens. Returns the slots of its requests."""
        slots = [self.open(entry.request) for entry in step.entries]
        if not self._limits.exceeds_memory:  # else `bring` does it, layer by layer
            for slot, entry in zip(slots, step.entries, strict=True):
                for index in range(len(self._heads)):
                    self._reach(self._held[slot], index, entry.end)
        return slots

    def bring(self, slot: int, index: int, tokens: int) -> None:
        """Put a layer that was read from the tier on the adapter, with room for `tokens`."""
        held = self._held[slot]
        arriving = held.arriving.pop(index, None)
        if arriving is not None:
            self._put(held, index, 0, *arriving)
        self._reach(held, index, tokens)

    def bound(self, slots: Sequence[int]) -> dict[str, ort.OrtValue]:
        """Arrays for inputs and outputs of the graphs of a step of these slots, by name."""
        arrays: dict[str, ort.OrtValue] = {}
        for entry, slot in enumerate(slots):
            held = self._held[slot]
            for layer, number in self.numbers.items():
                pair = held.layers[number]
                if pair.keys is None or pair.values is None:
                    continue
                # Present and past are the same array, so attention appends in place.
                for kind, array in (("key", pair.keys), ("value", pair.values)):
                    arrays[f"past_{kind}_{layer}.{entry}"] = array
                    arrays[f"present_{kind}_{layer}.{entry}"] = array
            if held.states is not None:
                for name, past, present in zip(
                    self._state_names, held.states, held.next_states, strict=True
                ):
                    arrays[f"past_{name}.{entry}"] = past
                    arrays[f"present_{name}.{entry}"] = present
        return arrays

    def turn_states(self, slots: Sequence[int], written: Sequence[int]) -> None:
        """Go on from the states that a graph wrote. written: their numbers (`states_written`)."""
        for held in map(self._held.__getitem__, slots):
            if held.states is not None:
                for number in written:
                    before, after = held.states[number], held.next_states[number]
                    held.states[number], held.next_states[number] = after, before

    def states_written(self, outputs: Sequence[str]) -> list[int]:
        """The numbers of the states that a graph with these outputs writes."""
        return [
            number
            for number, name in enumerate(self._state_names)
            if f"present_{name}.0" in outputs
        ]

    def rows(self, index: int, slot: int, first: int, last: int) -> tuple[Rows, Rows]:
        self.bring(slot, index, last)
        pair = self._held[slot].layers[index]
        assert pair.keys is not None
        assert pair.values is not None
        return self._moves.part(pair.keys, first, last), self._moves.part(pair.values, first, last)

    def put(self, index: int, slot: int, first: int, keys: Rows, values: Rows) -> None:
        """Set keys and values [num_kv_heads, tokens, elements] from token `first` on."""
        self._put(self._held[slot], index, first, keys, values)

    @contextlib.contextmanager
    def filling(self, index: int, slot: int, tokens: int) -> Iterator[tuple[Rows, Rows]]:
        """Arrays for a layer's first tokens. They are copied to the adapter by `bring`, because
        another thread may fill them during a step."""
        heads, elements = self._heads[index]
        keys, values = (np.empty((heads, tokens, elements), np.float32) for _ in range(2))
        yield keys, values
        self._held[slot].arriving[index] = keys, values

    def arrive(self) -> None:
        """Put all layers that were read on the adapter."""
        for held in self._held.values():
            for index in list(held.arriving):
                self._put(held, index, 0, *held.arriving.pop(index))

    def drop_layer(self, index: int, slot: int) -> None:
        held = self._held[slot]
        with self._device.used():
            pair, held.layers[index] = held.layers[index], _Pair()
            self._let_go((pair.keys, pair.values))
            del pair

    def new_rows(self, tokens: int) -> list[Rows]:
        """Arrays for keys and values of `tokens` tokens in every layer, as `put` takes them."""
        return [
            np.empty((heads, tokens, elements), np.float32)
            for heads, elements in self._heads
            for _ in range(2)
        ]

    def states(self, first: int, count: int) -> list[NDArray[np.float32]]:
        if not self._state_shapes:
            return []
        found = [self._states_of(slot) for slot in range(first, first + count)]
        return [
            np.concatenate([self._device.read(each[number]) for each in found])
            for number in range(len(self._state_shapes))
        ]

    def put_states(self, slot: int, states: Sequence[NDArray[np.float32]]) -> None:
        self._give_states(self._held[slot], states)

    def save_states(self, slot: int, place: int) -> None:
        saved = self._places.get(place)
        if saved is None:
            saved = self._places[place] = self._empty_states()
        for source, target in zip(self._states_of(slot), saved, strict=True):
            self._device.copy(source, target)

    def saved_states(self, place: int) -> list[NDArray[Any]]:
        return [self._device.read(each) for each in self._places.get(place, ())]

    def new_states(self) -> list[NDArray[Any]]:
        return [np.empty((1, *shape), np.float32) for shape in self._state_shapes]

    def load_states(self, slot: int, place: int) -> None:
        held = self._held[slot]
        if held.states is None:
            self._check_states()
            held.states, held.next_states = self._empty_states(), self._empty_states()
        for source, target in zip(self._places[place], held.states, strict=True):
            self._device.copy(source, target)

    def drop_states(self, slot: int) -> None:
        held = self._held[slot]
        with self._device.used():
            self._let_go((*(held.states or ()), *held.next_states))
            held.states, held.next_states = None, []

    def clear(self) -> None:
        """Forget every request and every place."""
        for request in list(self._slots):
            self.release(request)
        with self._device.used():
            self._places.clear()

    def _let_go(self, arrays: Sequence[ort.OrtValue | None]) -> None:
        """End the bindings of arrays that are freed next, with the device's lock held."""
        self.let_go({id(each) for each in arrays if each is not None})

    def _states_of(self, slot: int) -> list[ort.OrtValue]:
        states = self._held[slot].states
        assert states is not None
        return states

    def _give_states(self, held: _Held, states: Sequence[NDArray[np.float32]]) -> None:
        if not self._state_shapes:
            return
        if held.states is None:
            self._check_states()
            held.next_states = self._empty_states()
            held.states = [self._device.put(each) for each in states]
            return
        for array, state in zip(held.states, states, strict=True):
            self._device.write(array, state)

    def _check_states(self) -> None:
        """Raises KeyError unless one more request may have states."""
        if sum(each.states is not None for each in self._held.values()) >= self._limits.requests:
            raise KeyError(f"all {self._limits.requests} places for states are taken")

    def _empty_states(self) -> list[ort.OrtValue]:
        return [self._device.empty((1, *shape), np.float32) for shape in self._state_shapes]

    def _room(self, tokens: int) -> int:
        pieces = math.ceil(tokens / _PIECE_TOKENS) * _PIECE_TOKENS
        return min(pieces, self._limits.context_tokens)

    def _reach(self, held: _Held, index: int, tokens: int) -> None:
        """Make room for `tokens` tokens of a layer."""
        pair = held.layers[index]
        old = 0 if pair.keys is None else int(pair.keys.shape()[2])
        if old < tokens:
            self._resize(held, index, self._room(max(tokens, int(old * _GROWTH))))

    def _resize(self, held: _Held, index: int, room: int) -> None:
        """Give a layer room for so many tokens; it keeps those that fit."""
        with self._device.used():
            old = held.layers[index]
            keys = self._moves.resized(old.keys, self._new(index, room), held.length)
            values = self._moves.resized(old.values, self._new(index, room), held.length)
            held.layers[index] = _Pair(keys, values)
            self._let_go((old.keys, old.values))
            del old

    def _new(self, index: int, room: int) -> ort.OrtValue:
        heads, elements = self._heads[index]
        if self._is_read_whole:  # nodes multiply all of an array by zeros, and 0 · NaN is NaN
            return self._device.put(np.zeros((1, heads, room, elements), np.float32))
        return self._device.empty((1, heads, room, elements), np.float32)

    def _put(self, held: _Held, index: int, first: int, keys: Rows, values: Rows) -> None:
        last = first + keys.shape[1]
        self._reach(held, index, last)
        pair = held.layers[index]
        assert pair.keys is not None
        assert pair.values is not None
        for array, rows in ((pair.keys, keys), (pair.values, values)):
            whole = self._device.read(array)
            whole[0, :, first:last] = rows
            self._device.write(array, whole)


class _Moves:
    """Graphs that copy parts of keys and values [1, heads, room, elements]."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._part: ort.InferenceSession | None = None
        self._joined: ort.InferenceSession | None = None

    def part(self, array: ort.OrtValue, first: int, last: int) -> Rows:
        """Tokens [first, last) of an array, on the host [heads, tokens, elements]."""
        with self._device.used():
            if self._part is None:
                self._part = self._device.session(_part_model())
            binding = self._part.io_binding()
            binding.bind_ortvalue_input("array", array)
            binding.bind_cpu_input("first", np.asarray([first], np.int64))
            binding.bind_cpu_input("last", np.asarray([last], np.int64))
            _one, heads, _room, elements = array.shape()
            rows = np.empty((1, heads, last - first, elements), np.float32)
            binding.bind_output("part", "cpu", 0, np.float32, rows.shape, rows.ctypes.data)
            if rows.size:
                self._part.run_with_iobinding(binding)
            part: Rows = rows[0]
            return part

    def resized(self, old: ort.OrtValue | None, new: ort.OrtValue, tokens: int) -> ort.OrtValue:
        """`new` with the first `tokens` tokens of `old`."""
        if old is None or not tokens:
            return new
        with self._device.used():
            if self._joined is None:
                self._joined = self._device.session(_joined_model())
            room, kept = int(new.shape()[2]), min(tokens, int(new.shape()[2]))
            binding = self._joined.io_binding()
            binding.bind_ortvalue_input("array", old)
            binding.bind_cpu_input("kept", np.asarray([kept], np.int64))
            binding.bind_cpu_input("pads", np.asarray([0] * 6 + [room - kept, 0], np.int64))
            binding.bind_ortvalue_output("joined", new)
            self._joined.run_with_iobinding(binding)
        return new


def _part_model() -> bytes:
    graph = OnnxGraph("part", WEBGPU)
    array = graph.input("array", np.float32, [1, "heads", "room", "elements"])
    first, last = (graph.input(name, np.int64, [1]) for name in ("first", "last"))
    axis = graph.constant("axis", np.asarray([2], np.int64))
    part = graph.node("Slice", array, first, last, axis)
    graph.output(part, "part", np.float32, [1, "heads", "tokens", "elements"])
    return graph.build()


def _joined_model() -> bytes:
    graph = OnnxGraph("joined", WEBGPU)
    array = graph.input("array", np.float32, [1, "heads", "old", "elements"])
    kept, pads = graph.input("kept", np.int64, [1]), graph.input("pads", np.int64, [8])
    zero = graph.constant("zero", np.asarray([0], np.int64))
    axis = graph.constant("axis", np.asarray([2], np.int64))
    part = graph.node("Slice", array, zero, kept, axis)
    graph.output(
        graph.node("Pad", part, pads), "joined", np.float32, [1, "heads", "new", "elements"]
    )
    return graph.build()


def check_kv_dtype(kv_dtype: str) -> None:
    """Raises RequestError for keys and values that are not float32."""
    if kv_dtype != "float32":
        raise RequestError(
            f"a WebGPU peer keeps keys and values in float32, and {kv_dtype} was asked for",
            remedy="load the model with kv_dtype float32, or start the peer with --backend ort",
        )
