"""Devices with keys of their own: paired by words, by a token, expelled, and strangers."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import segno

from edge.membership.identity import fingerprint
from edge.membership.store import CONFIG_VARIABLE, TOKEN_VARIABLE
from tests.support import passing_time
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import EDGE, PATIENCE_S, Daemon, Outcome, edge_process
from tests.support.processes import edge as run_edge
from tests.support.slow_cases import shown_in_parts

LOOPBACK = "127.0.0.1"
ON_LOOPBACK = ("--interface", LOOPBACK)
NEW_TOKENS = 3


class Device:
    """A user's device: a folder of keys."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.folder = folder / name
        self.environment = {
            CONFIG_VARIABLE: str(self.folder / "keys"),
            "EDGE_CACHE": str(self.folder / "cache"),
        }

    def edge(self, *arguments: object, said: str | None = None, **environment: str) -> Outcome:
        """In this process, to which its folder is lent: a process of its own would compute for half
        a second before it begins."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**self.environment, **environment}.items():
                patch.setenv(name, value)
            return run_edge(*arguments, stdin=said)

    def edge_alone(self, *arguments: object) -> Outcome:
        """In a process of its own, as people run it."""
        done = subprocess.run(
            [*EDGE, *map(str, arguments)],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return Outcome(code=done.returncode, out=done.stdout, err=done.stderr)

    def json(self, *arguments: object) -> Any:
        outcome = self.edge(*arguments, "--json")
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    @contextmanager
    def peer(self, *options: str, announces: bool = False) -> Iterator[Daemon]:
        where = ON_LOOPBACK if announces else ("--no-announce",)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            daemon = Daemon(self.folder / "peer", "--name", self.name, *where, *options)
        with daemon:
            yield daemon

    @contextmanager
    def inviting(self, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
        listen = ("--listen", f"{LOOPBACK}:0", *ON_LOOPBACK, "--name", self.name, *options)
        with edge_process("pair", *listen, "--json", environment=self.environment) as process:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())


@pytest.fixture
def device(tmp_path: Path) -> Callable[[str], Device]:
    return lambda name: Device(tmp_path, name)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., TinyCheckpoint]) -> TinyCheckpoint:
    return tiny_checkpoint("llama")


def pair(inviter: Device, joiner: Device, *options: str, finds: bool = False) -> None:
    """finds: by zeroconf, which takes its time, in a process of its own; else by the address."""
    with inviter.inviting(*options) as (process, shown):
        where = ON_LOOPBACK if finds else ("--peer", shown["addresses"][0])
        run = joiner.edge_alone if finds else joiner.edge
        outcome = run("pair", shown["code"], *where, "--name", joiner.name)
        assert outcome.code == 0, outcome.err
        assert inviter.name in outcome.out
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        assert json.loads(out)["paired"]["name"] == joiner.name


def answer(asker: Device, daemon: Daemon, checkpoint: TinyCheckpoint) -> Outcome:
    return asker.edge(
        *("run", checkpoint.path, "-p", "hi", "-n", NEW_TOKENS),
        *("--dtype", "float32", "--peer", daemon.address),
    )


def test_two_fresh_devices_four_commands(
    device: Callable[[str], Device], checkpoint: TinyCheckpoint
) -> None:
    attic, kitchen, stranger = device("attic"), device("kitchen"), device("stranger")
    pair(attic, kitchen, finds=True)
    with kitchen.peer() as daemon:
        assert answer(attic, daemon, checkpoint).code == 0
        refused = answer(stranger, daemon, checkpoint).sentence()
        assert "does not know this device" in refused
        assert "edge pair" in refused
        shown = attic.json("cluster", "show")
        assert list(shown["paired"].values()) == ["kitchen"]
        assert shown["takes_others_in"]
        own = kitchen.json("cluster", "show")
        assert own["cluster"] == shown["cluster"]
        assert list(shown["paired"]) == [own["own"]]
        assert not own["takes_others_in"]
        (peer,) = attic.json("peers", "--peer", daemon.address)
        assert peer["id"] == own["own"]

        assert attic.edge_alone("cluster", "expel", "kitchen", *ON_LOOPBACK).code == 0
        refused = answer(attic, daemon, checkpoint).sentence()
        assert "has been expelled" in refused
        assert daemon.end() == 0


def test_what_people_see_when_they_pair(device: Callable[[str], Device]) -> None:
    """The words, and the same as a QR code; then, on both, whom each has got, so that the two can
    be compared."""
    attic, kitchen = device("attic"), device("kitchen")
    listen = ("--listen", f"{LOOPBACK}:0", *ON_LOOPBACK, "--name", attic.name)
    with edge_process("pair", *listen, environment=attic.environment) as process:
        assert process.stdout is not None
        shown = ""
        while "add --peer" not in shown:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            shown += line
        (words,) = re.findall(r"^    edge pair ((?:[a-z]+ ){5}[a-z]+)$", shown, re.MULTILINE)
        drawn = io.StringIO()
        segno.make(words, error="l").terminal(out=drawn, compact=True)
        assert drawn.getvalue() in shown
        assert not set("".join(words.split())) & set(drawn.getvalue())
        (address,) = re.findall(r"add --peer (\S+)\.$", shown, re.MULTILINE)
        joined = kitchen.edge("pair", *words.split(), "--peer", address, "--name", kitchen.name)
        assert joined.code == 0, joined.err
        ended, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
    own = {each.name: each.json("cluster", "show")["own"] for each in (attic, kitchen)}
    prints = {name: fingerprint(id) for name, id in own.items()}
    assert (
        ended == f"Paired with kitchen ({prints['kitchen']}); this device is {prints['attic']}.\n"
    )
    assert (
        joined.out
        == f"Paired with attic ({prints['attic']}); this device is {prints['kitchen']}.\n"
    )


def test_who_pairs_to_lend_goes_on_as_a_peer(device: Callable[[str], Device]) -> None:
    attic, kitchen = device("attic"), device("kitchen")
    with attic.inviting("--lend") as (process, shown):
        where = "--peer", shown["addresses"][0]
        assert kitchen.edge("pair", shown["code"], *where, "--name", "kitchen").code == 0
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["paired"]["name"] == "kitchen"
        ready = json.loads(process.stdout.readline())
        (peer,) = kitchen.json("peers", "--peer", ready["addresses"][0])
        assert peer["name"] == ready["name"] == "attic"
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err


@shown_in_parts("multiprocess/test_pairing_devices.py", "unit/membership/test_membership.py")
def test_an_expelled_device_is_refused_by_a_member_that_was_away(
    device: Callable[[str], Device], checkpoint: TinyCheckpoint
) -> None:
    """It hears of it from the next member that talks to it."""
    attic, kitchen, cellar = device("attic"), device("kitchen"), device("cellar")
    pair(attic, kitchen)
    pair(attic, cellar)
    with kitchen.peer() as daemon:
        assert answer(cellar, daemon, checkpoint).code == 0
    assert attic.edge("cluster", "expel", "cellar", *ON_LOOPBACK).code == 0
    with kitchen.peer() as daemon:
        assert answer(attic, daemon, checkpoint).code == 0
        assert "has been expelled" in answer(cellar, daemon, checkpoint).sentence()
        assert kitchen.json("cluster", "show")["expelled"] == [
            cellar.json("cluster", "show")["own"]
        ]
        assert daemon.end() == 0


@shown_in_parts("unit/membership/test_membership.py", "unit/membership/test_pairing_discovery.py")
def test_a_member_that_was_away_asks_the_others_before_the_expelled_device_comes(
    device: Callable[[str], Device],
) -> None:
    attic, kitchen, cellar = device("attic"), device("kitchen"), device("cellar")
    pair(attic, kitchen)
    pair(attic, cellar)
    said = attic.edge("cluster", "expel", "cellar", *ON_LOOPBACK).out
    assert "0 of 1 told. Not there: kitchen." in said
    assert "No daemon runs on this device" in said
    # However long it takes until they have found each other, the kitchen has not looked enough.
    kitchen.environment[passing_time.VARIABLE] = (
        f"edge.peer.expulsion_sync.FIRST_LOOK_S={passing_time.LONG_S}"
    )
    with attic.peer(announces=True), kitchen.peer(announces=True) as daemon:
        for _ in range(2):  # while it asks the others; and when it knows
            refused = cellar.edge("peers", "--peer", daemon.address).sentence()
            assert "expelled" in refused
            assert "`edge pair`" in refused
        assert "cellar" not in daemon.messages
        assert attic.edge("peers", "--peer", daemon.address).code == 0
        assert kitchen.json("cluster", "show")["expelled"]
        assert daemon.end() == 0
        said = attic.edge("cluster", "expel", "a" * 32, *ON_LOOPBACK).out
        assert "The daemon of this device tells them" in said


def test_a_device_does_what_it_was_paired_for(
    device: Callable[[str], Device], checkpoint: TinyCheckpoint
) -> None:
    attic, phone, cellar = device("attic"), device("phone"), device("cellar")
    pair(attic, phone, "--role", "use")
    pair(attic, cellar, "--role", "lend")
    assert phone.json("cluster", "show")["roles"] == ["use"]
    assert "compute for others" in phone.edge("peer", "--no-announce").sentence()
    with cellar.peer() as lent:
        assert answer(phone, lent, checkpoint).code == 0
        refused = answer(cellar, lent, checkpoint)  # its own
        assert refused.code == 0, refused.err
    with attic.peer() as daemon:
        assert "not use them" in answer(cellar, daemon, checkpoint).sentence()
        assert answer(phone, daemon, checkpoint).code == 0
        assert not daemon.messages


def test_a_peer_is_lent_to_whom_its_owner_allows(
    device: Callable[[str], Device], checkpoint: TinyCheckpoint
) -> None:
    attic, kitchen, cellar = device("attic"), device("kitchen"), device("cellar")
    pair(attic, kitchen)
    pair(attic, cellar)
    wanted = kitchen.json("cluster", "show")["own"]
    with attic.peer("--allow", f"use={wanted[:16]}") as daemon:
        assert answer(kitchen, daemon, checkpoint).code == 0
        assert answer(attic, daemon, checkpoint).code == 0
        assert "--allow use=" in answer(cellar, daemon, checkpoint).sentence()


def test_a_peer_that_runs_joins_the_cluster_that_its_device_is_paired_into(
    device: Callable[[str], Device], checkpoint: TinyCheckpoint
) -> None:
    attic, kitchen = device("attic"), device("kitchen")
    with kitchen.peer() as daemon:
        assert answer(attic, daemon, checkpoint).code == 1
        pair(attic, kitchen)
        assert daemon.process.stdout is not None
        again = json.loads(daemon.process.stdout.readline())
        assert again["addresses"] == list(daemon.addresses)
        assert answer(attic, daemon, checkpoint).code == 0
        assert daemon.end() == 0


def test_wrong_words_void_the_code(device: Callable[[str], Device]) -> None:
    attic, mallory = device("attic"), device("mallory")
    with attic.inviting() as (process, shown):
        *words, last = shown["code"].split()
        wrong = " ".join([*words, "acorn" if last != "acorn" else "actor"])
        assert mallory.edge("pair", wrong, *ON_LOOPBACK).code == 1
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "words of the two devices are not the same" in err
    assert mallory.json("cluster", "show")["paired"] == {}


def test_words_are_told_on_standard_input(device: Callable[[str], Device]) -> None:
    attic, kitchen = device("attic"), device("kitchen")
    with attic.inviting() as (process, shown):
        address = shown["addresses"][0]
        joined = kitchen.edge("pair", "-", "--peer", address, said=shown["code"] + "\n")
        assert joined.code == 0, joined.err
        assert "attic" in joined.out
        assert "words" not in joined.err  # nobody is asked where nobody sits
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    assert "has 6 words, not 0" in kitchen.edge("pair", "-", "--leave", said="").sentence()


def test_a_token_for_scripts(
    device: Callable[[str], Device], checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    attic, script = device("attic"), device("script")
    token = tmp_path / "token"
    assert attic.edge("cluster", "create", "--token", token).code == 0
    with attic.peer() as daemon:
        assert answer(script, daemon, checkpoint).code == 1
        script.environment[TOKEN_VARIABLE] = str(token)
        assert answer(script, daemon, checkpoint).code == 0
        with script.peer() as lent:
            assert answer(attic, lent, checkpoint).code == 0
        assert attic.edge("cluster", "rotate").code == 0
    with attic.peer() as daemon:
        refused = answer(script, daemon, checkpoint).sentence()
        assert "the cluster has a new key" in refused


@shown_in_parts("unit/membership/test_membership.py", "unit/membership/test_pairing_discovery.py")
def test_a_new_key_takes_members_along(
    device: Callable[[str], Device], checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """The peer that runs, by who uses it; the device that was away, by that peer."""
    attic, kitchen, cellar, gone = map(device, ("attic", "kitchen", "cellar", "gone"))
    for each in (kitchen, cellar, gone):
        pair(attic, each)
    assert attic.edge("cluster", "expel", "gone", *ON_LOOPBACK).code == 0
    assert attic.edge("cluster", "token", tmp_path / "token").code == 0
    with kitchen.peer() as daemon:
        rotated = attic.edge("cluster", "rotate", *ON_LOOPBACK)
        assert rotated.code == 0, rotated.err
        assert "Of kitchen, cellar, 0 have followed" in rotated.out
        assert "Pair these" not in rotated.out
        assert "Expelled, and left behind: gone." in rotated.out
        assert answer(attic, daemon, checkpoint).code == 0
        shown = attic.json("cluster", "show")
        assert shown["generation"] == 1
        assert set(shown["paired"].values()) == {"kitchen", "cellar"}
        assert shown["expelled"] == []
        assert kitchen.json("cluster", "show")["cluster"] == shown["cluster"]
        assert cellar.json("cluster", "show")["cluster"] != shown["cluster"]
        assert answer(cellar, daemon, checkpoint).code == 0
        assert cellar.json("cluster", "show")["cluster"] == shown["cluster"]
        assert "was left behind" in answer(gone, daemon, checkpoint).sentence()
        gone.environment[TOKEN_VARIABLE] = str(tmp_path / "token")
        assert "this token has an earlier one" in answer(gone, daemon, checkpoint).sentence()
        assert daemon.end() == 0


@shown_in_parts(
    "unit/membership/test_rotation.py",
    "unit/protocol/test_key_rotation_push.py",
    "multiprocess/test_pairing_devices.py",
)
def test_peers_that_are_there_follow_at_once(
    device: Callable[[str], Device], tmp_path: Path
) -> None:
    """Found by their announcements, under the key of before; and who they know as expelled stays
    behind."""
    attic, kitchen, gone, script = map(device, ("attic", "kitchen", "gone", "script"))
    pair(attic, kitchen)
    pair(attic, gone)
    assert attic.edge("cluster", "token", tmp_path / "token").code == 0
    script.environment[TOKEN_VARIABLE] = str(tmp_path / "token")
    for asks in (attic, script):
        limit = f"edge.cli.commands.cluster._TELL_FOR_S={passing_time.LONG_S}"
        asks.environment[passing_time.VARIABLE] = limit
    with kitchen.peer(announces=True):
        id = gone.json("cluster", "show")["own"]
        said = script.edge_alone("cluster", "expel", id, *ON_LOOPBACK).out
        assert "1 of 1 told: kitchen." in said
        assert "daemon" not in said
        rotated = attic.edge_alone("cluster", "rotate", *ON_LOOPBACK)
        assert rotated.code == 0, rotated.err
        assert "Of kitchen, 1 have followed" in rotated.out
        shown = attic.json("cluster", "show")
        assert kitchen.json("cluster", "show")["cluster"] == shown["cluster"]
        (peer,) = attic.json("peers", *ON_LOOPBACK)
        assert peer["name"] == "kitchen"


def test_a_device_that_is_paired_again_may_do_less(
    device: Callable[[str], Device], checkpoint: TinyCheckpoint
) -> None:
    """Also where it keeps what it was given before."""
    attic, phone, copy = device("attic"), device("phone"), device("copy")
    pair(attic, phone)
    shutil.copytree(phone.folder / "keys", copy.folder / "keys")
    with attic.peer() as daemon:
        assert answer(copy, daemon, checkpoint).code == 0
        with attic.inviting("--role", "lend") as (process, shown):
            address = ("--peer", shown["addresses"][0])
            assert phone.edge("pair", shown["code"], *address, "--leave").code == 0
            process.communicate(timeout=PATIENCE_S)
        assert "not use them" in answer(phone, daemon, checkpoint).sentence()
        assert answer(copy, daemon, checkpoint).code == 1
        assert daemon.end() == 0


def test_who_a_script_with_a_token_expels_stays_expelled(
    device: Callable[[str], Device], tmp_path: Path
) -> None:
    attic, script = device("attic"), device("script")
    token = tmp_path / "token"
    assert attic.edge("cluster", "create", "--token", token).code == 0
    script.environment[TOKEN_VARIABLE] = str(token)
    assert script.edge("cluster", "expel", "a" * 32, *ON_LOOPBACK).code == 0
    shown = script.json("cluster", "show")
    assert (shown["expelled"], shown["epoch"]) == (["a" * 32], 1)
    with attic.peer() as daemon:
        assert script.edge("peers", "--peer", daemon.address).code == 0
    assert attic.json("cluster", "show")["expelled"] == ["a" * 32]


@shown_in_parts("unit/membership/test_membership.py", "unit/membership/test_pairing_discovery.py")
def test_whoever_has_stolen_a_token_does_not_keep_members_from_the_next_key(
    device: Callable[[str], Device], tmp_path: Path
) -> None:
    """Not by expelling the device that makes it; and who is named goes along all the same."""
    attic, kitchen, cellar, thief = map(device, ("attic", "kitchen", "cellar", "thief"))
    pair(attic, kitchen)
    pair(attic, cellar)
    assert attic.edge("cluster", "token", tmp_path / "token").code == 0
    thief.environment[TOKEN_VARIABLE] = str(tmp_path / "token")
    ids = {each: each.json("cluster", "show")["own"] for each in (attic, kitchen, cellar)}
    refused = thief.edge("cluster", "expel", ids[attic], *ON_LOOPBACK).sentence()
    assert "nobody can expel it" in refused
    for each in (kitchen, cellar):
        assert thief.edge("cluster", "expel", ids[each], *ON_LOOPBACK).code == 0
    with attic.peer() as daemon:
        assert thief.edge("peers", "--peer", daemon.address).code == 0
        assert kitchen.edge("peers", "--peer", daemon.address).code == 1
        for options, said in ((("--leave",), "takes nobody along"), ((), "names no device")):
            refused = attic.edge("cluster", "rotate", "--with", "nobody", *options).sentence()
            assert said in refused
        rotated = attic.edge("cluster", "rotate", "--with", "kitchen", *ON_LOOPBACK)
        assert rotated.code == 0, rotated.err
        assert "Of kitchen, 0 have followed" in rotated.out
        assert "Expelled, and left behind: cellar." in rotated.out
    with attic.peer() as daemon:
        assert kitchen.edge("peers", "--peer", daemon.address).code == 0
        assert "was left behind" in cellar.edge("peers", "--peer", daemon.address).sentence()
    assert kitchen.json("cluster", "show")["expelled"] == []


@pytest.mark.parametrize("name", ["create", "rotate"])
def test_a_token_keeps_a_script_from_making_a_cluster_that_it_would_not_use(
    device: Callable[[str], Device], tmp_path: Path, name: str
) -> None:
    attic, token = device("attic"), tmp_path / "token"
    assert attic.edge("cluster", "token", token).code == 0
    before = attic.json("cluster", "show")["cluster"]
    sentence = attic.edge("cluster", name, **{TOKEN_VARIABLE: str(token)}).sentence()
    assert f"{TOKEN_VARIABLE} names {token}" in sentence
    assert "unset it" in sentence
    assert "write a new token" in sentence
    assert attic.json("cluster", "show")["cluster"] == before


def test_no_name_keeps_a_device_from_being_expelled(device: Callable[[str], Device]) -> None:
    attic, victim, mallory = device("attic"), device("victim"), device("mallory")
    pair(attic, victim)
    id = victim.json("cluster", "show")["own"]
    mallory.name = id
    pair(attic, mallory)
    assert attic.edge("cluster", "expel", id, *ON_LOOPBACK).code == 0
    assert attic.json("cluster", "show")["expelled"] == [id]


def test_ctrl_c_leaves_no_pairing_behind(device: Callable[[str], Device]) -> None:
    attic, kitchen = device("attic"), device("kitchen")
    with attic.inviting() as (process, shown):
        process.send_signal(2)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
    address = shown["addresses"][0]
    assert kitchen.edge("pair", shown["code"], "--peer", address).code == 1


def test_a_device_in_a_cluster_leaves_it_on_demand_only(device: Callable[[str], Device]) -> None:
    attic, kitchen, other = device("attic"), device("kitchen"), device("other")
    pair(attic, kitchen)
    with other.inviting() as (process, shown):
        sentence = kitchen.edge("pair", shown["code"], *ON_LOOPBACK).sentence()
        assert "in a cluster with attic; add --leave" in sentence
        assert kitchen.edge("pair", shown["code"], *ON_LOOPBACK, "--leave").code == 0
        process.communicate(timeout=PATIENCE_S)
    assert list(kitchen.json("cluster", "show")["paired"].values()) == ["other"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pair", "acorn"], "a code has 6 words"),
        (["pair", *["acorn"] * 5, "xyzzy"], "is no word of a code"),
        (["cluster", "expel", "nobody"], "names no device"),
        (["cluster", "token", "/nowhere/token"], "cannot use /nowhere/token"),
    ],
)
def test_what_cannot_be_done_is_said(
    device: Callable[[str], Device], arguments: list[str], message: str
) -> None:
    assert message in device("attic").edge(*arguments).sentence()
