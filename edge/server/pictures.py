"""Pictures in requests: parts of messages for `edge.pictures`, and downloads of those given by URL.

A download is asked for by a client and made by this server, so it could reach what only the server
reaches. It is off by default. Each address, also of a redirect, must be one of the public internet,
and the connection goes to the address that was checked.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urljoin, urlsplit

from edge.errors import RequestError
from edge.pictures.decoder import MOST_FILE_BYTES
from edge.pictures.messages import NOT_SEEN, bytes_of_url, decoded_base64
from edge.server.fields import Fields
from edge.server.refusals import Refusal

Part = Mapping[str, object]
Content = str | Sequence[Part]
"""The content of a message: a text, or parts of text and pictures."""

PICTURE_KINDS = ("image_url", "input_image")
"""The types of OpenAI's parts that are pictures."""
_URL = "url"
"""The field of a part whose picture is to be downloaded."""
_MOST_REDIRECTS = 3
_MOST_S = 20.0
_PIECE_BYTES = 64 << 10
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Addresses that hold one of IPv4."""
_PORTS = {"http": 80, "https": 443}

Fetch = Callable[[str], bytes]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def picture_of_url(part: Fields, name: str, url: str | None) -> Part:
    """The part of a message for a picture whose URL is in the field `name`."""
    if url is None:
        raise part.refuse(name, "is missing")
    if url[:7].lower() == "http://" or url[:8].lower() == "https://":
        return {"type": "image", _URL: url}
    try:
        return {"type": "image", "image": bytes_of_url(url)}
    except RequestError as error:
        raise part.refuse(name, f"is no picture: {error}") from None


def picture_of_base64(part: Fields, name: str, text: object) -> Part:
    """The part of a message for a picture in base64, perhaps as a data URL."""
    if not isinstance(text, str):
        raise part.refuse(name, "must be a text in base64")
    if text.startswith("data:"):
        return picture_of_url(part, name, text)
    try:
        return {"type": "image", "image": decoded_base64(text)}
    except RequestError as error:
        raise part.refuse(name, f"is no picture: {error}") from None


def openai_picture(part: Fields) -> Part:
    """The picture of an `image_url` or `input_image` part."""
    if part.raw("file_id") is not None:
        raise part.refuse("file_id", "names a file, and this server stores none; give a data URL")
    held = part.raw("image_url")
    if isinstance(held, dict):
        inner = Fields(held, part.place("image_url"))
        return picture_of_url(inner, "url", inner.text("url"))
    return picture_of_url(part, "image_url", part.text("image_url"))


def seen_or_said(part: Fields, read: Callable[[Fields], Part]) -> Part:
    """The picture of a part of a tool's result, or the words that it cannot be seen: an agent would
    stop if it were refused."""
    try:
        return read(part)
    except Refusal:
        return {"type": "text", "text": NOT_SEEN}


def as_parts(content: Content) -> list[Part]:
    """The parts of a content."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def downloaded(messages: Sequence[Part], fetch: Fetch | None) -> list[Part]:
    """The messages with the bytes of pictures that are given by URL. fetch: None: there are no
    downloads, and the model is told that it cannot see those of tools' results. Raises
    RequestError."""

    def with_bytes(part: Any, *, of_tool: bool) -> Any:
        if not (isinstance(part, Mapping) and part.get("type") == "image" and _URL in part):
            return part
        if fetch is None and of_tool:
            return {"type": "text", "text": NOT_SEEN}
        if fetch is None:
            raise RequestError(
                "an image is given by a URL, and this server downloads none",
                remedy="send it as a data URL, or serve with --fetch-images",
            )
        return {"type": "image", "image": fetch(part[_URL])}

    return [
        {
            **each,
            "content": [with_bytes(part, of_tool=each.get("role") == "tool") for part in parts],
        }
        if isinstance(parts := each.get("content"), list)
        else each
        for each in messages
    ]


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet."""
    held = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    if address in _NAT64:
        held = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.is_global and not address.is_multicast and (held is None or held.is_global)


def fetch_picture(url: str, *, allows: Callable[[Address], bool] = is_public) -> bytes:
    """Download a picture. Raises RequestError, also for addresses that are not allowed."""
    until_s = time.monotonic() + _MOST_S
    for _redirect in range(_MOST_REDIRECTS + 1):
        try:
            found = _got(url, allows, until_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _failed(str(error) or type(error).__name__) from error
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise _failed(f"it has more than {_MOST_REDIRECTS} redirects")


def _got(url: str, allows: Callable[[Address], bool], until_s: float) -> bytes | str:
    """The body of a URL, or the place that it redirects to."""
    asked = urlsplit(url)
    if asked.scheme not in _PORTS or not asked.hostname or asked.username is not None:
        raise ValueError("its URL is none of http or https")
    port = asked.port or _PORTS[asked.scheme]
    connection = http.client.HTTPConnection(asked.hostname, port)
    connection.sock = _connected(asked.hostname, port, allows, until_s)

    def end() -> None:  # a server that sends a byte now and then meets no other limit
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)

    limit = threading.Timer(_left_s(until_s), end)
    limit.daemon = True
    limit.start()
    try:
        if asked.scheme == "https":
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(connection.sock, server_hostname=asked.hostname)
        host = asked.netloc
        path = f"{asked.path or '/'}{f'?{asked.query}' if asked.query else ''}"
        connection.request("GET", path, headers={"Host": host, "Accept": "image/*"})
        answer = connection.getresponse()
        if answer.status in {301, 302, 303, 307, 308} and (place := answer.getheader("location")):
            return place
        if answer.status != http.client.OK:
            raise ValueError(f"its server answered {answer.status}")
        content = bytearray()
        while piece := answer.read1(_PIECE_BYTES):
            content += piece
            if len(content) > MOST_FILE_BYTES:
                raise ValueError(f"it has more than {MOST_FILE_BYTES >> 20} MiB")
            _left_s(until_s)
        return bytes(content)
    finally:
        limit.cancel()
        connection.close()


def _connected(
    host: str, port: int, allows: Callable[[Address], bool], until_s: float
) -> socket.socket:
    """A connection to the first address of a host; all of them must be allowed."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_kind, place in found:
        if not allows(ipaddress.ip_address(str(place[0]).partition("%")[0])):
            raise ValueError(f"{host} is not on the public internet")
    family, kind, protocol, _name, place = found[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.settimeout(_left_s(until_s))
        connection.connect(place)
    except BaseException:
        connection.close()
        raise
    return connection


def _left_s(until_s: float) -> float:
    if (left_s := until_s - time.monotonic()) <= 0:
        raise ValueError(f"it did not come within {_MOST_S:.0f} s")
    return left_s


def _failed(why: str) -> RequestError:
    return RequestError(f"an image could not be downloaded: {why}", remedy="send it as a data URL")
