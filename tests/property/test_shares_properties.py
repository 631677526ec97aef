"""However much others ask for: clients that always want something are given alike, none starves."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from edge.protocol.step import FinishReason, Step
from edge.scheduling.fairness import (
    ANSWER_WEIGHT,
    PRIORITIES,
    WEIGHTS,
    FairShares,
    Priority,
    Who,
)
from edge.scheduling.residency import Residency
from tests.support.scheduling import Steps


class Clients:
    """Some that each keep so many requests waiting, and peers that answer every step."""

    def __init__(
        self,
        waiting: list[tuple[int, Priority]],
        *,
        requests: int,
        memory: int,
        disk: int,
        new_tokens: int,
    ) -> None:
        residency = Residency(
            memory_tokens=memory, disk_tokens=disk, requests=requests, quantum_tokens=8
        )
        self.scheduler = Steps(
            residency, chunk_tokens=16, logit_chunk_tokens=16, stages=1, rows_agree=True
        )
        self.new_tokens = new_tokens
        self.finished: Counter[Who] = Counter()
        self.left: dict[str, int] = {}
        self.asked: dict[str, Who] = {}
        self.out: deque[Step] = deque()
        self.everybody = [Who(f"c{n}", priority) for n, (_count, priority) in enumerate(waiting)]
        for who, (count, _priority) in zip(self.everybody, waiting, strict=True):
            for _request in range(count):
                self.ask(who)

    def ask(self, who: Who) -> None:
        name = f"{len(self.left)}"
        self.left[name], self.asked[name] = self.new_tokens, who
        prompt = list(range(len(self.left), len(self.left) + 20))
        self.scheduler.add(name, prompt, new_tokens=self.new_tokens, who=who)

    def step(self) -> None:
        """Follow the orders there are, and answer the oldest step once."""
        while True:
            orders = self.scheduler.decide()
            for name in orders.swap_out:
                self.scheduler.swapped_out(name, why_not=None)
            for name, match in orders.match.items():
                self.scheduler.matched(name, match.tokens)
            if orders.step is not None:
                self.out.append(orders.step)
            elif not orders.swap_out and not orders.match:
                break
        step = self.out.popleft()
        ends: list[FinishReason | None] = []
        for entry in step.entries:
            if entry.logit_rows:
                self.left[entry.request] -= 1
                ends.append(None if self.left[entry.request] else "length")
        self.scheduler.answer([7] * len(ends), ends=ends)
        over = [e.request for e in step.entries if e.logit_rows and not self.left[e.request]]
        for name in over:
            self.finished[self.asked[name]] += 1
            self.ask(self.asked[name])


@given(
    waiting=st.lists(st.integers(1, 50), min_size=2, max_size=6),
    requests=st.integers(1, 4),
    memory=st.integers(40, 120),
    disk=st.sampled_from([0, 300]),
    new_tokens=st.integers(2, 12),
)
@settings(max_examples=24, deadline=None)
def test_who_asks_for_fifty_is_served_as_who_asks_for_one(
    waiting: list[int], requests: int, memory: int, disk: int, new_tokens: int
) -> None:
    """Where there is not room for all of them at once."""
    requests = min(requests, len(waiting) - 1)
    clients = Clients(
        [(count, "normal") for count in waiting],
        requests=requests,
        memory=memory,
        disk=disk,
        new_tokens=new_tokens,
    )
    while clients.finished.total() < 20 * len(waiting):
        clients.step()
    served = [clients.finished[who] for who in clients.everybody]
    assert max(served) <= 1.5 * min(served)


@given(
    waiting=st.lists(
        st.tuples(st.integers(2, 9), st.sampled_from(PRIORITIES)), min_size=2, max_size=4
    ),
    disk=st.sampled_from([0, 300]),
    new_tokens=st.integers(2, 5),
)
@settings(max_examples=12, deadline=None)
def test_a_priority_is_served_by_its_weight_and_none_starves(
    waiting: list[tuple[int, Priority]], disk: int, new_tokens: int
) -> None:
    """Where one answer is computed at a time, and others always wait."""
    clients = Clients(waiting, requests=1, memory=40, disk=disk, new_tokens=new_tokens)
    weights = {who: WEIGHTS[who.priority] for who in clients.everybody}
    alike = Counter(who.priority for who in clients.everybody)
    of_all = sum(WEIGHTS[priority] for priority in alike)
    while clients.finished.total() < 4 * of_all * max(alike.values()):
        clients.step()
    for who, weight in weights.items():
        due = clients.finished.total() * weight / of_all / alike[who.priority]
        assert abs(clients.finished[who] - due) <= 2 + 0.1 * due


@given(
    events=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40)), max_size=80),
    tokens=st.integers(1, 40),
)
def test_who_comes_anew_has_no_claim_and_no_debt(
    events: list[tuple[str, int]], tokens: int
) -> None:
    shares, under_way = FairShares(), Counter[Who]()
    for name, count in events:
        client = Who(name)
        if under_way[client] and count % 3 == 0:
            shares.go(client)
            under_way[client] -= 1
            continue
        shares.come(client)
        under_way[client] += 1
        shares.give(client, count)
    asking, new = [client for client in map(Who, "abcd") if under_way[client]], Who("new")
    shares.come(new)
    if not asking:
        return
    assert shares.first([*asking, new]) != new, "the least served was there before"
    given: Counter[Who] = Counter()
    for _turn in range(400):
        given[client := shares.first([*asking, new])] += 1
        shares.give(client, ANSWER_WEIGHT * tokens)
    assert given[new] >= 400 // (len(asking) + 1) - 1


def test_what_nobody_else_wanted_is_no_debt() -> None:
    """Neither of a client that was alone, nor of a priority."""
    for one, other in ((Who("a"), Who("b")), (Who("a"), Who("a", "low"))):
        shares = FairShares()
        shares.come(one)
        shares.give(one, 1_000_000)
        shares.go(one)
        shares.come(other)
        shares.come(one)
        turns = []
        for _turn in range(10):
            turns.append(shares.first([one, other]))
            shares.give(turns[-1], 10)
        assert turns.count(one) >= 5


def test_what_idle_clients_were_given_is_forgotten_in_the_end() -> None:
    shares = FairShares()
    shares.come(Who("stays"))
    for number in range(3000):
        shares.come(Who(f"c{number}"))
        shares.go(Who(f"c{number}"))
    assert len(shares._clients["normal"]._given) <= 1025
