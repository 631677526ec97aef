"""Members of a cluster that has a new key, of which some have not heard."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator

import pytest

from edge.membership.identity import Identity
from edge.membership.store import enrolled_by_token, token
from edge.transport import Listener, RefusedError, TransportError, bring_rotation, connect
from edge.transport.credentials import NONCE_BYTES, TAG_BYTES
from edge.transport.errors import OutdatedError
from tests.support.members import Kept
from tests.support.transport_pairs import GREETING, Refusals, check_echo, echoing, run


@contextlib.asynccontextmanager
async def listening(kept: Kept) -> AsyncIterator[tuple[Listener, Refusals]]:
    refused = Refusals()
    async with echoing(credentials=kept.credentials(), on_refused=refused) as listener:
        yield listener, refused


def test_a_member_that_was_away_is_told_by_whom_it_calls() -> None:
    """Any member, not only whoever made the key; and it calls again by itself."""
    attic = Kept.founded()
    kitchen, cellar = attic.taking_in("kitchen"), attic.taking_in("cellar")
    before = cellar.credentials()
    for _ in range(2):
        kitchen.membership = kitchen.membership.following(attic.rotate())

    async def scenario() -> None:
        async with listening(kitchen) as (listener, _refused):
            await check_echo(listener, before)
            assert cellar.membership.cluster_id == attic.membership.cluster_id
            await check_echo(listener, before)
            await check_echo(listener, cellar.credentials())

    run(scenario)


def test_a_member_that_was_away_is_told_by_who_calls_it() -> None:
    """It listens anew then, as the daemon does."""
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen")
    attic.rotate()

    async def scenario() -> None:
        async with listening(kitchen) as (listener, refused):
            address, calling = listener.addresses[0], attic.credentials()
            call = asyncio.create_task(
                connect(address, hello={}, credentials=calling, timeout_s=30.0)
            )
            while not isinstance(await refused.queue.get(), OutdatedError):
                pass
            assert kitchen.membership.cluster_id == attic.membership.cluster_id
        async with echoing(credentials=kitchen.credentials(), address=address):
            await (await call).aclose()

    run(scenario)


def test_it_is_told_without_being_asked_for_anything() -> None:
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen")
    attic.rotate()

    async def scenario() -> None:
        async with listening(kitchen) as (listener, _refused):
            told = [
                await bring_rotation(listener.addresses[0], who.credentials(), timeout_s=30.0)
                for who in (attic, attic, Kept.founded("other"))
            ]
            assert told == [True, True, False]
            assert kitchen.membership.cluster_id == attic.membership.cluster_id

    run(scenario)


def test_a_stranger_that_falls_silent_takes_no_more_time_than_was_given() -> None:
    """However many keys of before there are, by which it might be a member."""
    attic = Kept.founded()
    for _ in range(3):
        attic.rotate()
    calls: list[asyncio.Task[None] | None] = []

    async def falls_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_first = not calls
        calls.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            for size in (len(GREETING), NONCE_BYTES):
                writer.write(await reader.readexactly(size))
            await reader.readexactly(TAG_BYTES)
            if not is_first:
                await reader.read()
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(falls_silent, "127.0.0.1", 0) as stranger:
            address = f"127.0.0.1:{stranger.sockets[0].getsockname()[1]}"
            with pytest.raises(TransportError):
                await connect(address, hello={}, credentials=attic.credentials(), timeout_s=1.0)
            await asyncio.gather(*(call for call in calls if call is not None))
        assert len(calls) <= 2

    run(scenario)


def test_who_stays_behind_gets_no_connection() -> None:
    attic = Kept.founded()
    cellar = attic.taking_in("cellar")
    script = Kept(enrolled_by_token(token(attic.membership), "it", "script", Identity.made()))
    attic.change(lambda newest: newest.expelling(cellar.membership.identity.id))
    attic.rotate()
    were = cellar.membership, script.membership

    async def scenario() -> None:
        async with listening(attic) as (listener, refused):
            for kept, message in (
                (cellar, "was left behind; pair it again"),
                (script, "this token has an earlier one; write a new token"),
            ):
                with pytest.raises(RefusedError, match=message):
                    await connect(listener.addresses[0], hello={}, credentials=kept.credentials())
                assert "had an earlier key" in str(await refused.queue.get())
            assert (cellar.membership, script.membership) == were
        for kept in (cellar, script):
            async with listening(kept) as (listener, refused):
                with pytest.raises(RefusedError, match="does not know this device"):
                    await connect(listener.addresses[0], hello={}, credentials=attic.credentials())

    run(scenario)


def test_what_is_told_again_or_changed_on_the_way_moves_nobody() -> None:
    """Under a cover that is made of this connection's nonces."""
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen")
    attic.rotate()

    async def scenario() -> None:
        async with listening(attic) as (listener, _refused):
            seen: list[bytes] = []

            async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there, back = await asyncio.open_connection("127.0.0.1", listener.port)

                async def answers() -> None:
                    while content := await there.read(1 << 16):
                        seen.append(content)
                        changed = (
                            content[:-1] + bytes([content[-1] ^ 1])
                            if len(content) > 100
                            else content
                        )
                        writer.write(changed)
                    writer.close()

                async def asks() -> None:
                    while content := await reader.read(1 << 16):
                        back.write(content)
                    back.close()

                with contextlib.suppress(ConnectionError):
                    await asyncio.gather(answers(), asks())

            async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as relay:
                port = relay.sockets[0].getsockname()[1]
                with pytest.raises(TransportError):
                    await connect(f"127.0.0.1:{port}", hello={}, credentials=kitchen.credentials())
            assert kitchen.membership.generation == 0
            told = b"".join(seen)
            assert len(told) > 1000
            for secret in (b"kitchen", b"rotation", attic.membership.past[-1].rotation[:64]):
                assert secret not in told
            await check_echo(listener, kitchen.credentials())

    run(scenario)


def test_a_device_with_fewer_roles_does_not_come_with_more() -> None:
    attic = Kept.founded()
    phone = attic.taking_in("phone")
    again = attic.taking_in("phone", ["use"], phone.membership.identity)

    async def scenario() -> None:
        async with listening(attic) as (listener, refused):
            with pytest.raises(TransportError):
                await connect(listener.addresses[0], hello={}, credentials=phone.credentials())
            assert "before it was paired again" in str(await refused.queue.get())
            await check_echo(listener, again.credentials())

    run(scenario)


def test_what_is_told_of_a_new_key_is_read_beside_the_loop() -> None:
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen")
    before = kitchen.credentials()
    attic.rotate()
    threads: list[int] = []

    def follow(rotation: bytes) -> None:
        threads.append(threading.get_ident())
        before.follow(rotation)

    async def scenario() -> None:
        watched = dataclasses.replace(before, follow=follow, now=lambda: known[0])
        known = [watched]
        async with listening(attic) as (listener, _refused):
            with pytest.raises(OutdatedError):
                await connect(listener.addresses[0], hello={}, credentials=watched)
        async with echoing(credentials=watched) as listener:
            address = listener.addresses[0]
            assert await bring_rotation(address, attic.credentials(), timeout_s=30.0)

    run(scenario)
    assert len(threads) == 2
    assert threading.get_ident() not in threads
    assert kitchen.membership.cluster_id == attic.membership.cluster_id
