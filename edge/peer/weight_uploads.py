"""Weight uploads from one coordinator: a manifest is offered, pieces are sent, the shard is sealed.

Sealed shards are pinned in the cache until the connection ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from edge.concurrency.blocking import run_blocking
from edge.errors import CapacityError, ProtocolError
from edge.offload import CachedShard, Manifest, ShardWriter
from edge.peer.quota import QuotaShare
from edge.peer.resources import PeerResources
from edge.protocol import weight_frames
from edge.protocol.frame_codec import Call, Done
from edge.transport import Member


class WeightUploads:
    """The uploads of one coordinator. Close with `aclose`."""

    def __init__(self, resources: PeerResources, user: Member | None, owner: object) -> None:
        """Disk space is counted for `user`, open uploads for `owner`."""
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
            weight_frames.Offer: self._offer,
            weight_frames.Piece: self._piece,
            weight_frames.Seal: self._seal,
        }

    @property
    def are_coming(self) -> bool:
        """Whether an offered shard is not complete yet."""
        return bool(self._writers)

    def sealed(self, digest: str) -> CachedShard:
        """The complete shard whose manifest has this digest. Raises ProtocolError if there is
        none."""
        cached = self._sealed.get(digest)
        if cached is None:
            raise ProtocolError("the shard was not sent")
        return cached

    async def aclose(self) -> None:
        """Close all uploads, unpin the shards and give back the quotas."""
        async with AsyncExitStack() as stack:  # run all of these, even if one fails
            stack.callback(self._manifest_entries.give_back_all)
            stack.callback(self._offers.give_back_all)
            stack.push_async_callback(run_blocking, self._kept.close)
            for writer in self._writers.values():
                stack.push_async_callback(run_blocking, writer.close)

    async def _offer(self, call: weight_frames.Offer) -> weight_frames.Missing:
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
        return weight_frames.Missing(digests=missing)

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

    async def _piece(self, call: weight_frames.Piece) -> Done:
        writer = self._writer(call.manifest)
        await run_blocking(lambda: writer.put(call.digest, call.content))
        return Done()

    async def _seal(self, call: weight_frames.Seal) -> Done:
        digest = call.manifest
        if digest not in self._sealed:
            writer = self._writer(digest)
            self._keep(digest, await run_blocking(writer.finish, discard=CachedShard.close))
            del self._writers[digest]
        return Done()

    def _writer(self, digest: str) -> ShardWriter:
        writer = self._writers.get(digest)
        if writer is None:
            raise ProtocolError("the shard was not offered")
        return writer

    def _keep(self, digest: str, cached: CachedShard) -> None:
        """Pin the shard in the cache for as long as this coordinator is connected."""
        self._sealed[digest] = self._kept.enter_context(cached)


def _entries(manifest: Manifest) -> int:
    """Tensors and pieces of a manifest; its memory is proportional to their number."""
    return sum(1 + len(tensor.pieces) for tensor in manifest.tensors)
