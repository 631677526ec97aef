"""Weights that a coordinator sends: offered, piece by piece, sealed; held while it is here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from edge.concurrency.blocking import run_blocking
from edge.errors import CapacityError, ProtocolError
from edge.offload import CachedShard, Manifest, ShardWriter
from edge.peer.quota import QuotaShare
from edge.peer.resources import PeerResources
from edge.protocol import messages
from edge.protocol.frame_codec import Call
from edge.transport import Member


class WeightUploads:
    """One coordinator's. Close it with `aclose`."""

    def __init__(self, resources: PeerResources, user: Member | None, owner: object) -> None:
        """What they take of the disk counts as the user's, and what is open as the owner's."""
        self._peer = resources
        self._user = user
        self._offers = QuotaShare(resources.offers, owner)
        self._manifest_entries = QuotaShare(resources.manifest_entries, owner)
        self._writers: dict[str, ShardWriter] = {}
        self._sealed: dict[str, CachedShard] = {}
        self._kept = ExitStack()

    @property
    def calls(self) -> dict[type[Call[Any]], Callable[[Any], Awaitable[object]]]:
        return {
            messages.Offer: self._offer,
            messages.Piece: self._piece,
            messages.Seal: self._seal,
        }

    @property
    def are_coming(self) -> bool:
        """Some were offered, and are not whole."""
        return bool(self._writers)

    def sealed(self, digest: str) -> CachedShard:
        """The whole ones with a manifest of this digest. Raises ProtocolError without."""
        cached = self._sealed.get(digest)
        if cached is None:
            raise ProtocolError("a shard that was not sent")
        return cached

    async def aclose(self) -> None:
        """Nothing of them is open, or counts, any more."""
        async with AsyncExitStack() as stack:  # each of these whatever became of those before
            stack.callback(self._manifest_entries.give_back_all)
            stack.callback(self._offers.give_back_all)
            stack.push_async_callback(run_blocking, self._kept.close)
            for writer in self._writers.values():
                stack.push_async_callback(run_blocking, writer.close)

    async def _offer(self, call: messages.Offer) -> messages.Missing:
        manifest = call.manifest
        digest = manifest.digest
        missing: tuple[str, ...] = ()
        if digest not in self._sealed:
            if digest not in self._writers:
                self._take_offer(manifest)
                try:
                    begun = await run_blocking(
                        lambda: self._peer.cache.begin(
                            manifest,
                            owner=None if self._user is None else self._user.id,
                            owner_limit_bytes=self._peer.user_cache_bytes,
                        ),
                        discard=lambda begun: begun.close(),
                    )
                except BaseException:
                    self._give_back_offer(manifest)
                    raise
                if isinstance(begun, CachedShard):
                    self._keep(digest, begun)
                else:
                    self._writers[digest] = begun
            if digest in self._writers:
                writer = self._writers[digest]
                missing = await run_blocking(lambda: writer.missing)
        return messages.Missing(digests=missing)

    def _take_offer(self, manifest: Manifest) -> None:
        self._offers.take()
        try:
            self._manifest_entries.take(_entries(manifest))
        except CapacityError:
            self._offers.give_back()
            raise

    def _give_back_offer(self, manifest: Manifest) -> None:
        self._offers.give_back()
        self._manifest_entries.give_back(_entries(manifest))

    async def _piece(self, call: messages.Piece) -> messages.Done:
        writer = self._writer(call.manifest)
        await run_blocking(lambda: writer.put(call.digest, call.content))
        return messages.Done()

    async def _seal(self, call: messages.Seal) -> messages.Done:
        digest = call.manifest
        if digest not in self._sealed:
            writer = self._writer(digest)
            self._keep(digest, await run_blocking(writer.finish, discard=CachedShard.close))
            del self._writers[digest]
        return messages.Done()

    def _writer(self, digest: str) -> ShardWriter:
        writer = self._writers.get(digest)
        if writer is None:
            raise ProtocolError("a piece of a shard that was not offered")
        return writer

    def _keep(self, digest: str, cached: CachedShard) -> None:
        """Hold the shard in the cache for as long as this coordinator may load it."""
        self._sealed[digest] = self._kept.enter_context(cached)


def _entries(manifest: Manifest) -> int:
    """Tensors and pieces: what its memory goes by."""
    return sum(1 + len(tensor.pieces) for tensor in manifest.tensors)
