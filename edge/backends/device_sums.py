"""Sums of a stage's shards: over their links, or from device to device of one host.

Knows ranks and their offers; a back end's `DeviceSums` knows its devices. All shards of a stage
exchange offers over their links, so that they choose the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge.host.identity import host_id
from edge.transport import Collective, TransportError

OVER_LINKS = "links"
"""The `way` of sums over links."""

_HASH_BYTES = 32
_TOKEN_BYTES = 16

_log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]


class DeviceCollective(Collective, Protocol):
    """A collective that sums on devices. See `Collective`."""

    def leave(self) -> None:
        """End sums on devices; the links stay open. Called from any thread, also repeatedly."""


class DeviceSums(Protocol):
    """Sums of one device with others of its kind on the same host."""

    @property
    def way(self) -> str:
        """Name of the way of summing, for people."""

    @property
    def version(self) -> str:
        """A digest of all that must be the same on every rank."""

    @property
    def device(self) -> str:
        """Identity of the device on its host; two ranks cannot share a device."""

    def open(self, links: Collective, store: Path) -> DeviceCollective:
        """The collective. All ranks call this. store: a shared file that other users cannot read.

        Raises errors of its libraries.
        """


def join(links: Collective, own: DeviceSums | None) -> tuple[Collective, str]:
    """The collective to sum with, and the name of its way. All shards of a stage call this.

    own: None if the device does not sum. Raises the errors of `links`.
    """
    ours = _record(own)
    offers: list[Bytes] = [np.zeros_like(ours) for _ in range(links.size)]
    links.all_gather(ours, offers)
    if own is None or not may_join([each.tobytes() for each in offers]):
        return links, OVER_LINKS
    opened = _open(links, own)
    if opened is None:
        return links, OVER_LINKS
    return opened, own.way


def may_join(offers: Sequence[bytes]) -> bool:
    """Whether these offers, one of each rank, are of different devices of one kind and host."""
    alike = {offer[:_HASH_BYTES] for offer in offers}
    devices = {offer[_HASH_BYTES:] for offer in offers}
    return len(alike) == 1 and any(alike.pop()) and len(devices) == len(offers)


def _record(own: DeviceSums | None) -> Bytes:
    """A rank's offer; all zeros if it does not sum on its device."""
    record = bytes(2 * _HASH_BYTES)
    if own is not None:
        alike = hashlib.sha256(f"{host_id()} {own.way} {own.version}".encode())
        record = alike.digest() + hashlib.sha256(own.device.encode()).digest()
    return np.frombuffer(record, np.uint8).copy()


def _open(links: Collective, own: DeviceSums) -> DeviceCollective | None:
    """The collective on devices; None on every rank if any of them cannot open it."""
    with _shared_folder(links) as folder:
        if not _all(links, folder is not None):
            _log.warning("sums of a stage go over links: its shards share no temporary folder")
            return None
        assert folder is not None
        opened: DeviceCollective | None = None
        try:
            opened = own.open(links, folder / "store")
        except TransportError:
            raise
        except Exception as error:  # the libraries do not document their errors
            _log.warning("sums of a stage go over links: %s cannot begin: %s", own.way, error)
        if _all(links, opened is not None):
            return opened
    if opened is not None:
        opened.leave()
    return None


@contextlib.contextmanager
def _shared_folder(links: Collective) -> Iterator[Path | None]:
    """A new folder that only this user may enter; None for a rank that cannot.

    Rank 0 makes it with a random name, and sends the name. Each rank looks for it in its own
    temporary folder, so a process of another user or container does not find it.
    """
    token = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.uint8).copy()
    links.broadcast(token, root=0)
    folder = Path(tempfile.gettempdir(), f"edge-sums-{token.tobytes().hex()}")
    if links.rank == 0:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)
    links.barrier()
    try:
        yield folder if os.access(folder, os.R_OK | os.W_OK | os.X_OK) else None
    finally:
        if links.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _all(links: Collective, own: bool) -> bool:
    votes: list[Bytes] = [np.zeros(1, np.uint8) for _ in range(links.size)]
    links.all_gather(np.array([own], np.uint8), votes)
    return all(vote[0] for vote in votes)
