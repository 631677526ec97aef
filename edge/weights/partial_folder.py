"""A folder that appears when it is complete: written beside its place, continued, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge.errors import RequestError
from edge.offload import Closing, disk_errors_as_store_errors, rename_durably, write_durably
from edge.weights.writer_lock import WRITER_LOCK, only_writer

_RECORD = ".made_of.json"


def check_free(target: Path) -> None:
    """Raises RequestError if something exists at the place of a new folder."""
    if os.path.lexists(target.expanduser()):
        raise RequestError(f"{target} is there already", remedy="remove it, or name another folder")


class PartialFolder(Closing):
    """`<target>.partial`, written by one process at a time, from `begin` until `finish`.

    Close it, or use it as a context manager; its contents stay.
    """

    def __init__(self, target: Path) -> None:
        """Raises RequestError if `target` exists or is being written, or other files are in the
        partial folder; StoreError if the disk fails."""
        self.target = target.expanduser().absolute()
        self.path = self.target.with_name(f"{self.target.name}.partial")
        self._refuse_what_is_there()
        with contextlib.ExitStack() as held:
            with disk_errors_as_store_errors(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                self._refuse_others_files()  # before anything is cleaned up
            held.enter_context(only_writer(self.path, self._refuse_to_wait))
            held.callback(self._remove_if_empty)
            self._refuse_what_is_there()  # another process may just have finished
            self._held = held.pop_all()

    def begun(self) -> dict[str, Any]:
        """What the folder was begun with; nothing if it was not, or its record is damaged."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.path / _RECORD).read_bytes())
            return found if isinstance(found, dict) else {}
        return {}

    def begin(self, made_of: Mapping[str, Any]) -> None:
        """Begin or continue. made_of: JSON values; a folder begun with others is cleared. Raises
        StoreError."""
        path, record = self.path / _RECORD, json.dumps(made_of, sort_keys=True).encode()
        with disk_errors_as_store_errors(self.path):
            if path.exists() and path.read_bytes() == record:
                return
            for each in self.path.iterdir():
                if each.is_dir():
                    shutil.rmtree(each)
                elif each.name not in (_RECORD, WRITER_LOCK):
                    each.unlink()
        write_durably(path, record)

    def finish(self) -> None:
        """Give the durable folder its name, durably.

        Raises RequestError if the name is taken now, StoreError.
        """
        self._refuse_what_is_there()
        rename_durably(self.path, self.target)
        # Removed last, because an unfinished folder cannot be continued without its record.
        for name in (_RECORD, WRITER_LOCK):
            with contextlib.suppress(OSError):
                (self.target / name).unlink()
        self.close()

    def close(self) -> None:
        """Let others write into the folder, and remove it if nothing was begun in it.

        May be called again.
        """
        self._held.close()

    def _refuse_others_files(self) -> None:
        found = {each.name for each in self.path.iterdir()} - {WRITER_LOCK}
        if found and _RECORD not in found and found != {f"{_RECORD}.partial"}:
            raise RequestError(
                f"{self.path}, in which the new folder would be written first, holds other files",
                remedy="remove it, or name another folder",
            )

    def _remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            if {each.name for each in self.path.iterdir()} == {WRITER_LOCK}:
                (self.path / WRITER_LOCK).unlink()
                self.path.rmdir()

    def _refuse_what_is_there(self) -> None:
        check_free(self.target)

    def _refuse_to_wait(self) -> None:
        raise RequestError(
            f"{self.path} is being written by another process",
            remedy="wait for it, or name another folder",
        )
