"""How a shard with experts divides memory between experts and its other weights. Pure.

A step uses all non-expert weights of a layer, and few of its experts. So non-expert weights get
memory first. The memory that is left caches experts: those that most tokens went through so far
(`offload`'s unit cache).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WINDOW_LAYERS = 2
"""Streamed layers held at once: one is computed while the other is read. Memory for a third layer
is better used for one more resident layer, whatever the rates of disk and processor: if tokens wait
for the disk, this saves reading that layer; if they do not, nothing waits. This is exact to within
one layer's computing time, because resident layers are spread among the streamed ones
(`tests/property/test_window.py`). It assumes a steady computing time. On two cores that eight other
processes used, too, a window of three gave 1.2 to 2.7 times the tokens."""

_LEAST_EXPERTS = 16
"""The window has room for at least this many experts of a layer: enough for the run that waits for
them while the experts of the next run are read. A layer whose tokens go through more than 8 experts
gets room for twice that number."""

PLACE_BYTES = 80 << 10
"""Memory that a cached expert takes beyond its weights, for the graph that computes it. Measured:
71 KiB with ONNX Runtime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of a shard's part of one layer, without norms and biases, which always stay in
    memory."""

    others: int
    """Non-expert weights."""
    experts: int = 0
    num_experts: int = 0
    top_k: int = 0
    of_experts: int = 0
    """Experts of the layer on all devices, of which each token goes through `top_k`; 0: no more
    than here."""

    @property
    def total(self) -> int:
        return self.others + self.experts

    @property
    def placed_experts(self) -> int:
        """Bytes of the layer's experts when each is cached on its own."""
        return self.experts + self.num_experts * PLACE_BYTES

    @property
    def placed_expert(self) -> int:
        """Bytes of one cached expert."""
        return -(-self.placed_experts // self.num_experts) if self.num_experts else 0

    @property
    def least_experts(self) -> int:
        """Least bytes that the window reserves for experts."""
        count = min(self.num_experts, max(_LEAST_EXPERTS, 2 * self.top_k))
        return -(-self.placed_experts * count // self.num_experts) if count else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiers:
    """How memory is divided between layers and experts."""

    streamed: int
    """Layers whose non-expert weights are read from disk for each step."""
    cache_bytes: int
    """Memory for cached experts of all layers, with their graphs."""


def expert_bytes(layers: Sequence[LayerBytes]) -> int:
    """Bytes of the largest cached expert; 0 where there are no experts."""
    return max((layer.placed_expert for layer in layers), default=0)


def held_bytes(
    layers: Sequence[LayerBytes], streamed: int, *, spare_bytes: int = 0, is_whole: bool = False
) -> int:
    """Bytes of weights that a shard with `streamed` of its layers on disk keeps in memory: the
    resident layers and the window. The caller does not know which layers these are, so each counts
    as the largest.

    The window holds few experts, and as many more as fit into `spare_bytes`. `is_whole`: layers are
    copied whole, so the window holds all experts of its layers.
    """
    sizes = sorted((layer.total for layer in layers), reverse=True)
    if not streamed or not layers:
        return sum(sizes)
    most, window = sum(sizes), WINDOW_LAYERS * sizes[0]
    if not is_whole:
        most = sum(layer.others + layer.placed_experts for layer in layers)
        window = WINDOW_LAYERS * max(layer.others for layer in layers) + _least(layers)
        window += spare_bytes if expert_bytes(layers) else 0
    return min(most, window + sum(sizes[: len(sizes) - streamed]))


def expert_tiers(
    layers: Sequence[LayerBytes], streamed: int, *, spare_bytes: int = 0
) -> ExpertTiers:
    """The best use of the memory that `held_bytes` gives, with `streamed` layers on disk."""
    if not any(layer.experts for layer in layers):
        return ExpertTiers(streamed=streamed, cache_bytes=0)
    held = held_bytes(layers, streamed, spare_bytes=spare_bytes)
    others = sum(layer.others for layer in layers)
    least = _least(layers)
    if others + least <= held:
        return ExpertTiers(streamed=0, cache_bytes=held - others)
    # The non-expert weights do not all fit, so some layers are streamed.
    largest = max(layer.others for layer in layers)
    stay = max(0, (held - least) // largest - WINDOW_LAYERS)
    return ExpertTiers(
        streamed=len(layers) - stay, cache_bytes=held - (stay + WINDOW_LAYERS) * largest
    )


def read_bytes(
    layers: Sequence[LayerBytes],
    streamed: int,
    rows: int,
    *,
    spare_bytes: int = 0,
    hits: float | None = None,
    chances: Sequence[float] = (),
) -> tuple[float, float]:
    """Average bytes that a step of `rows` rows reads: (non-expert weights, experts).

    hits: hit rate of the expert cache. chances: for every expert of these layers, the part of all
    tokens that goes through it. It is used where `hits` is None; then the likeliest experts are
    cached. Without both, every expert is as likely as any other for each row, so cached experts are
    used as often as those on disk. Real models use some experts more, and those stay cached.
    """
    if not streamed:
        return 0.0, 0.0
    tiers = expert_tiers(layers, streamed, spare_bytes=spare_bytes)
    part = tiers.streamed / len(layers) if tiers.streamed > WINDOW_LAYERS else 0.0
    others = sum(layer.others for layer in layers) * part
    experts = sum(layer.placed_experts for layer in layers)
    missing = max(0.0, 1 - tiers.cache_bytes / experts) if experts else 0.0
    if hits is None and chances and missing:
        each_bytes = sum(layer.experts for layer in layers) / len(chances)
        stay = tiers.cache_bytes // expert_bytes(layers)
        seldom = sorted(chances, reverse=True)[stay:]
        return others, each_bytes * sum(1 - (1 - chance) ** rows for chance in seldom)
    if hits is not None and missing:
        missing = 1 - hits
    return others, missing * sum(layer.experts * part for layer, part in _used(layers, rows))


def expert_runs(layers: Sequence[LayerBytes], streamed: int, rows: int) -> float:
    """Graphs that a step of `rows` rows runs on average for experts: one for each expert that it
    uses."""
    if not streamed:
        return 0.0
    return sum(layer.num_experts * part for layer, part in _used(layers, rows))


def _used(layers: Sequence[LayerBytes], rows: int) -> Iterator[tuple[LayerBytes, float]]:
    """For each layer with experts, the part of them that a step of `rows` rows uses."""
    for layer in layers:
        if layer.experts:
            chance = layer.top_k / max(layer.num_experts, layer.of_experts)
            yield layer, 1 - (1 - chance) ** rows


def _least(layers: Sequence[LayerBytes]) -> int:
    """Least bytes that the window reserves for experts, in the layer where they are largest."""
    return max(layer.least_experts for layer in layers)
