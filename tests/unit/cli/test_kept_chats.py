"""Conversations are kept, and continued by their ids."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from edge.cli.chat.conversation import Conversation
from edge.cli.chat.kept_chats import LAST, MOST_CHATS, KeptChats
from edge.errors import RequestError


def said(*texts: str) -> Conversation:
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return Conversation(system="Be brief.", turns=turns)


def test_a_conversation_is_continued(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    first = KeptChats(folder)
    first.keep(Conversation(), model="m")  # nothing was said
    assert first.ids() == []
    with pytest.raises(RequestError, match="no conversation is kept here"):
        first.open(LAST)
    talk = said("Hello", "Hi")
    first.keep(talk, model="m")
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second = KeptChats(folder)
    found = second.open(LAST)
    assert (found, second.id) == (talk, first.id)
    found.ask("And?")
    found.answered("No more.")
    second.keep(found, model="m")
    assert KeptChats(folder).open(first.id) == found
    second.keep(Conversation(), model="m")  # after /new
    second.keep(said("Hello", "Hi"), model="m")
    assert len(second.ids()) == 2
    assert second.ids()[0] == second.id != first.id


def test_unknown_ids_are_refused(tmp_path: Path) -> None:
    chats = KeptChats(tmp_path)
    chats.keep(said("Hello", "Hi"), model="m")
    for id in ("../secret", "12345678", ""):
        with pytest.raises(RequestError, match="is kept here; the latest are " + chats.id):
            chats.open(id)


def test_the_oldest_go(tmp_path: Path) -> None:
    for number in range(MOST_CHATS + 1):
        chats = KeptChats(tmp_path)
        chats.keep(said("Hello", f"Hi {number}"), model="m")
        os.utime(tmp_path / f"{chats.id}.json", (number, number))
    chats = KeptChats(tmp_path)
    chats.keep(said("Hello", "Hi"), model="m")
    assert len(chats.ids()) == MOST_CHATS


def test_without_a_folder_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="the conversation is not kept"):
        KeptChats(tmp_path / "file" / "chats").keep(said("Hello", "Hi"), model="m")
