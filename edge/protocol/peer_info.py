"""Who a peer is and what it has, as it says itself; and where others can reach it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.errors import EdgeError, NetworkError, ProtocolError
from edge.protocol.client import PeerClient
from edge.protocol.messages import Place, integer, printable, text
from edge.protocol.topology import Seat
from partition import DeviceSpec
from transport import Frame, TransportError, parse_address

_MODEL_NUMBERS = (
    "stage",
    "rank",
    "bytes",
    "buffer_bytes",
    "streamed_bytes",
    "host_bytes",
    "kv_bytes",
    "kv_host_bytes",
    "kv_disk_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """A peer as it described itself."""

    id: str
    name: str
    address: str
    """Where we reached it."""
    addresses: tuple[str, ...]
    """Every address it listens on."""
    backend: str
    processor: str
    """What computes, for people."""
    threads: int
    memory_bytes: int
    """What it promised to stay under."""
    floor_bytes: int
    """Of that, what its process takes of itself."""
    free_bytes: int
    """Of that, what nothing was reserved for yet."""
    model_free_bytes: int
    """What the weights and the KV cache of another model may take; the same, where no limit of
    their own is set."""
    host: str
    """The machine it is on: peers of one host share its memory."""
    identity: str
    """Changes when the device must be measured anew."""
    host_memory_bytes: int | None = None
    """What models may still take of its host's memory, which is not its own; None: it is."""
    kv_memory_bytes: int | None
    """What keys and values may still take of its memory; None: whatever a plan reserves."""
    kv_disk_bytes: int
    """What they may still take of its disk."""
    kv_prefix_bytes: int
    """What beginnings of earlier prompts take there; it makes room for requests."""
    models: tuple[dict[str, Any], ...]
    """What it runs: name, dtype, stage and rank of each shard; how it sums with the others of its
    stage: over links, or what else (sums); bytes of its weights and KV cache, of these those of
    keys and values (kv_bytes), of its buffers, of what it reads from disk for each step, of weights
    in the memory of its host (host_bytes), and of keys and values that are there (kv_host_bytes) or
    on disk (kv_disk_bytes) now."""

    def device(self, *, buffer_bytes: int = 0) -> DeviceSpec:
        """As plans see it: memory for weights and KV, beside the buffers of their steps."""
        return DeviceSpec(
            id=self.id,
            name=self.name,
            memory_bytes=max(0, min(self.model_free_bytes, self.free_bytes - buffer_bytes)),
            threads=self.threads,
            host=self.host,
            host_memory_bytes=self.host_memory_bytes,
        )


async def describe_peer(address: str, *, timeout_s: float = 5.0) -> PeerInfo:
    """Ask the peer at `address` who it is.

    Raises NetworkError (or ProtocolError, a kind of it) when nothing usable answers in time.
    """
    client = await PeerClient.connect(address, timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await client.call("describe")
    except TimeoutError:
        raise NetworkError(
            f"{address} took the connection but did not say within {timeout_s:g} s who it is; "
            "restart the peer there"
        ) from None
    finally:
        await client.aclose()
    return peer_info(answer, address)


async def set_memory(peer: PeerInfo, memory_bytes: int) -> PeerInfo:
    """Give the peer another budget; the peer as it is then. Raises RequestError when it refuses."""
    client = await PeerClient.connect(peer.address)
    try:
        return peer_info(await client.call("memory", {"bytes": memory_bytes}), peer.address)
    finally:
        await client.aclose()


async def memory_rate(peer: PeerInfo) -> float:
    """Bytes per second the peer reads from memory; takes it a few tenths of a second."""
    client = await PeerClient.connect(peer.address)
    try:
        answer = await client.call("memory_rate")
        return float(answer.header["bytes_per_s"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"peer {peer.name} measures in a form Edge does not know") from error
    finally:
        await client.aclose()


def peer_info(answer: Frame, address: str) -> PeerInfo:
    """The answer to `describe`. Raises ProtocolError for one that makes no sense."""
    header = answer.header
    try:
        device = header["device"]
        info = PeerInfo(
            id=text(header, "id"),
            name=printable(text(header, "name")),
            address=address,
            addresses=tuple(_checked_address(each) for each in header["addresses"]),
            backend=printable(text(device, "backend")),
            processor=printable(text(device, "processor")),
            threads=integer(device, "threads"),
            memory_bytes=integer(device, "memory_bytes"),
            floor_bytes=integer(device, "floor_bytes"),
            free_bytes=integer(device, "free_bytes"),
            model_free_bytes=integer(device, "model_free_bytes"),
            host=printable(text(device, "host")),
            identity=printable(text(device, "identity")),
            host_memory_bytes=_integer_or_none(device, "host_memory_bytes"),
            kv_memory_bytes=_integer_or_none(device, "kv_memory_bytes"),
            kv_disk_bytes=integer(device, "kv_disk_bytes"),
            kv_prefix_bytes=integer(device, "kv_prefix_bytes"),
            models=tuple(_hosted_model(model) for model in header["models"]),
        )
        info.device()  # refuses what cannot be planned with
    except (
        ProtocolError,
        TransportError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise ProtocolError(
            f"{address} describes itself in a form Edge does not know ({printable(error)}); "
            "update Edge on both devices"
        ) from error
    return info


def _integer_or_none(device: Mapping[str, Any], name: str) -> int | None:
    return None if device[name] is None else integer(device, name)


def _hosted_model(model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": printable(text(model, "name")),
        "dtype": printable(text(model, "dtype")),
        "sums": printable(text(model, "sums")),
        **{name: integer(model, name) for name in _MODEL_NUMBERS},
    }


def _checked_address(address: object) -> str:
    parse_address(text({"address": address}, "address"))
    return str(address)


async def describe_all(
    addresses: Sequence[str],
) -> tuple[list[PeerInfo], dict[str, EdgeError]]:
    """Every peer that answers, once each, in the order given; and why the others do not."""
    infos: dict[str, PeerInfo] = {}
    failures: dict[str, EdgeError] = {}

    async def ask(address: str) -> None:
        try:
            infos[address] = await describe_peer(address)
        except EdgeError as error:
            failures[address] = error

    await gather_all(ask(address) for address in dict.fromkeys(addresses))
    by_id: dict[str, PeerInfo] = {}
    for address in addresses:
        if address in infos:
            by_id.setdefault(infos[address].id, infos[address])
    return list(by_id.values()), failures


async def describe_each(addresses: Sequence[str]) -> list[PeerInfo]:
    """Every peer; raises the error of the first that does not answer."""
    infos, failures = await describe_all(addresses)
    for address in addresses:
        if address in failures:
            raise failures[address]
    return infos


def places(devices: Mapping[Seat, PeerInfo]) -> dict[Seat, Place]:
    """Where each shard's neighbours reach it.

    That is where the coordinator reached it; but a peer beside the coordinator, reached by
    loopback, must be named to other devices by addresses of its own. Raises NetworkError when it
    has none.
    """
    everywhere = {seat: (peer.address, *peer.addresses) for seat, peer in devices.items()}
    if not all(is_loopback(peer.address) for peer in devices.values()):
        for seat, peer in devices.items():
            everywhere[seat] = tuple(a for a in everywhere[seat] if not is_loopback(a))
            if not everywhere[seat]:
                raise NetworkError(
                    f"peer {peer.name} listens on {', '.join(peer.addresses)} only, where other "
                    "devices cannot reach it; start it with --listen 0.0.0.0:0"
                )
    return {
        seat: Place(name=peer.name, addresses=tuple(dict.fromkeys(everywhere[seat])))
        for seat, peer in devices.items()
    }


def is_loopback(address: str) -> bool:
    """Whether only this very device can reach `address`."""
    host, _port = parse_address(address)
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


async def gather_all(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run all at once; the first error cancels the rest, and is raised once they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


BACKENDS = ("ort", "triton", "null")
"""Names of folders in `edge/backends`."""

BACKEND_CHOICES = ("auto", *BACKENDS)
"""What users may ask for; `usual_backend` says what auto is."""
