"""Which models are loaded, who waits for it, and who goes: over models that are made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest

from edge.api.async_model import AsyncModel
from edge.cli.commands.serve import Offered, check_for_several, offered, with_plans
from edge.errors import CapacityError, RequestError
from edge.planning.load_options import LoadOptions
from edge.server.model_pool import ModelPlace, ModelPool, first_to_go
from edge.server.refusals import Refusal
from tests.support.plans import bundled_plan


class Loaded:
    """A model that takes room."""

    is_over = False

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def aclose(self) -> None:
        self.closed.set()


class Room:
    """Loads models where there is room for so many."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[tuple[str, bool]] = []
        self.made: list[Loaded] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.has_begun = asyncio.Event()

    async def load(self, name: str, whole: bool) -> AsyncModel:
        self.asked.append((name, whole))
        self.has_begun.set()
        await self.may_go_on.wait()
        if sum(not each.closed.is_set() for each in self.made) >= self.most:
            raise CapacityError("box lacks 5 MiB")
        self.made.append(Loaded())
        return cast(AsyncModel, self.made[-1])


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


async def use(pool: ModelPool, name: str) -> None:
    async with pool.using(name):
        pass


def test_who_goes_is_who_was_not_used_for_longest_and_nobody_who_is_used() -> None:
    model = cast(AsyncModel, object())
    places = [
        ModelPlace("busy", model, users=1, used_s=1.0),
        ModelPlace("late", model, used_s=3.0),
        ModelPlace("early", model, used_s=2.0),
        ModelPlace("empty"),
        wanted := ModelPlace("wanted", model),
    ]
    found = first_to_go(places, wanted)
    assert found is not None
    assert found.name == "early"
    assert first_to_go(places[:1], wanted) is None


def test_what_is_not_used_makes_room() -> None:
    async def main() -> None:
        room = Room(2)
        pool = ModelPool("abc", room.load)
        for name in "aba":
            await use(pool, name)
        assert list(pool.loaded) == ["a", "b"], "who was used last comes first"
        await use(pool, "c")
        assert list(pool.loaded) == ["c", "a"]
        assert room.asked == [("a", False), ("b", True), ("c", True), ("c", True)]

    run(main)


def test_what_is_used_is_waited_for_and_requests_wait_in_order() -> None:
    async def main() -> None:
        room = Room(1)
        pool = ModelPool("abc", room.load, most_waiting=2)
        order: list[str] = []

        async def ask(name: str) -> None:
            async with pool.using(name):
                order.append(name)

        async with pool.using("a"):
            room.has_begun.clear()
            waiting = [asyncio.create_task(ask(name)) for name in "bc"]
            await room.has_begun.wait()
            with pytest.raises(Refusal, match="2 requests wait") as refused:
                await use(pool, "b")
            assert (refused.value.status, "Retry-After" in refused.value.headers) == (503, True)
            await use(pool, "a")  # who is loaded is no matter of waiting
        await asyncio.gather(*waiting)
        assert order == ["b", "c"]
        assert list(pool.loaded) == ["c"]

    run(main)


def test_who_goes_away_while_it_is_loaded_leaves_nothing() -> None:
    async def main() -> None:
        room = Room(1)
        room.may_go_on.clear()
        pool = ModelPool("ab", room.load)
        gone, other = (asyncio.create_task(use(pool, name)) for name in "ab")
        await room.has_begun.wait()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        room.may_go_on.set()
        await other
        assert [name for name, _whole in room.asked] == ["a", "b"]
        assert list(pool.loaded) == ["b"]
        assert len(room.made) == 1

    run(main)


def test_what_fits_nowhere_is_named_and_may_be_asked_for_again() -> None:
    async def main() -> None:
        room = Room(0)
        pool = ModelPool(["org/a"], room.load)
        for _time in range(2):
            with pytest.raises(CapacityError, match=r"the model 'org/a': box lacks 5 MiB"):
                await use(pool, "org/a")
        room.most = 1
        await use(pool, "org/a")

    run(main)


def test_what_nobody_uses_for_long_goes() -> None:
    async def main() -> None:
        room = Room(2)
        pool = ModelPool("ab", room.load, keep_alive_s=0.0)
        async with pool.using("a"):
            await use(pool, "b")
            await room.made[1].closed.wait()
            assert list(pool.loaded) == ["a"]
            assert pool.stays_s("a") == 0
        await room.made[0].closed.wait()
        assert not pool.loaded
        await pool.aclose()

    run(main)


def test_a_model_stays_as_long_as_was_said_last() -> None:
    async def main() -> None:
        room = Room(1)
        pool = ModelPool("a", room.load, keep_alive_s=500.0)
        await use(pool, "a")
        for said, least in ((None, None), (900.0, 800.0), (50.0, 40.0)):
            pool.keep("a", said)
            stays = pool.stays_s("a")
            assert stays == said if least is None else least < (stays or 0) <= (said or 0)
        async with pool.using("a"):
            assert pool.stays_s("a") == 500, "who comes has it stay as usual"
            pool.keep("a", 0.0)
            assert not room.made[0].closed.is_set()
        await room.made[0].closed.wait()
        await pool.aclose()

    run(main)


def test_what_is_dismissed_goes_when_nobody_uses_it() -> None:
    async def main() -> None:
        room = Room(1)
        pool = ModelPool("a", room.load)
        async with pool.using("a"):
            pool.keep("a", 0.0)
            assert list(pool.loaded) == ["a"]
        await room.made[0].closed.wait()
        async with pool.using("a"):
            pool.keep("a", 0.0)
            await use(pool, "a")  # who wants it to stay
        assert not room.made[1].closed.is_set()
        pool.keep("a", 0.0)
        pool.keep("a", 0.0)
        await room.made[1].closed.wait()
        pool.keep("a", 0.0)
        await pool.aclose()
        assert len(room.made) == 2

    run(main)


def test_one_that_has_ended_is_loaded_again_unless_it_is_the_only_one() -> None:
    async def main() -> None:
        for names in ("ab", "a"):
            room = Room(1)
            pool = ModelPool(names, room.load)
            await use(pool, "a")
            room.made[0].is_over = True
            await use(pool, "a")
            assert len(room.made) == len(names)
            assert room.made[0].closed.is_set() == (len(names) > 1)

    run(main)


def test_names() -> None:
    pool = ModelPool(["org/small", "x/twin", "y/twin"], Room(1).load)
    assert [pool.find(each) for each in ("default", "small", "y/twin")] == [
        *("org/small", "org/small", "y/twin")
    ]
    assert pool.find("small:latest") == pool.find("default:latest") == "org/small"
    for name in ("twin", "SMALL", "", "small:8b", ":latest", "small" + ":latest" * 2000):
        with pytest.raises(Refusal, match="is not here; this server has 'org/small'") as refused:
            pool.find(name)
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_names_that_are_given() -> None:
    b = Offered(name="org/b", place="org/b")
    assert offered(["s=org/a", "org/b"], None) == [Offered(name="s", place="org/a"), b]
    assert offered(["org/a", "org/b"], "n") == [Offered(name="n", place="org/a"), b]
    assert offered(["org/a"], None) == [Offered(place="org/a")]
    for wrong in (["org/c", "org/a", "org/a"], ["default=org/a"], ["s="], ["\udcf6=org/a"]):
        with pytest.raises(RequestError, match="NAME=MODEL"):
            offered(wrong, None)


def test_what_is_of_one_model_is_refused_for_several() -> None:
    check_for_several(LoadOptions(plan="tensor"))
    plan = bundled_plan("solo", devices=["a"])
    for option, options in (
        ("--plan", LoadOptions(plan=plan)),
        ("--lora", LoadOptions(lora="adapter")),
    ):
        with pytest.raises(RequestError, match=f"{option} is for one model"):
            check_for_several(options)


def test_each_of_several_models_may_have_a_plan_by_hand(tmp_path: Path) -> None:
    file, plan = tmp_path / "a=b.json", bundled_plan("solo", devices=["attic"])
    file.write_text(json.dumps(plan.to_json()))
    models = offered(["org/x", "a=org/a", "b=org/b"], None)
    plans = [each.plan for each in with_plans(models, [f"a={file}"], "tensor")]
    assert plans == ["tensor", plan, "tensor"]
    for wrong in (["c=x.json"], ["a"], ["a="], [f"a={file}", f"a={file}"], [f"={file}"]):
        with pytest.raises(RequestError, match="given names here: 'a', 'b'"):
            with_plans(models, wrong, "auto")
    with pytest.raises(RequestError, match="cannot be read as JSON"):
        with_plans(models, [f"b={tmp_path / 'none.json'}"], "auto")
