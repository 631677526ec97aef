"""A folder that is there once it is whole: begun next to its place, gone on with, then renamed."""

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
    """Raises RequestError where a new folder is to be, and something is there already."""
    if os.path.lexists(target.expanduser()):
        raise RequestError(f"{target} is there already", remedy="remove it, or name another folder")


class PartialFolder(Closing):
    """`<target>.partial`, written by one process at a time, from `begin` until `finish`.

    Close it, or use it as a context manager; its contents stay.
    """

    def __init__(self, target: Path) -> None:
        """Raises RequestError where `target` is there already or is being written, or something
        else lies in the place; StoreError where the disk fails."""
        self.target = target.expanduser().absolute()
        self.path = self.target.with_name(f"{self.target.name}.partial")
        self._refuse_what_is_there()
        with contextlib.ExitStack() as held:
            with disk_errors_as_store_errors(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                self._refuse_others_files()  # before anything of them is cleaned up
            held.enter_context(only_writer(self.path, self._refuse_to_wait))
            held.callback(self._remove_if_empty)
            self._refuse_what_is_there()  # by one that was just finished
            self._held = held.pop_all()

    def begin(self, made_of: Mapping[str, Any]) -> None:
        """made_of: values of JSON; what was begun of others is removed. Raises StoreError."""
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
        """The folder, all of which is durable, has its name now, durably.

        Raises RequestError where something else has it by now, StoreError.
        """
        self._refuse_what_is_there()
        rename_durably(self.path, self.target)
        # Only now: without its record, an unfinished folder could not be gone on with.
        for name in (_RECORD, WRITER_LOCK):
            with contextlib.suppress(OSError):
                (self.target / name).unlink()
        self.close()

    def close(self) -> None:
        """Lets others write into the folder, which goes if nothing was begun in it.

        Closing again does nothing.
        """
        self._held.close()

    def _refuse_others_files(self) -> None:
        found = {each.name for each in self.path.iterdir()} - {WRITER_LOCK}
        if found and _RECORD not in found and found != {f"{_RECORD}.partial"}:
            raise RequestError(
                f"{self.path}, where the new folder is to be written first, holds other files",
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
