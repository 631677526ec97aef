"""Which step comes next, by examples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from edge.offload.kv.slot_order import SlotOrder
from edge.protocol.step import FinishReason, Speculation, Step, StepEntry
from edge.scheduling.events import Answered, Event, Submitted
from edge.scheduling.orders import Match, Orders
from edge.scheduling.prefixes import PrefixCacheIndex
from edge.scheduling.residency import Residency
from tests.support.scheduling import Steps


def scheduler(
    *,
    chunk: int = 4,
    logit_chunk: int = 2,
    capacity: int = 100,
    disk: int = 0,
    requests: int = 8,
    stages: int = 1,
    has_prefixes: bool = False,
    rows_agree: bool = False,
    batches_agree: bool = False,
    drafts: int = 0,
    rewinds: bool = False,
) -> Steps:
    return Steps(
        Residency(
            memory_tokens=capacity,
            disk_tokens=disk,
            longest_tokens=disk,
            requests=requests,
            quantum_tokens=4,
        ),
        chunk_tokens=chunk,
        logit_chunk_tokens=logit_chunk,
        stages=stages,
        prefixes=PrefixCacheIndex(chunk_tokens=chunk, fewest_tokens=chunk)
        if has_prefixes
        else None,
        rows_agree=rows_agree,
        batches_agree=batches_agree,
        drafts=drafts,
        rewinds=rewinds,
        memory_tokens=capacity,
    )


def shown(step: Step | None) -> object:
    """A step as (request, position, tokens, logit rows) of each entry, and its run."""
    if step is None:
        return None
    return [(e.request, e.position, e.tokens, e.logit_rows) for e in step.entries], step.run


def answer(
    steps: Steps, tokens: Sequence[int], *, last: bool = True, end: FinishReason | None = None
) -> None:
    steps.answer(tokens, ends=[end] * len(tokens), last=last)


def test_a_prompt_goes_in_chunks_and_then_runs_on() -> None:
    steps = scheduler()
    steps.add("a", [1, 2, 3, 4, 5, 6], new_tokens=3)
    assert shown(steps.decide().step) == ([("a", 0, (1, 2, 3, 4), 0)], 1)
    assert shown(steps.decide().step) == ([("a", 4, (5, 6), 1)], 3)
    assert steps.decide().step is None
    answer(steps, [])
    answer(steps, [50], last=False)
    answer(steps, [51], last=False)
    answer(steps, [52], end="length")
    assert steps.decide() == Orders(finish=("a",))
    assert steps.decide() == Orders()


def test_a_run_that_was_cut_short_goes_on_from_its_last_token() -> None:
    steps = scheduler()
    steps.add("a", [1, 2], new_tokens=5)
    steps.decide()
    answer(steps, [50], last=False)
    answer(steps, [51])
    assert shown(steps.decide().step) == ([("a", 3, (51,), 1)], 3)


def test_an_answer_that_another_plan_began_is_computed_token_by_token() -> None:
    """As it was there: in one step of several it would round in another way."""
    steps = scheduler(batches_agree=True)
    steps.add("a", [1, 2, 3, 4, 5], answer=[50, 51, 52, 53, 54, 55, 56], new_tokens=4)
    steps.add("b", [7, 8], answer=[60, 61, 62], new_tokens=4)
    seen = []
    for token in range(70, 77):
        step = steps.decide().step
        assert step is not None
        seen.append((step.singly, shown(step)))
        answer(steps, [token] * sum(entry.logit_rows for entry in step.entries))
    assert seen == [
        (False, ([("a", 0, (1, 2), 0)], 1)),
        (False, ([("b", 0, (7, 8), 0)], 1)),
        (False, ([("a", 2, (3, 4, 5), 0)], 1)),
        (True, ([("a", 5, (50, 51), 0), ("b", 2, (60, 61), 0)], 1)),
        (False, ([("b", 4, (62,), 1)], 1)),
        (True, ([("a", 7, (52, 53, 54, 55), 0)], 1)),
        (False, ([("a", 11, (56,), 1), ("b", 5, (74,), 1)], 3)),
    ]


def test_an_answer_that_is_alone_has_guesses() -> None:
    """Whose keys and values have room where its own will be."""
    steps = scheduler(drafts=7)
    steps.add("a", [1, 2], new_tokens=9, speculate="auto")
    step = steps.decide().step
    assert (shown(step), step and step.drafts) == (([("a", 0, (1, 2), 1)], 9), 7)
    steps.answer([50], last=False)
    steps.answer([51, 52, 53], drafted=5)
    step = steps.decide().step
    assert (shown(step), step and step.drafts) == (([("a", 5, (53, 53), 2)], 5), 7)
    assert steps.work.drafted_tokens == 5
    assert steps.work.accepted_tokens == 2
    assert steps.work.answer_tokens == 4
    assert steps.work.steps == 3
    steps.add("b", [7, 8], new_tokens=9, speculate="lookup")
    orders = steps.decide()
    assert orders.yields
    assert shown(orders.step) == ([("b", 0, (7, 8), 1)], 1)
    steps.answer([54, 55], drafted=1)
    assert shown(steps.decide().step) == ([("a", 7, (55,), 1)], 1)
    steps.answer([60])
    steps.answer([56])
    step = steps.decide().step
    assert shown(step) == ([("a", 8, (56,), 1), ("b", 2, (60,), 1)], 2)


@pytest.mark.parametrize(
    ("limits", "speculate", "drafts"),
    [
        ({"drafts": 7}, "lookup", 7),
        ({"drafts": 7}, "off", 0),
        ({}, "lookup", 0),
        ({"drafts": 7, "capacity": 8, "disk": 40}, "lookup", 0),
    ],
)
def test_where_nothing_is_guessed(
    limits: dict[str, int], speculate: Speculation, drafts: int
) -> None:
    """Where that was not asked for, where rows do not agree, and in a request longer than
    memory."""
    steps = scheduler(**limits)  # type: ignore[arg-type]
    steps.add("a", [1, 2], new_tokens=9, speculate=speculate)
    orders = steps.decide()
    for request in orders.reserve:
        steps.reserved(request, why_not=None)
        orders = steps.decide()
    assert orders.step is not None
    assert orders.step.run > 1
    assert orders.step.drafts == drafts


def test_guesses_are_repeated_in_steps_of_an_even_number_of_rows() -> None:
    steps = scheduler(drafts=7)
    steps.add(
        "a", [1, 2, 3, 4], answer=[50, 51, 52, 53, 54, 55, 56, 57], together=((5, 10),),
        new_tokens=4, speculate="auto",
    )  # fmt: skip
    seen = []
    for tokens in ([], [], [], [], [], [70]):
        step = steps.decide().step
        assert step is not None
        (entry,) = step.entries
        seen.append((step.singly, step.spare, entry.position, entry.tokens, entry.logit_rows))
        answer(steps, tokens)
    assert seen == [
        (False, 0, 0, (1, 2, 3, 4), 0),
        (True, 0, 4, (50,), 0),
        (False, 0, 5, (51, 52, 53, 54), 0),
        (False, 1, 9, (55, 56), 0),
        (True, 0, 10, (56,), 0),
        (False, 0, 11, (57,), 1),
    ]


def test_after_a_wrong_guess_states_are_those_before_it() -> None:
    """Right tokens are computed again, alone, before the answer goes on beside another."""
    steps = scheduler(drafts=7, rewinds=True)
    steps.add("a", [1, 2], new_tokens=20, speculate="auto")
    steps.decide()
    steps.answer([50], last=False)
    steps.answer([51, 52, 53], drafted=5, last=False)  # from position 2, where it stays
    steps.add("b", [7, 8], new_tokens=9)
    assert steps.decide().yields
    steps.answer([54, 55], drafted=3)
    step = steps.decide().step
    assert shown(step) == ([("a", 2, (50, 51, 52, 53, 54, 55), 1)], 1)
    assert step is not None
    assert step.drafts
    steps.answer([60])  # of b's prompt, which came first
    steps.answer([56])
    assert shown(steps.decide().step) == ([("a", 8, (56,), 1), ("b", 2, (60,), 1)], 8)
    assert steps.work.accepted_tokens == 3


def test_where_the_rows_would_be_odd_a_token_stands_for_a_guess() -> None:
    steps = scheduler(drafts=7, rewinds=True)
    steps.add("a", [1, 2], new_tokens=20, speculate="auto")
    steps.decide()
    steps.answer([50], last=False)
    steps.answer([51, 52], drafted=3)
    assert shown(steps.decide().step) == ([("a", 2, (50, 51, 52, 52), 2)], 17)
    steps.answer([53], drafted=1, last=True)
    assert shown(steps.decide().step) == ([("a", 2, (50, 51, 52, 53), 1)], 16)
    answer(steps, [54], end="stop")
    assert steps.decide().finish == ("a",)


def test_states_are_repeated_without_a_spare_row() -> None:
    """The last of an odd number was behind: it is computed with the next token."""
    steps = scheduler(drafts=7, rewinds=True)
    steps.add(
        "a", [1, 2, 3, 4], answer=[50, 51, 52, 53, 54, 55], together=((4, 9),),
        new_tokens=4, speculate="auto",
    )  # fmt: skip
    seen = []
    for tokens in ([], [], [70], [71]):
        step = steps.decide().step
        assert step is not None
        (entry,) = step.entries
        seen.append((step.singly, step.spare, entry.position, entry.tokens, entry.logit_rows))
        steps.answer(tokens, together=bool(tokens))
    assert seen == [
        (False, 0, 0, (1, 2, 3, 4), 0),
        (False, 0, 4, (50, 51, 52, 53), 0),
        (False, 0, 8, (54, 55), 1),
        (False, 0, 10, (70, 70), 2),
    ]


def test_an_answer_that_is_given_is_not_computed() -> None:
    steps = scheduler()
    steps.add("a", [1, 2, 3, 4, 5], answer=[50, 51, 52, 53, 54], restored=3, new_tokens=4)
    assert steps.decide() == Orders(step=whole_step("a", 0, (1, 2)))
    answer(steps, [])
    assert steps.decide() == Orders(step=whole_step("a", 2, (3, 4, 5)))
    orders = steps.decide()
    assert orders.restore == {"a": 3}
    assert orders.step == Step(
        entries=(StepEntry(request="a", position=8, tokens=(53,), logit_rows=0),), singly=True
    )
    answer(steps, [])
    answer(steps, [])
    assert shown(steps.decide().step) == ([("a", 9, (54,), 1)], 4)
    steps.add("b", [1], answer=[2, 3], restored=2, new_tokens=1)
    with pytest.raises(ValueError, match="needs tokens"):
        steps.decide()


def test_a_prompt_that_is_given_with_its_answer_is_not_computed() -> None:
    steps = scheduler()
    known = partial(steps.add, answer=[50, 51, 52, 53, 54], new_tokens=4, restores_prompt=True)
    known("a", [1, 2, 3, 4, 5], restored=3)
    orders = steps.decide()
    assert orders.restore == {"a": 3}
    assert orders.step == Step(
        entries=(StepEntry(request="a", position=8, tokens=(53,), logit_rows=0),), singly=True
    )
    answer(steps, [])
    assert shown(steps.decide().step) == ([("a", 9, (54,), 1)], 4)
    known("b", [1, 2], restored=0)
    with pytest.raises(ValueError, match="needs tokens"):
        steps.decide()


def whole_step(request: str, position: int, tokens: tuple[int, ...]) -> Step:
    entry = StepEntry(request=request, position=position, tokens=tokens, logit_rows=0)
    return Step(entries=(entry,))


def test_a_step_of_known_tokens_stands_for_steps_of_one_each() -> None:
    entries = (
        StepEntry(request="a", position=5, tokens=(50, 51), logit_rows=0),
        StepEntry(request="b", position=2, tokens=(60, 61), logit_rows=0),
    )
    assert [shown(each) for each in Step(entries=entries, singly=True).apart] == [
        ([("a", 5, (50,), 0), ("b", 2, (60,), 0)], 1),
        ([("a", 6, (51,), 0), ("b", 3, (61,), 0)], 1),
    ]
    unequal = (entries[0], StepEntry(request="b", position=2, tokens=(60,), logit_rows=0))
    with pytest.raises(ValueError, match="same number of tokens of each"):
        Step(entries=unequal, singly=True)
    with pytest.raises(ValueError, match="cannot sample tokens"):
        Step(entries=entries, singly=True, run=2)


def test_requests_that_wait_for_one_token_go_together() -> None:
    steps = scheduler()
    steps.add("a", [1, 2], new_tokens=5)
    steps.add("b", [3], new_tokens=4)
    assert shown(steps.decide().step) == ([("a", 0, (1, 2), 1)], 1)
    assert shown(steps.decide().step) == ([("b", 0, (3,), 1)], 1)
    answer(steps, [50])
    answer(steps, [60])
    assert shown(steps.decide().step) == ([("a", 2, (50,), 1), ("b", 1, (60,), 1)], 3)


def test_a_long_prompt_does_not_hold_up_another_reply() -> None:
    steps = scheduler(chunk=2)
    steps.add("a", [1], new_tokens=9)
    steps.decide()
    assert not steps.decide().yields
    steps.add("b", list(range(6)), new_tokens=1)
    orders = steps.decide()
    assert orders.yields
    answer(steps, [50])
    order = []
    for _ in range(6):
        step = orders.step
        assert step is not None
        order.append(step.entries[0].request)
        (entry,) = step.entries
        answer(steps, [50] * entry.logit_rows, end="length" if entry.request == "b" else None)
        orders = steps.decide()
    assert order == ["b", "a", "b", "a", "b", "a"]


def test_the_last_token_of_a_prompt_is_computed_once() -> None:
    """Alone in its chunk, it looks like a sampled token that waits to be computed."""
    steps = scheduler(chunk=1, stages=1)
    steps.add("a", [1, 2], new_tokens=1)
    steps.add("b", [5], new_tokens=0)
    order = []
    while (step := steps.decide().step) is not None:
        order += [(entry.request, entry.position) for entry in step.entries]
        gives = step.entries[0].request == "a" and step.logit_rows > 0
        answer(steps, [9] * gives, end="length")
    assert sorted(order) == [("a", 0), ("a", 1), ("b", 0)]


def test_no_token_of_a_prompt_is_left_alone() -> None:
    """One token alone takes another way through attention, and the last of an odd number through
    products: its row would be another."""
    steps = scheduler(chunk=4, stages=3)
    steps.add("a", list(range(9)), new_tokens=1)
    sizes = []
    while (step := steps.decide().step) is not None:
        sizes.append(step.num_tokens)
    assert sizes == [4, 2, 3]


def test_a_prompt_is_cut_small_while_somebody_reads_an_answer() -> None:
    assert chunks_beside(new_tokens=500) == [4, 4, 6, 8, 12, 8, 8, 8, 8, 5]
    assert chunks_beside(new_tokens=500, rows_agree=False) == [64, 7], "it would be another prompt"
    assert chunks_beside(new_tokens=1) == [64, 7], "nobody waits for a next token"


def chunks_beside(*, new_tokens: int, rows_agree: bool = True) -> list[int]:
    """Of a prompt of 71 tokens, where one token of an answer takes as long as 8 of a chunk."""
    steps = scheduler(chunk=64, capacity=1000, rows_agree=rows_agree)
    steps.add("a", [1, 2], new_tokens=new_tokens)
    steps.decide()
    steps.add("b", list(range(71)), new_tokens=1)
    sizes: list[int] = []
    at_s = 0.0
    while sum(sizes) < 71:
        while (step := steps.decide().step) is not None:
            sizes += [step.num_tokens] if step.entries[0].request == "b" else []
        oldest = steps.under_way[0].step
        at_s += 1.0 if oldest.num_tokens == 1 else oldest.num_tokens / 8
        count = sum(entry.logit_rows for entry in oldest.entries)
        end: FinishReason | None = "length" if new_tokens == 1 else None
        steps.answer([50] * count, ends=[end] * count, at_s=at_s)
    return sizes


def test_the_logits_of_every_row() -> None:
    steps = scheduler()
    steps.add("a", [1, 2, 3], new_tokens=0)
    assert shown(steps.decide().step) == ([("a", 0, (1, 2), 2)], 1)
    assert shown(steps.decide().step) == ([("a", 2, (3,), 1)], 1)
    answer(steps, [])
    assert steps.decide() == Orders()
    answer(steps, [])
    assert steps.decide() == Orders(finish=("a",))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_only_as_many_steps_are_out_as_keep_the_stages_busy(stages: int) -> None:
    steps = scheduler(chunk=1, stages=stages)
    steps.add("a", list(range(20)), new_tokens=1)
    for _ in range(stages + 1):
        assert steps.decide().step is not None
    assert steps.decide().step is None
    answer(steps, [])
    assert steps.decide().step is not None


def test_who_does_not_fit_waits_and_is_not_overtaken() -> None:
    steps = scheduler(capacity=20, requests=2)
    steps.add("a", [1] * 4, new_tokens=10)
    steps.add("b", [2] * 4, new_tokens=10)
    steps.add("c", [3], new_tokens=1)
    assert shown(steps.decide().step) == ([("a", 0, (1, 1, 1, 1), 1)], 10)
    assert not steps.decide().yields, "nobody else could start"
    assert steps.decide().step is None
    steps.cancel("a")
    orders = steps.decide()
    assert (orders.yields, orders.finish) == (True, ("a",))
    assert shown(orders.step) == ([("b", 0, (2, 2, 2, 2), 1)], 1)
    answer(steps, [50])
    assert shown(steps.decide().step) == ([("c", 0, (3,), 1)], 1)


def test_no_more_requests_at_once_than_there_are_slots() -> None:
    steps = scheduler(requests=1)
    steps.add("a", [1], new_tokens=2)
    steps.add("b", [2], new_tokens=2)
    assert shown(steps.decide().step) == ([("a", 0, (1,), 1)], 2)
    answer(steps, [50])
    steps.cancel("a")
    assert shown(steps.decide().step) == ([("b", 0, (2,), 1)], 2)


def test_a_prompt_is_matched_before_it_is_computed() -> None:
    steps = scheduler(chunk=2, has_prefixes=True)
    steps.add("a", [1, 2, 3, 4, 5], new_tokens=1)
    steps.add("short", [1, 2], new_tokens=1)
    orders = steps.decide()
    assert orders.match == {"a": Match(prompt=(1, 2, 3, 4, 5))}
    assert shown(orders.step) == ([("short", 0, (1, 2), 1)], 1)
    assert steps.decide() == Orders()
    for wrong in (-2, 4, 6):
        steps.matched("a", wrong)
        with pytest.raises(ValueError, match=f"a prefix of {wrong} tokens found for a prompt of 5"):
            steps.decide()
    steps.matched("a", 2)
    assert shown(steps.decide().step) == ([("a", 2, (3, 4), 0)], 1)
    steps.matched("cancelled", 2)


def test_who_had_a_turn_is_swapped_out_for_who_waits() -> None:
    steps = scheduler(capacity=10, disk=40, chunk=8)
    steps.add("a", [1] * 4, new_tokens=6)
    steps.add("b", [2] * 4, new_tokens=6)
    assert shown(steps.decide().step) == ([("a", 0, (1, 1, 1, 1), 1)], 5)
    for token in range(5):
        answer(steps, [token], last=token == 4)
    assert steps.decide() == Orders(swap_out=("a",))
    assert steps.decide() == Orders()
    steps.swapped_out("a", why_not=None)
    assert shown(steps.decide().step) == ([("b", 0, (2, 2, 2, 2), 1)], 5)


def test_a_full_disk_ends_who_came_last_and_says_why() -> None:
    steps = scheduler(capacity=16, disk=40, chunk=8)
    steps.add("a", [1] * 4, new_tokens=9)
    steps.add("b", [2] * 4, new_tokens=9)
    for _ in range(2):
        steps.decide()
    for _ in range(2):
        answer(steps, [5])
    swapped_out: tuple[str, ...] = ()
    while not swapped_out:
        orders = steps.decide()
        swapped_out = orders.swap_out
        if orders.step is not None:
            answer(steps, [5] * orders.step.batch)
    assert swapped_out == ("a",)
    steps.swapped_out("a", why_not="no room on c")
    orders = steps.decide()
    assert orders.finish == ("b",)
    assert orders.give_up == {"b": "no room on c"}
    assert orders.step is not None
    assert [entry.request for entry in orders.step.entries] == ["a"]
    assert steps.decide() == Orders()


def test_who_is_longer_than_memory_needs_room_on_disk() -> None:
    steps = scheduler(capacity=10, disk=40)
    for name in ("a", "b"):
        steps.add(name, [1] * 15, new_tokens=2)
    assert steps.decide() == Orders(reserve={"a": 17})
    steps.reserved("a", why_not="no room on c")
    orders = steps.decide()
    assert (orders.finish, orders.give_up) == (("a",), {"a": "no room on c"})
    assert orders.reserve == {"b": 17}
    steps.reserved("b", why_not=None)
    assert shown(steps.decide().step) == ([("b", 0, (1, 1, 1, 1), 0)], 1)
    steps.reserved("a", why_not=None)


def test_what_is_cancelled_is_not_computed_any_more() -> None:
    steps = scheduler(chunk=1, stages=1)
    steps.add("a", [1, 2, 3, 4], new_tokens=1)
    steps.decide()
    steps.decide()
    steps.cancel("a")
    steps.cancel("a")
    steps.cancel("unknown")
    assert steps.decide() == Orders(finish=("a",))
    answer(steps, [])
    answer(steps, [])
    assert steps.decide().step is None


def submitted(request: str, tokens: int = 1, new_tokens: int = 1) -> Submitted:
    return Submitted(request=request, prompt=(1,) * tokens, new_tokens=new_tokens)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([submitted("a", tokens=0)], "needs tokens"),
        ([submitted("a", new_tokens=-1)], "needs tokens"),
        ([submitted("a"), submitted("a")], "id of its own"),
        ([Answered()], "peers answered a step, but none is under way"),
        ([submitted("a"), None, Answered()], "0 tokens for a step that gives 1"),
        (
            [submitted("a"), None, Answered(tokens=(1, 2), ends=(None, None))],
            "2 tokens for a step that gives 1",
        ),
        # The sampler says when a reply ends; a reply without an end must not outgrow its memory.
        (
            [submitted("a"), None, Answered(tokens=(5,), ends=(None,), last=False)],
            "goes on after its last token",
        ),
    ],
)
def test_events_that_contradict_the_orders(events: list[Event | None], message: str) -> None:
    """None: a decision between two events."""
    steps = scheduler()
    for event in events:
        if event is None:
            steps.decide()
        else:
            steps.tell(event)
    with pytest.raises(ValueError, match=message):
        steps.decide()


def test_a_request_that_could_never_start_is_refused() -> None:
    steps = scheduler()
    steps.tell(submitted("a", tokens=60, new_tokens=41))
    steps.tell(submitted("b", tokens=2))
    orders = steps.decide()
    assert orders.refuse == {"a": "101 tokens never fit into 100"}
    assert shown(orders.step) == ([("b", 0, (1, 1), 1)], 1)


def test_a_refusal_is_not_told_to_the_next_request_with_that_id() -> None:
    steps = scheduler()
    steps.tell(submitted("a", tokens=60, new_tokens=41))
    steps.cancel("a")
    steps.tell(submitted("a", tokens=2))
    orders = steps.decide()
    assert orders.refuse == {}
    assert shown(orders.step) == ([("a", 0, (1, 1), 1)], 1)


def test_only_who_has_ended_is_over() -> None:
    steps = scheduler()
    for name in ("a", "b"):
        steps.add(name, [1], new_tokens=9)
        steps.decide()
    for token in (5, 6):
        answer(steps, [token])
    assert shown(steps.decide().step) == ([("a", 1, (5,), 1), ("b", 1, (6,), 1)], 8)
    steps.answer([7, 8], ends=["stop", None])
    orders = steps.decide()
    assert orders.finish == ("a",)
    assert shown(orders.step) == ([("b", 2, (8,), 1)], 7)


def test_batches_lie_side_by_side_while_requests_come_and_go() -> None:
    """A pool moves the last cache into a hole, and swaps what a batch has in another order."""
    steps, pool, moved = scheduler(chunk=2, requests=32, capacity=100_000), SlotOrder(), 0
    names = iter(range(1000))
    for _ in range(12):
        steps.add(str(next(names)), [1, 2], new_tokens=500)
    for turn in range(200):
        orders = steps.decide()
        for name in orders.finish:
            pool.release(name)
            steps.add(str(next(names)), [1, 2, 3, 4], new_tokens=500)
        assert orders.step is not None
        batch = [each.request for each in orders.step.entries]
        for name in batch:
            pool.open(name)
        moved += len(pool.gather(batch).swaps)
        tokens = sum(each.logit_rows for each in orders.step.entries)
        if turn % 9 == 0 and tokens > 4:  # one in the middle is given up
            steps.cancel(batch[3])
        answer(steps, [9] * tokens)
    came = next(names)
    assert came > 30
    assert moved < came
