"""Peers of this process that compute nothing, and a coordinator's model on them.

Daemons, connections, links, caches and swaps are the real ones; only the back end is `null`, whose
replies are known beforehand. All run on the loop of the test.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from edge.answers.answer import Answer
from edge.backends.null.made_up import logits_after
from edge.demos.bundled import MODEL
from edge.kernels.sampling.parameters import SamplingParameters
from edge.kernels.sampling.reference import sample
from edge.membership.membership import Membership
from edge.membership.membership import credentials as credentials_of
from edge.models.spec import ModelSpec
from edge.peer.daemon import PeerDaemon
from edge.peer.settings import PeerSettings
from edge.planning.load_options import LoadOptions
from edge.protocol.lease import Lease
from edge.protocol.peer_info import describe_peer
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.runs.delivery import Delivery
from edge.runs.load import load_model
from edge.runs.resolved import ResolvedLoad
from edge.runs.run import PlanRun
from edge.transport import Credentials, WireRule
from edge.weights.checkpoint import Checkpoint
from tests.support.plans import bundled_plan
from tests.support.scripted_peers import Owner, Results, asked

TOKEN_BYTES = 6 * 4 * 2 * 16 * 4
"""Of keys and values of one token in the whole of the bundled model, in float32."""


@contextlib.asynccontextmanager
async def null_peers(
    folder: Path,
    count: int,
    *,
    kv_disk_bytes: int = 0,
    model_memory_bytes: int | None = None,
    membership: Membership | None = None,
    announce: bool = False,
) -> AsyncIterator[list[PeerDaemon]]:
    """N daemons; each may keep `kv_disk_bytes` of keys and values on disk, and has
    `model_memory_bytes` for weights and those. `membership` is that of one. announce: for tests
    that put another discovery in the place of zeroconf."""
    async with contextlib.AsyncExitStack() as stack:
        daemons = []
        for number in range(count):
            settings = PeerSettings(
                name=f"null-{number}",
                listen="127.0.0.1:0",
                threads=1,
                announce=announce,
                cache_root=folder / str(number),
                cache_limit_bytes=1 << 30,
                kv_disk=(folder / f"{number}-kv", kv_disk_bytes) if kv_disk_bytes else None,
                model_memory_bytes=model_memory_bytes,
                backend="null",
            )
            shown, id = None, None
            if membership is not None:
                shown = credentials_of(lambda: membership)
                id = membership.identity.id
            daemon = PeerDaemon(settings, shown, id)
            await daemon.start()
            stack.push_async_callback(daemon.aclose)
            daemons.append(daemon)
        yield daemons


async def load(
    daemons: Sequence[PeerDaemon],
    layout: str,
    limits: StepLimits,
    owner: Owner,
    folder: Path,
    lease: Lease | None = None,
    *,
    path: Path = MODEL,
    credentials: Credentials | None = None,
    share_prefixes: bool = False,
    prefixes_of: tuple[str, ...] = (),
    has_states: bool = False,
) -> PlanRun:
    """The bundled model, or one of its shape, cut by the layout of that name. has_states: keys and
    values are in 4 bits, so that requests have states."""
    peers = [await describe_peer(daemon.resources.addresses[0], credentials) for daemon in daemons]
    plan = bundled_plan(layout, devices=[peer.id for peer in peers])
    stages = len(plan.stages)
    with Checkpoint.open(path) as checkpoint:
        options = LoadOptions(dtype="int8", share_prefixes=share_prefixes, prefixes_of=prefixes_of)
        weight_format = options.weight_format(checkpoint)
        delivery = Delivery(
            checkpoint=checkpoint,
            load=ResolvedLoad(
                plan=plan,
                spec=weight_format.graded(checkpoint.spec),
                weight_format=weight_format,
                limits=limits,
                kv_dtype="int4" if has_states else options.kv_dtype,
                wire_rules=WireRules(
                    sums=(WireRule(),) * stages, hops=(WireRule(),) * (stages - 1)
                ),
                share_prefixes=share_prefixes,
                trusted=options.trusted,
            ),
            lease=lease or Lease(),
            cache_root=folder / "coordinator",
        )
        return await load_model(delivery, peers, on_end=owner)


def request(
    prompt: Sequence[int],
    sink: Results,
    *,
    new_tokens: int,
    parameters: SamplingParameters,
    salt: str = "",
) -> Answer:
    return asked(prompt, sink, new_tokens=new_tokens, sampling=parameters, cache_salt=salt)


def expected_tokens(
    spec: ModelSpec, prompt: Sequence[int], count: int, parameters: SamplingParameters
) -> list[int]:
    tokens = list(prompt)
    for position in range(len(prompt), len(prompt) + count):
        logits = logits_after(spec, tokens)
        tokens.append(
            sample(
                logits,
                history=tokens,
                prompt_tokens=len(prompt),
                parameters=parameters,
                position=position,
            )
        )
    return tokens[len(prompt) :]
