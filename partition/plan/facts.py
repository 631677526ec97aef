"""The facts that a plan is made from: devices, links, the model's sizes and the workload.

Knows numbers only, not how they were measured or what a weight is. Every wrong fact is a ValueError
at construction, so the rest of the package trusts facts.
"""

import math
import operator
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import SupportsIndex

from edge.partition.plan.rates import ComputeRates

LONGEST_NAME = 1024
"""Characters in the name or id of a device or a model."""

MOST_TOKENS = 1_000_000_000
"""The largest prompt, answer and number of concurrent requests. No model has as many, and rates
computed from them stay finite."""

_UNSAFE_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Control characters, lone surrogates, line separators: they break terminals, logs and UTF-8."""


def is_name(text: str) -> bool:
    """Whether `text` is safe as a name or id: 1 to LONGEST_NAME characters, all on one line."""
    return 0 < len(text) <= LONGEST_NAME and not any(
        unicodedata.category(character) in _UNSAFE_CATEGORIES for character in text
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A place with memory that computes."""

    id: str
    """Unique in the cluster; does not change while the cluster exists."""
    name: str
    """The display name; need not be unique."""
    memory_bytes: int
    """Memory that this program may use, not the memory of the device."""
    threads: int
    """Compute threads. Until rates are measured, they are the only sign of speed."""
    host: str = ""
    """The machine that the device is on. Devices of one host share its memory. Empty: shares with
    none."""
    rates: ComputeRates | None = None
    """Rates that the device measured; None: not yet measured."""
    host_memory_bytes: int | None = None
    """Bytes of host memory for layers that do not fit on the device; None: its memory is the
    host's."""
    unused_buffer_bytes: int = 0
    """Part of the buffers for steps that decoding does not use, so that streamed layers can."""
    streams: bool = True
    """Whether it computes layers that lie on its disk; otherwise only those in its memory."""
    reads_windows: bool = True
    """Whether layers with a sliding window read its tokens alone; otherwise all that are kept."""
    slowed: float = 1.0
    """How many times as long it takes as when it was measured, because something else keeps it
    busy. `rates` are those of now, with this factor."""

    def __post_init__(self) -> None:
        _require_name("a device's id", self.id)
        _require_name(f"the name of device {self.id!r}", self.name)
        if self.host:
            _require_name(f"the host of device {self.id!r}", self.host)
        _require_at_least(
            0,
            f"device {self.id!r}",
            memory_bytes=self.memory_bytes,
            unused_buffer_bytes=self.unused_buffer_bytes,
        )
        _require_at_least(1, f"device {self.id!r}", threads=self.threads)
        if self.host_memory_bytes is not None:
            _require_at_least(0, f"device {self.id!r}", host_memory_bytes=self.host_memory_bytes)
        if not (math.isfinite(self.slowed) and self.slowed > 0):
            raise ValueError(f"slowed of device {self.id!r} must be above 0, not {self.slowed}.")

    def slowed_by(self, factor: float) -> "DeviceSpec":
        """The device while it takes `factor` times as long as when it was measured. A device
        without rates stays as it is."""
        if self.rates is None:
            return self
        return replace(self, rates=self.rates.slowed_by(factor / self.slowed), slowed=factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A live data path from one device to another, as measured."""

    source: str
    target: str
    latency_s: float
    """Seconds for an empty message, one way."""
    bytes_per_s: float

    def __post_init__(self) -> None:
        where = f"the link {self.source!r} -> {self.target!r}"
        if self.source == self.target:
            raise ValueError(f"{where} must join two different devices.")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s of {where} must be 0 or more, not {self.latency_s}.")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s of {where} must be more than 0, not {self.bytes_per_s}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdSpec:
    """How devices of one host slow each other down in one stage, measured with all of them at once.

    They share its memory, its cores and its scheduler. Times are by rows of a step.
    """

    host: str
    count: int
    """Devices of the host in the stage."""
    rows: tuple[int, ...]
    sum_s: tuple[float, ...]
    """Seconds that a sum takes longer than predicted from its parts, with the computing since the
    sum before it."""
    slower: tuple[float, ...]
    """Time of a whole step, over the time predicted from its parts."""
    pace: tuple[float, ...]
    """Time of a step on one device alone, over the time that its rates predict. The other fields
    are measured against rates corrected by this factor."""
    link: tuple[float, float]
    """(latency in s, bytes per s) of the host's links that the predictions above assumed."""

    def __post_init__(self) -> None:
        times = (self.sum_s, self.slower, self.pace)
        if not all(len(each) == len(self.rows) > 0 for each in times) or self.count < 2:
            raise ValueError("A CrowdSpec needs 2 or more devices, and one time for each of rows.")
        if not all(math.isfinite(each) for each in sum(times, ())) or min(self.slower) < 0:
            raise ValueError(f"The times of a CrowdSpec must be finite, not {times!r:.80}.")
        if min(self.pace) <= 0:
            raise ValueError(f"pace of a CrowdSpec must be more than 0, not {self.pace!r:.80}.")
        latency_s, bytes_per_s = self.link
        if not (math.isfinite(latency_s) and latency_s >= 0 and bytes_per_s > 0):
            raise ValueError(
                "link of a CrowdSpec must be a latency of 0 s or more and a rate above 0, not"
                f" {self.link!r:.80}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The devices that may be used, in the order stages are laid out in, and links between them."""

    devices: tuple[DeviceSpec, ...]
    links: tuple[LinkSpec, ...] = ()
    crowds: tuple[CrowdSpec, ...] = ()

    def __post_init__(self) -> None:
        known: set[str] = set()
        for device in self.devices:
            if device.id in known:
                raise ValueError(f"Device {device.id!r} is in the cluster twice; ids are unique.")
            known.add(device.id)
        for link in self.links:
            for end in (link.source, link.target):
                if end not in known:
                    raise ValueError(
                        f"The link {link.source!r} -> {link.target!r} names {end!r},"
                        " which is not a device of the cluster."
                    )

    def device(self, id: str) -> DeviceSpec:
        """The device with this id. ValueError when there is none."""
        for device in self.devices:
            if device.id == id:
                return device
        raise ValueError(f"There is no device {id!r} in the cluster.")

    def without(self, *ids: str) -> "ClusterSpec":
        """The cluster without these devices, and without their links.

        An id that is not in the cluster is no error: a device may be reported lost twice.
        """
        return ClusterSpec(
            devices=tuple(device for device in self.devices if device.id not in ids),
            links=tuple(
                link for link in self.links if link.source not in ids and link.target not in ids
            ),
            crowds=self.crowds,
        )

    def slowed_by(self, factors: Mapping[str, float]) -> "ClusterSpec":
        """The cluster while the devices of these ids take so many times as long as when they were
        measured, and the others take as long."""
        slowed = (each.slowed_by(factors.get(each.id, 1.0)) for each in self.devices)
        return replace(self, devices=tuple(slowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """The sizes of one kind of layer, and the bytes of its parts.

    The mixer (attention) is divided by query heads, the feed-forward block by columns.
    """

    num_heads: int
    """Query heads; a multiple of `num_kv_heads`."""
    num_kv_heads: int
    ffn_columns: int
    """Width of the feed-forward block."""
    query_head_bytes: int
    """Query rows and output columns of one query head."""
    kv_head_bytes: int
    """Key and value rows of one KV head."""
    ffn_column_bytes: int
    """Gate and up row and down column of one feed-forward column."""
    layer_bytes: int
    """Norms and biases, which every shard of the layer holds."""
    kv_bytes_per_token: int
    """KV cache: keys and values of one token, for one KV head."""
    state_bytes: int = 0
    """State of one request in a layer of linear attention, for one KV head; it replaces the KV
    cache."""
    window_bytes: int = 0
    """Keys and values of one request in a layer that keeps the newest tokens only, for one KV head;
    in place of those of every token."""
    window_tokens: int | None = None
    """Most tokens that such a layer keeps; None: all."""
    seen_tokens: int | None = None
    """Most tokens that a row sees, the sliding window; None: all."""
    heads_per_unit: int = 1
    """Heads of the model that one query head here stands for. More than 1 where only all of them
    together can be given to a device; 0 where heads attend no earlier tokens."""
    num_experts: int = 0
    """Experts of its feed-forward block; 0 where it has none."""
    top_k: int = 0
    """Experts that each token goes through."""
    expert_column_bytes: int = 0
    """The part of `ffn_column_bytes` that belongs to each expert."""
    is_grouped: bool = False
    """The router chooses groups of experts first."""
    keys_of: int | None = None
    """The layer whose keys and values layers of this kind attend to. A shard keeps these once, also
    where that layer is in another shard. None: each layer has its own."""

    def __post_init__(self) -> None:
        _require_at_least(
            1,
            "a layer",
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            ffn_columns=self.ffn_columns,
        )
        _require_at_least(
            0,
            "a layer",
            query_head_bytes=self.query_head_bytes,
            kv_head_bytes=self.kv_head_bytes,
            ffn_column_bytes=self.ffn_column_bytes,
            layer_bytes=self.layer_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token,
            state_bytes=self.state_bytes,
            window_bytes=self.window_bytes,
            window_tokens=self.window_tokens or 0,
            seen_tokens=self.seen_tokens or 0,
            heads_per_unit=self.heads_per_unit,
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_column_bytes=self.expert_column_bytes,
            keys_of=self.keys_of or 0,
        )
        if bool(self.num_experts) != bool(self.top_k) or self.top_k > self.num_experts:
            raise ValueError(
                f"a token cannot go through {self.top_k} of {self.num_experts} experts."
            )
        if self.num_experts * self.expert_column_bytes > self.ffn_column_bytes:
            raise ValueError("the experts of a layer weigh more than its feed-forward block.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"A layer has {self.num_heads} query heads, which {self.num_kv_heads}"
                " KV heads cannot share evenly."
            )

    @property
    def attention_bytes(self) -> int:
        """Weights of all heads."""
        return self.num_heads * self.query_head_bytes + self.num_kv_heads * self.kv_head_bytes

    @property
    def feed_forward_bytes(self) -> int:
        return self.ffn_columns * self.ffn_column_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one whole expert."""
        return self.ffn_columns * self.expert_column_bytes

    @property
    def shared_column_bytes(self) -> int:
        """Bytes of a feed-forward column without its experts."""
        return self.ffn_column_bytes - self.num_experts * self.expert_column_bytes

    @property
    def weight_bytes(self) -> int:
        return self.attention_bytes + self.feed_forward_bytes + self.layer_bytes

    def read_tokens(self, context_tokens: float, *, reads_windows: bool) -> float:
        """Cached tokens that a row reads behind so many; see `DeviceSpec.reads_windows`."""
        most = self.seen_tokens if reads_windows else self.window_tokens
        return context_tokens if most is None else min(context_tokens, most)

    @property
    def token_bytes(self) -> int:
        """KV cache of one token, for all heads."""
        return self.num_kv_heads * self.kv_bytes_per_token

    def kept_bytes(self, workload: "Workload") -> int:
        """Keys and values, or states or windows, of all requests, for one KV head."""
        tokens_bytes = workload.cached_tokens * self.kv_bytes_per_token
        states_bytes = workload.states * self.state_bytes
        return tokens_bytes + states_bytes + workload.windows * self.window_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The sizes of a decoder model, and the bytes of its parts.

    Bytes are those in memory, after quantisation and packing.
    """

    name: str
    hidden_size: int
    vocab_size: int
    kinds: tuple[LayerFacts, ...]
    """The kinds of layers. A plan cuts each kind in its own way."""
    layers: tuple[int, ...]
    """The kind of each layer, as an index into `kinds`."""
    tied_embeddings: bool
    """Embedding and head share values. Both count, because they are stored in different types."""
    column_multiple: int
    """Feed-forward columns may only be cut at multiples of this (quantisation blocks)."""
    embedding_row_bytes: int
    head_row_bytes: int
    kept: tuple[int, ...] = ()
    """For each layer: if a stage begins with it, how many inputs of earlier layers are sent to the
    stage with the hidden state. Empty: none for any layer."""
    wire_number_bytes: float = 4.0
    """Bytes of each number of a hidden state on a link; 4 for float32."""
    expert_uses: tuple[tuple[float, ...], ...] = ()
    """For each layer, and each of its experts, the part of all tokens that go through it, counted
    over a text. Empty: not counted, and each expert is as likely as any other."""

    def __post_init__(self) -> None:
        _require_name("a model's name", self.name)
        _require_at_least(
            1,
            f"model {self.name!r}",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            column_multiple=self.column_multiple,
        )
        _require_at_least(
            0,
            f"model {self.name!r}",
            embedding_row_bytes=self.embedding_row_bytes,
            head_row_bytes=self.head_row_bytes,
        )
        if set(self.layers) != set(range(len(self.kinds))):
            raise ValueError(f"layers of model {self.name!r} must name each kind, and no other.")
        if self.expert_uses:
            self._check_uses()
        if not 0 < self.wire_number_bytes <= 8:
            raise ValueError(
                f"wire_number_bytes of model {self.name!r} must be above 0 and at most 8, not"
                f" {self.wire_number_bytes}."
            )

    def _check_uses(self) -> None:
        if len(self.expert_uses) != self.num_layers:
            raise ValueError(f"expert_uses of model {self.name!r} needs an entry for each layer.")
        for layer, uses in enumerate(self.expert_uses):
            facts = self.kinds[self.layers[layer]]
            # Comparisons with NaN are false.
            is_right = len(uses) == facts.num_experts and all(0 <= each <= 1 for each in uses)
            if not (is_right and abs(sum(uses) - facts.top_k) <= 1e-3 * max(1, facts.top_k)):
                raise ValueError(
                    f"expert_uses of layer {layer} of model {self.name!r} must be"
                    f" {facts.num_experts} numbers from 0 to 1, one for each expert, that add up"
                    f" to {facts.top_k}."
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def shapes(self) -> tuple[LayerFacts, ...]:
        """The distinct kinds: kinds with equal facts are one shape."""
        return tuple(dict.fromkeys(self.kinds))

    def count(self, layers: range) -> tuple[tuple[LayerFacts, int], ...]:
        """For every kind of the model: its facts, and how many of these layers are of it."""
        run = self.layers[layers.start : layers.stop]
        return tuple((facts, run.count(number)) for number, facts in enumerate(self.kinds))

    def experts_of(self, layers: range) -> int:
        """Experts of these layers, all together."""
        return sum(count * facts.num_experts for facts, count in self.count(layers))

    @property
    def wire_row_bytes(self) -> float:
        """One token's hidden state on a link."""
        return self.hidden_size * self.wire_number_bytes

    def hop_row_bytes(self, layer: int) -> float:
        """Bytes of one token on the link to a stage that begins with `layer`: its hidden state, and
        the inputs of earlier layers that are sent with it (`kept`)."""
        beside = self.kept[layer] if self.kept else 0
        return self.wire_row_bytes * (1 + beside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests that the devices must have room for."""

    prompt_tokens: int = 512
    output_tokens: int = 128
    concurrency: int = 1
    """Requests in flight at once, each with a context of its own."""
    reserved_tokens: int | None = None
    """Tokens that the KV cache has room for; None: the full context of every request."""
    states: int = 1
    """Requests whose states there is room for, where layers have states."""
    windows: int = 1
    """The same of layers that keep the newest tokens only."""
    expert_hits: float | None = None
    """Hit rate of the expert cache, where experts are on disk; None: estimated as if all experts
    were used as often as each other."""

    def __post_init__(self) -> None:
        hits: object = self.expert_hits
        if hits is not None and not (isinstance(hits, Real) and 0 <= float(hits) <= 1):
            raise ValueError(f"the workload's expert_hits are {_in_short(hits)}, not 0 to 1")
        counts: dict[str, tuple[int, int]] = {
            "prompt_tokens": (1, MOST_TOKENS),
            "output_tokens": (0, MOST_TOKENS),
            "concurrency": (1, MOST_TOKENS),
            "states": (1, MOST_TOKENS),
            "windows": (1, MOST_TOKENS),
            "reserved_tokens": (1, MOST_TOKENS**2),
        }
        for name, (least, most) in counts.items():
            value = getattr(self, name)
            if name != "reserved_tokens" or value is not None:
                object.__setattr__(self, name, _count(name, value, least=least, most=most))

    @property
    def context_tokens(self) -> int:
        """The longest context of one request: its prompt and its answer."""
        return self.prompt_tokens + self.output_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values are kept at once, over all requests."""
        if self.reserved_tokens is not None:
            return self.reserved_tokens
        return self.context_tokens * self.concurrency


def _require_name(what: str, text: str) -> None:
    if not is_name(text):
        raise ValueError(
            f"{what} must be 1 to {LONGEST_NAME} characters without line breaks or control"
            f" characters, not {text[:40]!r}."
        )


def _count(name: str, value: object, *, least: int, most: int) -> int:
    """A number of tokens or requests, as any integer type. ValueError for other types and outside
    the limits."""
    count = None
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        count = operator.index(value)
    if count is None or not least <= count <= most:
        raise ValueError(
            f"{name} must be a whole number from {least} to {most}, not {_in_short(value)}"
        )
    return count


def _in_short(value: object) -> str:
    if isinstance(value, int | float | str | None):
        # Python refuses to convert very long integers to text.
        is_enormous = isinstance(value, int) and value.bit_length() > 128
        return "an enormous number" if is_enormous else f"{value!r:.80}"
    return f"one of the type {type(value).__name__}"


def _require_at_least(least: int, owner: str, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} of {owner} must be {least} or more, not {value}.")
