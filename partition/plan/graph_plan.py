"""A graph of any kind over devices: its facts, its plan, and what a plan is predicted to take.

Data alone. Tensors between devices pass the coordinator: a device sends what it made once, and each
device that needs it gets it once. `search/graph_cut.py` finds a good plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from edge.partition.errors import PlanError

Objective = Literal["latency", "throughput"]

MOST_GRAPH_STAGES = 64
MOST_GRAPH_COPIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomFacts:
    """Nodes that stay together. Atoms are in topological order."""

    inputs: tuple[str, ...]
    """Tensors of earlier atoms, and inputs of the graph."""
    outputs: tuple[str, ...]
    """Tensors that others use."""
    memory_bytes: int
    """Memory of its weights, and of tensors that stay, on a device."""
    live_bytes: int = 0
    """Memory of the tensors that are there while it is computed. Atoms of a stage take turns."""
    shared: tuple[str, ...] = ()
    """Weights that other atoms use, too. A stage has each of them once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDevice:
    """A device, and the way between it and the coordinator."""

    name: str
    seconds: tuple[float, ...]
    """The time of each atom."""
    memory_bytes: int
    """For atoms, with one part."""
    latency_s: float
    """The time of asking it once, without computation and with empty tensors."""
    overhead_s: float
    """The time of a stage beside its nodes, while others are under way."""
    bytes_per_s: float
    """The rate of tensors, in each direction."""
    handling_s_per_byte: float = 0.0
    """The time for each byte that comes or goes in which it computes nothing else."""
    part_bytes: int = 0
    """Memory of each further part, beside its atoms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """All that a plan follows from."""

    atoms: tuple[AtomFacts, ...]
    shared_bytes: Mapping[str, int] = field(default_factory=dict)
    """Memory of each weight that several atoms use."""
    tensor_bytes: Mapping[str, int]
    """Bytes of every tensor between atoms, and of inputs of the graph."""
    results: frozenset[str]
    """Outputs of the graph."""
    cuts: tuple[int, ...]
    """Places at which the order of atoms may be cut, ascending: before which atom."""
    devices: tuple[GraphDevice, ...]
    exit_at: int | None = None
    """The place behind which an input may end early: before which atom. Every plan is cut there."""
    exit_share: float = 0.0
    """The share of inputs that end there."""
    received_copies: int = 0
    sent_copies: int = 0
    """So many times a device holds what a stage receives, and what it sends."""
    may_copy: bool = True
    """Whether inputs of a stream may go to several copies of the graph: they share no state."""
    at_once: int = 3
    """Inputs of one stage that are under way at once."""

    def border(self, atoms: range) -> tuple[list[str], list[str]]:
        """The tensors that a stage receives, and those that it sends."""
        made = {name for number in atoms for name in self.atoms[number].outputs}
        received = dict.fromkeys(
            name for number in atoms for name in self.atoms[number].inputs if name not in made
        )
        later = {name for atom in self.atoms[atoms.stop :] for name in atom.inputs}
        sent = [
            name
            for number in atoms
            for name in self.atoms[number].outputs
            if name in self.results or name in later
        ]
        return list(received), sent

    def memory(self, atoms: range) -> int:
        """Bytes of memory of a stage."""
        received, sent = self.border(atoms)
        moved = self.received_copies * sum(self.tensor_bytes[name] for name in received)
        moved += self.sent_copies * sum(self.tensor_bytes[name] for name in sent)
        own = [self.atoms[number] for number in atoms]
        live = max((atom.live_bytes for atom in own), default=0)
        shared = {name for atom in own for name in atom.shared}
        own_bytes = sum(atom.memory_bytes for atom in own)
        return moved + live + own_bytes + sum(self.shared_bytes[name] for name in shared)

    def weight(self, atoms: range) -> float:
        """The share of inputs for which a stage is computed."""
        is_behind = self.exit_at is not None and atoms.start >= self.exit_at
        return 1.0 - self.exit_share if is_behind else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStage:
    """Atoms that one device computes together."""

    device: str
    atoms: range

    def to_json(self) -> dict[str, Any]:
        return {"device": self.device, "atoms": [self.atoms.start, self.atoms.stop]}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """The whole assignment: stages in topological order, without gaps. A device may have several,
    with those of other devices between them."""

    stages: tuple[GraphStage, ...]
    copies: tuple["GraphPlan", ...] = ()
    """Further copies of the whole graph on devices of their own. Each input goes to one copy."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that compute, each once."""
        return tuple(
            dict.fromkeys(stage.device for each in self.each_copy for stage in each.stages)
        )

    @property
    def each_copy(self) -> tuple["GraphPlan", ...]:
        """A plan for each copy of the graph, the first one of `stages`."""
        return (GraphPlan(stages=self.stages), *self.copies) if self.copies else (self,)

    def to_json(self) -> dict[str, Any]:
        """The plan for `from_json`."""
        found: dict[str, Any] = {"stages": [stage.to_json() for stage in self.stages]}
        return found | ({"copies": [e.to_json() for e in self.copies]} if self.copies else {})

    @classmethod
    def from_json(cls, value: object) -> "GraphPlan":
        """Read a plan from outside. Raises PlanError, with every problem, unless its stages follow
        each other without gaps, and its copies have devices of their own."""
        listed = value.get("copies", []) if isinstance(value, dict) else []
        if not isinstance(listed, list) or len(listed) >= MOST_GRAPH_COPIES:
            raise PlanError([f"A plan has a list of less than {MOST_GRAPH_COPIES} copies."])
        if any(isinstance(each, dict) and each.get("copies") for each in listed):
            raise PlanError(["A copy has no copies of its own."])
        plan, *copies = [cls(stages=_read_stages(each)) for each in (value, *listed)]
        seen: set[str] = set()
        for each in (plan, *copies):
            if twice := seen.intersection(each.devices):
                raise PlanError([f"{name!r:.80} is in two copies." for name in sorted(twice)])
            seen.update(each.devices)
        return cls(stages=plan.stages, copies=tuple(copies))

    def check(self, facts: GraphFacts) -> None:
        """Raises PlanError unless it fits to these facts: atoms, devices, cuts and memory."""
        if self.copies and not facts.may_copy:
            raise PlanError(["A graph with state has no copies: a sequence stays on its devices."])
        if problems := [each for copy in self.each_copy for each in copy._problems(facts)]:
            raise PlanError(problems)

    def _problems(self, facts: GraphFacts) -> list[str]:
        problems: list[str] = []
        names = {device.name: device for device in facts.devices}
        if self.stages[-1].atoms.stop != len(facts.atoms):
            problems.append(
                f"The plan has {self.stages[-1].atoms.stop} atoms, the graph {len(facts.atoms)}."
            )
        for stage in self.stages[1:]:
            if stage.atoms.start not in facts.cuts:
                problems.append(f"The graph cannot be cut before atom {stage.atoms.start}.")
        starts = {stage.atoms.start for stage in self.stages}
        if facts.exit_at is not None and facts.exit_at not in starts:
            problems.append(f"Inputs may end before atom {facts.exit_at}: the plan must cut there.")
        for name in self.devices:
            if name not in names:
                problems.append(f"There is no device {name!r:.80}.")
            elif not problems:
                own = [stage for stage in self.stages if stage.device == name]
                needed = sum(facts.memory(stage.atoms) for stage in own)
                needed += (len(own) - 1) * names[name].part_bytes
                if needed > names[name].memory_bytes:
                    problems.append(
                        f"{name} needs {needed:,} bytes and has {names[name].memory_bytes:,}."
                    )
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Predicted seconds of one stage for one input."""

    device: str
    compute_s: float
    receive_s: float
    send_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEstimate:
    """What a plan is predicted to take."""

    latency_s: float
    """From an input to its results, with nothing else under way; the mean, if some end early."""
    interval_s: float
    """Between two results, with many inputs under way: the time of the slowest device of a copy,
    divided among the copies."""
    stages: tuple[StageEstimate, ...]
    """Those of one copy after the other."""
    copies: tuple["GraphEstimate", ...] = ()
    """The estimate of each copy, if there are several."""

    def score(self, objective: Objective) -> float:
        """What the objective makes small."""
        return self.latency_s if objective == "latency" else self.interval_s

    @property
    def inputs_per_s(self) -> float:
        return 1 / self.interval_s if self.interval_s else float("inf")


def _read_stages(value: object) -> tuple[GraphStage, ...]:
    problems: list[str] = []
    stages: list[GraphStage] = []
    listed = value.get("stages") if isinstance(value, dict) else None
    if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_GRAPH_STAGES:
        raise PlanError([f"A plan has a list of 1 to {MOST_GRAPH_STAGES} stages."])
    for number, each in enumerate(listed):
        device = each.get("device") if isinstance(each, dict) else None
        atoms = each.get("atoms") if isinstance(each, dict) else None
        if not isinstance(device, str) or not device:
            problems.append(f"Stage {number} names no device.")
            continue
        if not isinstance(atoms, list) or len(atoms) != 2 or not all(map(_is_count, atoms)):
            problems.append(f"Stage {number} has no atoms [first, last + 1].")
            continue
        stages.append(GraphStage(device=device, atoms=range(*atoms)))
    if problems := problems or _gaps(stages):
        raise PlanError(problems)
    return tuple(stages)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _gaps(stages: Sequence[GraphStage]) -> list[str]:
    place, problems = 0, []
    for number, stage in enumerate(stages):
        if stage.atoms.start != place or stage.atoms.stop <= place:
            problems.append(f"Stage {number} does not begin with atom {place}, or is empty.")
        place = stage.atoms.stop
    return problems
