"""Graphs over peers of this process: real connections, caches and processes of parts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from edge.api.graph import AsyncGraph, GraphAsked, asked_plan
from edge.errors import CapacityError, NetworkError, PlanError, RequestError
from edge.graphs.atoms import Atoms
from edge.graphs.onnx_checks import open_onnx
from edge.graphs.onnx_file import GraphValue
from edge.graphs.tiles import TileSize
from edge.partition import GraphChoice, GraphPlan, GraphStage, estimate_graph
from edge.peer import graph_parts
from edge.peer.hosted_part import HostedPart
from edge.progress import ignore_progress
from edge.protocol.peer_info import PeerInfo, describe_peer
from edge.runs import shipping
from edge.runs.graphs import cut_graph, measured_peers, measuring
from edge.runs.graphs.agreement import compare, tolerance_of
from edge.runs.graphs.cut_graph import CutGraph, load_cut_graph
from edge.runs.graphs.graph_options import EarlyExit, GraphOptions
from edge.runs.graphs.inputs import checked, made_up_sample
from edge.runs.graphs.opened_parts import OpenedParts
from edge.runs.graphs.remote_part import DeviceGoneError, RemotePart, same
from edge.runs.graphs.tiled_graph import load_tiled_graph
from edge.transport.frame import Buffer
from tests.support.null_peers import null_peers
from tests.support.slow_cases import shown_in_parts
from tests.support.small_graphs import (
    FLOAT,
    INT64,
    KINDS,
    Builder,
    agree,
    branches,
    cnn,
    computed,
    early,
    encoder,
    pixels,
    seen_kinds,
    written,
)

IN_PARTS = shown_in_parts("unit/graphs/test_parts.py")


@contextlib.asynccontextmanager
async def two_peers(folder: Path) -> AsyncIterator[list[PeerInfo]]:
    async with null_peers(folder / "peers", 2) as daemons, asyncio.timeout(200):
        yield [await describe_peer(each.resources.addresses[0], None) for each in daemons]


async def load(
    path: Path, peers: list[PeerInfo], sample: Mapping[str, Any], **options: Any
) -> CutGraph:
    return await load_cut_graph(
        open_onnx(path), peers, sample, GraphOptions(**options), ignore_progress
    )


def in_the_middle(path: Path, *devices: str) -> GraphPlan:
    """A plan that cuts at half of the atoms, and behind it atom by atom."""
    atoms = len(Atoms(open_onnx(path)))
    first = atoms // 2 - len(devices) + 2
    ends = [0, *range(first, first + len(devices) - 1), atoms]
    return GraphPlan(
        stages=tuple(
            GraphStage(device=device, atoms=range(*ends[place : place + 2]))
            for place, device in enumerate(devices)
        )
    )


@pytest.mark.parametrize(
    "name",
    [
        "half",
        *(pytest.param(name, marks=IN_PARTS) for name in KINDS if name != "half"),
    ],
)
def test_two_peers_compute_what_one_does(name: str, tmp_path: Path) -> None:
    make, inputs_of = KINDS[name]
    path = written(make(), tmp_path, external=name == "cnn")

    async def main() -> None:
        plan = in_the_middle(path, "null-0", "null-1")
        async with two_peers(tmp_path) as peers:
            graph = await load(path, peers, inputs_of(0), plan=plan)
            assert graph.plan == plan
            assert graph.agreement is not None
            for seed in range(3):
                expected = computed(make(), inputs_of(seed))
                rtol = 2e-3 if name == "half" else 1e-5
                agree(await graph.run(inputs_of(seed)), expected, rtol)
            await graph.aclose()

    asyncio.run(main())


def expanded() -> ModelProto:
    """Nodes that ONNX Runtime computes by others, as it has no kernel for them."""
    b = Builder(11)
    x = b.add("Cast", "x", to=TensorProto.FLOAT16)
    w = b.constant(np.random.default_rng(11).normal(0, 0.3, (8, 8)).astype(np.float16))
    for kind in ("Softmax", "Relu", "ThresholdedRelu"):
        x = b.add(kind, b.add("MatMul", x, w))
        x = b.add("Abs", x)
    b.add("Cast", x, to=FLOAT, out="y")
    return b.model({"x": (FLOAT, ["n", 8])}, {"y": FLOAT})


def test_a_graph_is_cut_at_nodes_that_the_profile_does_not_show(tmp_path: Path) -> None:
    sample = {"x": np.random.default_rng(0).normal(0, 1, (3, 8)).astype(np.float32)}

    async def main() -> None:
        async with two_peers(tmp_path) as peers:
            graph = await load(written(expanded(), tmp_path), peers[:1], sample)
            assert graph.facts.cuts == tuple(range(1, len(graph.atoms)))
            expected = seen_kinds(expanded(), sample)
            assert {n: graph.measured.kinds[n] for n in expected} == expected
            await graph.aclose()

    asyncio.run(main())


def test_a_part_has_addresses_for_its_file_and_for_what_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime maps the file, reads weights from it and packs them."""
    seen: list[tuple[int, int]] = []

    class Seen(HostedPart):
        def __init__(self, call: Any, shard: Any, user: Any, **terms: Any) -> None:
            seen.append((terms["memory_bytes"] - call.buffer_bytes, shard.manifest.total_bytes))
            super().__init__(call, shard, user, **terms)

    monkeypatch.setattr(graph_parts, "HostedPart", Seen)

    async def main() -> None:
        async with two_peers(tmp_path) as peers:
            make, inputs_of = KINDS["cnn"]
            graph = await load(written(make(), tmp_path), peers[:1], inputs_of(0))
            await graph.aclose()

    asyncio.run(main())
    assert seen
    assert all(limit >= 3 * weights for limit, weights in seen)


def bomb() -> Builder:
    """A Loop as long as an input says, and an Expand as large as another one says."""
    b = Builder(8)
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["goes on"]),
         helper.make_node("Mul", ["state", "state"], ["next"])],
        "body",
        [helper.make_tensor_value_info("i", INT64, []),
         helper.make_tensor_value_info("on", TensorProto.BOOL, []),
         helper.make_tensor_value_info("state", FLOAT, None)],
        [helper.make_tensor_value_info("goes on", TensorProto.BOOL, []),
         helper.make_tensor_value_info("next", FLOAT, None)],
    )  # fmt: skip
    x = b.add("Loop", "count", "", "x", body=body)
    x = b.add("Expand", x, "size")
    x = b.add("Gather", x, "row")
    b.add("Identity", x, out="y")
    return b


def test_an_input_fails_alone_and_bombs_end(tmp_path: Path) -> None:
    model = bomb().model(
        {"x": (FLOAT, [1]), "count": (INT64, []), "size": (INT64, [1]), "row": (INT64, [])},
        {"y": FLOAT},
    )
    path = written(model, tmp_path)

    def inputs(count: int = 2, size: int = 4, row: int = 0) -> dict[str, NDArray[Any]]:
        return {
            "x": np.ones(1, np.float32),
            "count": np.array(count),
            "size": np.array([size]),
            "row": np.array(row),
        }

    many = [inputs(), inputs(row=7), inputs(count=1 << 60), inputs(size=1 << 40), inputs(row=1)]

    async def main() -> list[Any]:
        async with two_peers(tmp_path) as peers:
            graph = AsyncGraph(await load(path, peers, inputs(), run_limit_s=1.0))
            found = [each async for each in graph.stream(many, on_error="give")]
            again = await graph.run(inputs())
            await graph.aclose()
        return [*found, again]

    good, row, endless, large, last, again = asyncio.run(main())
    assert [each["y"].tolist() for each in (good, last, again)] == [1.0, 1.0, 1.0]
    assert isinstance(row, RequestError)
    assert "Gather 2" in str(row)
    assert isinstance(endless, RequestError)
    assert "within 1 s" in str(endless)
    assert isinstance(large, RequestError)
    assert "Expand 1" in str(large) or "memory" in str(large)


def test_copies_share_a_stream_and_one_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, inputs_of = written(cnn(), tmp_path), KINDS["cnn"][1]
    inputs = [inputs_of(seed) for seed in range(16)]
    whole = range(len(Atoms(open_onnx(path))))
    one, two = (GraphPlan(stages=(GraphStage(device=f"null-{n}", atoms=whole),)) for n in range(2))
    plan = dataclasses.replace(one, copies=(two,))
    assert asked_plan(plan.to_json()) == plan
    true_run, asked, lost = RemotePart.run, list[str](), list[str]()

    async def run(remote: RemotePart, *arguments: Any) -> Any:
        asked.append(remote.peer.name)
        if "null-1" in asked and not lost:
            lost.append(remote.peer.name)
            raise DeviceGoneError(remote.peer.id, NetworkError("gone"))
        return await true_run(remote, *arguments)

    async def main() -> None:
        async with two_peers(tmp_path) as peers:
            graph = AsyncGraph(await load(path, peers, inputs[0], plan=plan))
            assert len(graph.plan.devices) == 2
            assert [each["copy"] for each in graph.explain()["stages"]] == [0, 1]
            monkeypatch.setattr(RemotePart, "run", run)
            # Whichever was measured to be faster: it would be asked alone.
            monkeypatch.setattr(OpenedParts, "_next_s", lambda parts: parts._under_way)
            found = [each async for each in graph.stream(inputs)]
            assert lost
            assert set(asked) == {"null-0", "null-1"}
            assert "null-1" not in graph.plan.devices
            for results, each in zip(found, inputs, strict=True):
                assert isinstance(results, dict)
                agree(results, computed(cnn(), each))
            await graph.aclose()

    asyncio.run(main())


def test_a_run_that_ends_with_its_part_is_computed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, inputs_of = written(cnn(), tmp_path), KINDS["cnn"][1]
    true_run, closed = HostedPart._run, list[HostedPart]()

    def run(part: HostedPart, content: Buffer) -> tuple[str, bytearray]:
        if not closed:
            closed.append(part)
            part._is_closing = True
            part._process.forbid()  # the link is closed next
        return true_run(part, content)

    async def main() -> None:
        async with two_peers(tmp_path) as peers:
            graph = AsyncGraph(await load(path, peers, inputs_of(0)))
            [first] = graph.plan.devices
            monkeypatch.setattr(HostedPart, "_run", run)
            agree(await graph.run(inputs_of(1)), computed(cnn(), inputs_of(1)))
            assert len(closed) == 1
            assert graph.plan.devices != (first,)
            await graph.aclose()

    asyncio.run(main())


def test_a_large_picture_is_computed_in_tiles(tmp_path: Path) -> None:
    path = written(pixels(), tmp_path)
    random = np.random.default_rng(0)

    def picture(height: int, width: int) -> dict[str, NDArray[Any]]:
        return {"x": random.standard_normal((1, 3, height, width), np.float32)}

    async def main() -> None:
        async with two_peers(tmp_path) as peers:
            options, sample = GraphOptions(objective="throughput"), picture(160, 200)
            rest = sample, options, ignore_progress
            tiled = await load_tiled_graph(open_onnx(path), peers, *rest, TileSize(64, 16))
            arguments = peers[:1], *rest
            graph = AsyncGraph(tiled)
            assert graph.tiles is not None
            assert (graph.tiles.step, graph.tiles.count) == (4, 12)
            assert set(graph.plan.devices) == {"null-0", "null-1"}
            for size in ((160, 200), (40, 300), (164, 132)):
                inputs = picture(*size)
                agree(await graph.run(inputs), computed(pixels(), inputs))
            with pytest.raises(RequestError, match="no multiple of 4"):
                await graph.run(picture(165, 200))
            found = [each async for each in graph.stream(picture(88, 92) for _ in range(3))]
            assert [each["y"].shape for each in found if isinstance(each, dict)] == [
                (1, 4, 88, 92)
            ] * 3
            await graph.aclose()
            with pytest.raises(RequestError, match="'y' differs"):
                await load_tiled_graph(open_onnx(path), *arguments, TileSize(64, 0))
            with pytest.raises(RequestError, match="shows nothing of tiles of 192"):
                await load_tiled_graph(open_onnx(path), *arguments, TileSize(192, 16))
            other = open_onnx(written(pixels(is_global=True), tmp_path))
            with pytest.raises(RequestError, match="looks at the whole picture"):
                await load_tiled_graph(other, *arguments, TileSize(64, 16))
            with pytest.raises(RequestError, match="no input of the graph is a picture"):
                await load_tiled_graph(
                    open_onnx(written(early(), tmp_path)), *arguments, TileSize(64, 16)
                )

    asyncio.run(main())


def test_a_device_is_in_one_copy_alone() -> None:
    plan = GraphPlan(stages=(GraphStage(device="attic", atoms=range(3)),))
    with pytest.raises(PlanError, match="in two copies"):
        asked_plan({**plan.to_json(), "copies": [plan.to_json()]})
    with pytest.raises(PlanError, match="list of less than"):
        asked_plan({**plan.to_json(), "copies": "attic"})


def test_a_device_with_other_results_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_run = RemotePart.run

    async def wrong_run(remote: RemotePart, arrays: Any) -> Any:
        found = await true_run(remote, arrays)
        if remote.peer.name == "null-1":
            return {n: a * 1.1 if a.dtype == np.float32 else a for n, a in found.items()}
        return found

    monkeypatch.setattr(RemotePart, "run", wrong_run)
    monkeypatch.setattr(cut_graph, "choose_graph_plan", always_both)
    monkeypatch.setattr(measured_peers, "room_bytes", lambda _peer: 1 << 30)  # all are alike
    path, sample = written(branches(), tmp_path), KINDS["branches"][1](0)

    async def main() -> None:
        async with two_peers(tmp_path) as peers:
            graph = await load(path, peers, sample)
            assert graph.plan.devices == ("null-0",)
            assert "peer null-1" in graph.refused[0]
            agree(await graph.run(sample), computed(branches(), sample))
            await graph.aclose()

    asyncio.run(main())


def test_a_device_that_lacks_room_or_is_lost_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the choice of a plan and by the search for a device with other results."""
    true_open, true_find = CutGraph.open_stage, cut_graph.find_wrong
    monkeypatch.setattr(cut_graph, "choose_graph_plan", always_both)
    path, sample = written(branches(), tmp_path), KINDS["branches"][1](0)

    async def no_room(
        graph: CutGraph, stage: GraphStage, peer: PeerInfo, number: int
    ) -> RemotePart:
        if peer.name == "null-1":
            raise CapacityError("null-1 has no room")
        return await true_open(graph, stage, peer, number)

    async def is_lost(graph: CutGraph, *_arguments: Any) -> Any:
        monkeypatch.setattr(cut_graph, "find_wrong", true_find)
        monkeypatch.setattr(cut_graph, "compare", compare)
        lost = next(id for id in graph.measured.ids if id != graph.measured.trusted.id)
        raise DeviceGoneError(lost, NetworkError("gone"))

    def differs(*arrays: Any, tolerance: float) -> Any:
        return dataclasses.replace(compare(*arrays, tolerance=tolerance), problem="they differ")

    async def main() -> None:
        async with two_peers(tmp_path) as peers:
            with monkeypatch.context() as patched:
                patched.setattr(CutGraph, "open_stage", no_room)
                graph = await load(path, peers, sample)
                assert graph.plan.devices == ("null-0",)
                await graph.aclose()
                plan = in_the_middle(path, "null-0", "null-1")
                with pytest.raises(CapacityError, match="null-1 has no room"):
                    await load(path, peers, sample, plan=plan)
            monkeypatch.setattr(cut_graph, "find_wrong", is_lost)
            monkeypatch.setattr(cut_graph, "compare", differs)
            graph = await load(path, peers, sample)
            assert len(graph.plan.devices) == 1
            agree(await graph.run(sample), computed(branches(), sample))
            await graph.aclose()

    asyncio.run(main())


def test_a_stream_gives_results_while_its_source_is_slow(tmp_path: Path) -> None:
    path, sample = written(branches(), tmp_path), KINDS["branches"][1](0)

    async def main() -> None:
        async with two_peers(tmp_path) as peers:
            graph = AsyncGraph(await load(path, peers, sample))
            was_given = asyncio.Event()

            async def slow() -> AsyncIterator[Any]:
                for _ in range(3):
                    yield sample
                    await was_given.wait()
                    was_given.clear()

            count = 0
            async for found in graph.stream(slow()):
                assert isinstance(found, dict)
                agree(found, computed(branches(), sample))
                count += 1
                was_given.set()
            assert count == 3
            async with contextlib.aclosing(graph.stream(slow())) as ended_early:
                await anext(ended_early)
            with pytest.raises(RequestError, match="on_error must be"):
                await anext(graph.stream([], on_error="ignore"))  # type: ignore[arg-type]
            await graph.aclose()
            planned = await load_cut_graph(
                open_onnx(path), peers, sample, GraphOptions(), ignore_progress, plan_only=True
            )
            with pytest.raises(RequestError, match="planned only"):
                await planned.run(sample)

    asyncio.run(main())


@pytest.mark.parametrize(
    "which",
    ["by hand", pytest.param("auto", marks=shown_in_parts("property/test_graph_cuts.py"))],
)
def test_inputs_end_early_and_later_devices_are_not_asked(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(early(), tmp_path)
    inputs = [KINDS["branches"][1](seed) for seed in range(12)]
    inputs = [{"x": each["x"][:1]} for each in inputs]
    expected = [computed(early(), each) for each in inputs]
    least = float(np.median([each["confidence"] for each in expected]))
    ends = [bool(each["confidence"] >= least) for each in expected]
    asked: list[str] = []
    true_run = RemotePart.run

    async def run(remote: RemotePart, *arguments: Any) -> Any:
        asked.append(remote.part.outputs[-1])
        return await true_run(remote, *arguments)

    async def main() -> None:
        async with two_peers(tmp_path) as peers:
            exits = EarlyExit(output="confidence", least=least)
            plan = None
            if which == "by hand":
                plan = GraphPlan(
                    stages=(
                        GraphStage(device="null-0", atoms=range(4)),
                        GraphStage(device="null-1", atoms=range(4, 8)),
                    )
                )
            graph = AsyncGraph(await load(path, peers, inputs[0], exit_when=exits, plan=plan))
            assert graph.explain()["exit_at"] == 4
            assert graph.exit_share == float(ends[0])
            assert [stage.atoms.start for stage in graph.plan.stages] == [0, 4]
            monkeypatch.setattr(RemotePart, "run", run)
            found = [each async for each in graph.stream(inputs)]
            for one, other, is_early in zip(found, expected, ends, strict=True):
                assert isinstance(one, dict)
                names = {"early_logits", "confidence"} | (set() if is_early else {"logits"})
                assert one.keys() == names
                agree(one, {name: other[name] for name in names})
            assert asked.count("logits") == ends.count(False)
            assert graph.exit_share == ends.count(True) / len(ends)
            await graph.aclose()
            whole = GraphPlan(stages=(GraphStage(device="null-0", atoms=range(8)),))
            with pytest.raises(PlanError, match="must cut there"):
                await load(path, peers, inputs[0], exit_when=exits, plan=whole)
            last = EarlyExit(output="logits", least=0.0)
            simple = written(without_exit(), tmp_path)
            with pytest.raises(RequestError, match="cannot be cut behind 'logits'"):
                await load(simple, peers, inputs[0], exit_when=last)

    asyncio.run(main())


def without_exit() -> Any:
    """A graph whose only output needs everything."""
    b = Builder(11)
    x = b.add("Tanh", b.add("MatMul", "x", b.weight(8, 8)))
    b.add("MatMul", x, b.weight(8, 4), out="logits")
    return b.model({"x": (FLOAT, ["n", 8])}, {"logits": FLOAT})


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"exit_when": ("z", 0.5)}, "'z' is no output of numbers"),
        ({"exit_when": ("logits", float("nan"))}, "needs a finite number"),
        ({"exit_when": ("logits", 0.5), "state": {}}, "leaves no state"),
        ({"objective": "speed"}, "objective must be"),
        ({"time_limit_s": 0}, "time_limit_s must be"),
    ],
)
def test_wrong_terms_are_refused(terms: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = open_onnx(written(early(), tmp_path))
    with pytest.raises(RequestError, match=said):
        GraphAsked(**terms).options(file)


def always_both(facts: Any, objective: Any) -> Any:
    """The plan with all devices, in the place of the best one."""
    ends = [0, *facts.cuts[: len(facts.devices) - 1], len(facts.atoms)]
    plan = GraphPlan(
        stages=tuple(
            GraphStage(device=device.name, atoms=range(start, stop))
            for device, start, stop in zip(facts.devices, ends, ends[1:], strict=False)
        )
    )
    estimate = estimate_graph(facts, plan)
    return GraphChoice(plan=plan, estimate=estimate, alone=None)


def test_a_graph_larger_than_a_device_is_measured_in_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sample = cnn(), KINDS["cnn"][1](0)
    path = written(model, tmp_path)
    atoms = Atoms(file := open_onnx(path))
    monkeypatch.setattr(
        measuring, "_sections", lambda _file, _atoms, _peer: [range(4), range(4, len(atoms))]
    )

    async def main() -> None:
        async with two_peers(tmp_path) as peers:
            measured = await measuring.measure_graph(
                file,
                atoms,
                peers[0],
                sample,
                known=None,
                run_limit_s=60.0,
                on_progress=ignore_progress,
            )
            agree(measured.results, computed(model, sample))
            assert sum(measured.seconds[:4]) > 0
            assert sum(measured.seconds[4:]) > 0
            assert measured.kinds["t3"] == seen_kinds(model, sample)["t3"]

    asyncio.run(main())


@pytest.mark.parametrize(("room", "count"), [(10_000, 1), (5_000, 2)])
def test_sections_have_room_for_their_weights(
    room: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    atoms = Atoms(file := open_onnx(written(cnn(), tmp_path)))
    unit = file.total_weight_bytes
    monkeypatch.setattr(measuring, "room_bytes", lambda _peer: room * unit // 2_500)
    sections = measuring._sections(file, atoms, object())  # type: ignore[arg-type]
    assert len(sections) == count
    assert [n for section in sections for n in section] == list(range(len(atoms)))


def test_sections_are_not_cut_where_a_tensor_cannot_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two casts is bfloat16, as the nodes alone say."""
    b = Builder(12)
    x = b.add("MatMul", "x", b.weight(32, 32))
    x = b.add("Cast", x, to=TensorProto.BFLOAT16)
    x = b.add("Mul", x, x)
    x = b.add("Cast", x, to=FLOAT)
    b.add("MatMul", x, b.weight(32, 32), out="y")
    model = b.model({"x": (FLOAT, ["n", 32])}, {"y": FLOAT})
    atoms = Atoms(file := open_onnx(written(model, tmp_path)))
    assert file.inferred_types()["t1"] == TensorProto.BFLOAT16
    monkeypatch.setattr(measuring, "room_bytes", lambda _peer: 3 * file.total_weight_bytes // 2 + 9)
    sections = measuring._sections(file, atoms, object())  # type: ignore[arg-type]
    assert sections == [range(4), range(4, 5)]


def test_graphs_and_plans_that_cannot_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "FIRST_DELAY_S", 0.0)  # until one is lost
    strange = branches()
    strange.graph.node[2].op_type = "Nonsense"
    folder = tmp_path / "strange"
    folder.mkdir()
    bad, path = written(strange, folder), written(branches(), tmp_path)
    sample = KINDS["branches"][1](0)

    async def main() -> None:
        async with two_peers(tmp_path) as peers:
            with pytest.raises(RequestError, match=r"peer null-.*Nonsense"):
                await load(bad, peers, sample)
            lost = dataclasses.replace(
                peers[1], id="lost", name="lost", host="lost", address="127.0.0.1:1"
            )
            for known in (peers, [*peers, lost]):
                with pytest.raises(PlanError, match="attic"):
                    await load(path, known, sample, plan=in_the_middle(path, "attic", "null-1"))
            plan = GraphPlan(stages=(GraphStage(device="null-0", atoms=range(3)),))
            with pytest.raises(PlanError, match="3 atoms"):
                await load(path, peers, sample, plan=plan)
            with pytest.raises(RequestError, match="must be float32"):
                await load(path, peers, {"x": np.ones((1, 9), np.float32)})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ((), "list of 1 to"),
        ((GraphStage(device="a", atoms=range(2, 4)),), "does not begin with atom 0"),
    ],
)
def test_plans_put_together_by_hand_have_no_gaps(stages: tuple[GraphStage, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        asked_plan(GraphPlan(stages=stages))


VALUES = (
    GraphValue(name="a", dtype="float32", shape=("n", 3)),
    GraphValue(name="b", dtype="int64", shape=("n",)),
    GraphValue(name="s", dtype="string", shape=None),
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"a": None}, "'a' is missing; give float32"),
        ({"c": np.ones(1)}, "'c' is no input of the graph, which has 'a', 'b', 's'"),
        ({"a": np.ones((2, 3))}, r"must be float32 \[n, 3\], not float64 \[2, 3\]"),
        ({"a": np.ones((2, 4), np.float32)}, r"not float32 \[2, 4\]"),
        ({"a": np.ones(3, np.float32)}, r"not float32 \[3\]"),
        ({"b": np.ones(5, np.int64)}, r"'b' must be int64 \[n\], not int64 \[5\]"),
        ({"a": [[1, 2, 3], [4]]}, "'a' must be float32 .*, and is no array"),
        ({"s": np.array(["x", None], object)}, "'s' must be string .*NoneType"),
        ({"s": np.array(["x\ud800"], object)}, "'s' must be string .*surrogates"),
        ({"s": np.ones(2, complex)}, "'s' must be string of any shape, not complex128"),
    ],
)
def test_inputs_of_another_form_are_refused(changes: Mapping[str, Any], said: str) -> None:
    inputs: dict[str, Any] = {
        "a": np.ones((2, 3), np.float32),
        "b": np.ones(2, np.int64),
        "s": np.array(["x"], object),
    }
    assert checked(VALUES, inputs).keys() == inputs.keys()
    inputs |= changes
    with pytest.raises(RequestError, match=said):
        checked(VALUES, {name: each for name, each in inputs.items() if each is not None})


def test_a_made_up_sample_has_the_forms_that_are_wanted(tmp_path: Path) -> None:
    for make in (cnn, encoder, *(make for make, _inputs in KINDS.values())):
        values = open_onnx(written(make(), tmp_path)).inputs
        checked(values, made_up_sample(values))


def test_coarse_numbers_may_differ_by_more(tmp_path: Path) -> None:
    found = {}
    for name in ("cnn", "half", "quantised"):
        make, inputs_of = KINDS[name]
        kinds = seen_kinds(make(), inputs_of(0))
        found[name] = tolerance_of(open_onnx(written(make(), tmp_path)), kinds)
    assert found == {"cnn": 1e-3, "half": 1e-2, "quantised": 5e-2}


def test_results_are_compared_within_a_tolerance() -> None:
    one = {"x": np.array([1.0, -8.0, np.nan], np.float32), "k": np.array([1, 2])}
    near = {**one, "x": np.array([1.001, -8.0, np.nan], np.float32)}
    assert compare(one, one, tolerance=0).exact
    assert same(one, dict(one))
    found = compare(near, one, tolerance=1e-3)
    assert found.problem is None
    assert not found.exact
    assert compare(near, one, tolerance=1e-5).problem is not None
    for other in ({"x": one["x"]}, {**one, "k": np.array([1, 3])},
                  {**one, "x": np.array([1, -8, 0], np.float32)},
                  {**one, "k": np.array([1.0, 2.0])}):  # fmt: skip
        assert compare(other, one, tolerance=1.0).problem is not None
    bytes_ = {"q": np.array([255, 0], np.uint8)}
    nearly_nothing = {"y": np.array([0.0, 1e-6], np.float32)}
    one_rounding = {"y": np.array([6e-8, 1.12e-6], np.float32)}
    assert compare(one_rounding, nearly_nothing, tolerance=1e-3).problem is None
    assert compare({"y": np.zeros(2, np.float32)}, nearly_nothing, tolerance=1e-3).problem
    assert compare({"q": np.array([254, 1], np.uint8)}, bytes_, tolerance=0).problem is None
    assert compare({"q": np.array([250, 1], np.uint8)}, bytes_, tolerance=0).problem is not None


def test_an_atom_too_large_for_a_device_is_told() -> None:
    class Large:
        weight_bytes = 1 << 40
        outputs = ()

    class Peer:
        name, free_now_bytes, model_free_bytes = "small", 1 << 30, 1 << 30

    with pytest.raises(CapacityError, match="small has 928"):
        measuring._sections(None, [Large()], Peer())  # type: ignore[arg-type]
