"""Shards: slices of layers, by heads and feed-forward columns, and of the vocabulary."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from edge.partition.plan.expert_tiers import (
    LayerBytes,
    expert_bytes,
    expert_runs,
    held_bytes,
    read_bytes,
)
from edge.partition.plan.facts import LayerFacts, ModelFacts, Workload
from edge.partition.plan.ranges import kv_group_size
from edge.partition.plan.reading import Reader
from edge.partition.plan.share import MemoryUse, StagePlace, tiling_problems

MOST_KINDS = 64
"""The most kinds of layers in a shard that is read from outside."""

MOST_LAYERS = 4096
MOST_EXPERTS = 1024
"""The most experts of a layer in a shard that is read from outside."""

Experts = tuple[tuple[int, ...], ...]
"""For each layer of a stage the experts, by number, rising; empty where a layer has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlice:
    """A shard's slice of every layer of one kind."""

    heads: range
    """Query heads; `kv_heads` says which KV heads go along."""
    ffn_columns: range
    whole_experts: int = 0
    """Experts of a layer that the shard has whole, with all columns; 0: it has `ffn_columns` of
    every expert."""

    def matrix_bytes(self, layer: LayerFacts) -> int:
        """Bytes that the shard streams of a layer: all of it except norms and biases, which stay in
        memory."""
        return self.layer_bytes(layer).total

    def layer_bytes(self, layer: LayerFacts) -> LayerBytes:
        """The same bytes, experts separate."""
        count = layer.num_experts if self.ffn_columns else 0
        columns, others = len(self.ffn_columns), len(self.heads) * layer.query_head_bytes
        others += num_local_kv_heads(self.heads, layer) * layer.kv_head_bytes
        experts = columns * layer.expert_column_bytes * layer.num_experts
        others += columns * layer.ffn_column_bytes - experts
        if count and self.whole_experts:
            count = self.whole_experts
            experts = count * layer.expert_bytes
        return LayerBytes(
            others=others,
            experts=experts,
            num_experts=count if experts else 0,
            top_k=layer.top_k if experts else 0,
            of_experts=layer.num_experts if experts else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One device's slice of a stage. Ranges are half-open with step 1, and may be empty.

    `heads` and `ffn_columns` are those of the model's first kind of layer. `further` has the slices
    of the other kinds; without it, these ranges are for all kinds.
    """

    kind: ClassVar[str] = "layers"

    device: str
    """The id of the device."""
    heads: range
    """Query heads; `kv_heads` says which KV heads go along."""
    ffn_columns: range
    vocab: range
    """Vocabulary rows: of the embedding in the first stage, of the head in the last, of both where
    these are one stage. Empty in other stages."""
    streamed_layers: int = 0
    """Layers of the stage whose matrices are on disk and read for each step."""
    kept_experts: int = 0
    """Experts of streamed layers kept in memory, beyond those that fit into the memory that the
    resident layers and the window take anyway (`held_bytes`)."""
    further: tuple[LayerSlice, ...] = ()
    """Slices of each further kind of layer of the model; empty where all kinds are cut alike."""
    experts: Experts = ()
    """For each layer of the stage, the experts that the shard has whole; the same number in every
    layer with experts. The layer's other feed-forward weights are cut by columns. Empty: experts
    are cut by columns, too."""

    @classmethod
    def of_slices(
        cls, device: str, slices: Sequence[LayerSlice], *, vocab: range, streamed_layers: int = 0
    ) -> "Shard":
        """slices: one for each kind of layer, with columns of every expert."""
        first, *further = slices
        return cls(
            device=device,
            heads=first.heads,
            ffn_columns=first.ffn_columns,
            vocab=vocab,
            streamed_layers=streamed_layers,
            further=tuple(further) if any(each != first for each in further) else (),
        )

    def on(self, device: str) -> "Shard":
        return replace(self, device=device)

    def streaming(self, layers: int) -> "Shard":
        """The same with `layers` on disk. `kept_experts` becomes 0, because it was computed for
        another number of streamed layers."""
        if layers == self.streamed_layers:
            return self
        return replace(self, streamed_layers=layers, kept_experts=0)

    def keeping(self, experts: int) -> "Shard":
        """The same with `experts` experts kept."""
        return replace(self, kept_experts=experts)

    def with_experts(self, experts: Experts) -> "Shard":
        """The same with these experts whole. `kept_experts` becomes 0, because it was for other
        experts."""
        return replace(self, experts=experts, kept_experts=0)

    @property
    def whole_experts(self) -> int:
        """Whole experts in each layer that has experts; 0 where experts are cut by columns."""
        return next((len(each) for each in self.experts if each), 0)

    def experts_in(self, layers: range, model: ModelFacts) -> int:
        """Experts that the shard has whole or in part."""
        if self.experts:
            return sum(map(len, self.experts))
        return model.experts_of(layers)

    def slice(self, kind: int) -> LayerSlice:
        """The shard's slice of layers of this kind."""
        whole = self.whole_experts
        if kind and self.further:
            own = self.further[kind - 1]
            return replace(own, whole_experts=whole) if whole else own
        return LayerSlice(heads=self.heads, ffn_columns=self.ffn_columns, whole_experts=whole)

    def counted(
        self, layers: range, model: ModelFacts
    ) -> Iterator[tuple[LayerSlice, LayerFacts, int]]:
        """For each kind among these layers: the shard's slice, the facts of the kind, the number of
        layers."""
        for number, (facts, count) in enumerate(model.count(layers)):
            if count:
                yield self.slice(number), facts, count

    def cached(
        self, layers: range, model: ModelFacts
    ) -> Iterator[tuple[LayerSlice, LayerFacts, int]]:
        """The same, with the number of layers that keep keys and values. Layers that attend to the
        keys and values of another layer share one cache, if the shard has the same heads of
        each."""
        kinds = {kind.keys_of for kind in model.kinds} - {None}
        known = {
            (layer, self.slice(model.layers[layer]).heads) for layer in layers if layer in kinds
        }
        for part, facts, count in self.counted(layers, model):
            if facts.keys_of is None:
                yield part, facts, count
                continue
            own = facts.keys_of, part.heads
            yield part, facts, 0 if own in known else 1
            known.add(own)

    def to_json(self) -> dict[str, object]:
        value: dict[str, object] = {
            "device": self.device,
            "heads": _bounds(self.heads),
            "ffn_columns": _bounds(self.ffn_columns),
            "vocab": _bounds(self.vocab),
            "streamed_layers": self.streamed_layers,
        }
        if self.kept_experts:
            value["kept_experts"] = self.kept_experts
        if self.further:
            value["further"] = [
                {"heads": _bounds(each.heads), "ffn_columns": _bounds(each.ffn_columns)}
                for each in self.further
            ]
        if self.experts:
            value["experts"] = [list(each) for each in self.experts]
        return value

    @classmethod
    def read(cls, reader: Reader, value: Mapping[str, object], where: str) -> "Shard":
        # Plans written by hand may leave these fields out: nothing is streamed, all layers are cut
        # alike.
        given = {"streamed_layers": 0, "kept_experts": 0, "further": [], "experts": [], **value}
        names = ("device", "heads", "ffn_columns", "vocab")
        device, heads, ffn_columns, vocab, streamed, kept, further, experts = reader.fields(
            given, (*names, "streamed_layers", "kept_experts", "further", "experts"), where
        )
        slices: list[LayerSlice] = []
        for number, item in enumerate(
            reader.items(further, f"{where}.further", most=MOST_KINDS - 1)
        ):
            place = f"{where}.further[{number}]"
            own_heads, own_columns = reader.fields(item, ("heads", "ffn_columns"), place)
            slices.append(
                LayerSlice(
                    heads=reader.bounds(own_heads, f"{place}.heads"),
                    ffn_columns=reader.bounds(own_columns, f"{place}.ffn_columns"),
                )
            )
        return cls(
            device=reader.name(device, f"{where}.device"),
            heads=reader.bounds(heads, f"{where}.heads"),
            ffn_columns=reader.bounds(ffn_columns, f"{where}.ffn_columns"),
            vocab=reader.bounds(vocab, f"{where}.vocab"),
            streamed_layers=reader.integer(streamed, f"{where}.streamed_layers"),
            kept_experts=reader.integer(kept, f"{where}.kept_experts"),
            further=tuple(slices),
            experts=_read_experts(reader, experts, f"{where}.experts"),
        )

    @classmethod
    def problems(
        cls, names: Sequence[str], shares: Sequence["Shard"], place: StagePlace, model: ModelFacts
    ) -> Iterator[str]:
        owner = f"Stage {place.number}"
        wrong = [
            f"{name} has slices of {len(shard.further) + 1} kinds of layers, and the model has"
            f" {len(model.kinds)} kinds."
            for name, shard in zip(names, shares, strict=True)
            if shard.further and len(shard.further) + 1 != len(model.kinds)
        ]
        yield from wrong
        if not wrong:
            yield from _slice_problems(names, shares, model, owner)
            yield from _expert_problems(names, shares, place, model)
        is_outer = place.is_first or place.is_last
        if is_outer:
            rows = [shard.vocab for shard in shares]
            yield from tiling_problems("vocabulary rows", names, rows, model.vocab_size, owner)
        for name, shard in zip(names, shares, strict=True):
            if shard.vocab and not is_outer:
                yield f"{name} has vocabulary rows, which only the first and last stage hold."
            if not 0 <= shard.streamed_layers <= len(place.layers):
                yield (
                    f"{name} streams {shard.streamed_layers} layers, and the stage has"
                    f" {len(place.layers)}."
                )
            experts = shard.experts_in(place.layers, model)
            if not 0 <= shard.kept_experts <= experts:
                yield f"{name} keeps {shard.kept_experts} experts, and the stage has {experts}."
            slices = (shard.slice(0), *shard.further)
            if not any(each.heads or each.ffn_columns for each in slices) and not (
                shard.vocab and is_outer
            ):
                yield f"{name} has nothing to do."

    def memory(self, place: StagePlace, model: ModelFacts, workload: Workload) -> MemoryUse:
        """Memory of the shard. First-stage shards hold embedding rows and last-stage shards head
        rows; also with tied embeddings, because the two are stored in different types. A shard that
        streams layers leaves its embedding on disk, too, because a token needs one row of it. KV
        heads that a shard holds more than once (see `kv_heads`) count as often."""
        row_bytes = model.head_row_bytes * place.is_last
        if not self.streamed_layers:
            row_bytes += model.embedding_row_bytes * place.is_first
        layers: list[LayerBytes] = []
        fixed_bytes = token_bytes = state_bytes = window_bytes = 0
        for part, facts, count in self.counted(place.layers, model):
            layers += [part.layer_bytes(facts)] * count
            fixed_bytes += count * facts.layer_bytes
        for part, facts, count in self.cached(place.layers, model):
            kv_count = num_local_kv_heads(part.heads, facts)
            token_bytes += count * kv_count * facts.kv_bytes_per_token
            state_bytes += count * kv_count * facts.state_bytes
            window_bytes += count * kv_count * facts.window_bytes
        # The back end chooses which layers stay, so each counts as the largest.
        streamed, spare_bytes = self.streamed_layers, self.kept_experts * expert_bytes(layers)
        held = held_bytes(layers, streamed, spare_bytes=spare_bytes)
        others, routed = read_bytes(
            layers,
            streamed,
            workload.concurrency,
            spare_bytes=spare_bytes,
            hits=workload.expert_hits,
            chances=self._chances(place.layers, model) if streamed else (),
        )
        read = others + routed
        return MemoryUse(
            weight_bytes=held + fixed_bytes + len(self.vocab) * row_bytes,
            kv_bytes=_room_bytes(token_bytes, window_bytes, model) * workload.cached_tokens,
            state_bytes=state_bytes * workload.states + window_bytes * workload.windows,
            streamed_bytes=int(read),
            routed_bytes=int(routed),
            expert_runs=expert_runs(layers, streamed, workload.concurrency),
            expert_bytes=expert_bytes(layers) if streamed else 0,
            apart_bytes=held_bytes(layers, streamed, is_whole=True) - held,
            streamed_layer_bytes=max(each.total for each in layers) if read else 0,
        )

    def _chances(self, layers: range, model: ModelFacts) -> list[float]:
        """For each expert that the shard has whole or in part, the part of all tokens that go
        through it; empty where it was not counted."""
        if not model.expert_uses:
            return []
        found: list[float] = []
        for index, layer in enumerate(layers):
            uses = model.expert_uses[layer]
            if self.experts:
                found += (uses[number] for number in self.experts[index])
            elif self.slice(model.layers[layer]).ffn_columns:
                found += uses
        return found

    def in_words(self) -> str:
        words = f"heads {self.heads.start}-{self.heads.stop}"
        if self.experts:
            words += f", {self.whole_experts} of the experts"
        return f"{words}, and {len(self.further)} further kinds" if self.further else words


def _room_bytes(token_bytes: int, window_bytes: int, model: ModelFacts) -> int:
    """Bytes for each token of a shard with these bytes of a token and of one request's windows: at
    least as much beside its windows as the whole model has, so that all shards have room for the
    same requests."""
    if not window_bytes:
        return token_bytes
    kinds = [model.kinds[kind] for kind in model.layers]
    windows = sum(kind.num_kv_heads * kind.window_bytes for kind in kinds)
    return max(token_bytes, -(-window_bytes * sum(kind.token_bytes for kind in kinds) // windows))


def whole_shard(device: str, model: ModelFacts, *, vocab: range, streamed_layers: int = 0) -> Shard:
    """All of the stage's layers on one device."""
    slices = [
        LayerSlice(heads=range(kind.num_heads), ffn_columns=range(kind.ffn_columns))
        for kind in model.kinds
    ]
    return Shard.of_slices(device, slices, vocab=vocab, streamed_layers=streamed_layers)


def num_local_kv_heads(heads: range, layer: LayerFacts) -> int:
    """`len(kv_heads(...))` without building the tuple."""
    size = kv_group_size(heads, layer.num_heads, layer.num_kv_heads)
    return len(heads) // size if size else 0


def _read_experts(reader: Reader, value: object, where: str) -> Experts:
    return tuple(
        tuple(
            reader.integer(number, f"{where}[{layer}][{place}]")
            for place, number in enumerate(
                reader.items(numbers, f"{where}[{layer}]", most=MOST_EXPERTS)
            )
        )
        for layer, numbers in enumerate(reader.items(value, where, most=MOST_LAYERS))
    )


def _expert_problems(
    names: Sequence[str], shards: Sequence[Shard], place: StagePlace, model: ModelFacts
) -> Iterator[str]:
    """Problems of whole experts: each must be on one shard that has columns of its layer, and a
    shard must have the same number of experts in each layer."""
    if not any(shard.experts for shard in shards):
        return
    owner, layers = f"Stage {place.number}", place.layers
    if any(kind.is_grouped for kind, count in model.count(layers) if count):
        yield f"{owner} has whole experts, and the model chooses them by groups: cut their columns."
        return
    for name, shard in zip(names, shards, strict=True):
        if shard.experts and len(shard.experts) != len(layers):
            yield (
                f"{name} names experts of {len(shard.experts)} layers, and the stage has"
                f" {len(layers)}."
            )
            return
    told: list[str] = []
    counts = [shard.whole_experts for shard in shards]
    has_columns = [
        [bool(shard.slice(kind).ffn_columns) for kind in range(len(model.kinds))]
        for shard in shards
    ]
    for index, layer in enumerate(layers):
        kind = model.layers[layer]
        num_experts = model.kinds[kind].num_experts
        every: list[int] = []
        for name, shard, count, columns in zip(names, shards, counts, has_columns, strict=True):
            numbers = shard.experts[index] if shard.experts else ()
            has_some = bool(num_experts) and columns[kind]
            wanted = count if has_some else 0
            if len(numbers) != wanted or has_some != bool(wanted):
                told.append(
                    f"{name} has {len(numbers)} whole experts of layer {layer}, and must have as"
                    " many of every layer that it has columns of, one at least."
                )
            elif list(numbers) != sorted(set(numbers)):
                told.append(f"{name} names experts of layer {layer} twice, or not in order.")
            every += numbers
        if num_experts and not told and sorted(every) != list(range(num_experts)):
            told.append(
                f"{owner}: the shards have not each of the {num_experts} experts of layer"
                f" {layer} once."
            )
        if told:
            yield from told
            return


def _slice_problems(
    names: Sequence[str], shards: Sequence[Shard], model: ModelFacts, owner: str
) -> Iterator[str]:
    """Problems of the slices of each kind of layer. Kinds with the same slices and sizes are
    checked once."""
    seen: set[object] = set()
    for number, facts in enumerate(model.kinds):
        slices = [shard.slice(number) for shard in shards]
        key = (tuple(slices), facts.num_heads, facts.ffn_columns)
        if key in seen:
            continue
        seen.add(key)
        of_kind = f" of layers of kind {number}" if len(model.kinds) > 1 else ""
        heads = [each.heads for each in slices]
        yield from tiling_problems(f"heads{of_kind}", names, heads, facts.num_heads, owner)
        yield from tiling_problems(
            f"feed-forward columns{of_kind}",
            names,
            [each.ffn_columns for each in slices],
            facts.ffn_columns,
            owner,
            multiple=model.column_multiple,
        )


def _bounds(indices: range) -> list[int]:
    return [indices.start, indices.stop]
