"""Collectives and hops with compressed messages: fewer bytes on the wire, rounded numbers.

Knows ranks, links and wire formats. Messages that a rule does not encode move as usual.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.transport.collective import SLICED_ABOVE_BYTES, MeshCollective, check_contiguous
from edge.transport.link import Link
from edge.transport.scratch import Scratch
from edge.transport.wire_format import BLOCK_NUMBERS, Codec, WireRule, open_codec

Array = NDArray[Any]

_BYTE = np.dtype(np.uint8)


class EncodedMeshCollective(MeshCollective):
    """A mesh whose float32 sums travel encoded, by a rule. See :class:`Collective`.

    Every rank adds what the others receive, its own term rounded as theirs are, in rank order: all
    hold the same bits. Large sums of more than two ranks are taken in slices, and the sums are
    encoded once more; their owner continues with the rounded ones as well. Gathers and broadcasts
    are not encoded.
    """

    def __init__(self, rank: int, links: Mapping[int, Link], rule: WireRule) -> None:
        """``links``: as in :class:`MeshCollective`. ``rule``: names another format than float32."""
        super().__init__(rank, links)
        self._rule = rule
        self._codec = open_codec(rule.format)
        self._messages = Scratch(self.size)
        self._packet = Scratch(1)

    def all_reduce(self, array: Array) -> None:
        if not self._rule.encodes(array):
            super().all_reduce(array)
            return
        check_contiguous(array)
        flat = array.reshape(-1)
        nbytes = self._codec.num_bytes(flat.size)
        if self.size > 2 and nbytes > SLICED_ABOVE_BYTES:
            self._reduce_encoded_slices(flat)
            return
        messages = self._messages.take(nbytes, _BYTE)
        own = messages[self.rank]
        self._codec.encode(flat, own)
        self._all_gather(own, messages)
        self._sum_decoded(messages, flat)

    def _sum_decoded(self, messages: Sequence[Array], into: Array) -> None:
        """Sum decoded messages into ``into``, in their order."""
        self._codec.decode(messages[0], into)
        (term, *_) = self._scratch.take(into.size, into.dtype)
        for message in messages[1:]:
            self._codec.decode(message, term)
            np.add(into, term, out=into)

    def _reduce_encoded_slices(self, flat: Array) -> None:
        """Each rank sums one slice. Slices end at block boundaries, so each block belongs to one
        rank."""
        blocks = -(-flat.size // BLOCK_NUMBERS)
        ends = [BLOCK_NUMBERS * (blocks * rank // self.size) for rank in range(1, self.size)]
        slices = [flat[start:stop] for start, stop in pairwise((0, *ends, flat.size))]
        codec, own = self._codec, slices[self.rank]
        messages = self._messages.take(codec.num_bytes(own.size), _BYTE)
        message = messages[self.rank]
        codec.encode(own, message)
        for other, link in self._rounds:
            packet = self._packet_for(slices[other])
            codec.encode(slices[other], packet)
            link.exchange(packet, messages[other])
        self._sum_decoded(messages, own)
        codec.encode(own, message)
        codec.decode(message, own)
        for other, link in self._rounds:
            packet = self._packet_for(slices[other])
            link.exchange(message, packet)
            codec.decode(packet, slices[other])

    def _packet_for(self, numbers: Array) -> Array:
        """Space for a message, valid until the next call."""
        return self._packet.take(self._codec.num_bytes(numbers.size), _BYTE)[0]


def open_mesh(rank: int, links: Mapping[int, Link], rule: WireRule) -> MeshCollective:
    """The mesh collective for ``rule``."""
    if rule.format == "float32":
        return MeshCollective(rank, links)
    return EncodedMeshCollective(rank, links, rule)


class EncodedHop:
    """One direction of a link whose arrays travel encoded, by a rule. Used from one thread."""

    def __init__(self, rule: WireRule) -> None:
        self._rule = rule
        self._codec = None if rule.format == "float32" else open_codec(rule.format)
        self._message = Scratch(1)

    def outgoing(self, array: Array) -> Array:
        """The message for ``array``, for every link that sends it; valid until the next call."""
        if self._codec is None or not self._rule.encodes(array):
            return array
        check_contiguous(array)
        message = self._space(self._codec, array)
        self._codec.encode(array.reshape(-1), message)
        return message

    def receive(self, link: Link, into: Array) -> None:
        """Receive and decode what :meth:`outgoing` made at the other end. Raises what the link
        raises."""
        if self._codec is None or not self._rule.encodes(into):
            link.receive(into)
            return
        check_contiguous(into)
        message = self._space(self._codec, into)
        link.receive(message)
        self._codec.decode(message, into.reshape(-1))

    def _space(self, codec: Codec, array: Array) -> Array:
        return self._message.take(codec.num_bytes(array.size), _BYTE)[0]
