"""Who had this peer compute what, and when."""

from __future__ import annotations

import datetime
import json
import logging
import os
from pathlib import Path

from edge.errors import RequestError
from edge.host.free_memory import format_size
from edge.membership.identity import fingerprint
from edge.protocol.assignment import Assignment
from edge.protocol.fields import printable
from edge.transport import Member

_log = logging.getLogger(__name__)


class Audit:
    """A line for the log, and one of JSON for a file that only its owner can read."""

    def __init__(self, path: Path | None) -> None:
        """Raises RequestError for a file that cannot be written."""
        self._path = path
        self._known: dict[str, tuple[str, dict[str, object]]] = {}
        if path is not None:
            try:
                _append(path, "")
            except OSError as error:
                raise RequestError(f"--audit {path}: {error.strerror}") from error

    def loaded(self, user: Member | None, assignment: Assignment, num_bytes: int) -> None:
        """A device's coordinator has loaded a shard here."""
        who = "somebody (--insecure)"
        if user is not None:
            who = f"{printable(user.name)} ({fingerprint(user.id)})"
        model = printable(assignment.plan.model)
        facts: dict[str, object] = {
            "device": None if user is None else user.id,
            "name": None if user is None else printable(user.name),
            "session": assignment.session,
            "model": model,
            "dtype": assignment.weight_format.name,
            "stage": assignment.stage,
            "rank": assignment.rank,
            "bytes": num_bytes,
        }
        self._known[assignment.key] = (who, facts)
        _log.info("%s loaded %s of %s", who, format_size(num_bytes), model)
        self._write("loaded", facts)

    def ended(self, key: str) -> None:
        """What was loaded is gone; keys of assignments that never were are ignored."""
        if key in self._known:
            who, facts = self._known.pop(key)
            _log.info("%s ended %s", who, facts["model"])
            self._write("ended", facts)

    def _write(self, event: str, facts: dict[str, object]) -> None:
        if self._path is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        try:
            _append(self._path, json.dumps({"at": now, "event": event, **facts}) + "\n")
        except OSError as error:  # the device serves on: whoever lends it may have moved the disk
            _log.warning("cannot write %s: %s", self._path, error.strerror)


def _append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "a", encoding="utf-8") as file:
        file.write(line)
