"""How long a member waits while strangers fill a peer's door.

python -m edge.demos.bench.flood

One peer of one thread with the bundled model. A member asks who it is, over a connection of its own
with handshake and all, and has it answer a prompt: alone, with 500 connections that say nothing,
with 500 that stopped in the middle of a handshake, and with 1,000 handshakes a second that have no
key. Strangers are a process of their own, and come from one address. How many handshakes the peer
has ended in a second is a figure, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import click

import edge
from edge.demos.bench import results
from edge.demos.bench.options import append_option
from edge.demos.bench.results import Figures
from edge.demos.bundled import MODEL
from edge.protocol.peer_info import PeerInfo, describe_peer
from edge.transport import PROTOCOL_VERSION, parse_address

CONNECTIONS = 500
HANDSHAKES_PER_S = 1000
NEW_TOKENS = 32
_PREAMBLE = struct.pack("!4sHB", b"EDGE", PROTOCOL_VERSION, 0x11)
_ROUND_S = 0.02


async def _idle(address: str) -> None:
    """Connections that say nothing; who is hung up on comes again."""
    await asyncio.gather(*(_again_and_again(address, b"") for _ in range(CONNECTIONS)))


async def _half(address: str) -> None:
    """Connections that say what Edge says first, and no more."""
    await asyncio.gather(*(_again_and_again(address, _PREAMBLE) for _ in range(CONNECTIONS)))


async def _again_and_again(address: str, said: bytes) -> None:
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(*parse_address(address))
            writer.write(said)
            while await reader.read(100):
                pass
            writer.close()
        await asyncio.sleep(1.0)


async def _handshakes(address: str) -> None:
    """With a proof of membership that is none; at the end, prints how many there were a second."""
    running: set[asyncio.Task[None]] = set()
    begun = 0
    first_s = time.perf_counter()
    try:
        while True:
            due = int((time.perf_counter() - first_s) * HANDSHAKES_PER_S)
            while begun < due and len(running) < CONNECTIONS:
                begun += 1
                task = asyncio.ensure_future(_handshake(address))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(_ROUND_S)
    finally:
        print((begun - len(running)) / (time.perf_counter() - first_s), flush=True)


async def _handshake(address: str) -> None:
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*parse_address(address))
        writer.write(_PREAMBLE + os.urandom(16) + os.urandom(32))
        while await reader.read(100):
            pass
        writer.close()


STRANGERS = {"idle": _idle, "half-open": _half, "handshakes": _handshakes}


async def _until_terminated(kind: str, address: str) -> None:
    being = asyncio.ensure_future(STRANGERS[kind](address))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, being.cancel)
    print(flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        await being


@contextlib.contextmanager
def strangers(kind: str, address: str) -> Iterator[list[float]]:
    """At the peer's door for as long as this lasts; afterwards, what they say of themselves."""
    command = [sys.executable, "-m", __spec__.name, "--be", kind, address]
    said: list[float] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()  # they come
            time.sleep(2.0)  # they are there then
            yield said
        finally:
            process.terminate()
            said.extend(map(float, process.stdout.read().split()))


def asked(peer: PeerInfo) -> float:
    """Seconds until it has said who it is."""
    begin_s = time.perf_counter()
    asyncio.run(describe_peer(peer.address, peer.credentials))
    return time.perf_counter() - begin_s


def measure(rounds: int) -> Figures:
    """A member's times; in each round alone and with each kind of strangers."""
    found = Figures()
    with (
        edge.Cluster.local(1, threads=1) as cluster,
        cluster.load(MODEL) as model,
    ):
        (peer,) = cluster.peers

        def times(beside: str) -> dict[str, float]:
            questions = [asked(peer) for _ in range(20)]
            replies = [
                told["first_token_s"] + told["decode_s"]
                for told in (
                    model.generate([1], max_new_tokens=NEW_TOKENS, ignore_eos=True).statistics
                    for _ in range(5)
                )
            ]
            took = {
                "describe": statistics.median(questions),
                f"reply of {NEW_TOKENS} tokens": statistics.median(replies),
            }
            for what, each_s in took.items():
                found.add(f"{what}, {beside}", "s", each_s)
            return took

        times("warming up")
        found = Figures()
        for _ in range(rounds):
            alone = times("alone")
            for kind in STRANGERS:
                with strangers(kind, peer.address) as said:
                    took = times(f"beside {kind}")
                for rate in said:
                    found.add("handshakes of strangers that were ended", "1/s", rate)
                for what, each_s in took.items():
                    found.add(f"{what}, beside {kind} / alone", "ratio", each_s / alone[what])
    return found


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--be", nargs=2, hidden=True, type=(click.Choice(list(STRANGERS)), str))
@append_option
def main(rounds: int, append: bool, be: tuple[str, str] | None) -> None:
    """What a member notices of strangers."""
    if be is not None:
        asyncio.run(_until_terminated(*be))
        return
    results.publish(
        measure(rounds).metrics(),
        question="a member beside strangers at the same peer",
        variant=f"{CONNECTIONS} connections; {HANDSHAKES_PER_S} handshakes a second",
        link="TCP over loopback",
        model="bundled",
        keep=append,
    )


if __name__ == "__main__":
    main()
