"""Pairing: two devices whose users share six words become members of one cluster.

The words are a password for SPAKE2 (Abdalla, Pointcheval, 2005; the variant of the package
`spake2`, which is older than RFC 9382). A device without them learns nothing from the exchange and
has one guess, after which they are void. Then the public key and the membership are exchanged,
sealed by AES-GCM under the agreed key. The public key comes with a signature: otherwise a device
could present a member's key and replace that member's certificate.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_der_public_key,
)
from spake2 import SPAKE2_A, SPAKE2_B

from edge.errors import EdgeError, RequestError
from edge.membership.authority import Authority
from edge.membership.identity import Identity, PublicKey, fingerprint, is_id, key_id
from edge.membership.membership import (
    Change,
    Membership,
    read_membership,
    read_past,
    told_past,
)
from edge.membership.pairing_words import WORDS
from edge.membership.roles import ROLES
from edge.system.since_boot import since_boot_s
from edge.transport import Channel, Frame, ProtocolError
from edge.transport.frame import FrameLimits

CODE_WORDS = 6
_PLACE_WORDS = 2
"""Words by which the devices find each other. The others, 32 bits, are the secret."""

CODE_LASTS_S = 300.0

_HELLO, _JOIN, _TAKEN_IN = "pair", "join", "taken in"
_LIMITS = FrameLimits(header_bytes=1 << 10, payload_bytes=64 << 10)
_TAKEN_IN_LIMITS = FrameLimits(header_bytes=1 << 10, payload_bytes=1 << 20)
"""Large enough for the cluster's earlier keys."""

_WORD_LIMIT_S = 3.0
"""Time limit for each expected message, in seconds; a device takes milliseconds."""

_NONCE = bytes(12)
"""Each key seals one message only."""

_MAGIC = b"edge pair\0"
"""No other content that a device's key signs begins like this."""
_ECDSA = ec.ECDSA(SHA256())


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """The other device, for display."""

    name: str
    id: str

    def __str__(self) -> str:
        return f"{self.name} ({fingerprint(self.id)})"


class WrongCodeError(RequestError):
    """The code is void: a device guessed wrongly, or came too late."""


class CannotKeepError(RequestError):
    """This device cannot store new members, so nobody can join by any code."""


class HeldMembership(Protocol):
    """Stored membership of this device, for example `CurrentMembership`."""

    def current(self) -> Membership:
        """The newest membership."""

    def change(self, change: Change) -> Membership:
        """Apply `change` to the newest membership, keep and return the result."""


def new_code() -> str:
    """A random code of six words."""
    return " ".join(secrets.choice(WORDS) for _ in range(CODE_WORDS))


def read_code(text: str) -> str:
    """A code as typed by a user. Raises RequestError if it is none."""
    words = text.lower().replace("-", " ").split()
    if len(words) != CODE_WORDS:
        raise RequestError(
            f"a code has {CODE_WORDS} words, not {len(words)}",
            remedy="type all that the other device shows, in their order",
        )
    for word in words:
        if word not in WORDS:
            raise RequestError(
                f"{word!r:.40} is no word of a code", remedy="compare it with the other device"
            )
    return " ".join(words)


def meeting_place(code: str) -> str:
    """The place that devices with this code announce; it reveals nothing about the secret words."""
    return "pair-" + "-".join(code.split()[:_PLACE_WORDS])


def check_takes_in(membership: Membership) -> Authority:
    """The authority that issues certificates. Raises RequestError if this device has none."""
    if membership.authority is None:
        raise RequestError(
            "this device may not take others in: it does not have the cluster's key; run "
            "`edge pair` on "
            "the device that made the cluster"
        )
    return membership.authority


class Invitation:
    """The inviting side, which shows the code: any number of devices may talk, one may guess.

    The first answer does not tell whether the words are right; only the proof after it is a guess.
    Proofs are checked one at a time, and after a wrong one none is.
    """

    def __init__(
        self,
        code: str,
        own: HeldMembership,
        name: str,
        roles: Collection[str] = ROLES,
        *,
        clock: Callable[[], float] = since_boot_s,
    ) -> None:
        """roles: of the new member. name: this device's. own: asked for the membership when a
        device comes, since the cluster's key may have changed by then. clock: seconds, including
        time in suspension; the code's lifetime begins here.

        Raises RequestError if this device cannot take others in.
        """
        check_takes_in(own.current())
        self._code = code
        self._own = own
        self._name = name
        self._roles = roles
        self._clock = clock
        self._ends_at_s = clock() + CODE_LASTS_S
        self._is_guessed = False
        """Whether a proof is being checked, was wrong, or has made a member."""

    async def take_in(self, channel: Channel, on_word: Callable[[], None] = lambda: None) -> Other:
        """Make the other device a member if it knows the words.

        on_word: called after each of its two messages.

        Raises WrongCodeError, after which the code is void; CannotKeepError; RequestError for a
        device that breaks the protocol or comes after another one; TimeoutError; errors of the
        channel.
        """
        spake = SPAKE2_B(self._code.encode())
        async with asyncio.timeout(_WORD_LIMIT_S):
            theirs = await _payload(channel, _HELLO)
        on_word()
        await channel.send(Frame(_HELLO, {}, spake.start()))
        keys = _Keys.agreed(spake, theirs)
        async with asyncio.timeout(_WORD_LIMIT_S):
            proof = await _payload(channel, _JOIN)
        on_word()
        if self._is_guessed:
            raise RequestError("another device has used the code")
        if self._clock() >= self._ends_at_s:
            raise WrongCodeError(
                "a device came too late: the code was void by then", remedy="show a new one"
            )
        self._is_guessed = True
        try:
            return await self._taken_in(channel, keys, keys.opened(keys.joining, proof))
        except WrongCodeError:
            raise
        except BaseException:
            self._is_guessed = False  # it knew the words, so it was no guess
            raise

    async def _taken_in(self, channel: Channel, keys: _Keys, asked: Mapping[str, Any]) -> Other:
        try:
            device = load_der_public_key(_bytes(asked, "key"))
        except (ValueError, UnsupportedAlgorithm) as error:
            raise RequestError(f"the other device has no key that can be used: {error}") from error
        if not isinstance(device, PublicKey) or not isinstance(device.curve, ec.SECP256R1):
            raise RequestError("the other device has a key of another kind; update Edge there")
        try:
            device.verify(_bytes(asked, "signature"), keys.signed, _ECDSA)
        except InvalidSignature:
            raise RequestError("the other device does not have the key that it shows") from None
        id, name = key_id(device), _name(asked)
        if id == self._own.current().identity.id:
            raise RequestError(
                "the other device has this device's own key, copied; remove the folder of keys "
                "there, and pair it again"
            )

        def taking_in(newest: Membership) -> Membership:
            authority, edition = check_takes_in(newest), newest.next_edition(id)
            return newest.taking_in(id, name, authority.member(device, name, self._roles, edition))

        # Store before sending: if this process ends now, every member is still on record.
        try:
            membership = self._own.change(taking_in)
        except EdgeError as error:
            raise CannotKeepError(str(error), remedy=error.remedy) from error
        certificate = membership.taken_in[id]
        answer = {
            "certificate": certificate.public_bytes(Encoding.DER),
            "cluster": membership.cluster.public_bytes(Encoding.DER),
            "tag_key": membership.tag_key,
            "expelled": membership.expelled.signed,
            "past": told_past(membership.past),
            "name": self._name.encode(),
            "id": membership.identity.id.encode(),
        }
        await channel.send(Frame(_TAKEN_IN, {}, keys.sealed(keys.inviting, answer)))
        return Other(name=name, id=id)


async def join(
    channel: Channel, code: str, identity: Identity, name: str
) -> tuple[Membership, Other]:
    """The joining side, which got the code: this device's membership, and the device that took it
    in.

    Raises WrongCodeError, RequestError and errors of the channel.
    """
    spake = SPAKE2_A(code.encode())
    await channel.send(Frame(_HELLO, {}, spake.start()))
    keys = _Keys.agreed(spake, await _payload(channel, _HELLO))
    public = identity.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    signature = identity.key.sign(keys.signed, _ECDSA)
    asked = {"key": public, "name": name.encode(), "signature": signature}
    await channel.send(Frame(_JOIN, {}, keys.sealed(keys.joining, asked)))
    told = keys.opened(keys.inviting, await _payload(channel, _TAKEN_IN, _TAKEN_IN_LIMITS))
    membership = read_membership(
        identity=identity,
        certificate=_bytes(told, "certificate"),
        cluster=_bytes(told, "cluster"),
        tag_key=_bytes(told, "tag_key"),
        expelled=_bytes(told, "expelled"),
    )
    other = Other(name=_name(told), id=_id(told))
    past = read_past(_bytes(told, "past"), "what the other device says")
    return replace(membership.knowing(other.id, other.name), past=past), other


@dataclass(frozen=True, slots=True)
class _Keys:
    """One key for each direction, and the transcript that the joining device signs, valid nowhere
    else."""

    joining: AESGCM
    inviting: AESGCM
    signed: bytes

    @classmethod
    def agreed(cls, spake: Any, theirs: bytes) -> _Keys:
        try:
            shared = spake.finish(theirs)
        except (
            Exception
        ) as error:  # the package raises a different error for each malformed message
            raise RequestError(
                "the other device does not follow Edge's pairing protocol"
            ) from error
        derived = HKDF(SHA256(), 96, salt=None, info=b"edge pair").derive(shared)
        return cls(AESGCM(derived[:32]), AESGCM(derived[32:64]), _MAGIC + derived[64:])

    @staticmethod
    def sealed(key: AESGCM, values: Mapping[str, bytes]) -> bytes:
        texts = {name: base64.b64encode(value).decode() for name, value in values.items()}
        return key.encrypt(_NONCE, json.dumps(texts).encode(), None)

    @staticmethod
    def opened(key: AESGCM, sealed: bytes) -> dict[str, Any]:
        try:
            values = json.loads(key.decrypt(_NONCE, sealed, None))
        except InvalidTag:
            raise WrongCodeError("the words of the two devices are not the same") from None
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"the other device does not follow Edge's pairing protocol: {error}"
            ) from error
        if not isinstance(values, dict):
            raise RequestError("the other device does not follow Edge's pairing protocol")
        return values


async def _payload(channel: Channel, kind: str, limits: FrameLimits = _LIMITS) -> bytes:
    try:
        frame = await channel.receive(most=limits)
    except ProtocolError as error:
        raise RequestError(
            f"the other device does not follow Edge's pairing protocol: {error}"
        ) from error
    if frame.kind != kind:
        raise RequestError(
            "the other device does not follow Edge's pairing protocol; update Edge on both"
        )
    return bytes(frame.payload)


def _bytes(values: Mapping[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(values[name], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise RequestError("the other device does not follow Edge's pairing protocol") from None


def _name(values: Mapping[str, Any]) -> str:
    text = _bytes(values, "name").decode("utf-8", "replace")[:64]
    return "".join(letter for letter in text if letter.isprintable()) or "nameless"


def _id(values: Mapping[str, Any]) -> str:
    text = _bytes(values, "id").decode("ascii", "replace")
    if not is_id(text):
        raise RequestError(
            "the other device does not follow Edge's pairing protocol: its id is none"
        )
    return text
