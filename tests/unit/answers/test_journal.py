"""The journal of a reply: whole again after a cut anywhere, one writer, refused when damaged."""

from __future__ import annotations

import logging
import os
import resource
import signal
from dataclasses import fields
from pathlib import Path

import pytest

from edge.answers import journal_folder
from edge.answers.journal import Journal, read_journal
from edge.answers.journal_folder import JournalFolder
from edge.answers.journal_records import JournalContent, JournaledLoad, JournaledToken
from edge.errors import RequestError
from edge.planning.load_options import LoadOptions
from edge.protocol.lease import Lease
from tests.support.kept_journals import LIKELY, asked


@pytest.fixture
def replies(tmp_path: Path) -> JournalFolder:
    return JournalFolder(tmp_path / "replies")


def begun(replies: JournalFolder, tokens: int = 5) -> Journal:
    journal = replies.begin(asked(), Lease(run="a run"))
    assert journal is not None
    for number in range(tokens):
        journal.token(100 + number, None, LIKELY)
    return journal


def test_what_is_written_is_read(replies: JournalFolder) -> None:
    with begun(replies) as journal:
        journal.token(4, "stop", LIKELY)
        assert journal.path.stat().st_mode & 0o777 == 0o600
    found = read_journal(journal.path)
    assert found.head == asked()
    assert found.head.load.plan.devices == ("attic", "cellar")
    assert found.head.load.options().plan == "auto", "it was made by hand"
    assert found.lease == Lease(run="a run", term=1)
    assert found.tokens[0] == JournaledToken(token_id=100, end=None, logprobs=LIKELY)
    assert found.tokens[-1] == JournaledToken(token_id=4, end="stop", logprobs=LIKELY)
    assert found.tokens[-1].end is not None


def test_tokens_of_steps_with_guesses_are_known(replies: JournalFolder) -> None:
    """Also those behind a cut, as another coordinator goes on from there."""
    first = len(asked().terms.prompt) - 1
    with begun(replies, tokens=2) as journal:
        for number, together in enumerate((True, True, False, True)):
            journal.token(number, None, LIKELY, together=together)
    found = read_journal(journal.path)
    assert len(found.tokens) == 6
    assert found.together == ((first + 2, first + 4), (first + 5, first + 6))
    with replies.open(journal.id) as again:
        again.token(7, None, LIKELY, together=True)
        again.token(8, None, LIKELY)
    assert read_journal(journal.path).together == ((first + 2, first + 4), (first + 5, first + 7))
    with begun(replies, tokens=0) as journal:
        journal.token(7, None, LIKELY, together=True)
    with pytest.raises(RequestError, match="it was damaged"):
        read_journal(journal.path)


def test_every_option_of_a_load_is_kept_or_of_no_consequence() -> None:
    """`workload` has given the context its length; a load that observes has no replies, and a draft
    model, which keeps all tokens, none of its own; how tokens are guessed is one of the terms;
    copies give the tokens of one."""
    kept = {each.name for each in fields(JournaledLoad)}
    options = {each.name for each in fields(LoadOptions)}
    assert options - kept == {"workload", "observes", "keeps_all_tokens", "speculate", "copies"}


def test_a_cut_at_any_byte_leaves_a_beginning(replies: JournalFolder) -> None:
    begun(replies, tokens=3).close()
    (entry,) = replies.entries()
    content = entry.path.read_bytes()
    counts: list[int] = []
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    cuts = {place + near for place in ends for near in (-2, -1, 0)} | {*range(0, len(content), 61)}
    for size in sorted(cuts):
        entry.path.write_bytes(content[:size])
        ((_entry, found),) = replies.read()
        assert isinstance(found, JournalContent) or "is cut inside its first lines" in str(found)
        counts.append(len(found.tokens) if isinstance(found, JournalContent) else -1)
    assert counts == sorted(counts)
    assert set(counts) == {-1, 0, 1, 2, 3}
    entry.path.write_bytes(content[:-3])
    with replies.open(entry.id) as journal:
        journal.token(7, None, LIKELY)
    found = read_journal(entry.path)
    assert [each.token_id for each in found.tokens] == [100, 101, 7]
    assert found.lease.term == 2


def test_a_changed_byte_is_not_believed(replies: JournalFolder) -> None:
    begun(replies, tokens=3).close()
    (entry,) = replies.entries()
    content = entry.path.read_bytes()
    for place in range(0, len(content) - 1, 23):
        entry.path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(RequestError, match="cannot be gone on with"):
            read_journal(entry.path)


def test_two_at_once(replies: JournalFolder) -> None:
    journal = begun(replies)
    (entry,) = replies.entries()
    assert entry.is_under_way
    for id in (entry.id, "last"):
        with pytest.raises(RequestError, match=f"process {os.getpid()} has this reply under way"):
            replies.open(id)
    assert replies.remove({entry.id}) == 0
    journal.close()
    with replies.open("last") as again:
        assert again.id == entry.id
        again.remove()
    assert replies.entries() == []


@pytest.mark.parametrize("id", ["01234567", "last", "../../secret", "", "a" * 5000])
def test_one_that_is_not_there(id: str, replies: JournalFolder) -> None:
    with pytest.raises(RequestError, match=r"no reply .{0,90}is kept here") as raised:
        replies.open(id)
    assert len(str(raised.value)) < 300


def test_a_file_that_others_can_read_is_refused(replies: JournalFolder) -> None:
    begun(replies).close()
    (entry,) = replies.entries()
    entry.path.chmod(0o640)
    with pytest.raises(RequestError, match="others may read or write it"):
        replies.open(entry.id)
    ((_entry, told),) = replies.read()
    assert isinstance(told, RequestError)


def test_the_oldest_are_removed(replies: JournalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_folder, "MOST_REPLIES", 3)
    under_way = begun(replies)
    os.utime(under_way.path, (1, 1))
    for number in range(5):
        journal = begun(replies)
        journal.close()
        os.utime(journal.path, (10 + number, 10 + number))
    left = [round(entry.written_s) for entry in replies.entries()]
    assert left == [14, 13, 1], "who is under way stays"
    under_way.close()


def test_a_full_disk_ends_the_journal_and_not_the_reply(
    replies: JournalFolder, caplog: pytest.LogCaptureFixture
) -> None:
    journal = begun(replies)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = journal.path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, limits[1]))
    try:
        for token in range(3):
            journal.token(token, None, LIKELY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    journal.token(9, None, LIKELY)
    journal.close()
    (told,) = caplog.messages
    assert told.startswith("the rest of the answer is not kept in ")
    assert len(read_journal(journal.path).tokens) == 5


def test_a_disk_that_is_full_from_the_start_keeps_nothing(
    replies: JournalFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """So nobody is told that the answer can be gone on with."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))
    try:
        assert replies.begin(asked(), Lease()) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert len(caplog.messages) == 1
    assert not replies.entries()


def test_no_folder_is_no_reason_not_to_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert JournalFolder(tmp_path / "file" / "replies").begin(asked(), Lease()) is None
    assert "the answer is not kept" in caplog.text


def test_one_that_cannot_be_removed_does_not_spoil_the_reply(
    replies: JournalFolder, caplog: pytest.LogCaptureFixture
) -> None:
    journal = begun(replies)
    folder = journal.path.parent
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("")
    journal.remove()
    assert not journal.is_open
    (told,) = caplog.messages
    assert told.startswith(f"{journal.path} stays there")
