"""A graph of any kind over devices: its facts, its plan, and what a plan is predicted to take.

Data alone. Tensors between devices pass the coordinator: a device sends what it made once, and each
device that needs it gets it once. `search/graph_cut.py` finds a good plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edge.partition.errors import PlanError

Objective = Literal["latency", "throughput"]

MOST_GRAPH_STAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomFacts:
    """Nodes that stay together. Atoms are in topological order."""

    inputs: tuple[str, ...]
    """Tensors of earlier atoms, and inputs of the graph."""
    outputs: tuple[str, ...]
    """Tensors that others use."""
    memory_bytes: int
    """Memory of its weights and tensors on a device."""


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
    at_once: int = 3
    """Inputs of one stage that are under way at once."""

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

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that compute, each once."""
        return tuple(dict.fromkeys(stage.device for stage in self.stages))

    def to_json(self) -> dict[str, Any]:
        """The plan for `from_json`."""
        return {"stages": [stage.to_json() for stage in self.stages]}

    @classmethod
    def from_json(cls, value: object) -> "GraphPlan":
        """Read a plan from outside. Raises PlanError, with every problem, unless its stages follow
        each other without gaps."""
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
        if not problems:
            problems = _gaps(stages)
        if problems:
            raise PlanError(problems)
        return cls(stages=tuple(stages))

    def check(self, facts: GraphFacts) -> None:
        """Raises PlanError unless it fits to these facts: atoms, devices, cuts and memory."""
        problems = []
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
                needed = sum(facts.atoms[n].memory_bytes for stage in own for n in stage.atoms)
                needed += (len(own) - 1) * names[name].part_bytes
                if needed > names[name].memory_bytes:
                    problems.append(
                        f"{name} needs {needed:,} bytes and has {names[name].memory_bytes:,}."
                    )
        if problems:
            raise PlanError(problems)


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
    """Between two results, with many inputs under way: the time of the slowest device."""
    stages: tuple[StageEstimate, ...]

    def score(self, objective: Objective) -> float:
        """What the objective makes small."""
        return self.latency_s if objective == "latency" else self.interval_s

    @property
    def inputs_per_s(self) -> float:
        return 1 / self.interval_s if self.interval_s else float("inf")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _gaps(stages: Sequence[GraphStage]) -> list[str]:
    place, problems = 0, []
    for number, stage in enumerate(stages):
        if stage.atoms.start != place or stage.atoms.stop <= place:
            problems.append(f"Stage {number} does not begin with atom {place}, or is empty.")
        place = stage.atoms.stop
    return problems
