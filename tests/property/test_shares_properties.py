"""However much others ask for: clients that always want something are given alike, none starves."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from edge.coordinator.kv_residency import Residency
from edge.coordinator.scheduler import Scheduler
from edge.coordinator.shares import ANSWER_WEIGHT, Shares
from edge.protocol.step import FinishReason, Step


class Clients:
    """Some that each keep so many requests waiting, and peers that answer every step."""

    def __init__(
        self, waiting: list[int], *, requests: int, memory: int, disk: int, new_tokens: int
    ) -> None:
        residency = Residency(
            memory_tokens=memory, disk_tokens=disk, requests=requests, quantum_tokens=8
        )
        self.scheduler = Scheduler(
            chunk_tokens=16, logit_chunk_tokens=16, residency=residency, stages=1
        )
        self.scheduler.rows_agree()
        self.new_tokens = new_tokens
        self.finished: Counter[str] = Counter()
        self.left: dict[str, int] = {}
        self.out: deque[Step] = deque()
        for number, count in enumerate(waiting):
            for _request in range(count):
                self.ask(f"c{number}")

    def ask(self, client: str) -> None:
        name = f"{client} {len(self.left)}"
        self.left[name] = self.new_tokens
        prompt = list(range(len(self.left), len(self.left) + 20))
        self.scheduler.add(name, prompt, new_tokens=self.new_tokens, client=client)

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
        self.scheduler.answered([7] * len(ends), ends, last=True)
        over = [e.request for e in step.entries if e.logit_rows and not self.left[e.request]]
        for name in over:
            client = name.split()[0]
            self.finished[client] += 1
            self.ask(client)


@given(
    waiting=st.lists(st.integers(1, 50), min_size=2, max_size=6),
    requests=st.integers(1, 4),
    memory=st.integers(40, 120),
    disk=st.sampled_from([0, 300]),
    new_tokens=st.integers(2, 12),
)
@settings(max_examples=60, deadline=None)
def test_who_asks_for_fifty_is_served_as_who_asks_for_one(
    waiting: list[int], requests: int, memory: int, disk: int, new_tokens: int
) -> None:
    """Where there is not room for all of them at once."""
    requests = min(requests, len(waiting) - 1)
    clients = Clients(waiting, requests=requests, memory=memory, disk=disk, new_tokens=new_tokens)
    while clients.finished.total() < 20 * len(waiting):
        clients.step()
    served = [clients.finished[f"c{number}"] for number in range(len(waiting))]
    assert max(served) <= 1.5 * min(served)


@given(
    events=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40)), max_size=80),
    tokens=st.integers(1, 40),
)
def test_who_comes_anew_has_no_claim_and_no_debt(
    events: list[tuple[str, int]], tokens: int
) -> None:
    shares, under_way = Shares(), Counter[str]()
    for client, count in events:
        if under_way[client] and count % 3 == 0:
            shares.go(client)
            under_way[client] -= 1
            continue
        shares.come(client)
        under_way[client] += 1
        shares.give(client, count)
    asking = [client for client in "abcd" if under_way[client]]
    shares.come("new")
    if not asking:
        return
    assert shares.first([*asking, "new"]) != "new", "the least served was there before"
    given: Counter[str] = Counter()
    for _turn in range(400):
        given[client := shares.first([*asking, "new"])] += 1
        shares.give(client, ANSWER_WEIGHT * tokens)
    assert given["new"] >= 400 // (len(asking) + 1) - 1


def test_what_idle_clients_were_given_is_forgotten_in_the_end() -> None:
    shares = Shares()
    shares.come("stays")
    for number in range(3000):
        shares.come(f"c{number}")
        shares.go(f"c{number}")
    assert len(shares._given) <= 1025
