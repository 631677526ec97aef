"""Audit log: which device loaded which model on this peer, and when."""

from __future__ import annotations

import datetime
import json
import logging
import os
from pathlib import Path

from edge.errors import RequestError
from edge.host.free_memory import format_size
from edge.membership.identity import fingerprint
from edge.protocol.fields import one_line
from edge.transport import Member

_log = logging.getLogger(__name__)


class Audit:
    """Writes each event as a line to the log and as JSON to a file that only its owner can read."""

    def __init__(self, path: Path | None) -> None:
        """Raises RequestError if the file cannot be written."""
        self._path = path
        self._known: dict[str, tuple[str, dict[str, object]]] = {}
        if path is not None:
            try:
                _append(path, "")
            except OSError as error:
                raise RequestError(f"--audit {path}: {error.strerror}") from error

    def loaded(self, user: Member | None, key: str, model: str, **facts: object) -> None:
        """Record that `user` has loaded a shard of a model, or a part of a graph.

        key: names it until `ended`. facts: what else is told, among it its `bytes`.
        """
        who = "an unknown device (--insecure)"
        if user is not None:
            who = f"{one_line(user.name)} ({fingerprint(user.id)})"
        facts = {
            "device": None if user is None else user.id,
            "name": None if user is None else one_line(user.name),
            "model": one_line(model),
            **facts,
        }
        self._known[key] = (who, facts)
        _log.info("%s loaded %s of %s", who, format_size(int(str(facts["bytes"]))), facts["model"])
        self._write("loaded", facts)

    def ended(self, key: str) -> None:
        """Record that it was unloaded. Unknown keys are ignored."""
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
        except OSError as error:  # keep serving: the disk may have been unmounted
            _log.warning("cannot write %s: %s", self._path, error.strerror)


def _append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "a", encoding="utf-8") as file:
        file.write(line)
