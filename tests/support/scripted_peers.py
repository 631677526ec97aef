"""Peers that follow the handshake and then do as a test tells them, on a port of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge import transport
from edge.answers.answer import Answer, Sink
from edge.answers.terms import Terms
from edge.errors import EdgeError
from edge.kernels.sampling.logprobs import Logprobs
from edge.partition import Plan, Shard, Stage
from edge.protocol.heartbeat import show_life
from edge.protocol.step import FinishReason
from edge.scheduling.residency import Residency
from edge.scheduling.state import SchedulingLimits, SchedulingState
from edge.transport import Channel, Frame, Link

VOCAB = 10


def plan(stages: int) -> Plan:
    shard = Shard(device="d", heads=range(1), ffn_columns=range(1), vocab=range(VOCAB))
    return Plan(
        model="m",
        version=1,
        stages=tuple(
            Stage(layers=range(each, each + 1), shards=(replace(shard, device=f"d{each}"),))
            for each in range(stages)
        ),
    )


def asked(prompt: Sequence[int], sink: Sink, *, new_tokens: int = 0, **terms: Any) -> Answer:
    """An answer of so many tokens; of none: the logits of the prompt. terms: fields of Terms."""
    if not new_tokens:
        terms.setdefault("rows", "logits")
    return Answer(terms=Terms(prompt=tuple(prompt), max_new_tokens=new_tokens, **terms), sink=sink)


def begun(residency: Residency, **limits: Any) -> SchedulingState:
    """An empty state for a run of one stage. limits: fields of SchedulingLimits."""
    given = {"stages": 1, "chunk_tokens": 4, "logit_chunk_tokens": 4, **limits}
    return SchedulingState.new(SchedulingLimits(**given), residency)


Behaviour = Callable[[Channel, Frame], Awaitable[None]]


class Results:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs | None] = []
        self.chosen_s: list[float] = []
        self.end: FinishReason | None = None
        self.errors: list[EdgeError] = []
        self.found: NDArray[np.float32] | None = None
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    def token(
        self,
        token_id: int,
        end: FinishReason | None,
        chosen_s: float,
        logprobs: Logprobs | None,
    ) -> bool:
        self.logprobs.append(logprobs)
        self.chosen_s.append(chosen_s)
        self.tokens.append(token_id)
        self.end = end
        self.begun.set()
        if end is not None:
            self.ended.set()
        return False

    def rows(self, rows: NDArray[np.float32]) -> None:
        self.found = rows
        self.ended.set()

    def failed(self, error: EdgeError) -> None:
        self.errors.append(error)
        self.ended.set()


class Owner:
    """Keeps what a plan that ended has not finished."""

    def __init__(self) -> None:
        self.unfinished: list[Answer] = []
        self.failure: EdgeError | None = None
        self.told = asyncio.Event()

    def __call__(self, answers: Sequence[Answer], error: EdgeError) -> None:
        self.unfinished.extend(answers)
        self.failure = error
        self.told.set()


async def refuse(link: Link, _hello: Mapping[str, Any]) -> None:
    link.close()


@contextlib.asynccontextmanager
async def peer(
    behave: Behaviour, name: str = "odd", *, answers_calls: bool = True
) -> AsyncIterator[str]:
    """A peer that answers calls by "ok", unless that is left to `behave`, too, as posts are.

    It shows life, however long a slow machine takes for what a test is about.
    """

    async def living(channel: Channel) -> None:
        with contextlib.suppress(transport.TransportError):
            await show_life(channel)

    async def serve(channel: Channel) -> None:
        life = asyncio.create_task(living(channel))
        try:
            while True:
                frame = await channel.receive()
                if answers_calls and "call" in frame.header and frame.kind != "strange":
                    told = {"kv_digest": None} if frame.kind == "connect" else {}
                    await channel.send(Frame("ok", {"call": frame.header["call"], **told}))
                else:
                    await behave(channel, frame)
        except transport.TransportError:
            await channel.aclose()
        finally:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)

    listener = await transport.listen(
        "127.0.0.1:0", credentials=None, hello={"name": name}, on_channel=serve, on_link=refuse
    )
    try:
        yield listener.addresses[0]
    finally:
        await listener.aclose()
