"""What of a shard with experts is in memory while others of its weights are on disk. Pure.

A step uses all of a layer but its experts, and few of those. So what memory there is holds the rest
of the layers first, which is used by every token, and in what is left experts: those that tokens
went through most so far (`offload`'s unit cache).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WINDOW_LAYERS = 2
"""Streamed layers held at once: one computes while the other is filled. Whatever the rates of disk
and processor, memory for a third serves better as one more layer that stays: where the disk is what
a token waits for, that saves it a layer's reading; where it is not, nothing waits. This holds to
within a layer's computing, as those that stay are spread among those that are read
(`tests/property/test_window.py`), where computing is steady. On two cores that eight others wanted,
it was not: there a window of three gave 1.2 to 2.7 times the tokens."""

_LEAST_EXPERTS = 16
"""Experts of a layer that there is room for: those that a run of them waits for, while as many are
read for the next one. Twice those of a token, where that is more."""

PLACE_BYTES = 80 << 10
"""Overhead of an expert in memory over its weights, for the graph that computes it there: measured
71 KiB with ONNX Runtime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """What a shard has of one layer, as far as it may be on disk."""

    others: int
    """All but experts."""
    experts: int = 0
    num_experts: int = 0
    top_k: int = 0
    of_experts: int = 0
    """How many the layer has on all devices, which a token's are among; 0: no more than here."""

    @property
    def total(self) -> int:
        return self.others + self.experts

    @property
    def placed_experts(self) -> int:
        """What its experts take where each has a place of its own."""
        return self.experts + self.num_experts * PLACE_BYTES

    @property
    def placed_expert(self) -> int:
        """One of them."""
        return -(-self.placed_experts // self.num_experts) if self.num_experts else 0

    @property
    def least_experts(self) -> int:
        """The same of those that there is room for at least."""
        count = min(self.num_experts, max(_LEAST_EXPERTS, 2 * self.top_k))
        return -(-self.placed_experts * count // self.num_experts) if count else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiers:
    """How memory is shared out."""

    streamed: int
    """Layers that are read for each step, their experts apart."""
    cache_bytes: int
    """For experts of all layers, and their places."""


def expert_bytes(layers: Sequence[LayerBytes]) -> int:
    """What an expert in memory takes, of the layer where it takes most; 0 where there is none."""
    return max((layer.placed_expert for layer in layers), default=0)


def held_bytes(
    layers: Sequence[LayerBytes], streamed: int, *, spare_bytes: int = 0, is_whole: bool = False
) -> int:
    """What a shard keeps memory for that has `streamed` of its layers on disk: those that stay, and
    the window. Which these are is not said: none takes more than the largest.

    Of experts the window has few, and as many more as there are `spare_bytes` for. `is_whole`: it
    has all of a layer's, as they come with it.
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
    """The best use of the memory that `held_bytes` says, with `streamed` layers on disk."""
    if not any(layer.experts for layer in layers):
        return ExpertTiers(streamed=streamed, cache_bytes=0)
    held = held_bytes(layers, streamed, spare_bytes=spare_bytes)
    others = sum(layer.others for layer in layers)
    least = _least(layers)
    if others + least <= held:
        return ExpertTiers(streamed=0, cache_bytes=held - others)
    # Others take turns.
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
    """Bytes that a step of `rows` rows reads on average of others, and of experts.

    `hits`: the part of those it goes through that is in memory. Without it those stay that tokens
    like best by `chances`: for every expert of these layers, how many go through it. Without both
    as if every expert were as likely as any other, for each row anew: then those in memory are used
    as often as those on disk. Models have experts that they like better, which stay.
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
    """Graphs that a step of `rows` rows runs on average for experts: one for each that it uses."""
    if not streamed:
        return 0.0
    return sum(layer.num_experts * part for layer, part in _used(layers, rows))


def _used(layers: Sequence[LayerBytes], rows: int) -> Iterator[tuple[LayerBytes, float]]:
    """The part of its experts that rows go through in each layer that has some."""
    for layer in layers:
        if layer.experts:
            chance = layer.top_k / max(layer.num_experts, layer.of_experts)
            yield layer, 1 - (1 - chance) ** rows


def _least(layers: Sequence[LayerBytes]) -> int:
    """Experts that there is room for at least, in the layer where they take most."""
    return max(layer.least_experts for layer in layers)
