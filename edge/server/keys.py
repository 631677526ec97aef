"""API keys, the limits of each, and the caller of a request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.errors import RequestError
from edge.offload import read_file
from edge.scheduling.fairness import PRIORITIES, Priority

_MOST_FILE_BYTES = 1 << 20
_SHORTEST_KEY = 16
_MOST_ANSWERS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An API key and its limits."""

    text: str
    most_answers: int | None = None
    """Most answers under way or waiting; None: no limit but the server's."""
    most_priority: Priority = "high"
    """Highest priority; a request for a higher one gets this one."""
    shares: str | None = None
    """Keys with the same word share cached prefixes; None: this key shares with no other."""

    @property
    def cache_salt(self) -> str:
        """Salt of the prefixes that requests with this key cache and find."""
        return self.client if self.shares is None else f"shares {self.shares}"

    @property
    def client(self) -> str:
        """Name of the key in logs and queues; the key cannot be derived from it."""
        return f"key {hashlib.sha256(self.text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request, and its limits."""

    name: str = ""
    """Name of a key, or an address; the scheduler shares time fairly between names."""
    request_id: str | None = None
    """The id of the request in the logs of all devices."""
    most_answers: int | None = None
    most_priority: Priority = "high"
    cache_salt: str = ""
    """Only prefixes cached with the same salt are found, so that response times and counts of
    cached tokens say nothing about other callers' prompts."""

    def priority(self, asked: Priority) -> Priority:
        """The priority that a request for this one gets."""
        return max(asked, self.most_priority, key=PRIORITIES.index)


def find_key(keys: Sequence[Key], shown: bytes) -> Key | None:
    """The key that was shown, if it is one of these. Takes the same time for every key."""
    found = [key for key in keys if hmac.compare_digest(shown, key.text.encode())]
    return found[0] if found else None


def read_keys(path: Path) -> tuple[Key, ...]:
    """Reads a file with a key on each line, followed by its limits: `answers=N`, `priority=P`,
    `shares=WORD`.

    Raises RequestError for a file without keys, a key that is too short, or an unknown limit.
    """
    try:
        lines = read_file(path, _MOST_FILE_BYTES).decode().splitlines()
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path} cannot be read as keys: {error}", remedy="name a file with a key on each line"
        ) from error
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            keys.append(_key(words, f"{path}, line {number}"))
    if not keys:
        raise RequestError(f"{path} has no keys", remedy=_HOW_TO_MAKE_ONE)
    if len({key.text for key in keys}) != len(keys):
        raise RequestError(
            f"{path} has a key twice, and each stands for a client of its own",
            remedy="remove one of the two",
        )
    return tuple(keys)


_HOW_TO_MAKE_ONE = (
    f"it must have keys of {_SHORTEST_KEY} characters or more, one a line; "
    'python -c "import secrets; print(secrets.token_urlsafe())" makes one'
)


def _key(words: Sequence[str], where: str) -> Key:
    text, *limits = words
    if len(text) < _SHORTEST_KEY:
        raise RequestError(f"{where} has a key that can be guessed", remedy=_HOW_TO_MAKE_ONE)
    most_answers: int | None = None
    most_priority: Priority = "high"
    shares: str | None = None
    for limit in limits:
        name, _, value = limit.partition("=")
        if name == "answers" and value.isdecimal() and 1 <= int(value[:9]) <= _MOST_ANSWERS:
            most_answers = int(value[:9])
        elif name == "priority" and value in PRIORITIES:
            most_priority = value
        elif name == "shares" and value:
            shares = value
        else:
            # The error does not repeat the word, because it may be another key.
            raise RequestError(
                f"{where} has a word after its key that is no limit",
                remedy=f"write answers=N, priority={'|'.join(PRIORITIES)} or shares=WORD there; "
                "further keys go on lines of their own",
            )
    return Key(text=text, most_answers=most_answers, most_priority=most_priority, shares=shares)
