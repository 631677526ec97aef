"""Storage of a device's key and membership on disk; and tokens, which stand for a membership.

Files are private: a file that others can read or write is refused.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from edge.errors import RequestError
from edge.host.home import own_folder
from edge.membership.authority import MALFORMED, Authority
from edge.membership.identity import (
    MOST_PEERS,
    Identity,
    PublicKey,
    key_id,
    key_pem,
    read_key,
)
from edge.membership.length_prefix import joined, parted
from edge.membership.membership import (
    TAG_KEY_BYTES,
    Change,
    Membership,
    read_membership,
    read_past,
    told_past,
)
from edge.system.files import is_own, others_may, read_at, write_at
from edge.system.locks import lock, lock_now

CONFIG_VARIABLE = "EDGE_CONFIG"
TOKEN_VARIABLE = "EDGE_CLUSTER_TOKEN_FILE"  # noqa: S105  a name

_MOST_FILE_BYTES = 256 << 10
_MOST_MEMBERSHIP_BYTES = 2 << 20
"""Size limit, for the earlier keys and all issued certificates."""

_IDENTITY, _MEMBERSHIP = "identity.pem", "membership.json"
_TELLING = "telling.lock"
_PARTS = {"certificate", "cluster", "key", "tag_key", "expelled", "others"}
_LATER_PARTS = {"taken_in", "past"}
"""Fields that files of earlier versions lack."""


def config_root() -> Path:
    """The folder of keys: EDGE_CONFIG of the environment, or the system's folder for user settings.

    Raises RequestError for a user without a home folder."""
    return own_folder(CONFIG_VARIABLE, lambda: platformdirs.user_config_dir("edge"))


_EPOCH_DIGITS = 20
_MOST_EPOCH = 1 << 52
"""Microseconds until the year 2112. A greater epoch comes from a damaged file."""


class MembershipStore:
    """One folder of keys. Every method raises RequestError for files that cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: tuple[_Version, Membership] | None = None

    def identity(self) -> Identity:
        """This device's identity, created at the first call."""
        with self._alone():
            return self._identity()

    def membership(self) -> Membership | None:
        """This device's membership, read again if another process has changed it. None: in no
        cluster."""
        path = self.folder / _MEMBERSHIP
        try:
            version = _version(path.stat())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unusable(path, error) from error
        if self._read is None or self._read[0] != version:
            with self._alone():
                self._read = version, self._loaded(path)
        return self._read[1]

    def founded(self, name: str) -> Membership:
        """The membership; without one, of a newly founded cluster."""
        known = self.membership()
        if known is not None:
            return known
        with self._alone():  # else two daemons that start at once would found two clusters
            path = self.folder / _MEMBERSHIP
            if path.exists():
                return self._loaded(path)
            return self._kept(Membership.founded(name, self._identity()))

    def keep(self, membership: Membership) -> Membership:
        """Store a membership. Devices expelled from the cluster stay expelled."""
        with self._alone():
            path = self.folder / _MEMBERSHIP
            present = self._loaded(path) if path.exists() else None
            if present is not None and present.cluster_id == membership.cluster_id:
                membership = membership.hearing(present.expelled.signed)
            return self._kept(membership)

    def change(self, change: Change) -> Membership:
        """Apply `change` to the newest membership under a lock, store and return the result.

        `change` must not use the store.
        """
        with self._alone():
            newest = self._loaded(self.folder / _MEMBERSHIP)
            changed = change(newest)
            return newest if changed is newest else self._kept(changed)

    def with_expelled(self, held: Membership) -> Membership:
        """A membership by token, with the expulsions stored in this folder."""
        path = self._expelled_from(held)
        signed = _private(path) if path.exists() else b""
        if signed == held.expelled.signed:
            return held
        try:
            return held.hearing(signed)
        except RequestError as error:
            raise RequestError(f"{path} cannot be used: {error}") from error

    def change_held(self, held: Membership, change: Change) -> Membership:
        """As `change`, for a membership by token: only its expulsions are stored."""
        with self._alone():
            path = self._expelled_from(held)
            changed = change(self.with_expelled(held))
            signed = changed.expelled.signed
            if signed and not (path.exists() and _private(path) == signed):
                _write(path, signed)
            return changed

    @contextlib.contextmanager
    def numbered(self) -> Iterator[tuple[int, int]]:
        """The least number that no other daemon of this device holds, while it runs, and the epoch
        of this start, greater than earlier ones."""
        with contextlib.ExitStack() as stack:
            self.identity()  # creates the folder
            for number in range(MOST_PEERS):
                descriptor = _lock_file(self.folder / f"peer-{number}.lock")
                try:
                    is_free = lock_now(descriptor)
                except OSError:
                    is_free = False
                if not is_free:
                    os.close(descriptor)
                    continue
                stack.callback(os.close, descriptor)
                yield number, _next_epoch(descriptor)
                return
        raise RequestError(
            f"{MOST_PEERS} peers run on this device already", remedy="end one of them"
        )

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Hold the lock that says: a daemon of this device tells members of expulsions."""
        self.identity()  # creates the folder
        descriptor = _lock_file(self.folder / _TELLING)
        try:
            lock(descriptor, is_shared=True, waits=True)
            yield
        finally:
            os.close(descriptor)

    def is_telling(self) -> bool:
        """Whether a daemon holds that lock."""
        try:
            descriptor = os.open(self.folder / _TELLING, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not lock_now(descriptor)
        finally:
            os.close(descriptor)

    def _identity(self) -> Identity:
        path = self.folder / _IDENTITY
        if not path.exists():
            _write(path, key_pem(Identity.made().key))
        return Identity(read_key(_private(path), str(path)))

    def _expelled_from(self, held: Membership) -> Path:
        return self.folder / f"expelled-{held.cluster_id}"

    def _kept(self, membership: Membership) -> Membership:
        content = _encoded(_told(membership))
        if len(content) > _MOST_MEMBERSHIP_BYTES:
            raise RequestError(
                f"{self.folder / _MEMBERSHIP} would hold too many devices to be read again",
                remedy="begin anew, and pair those that you want: `edge cluster rotate --leave`",
            )
        path, pem = self.folder / _IDENTITY, key_pem(membership.identity.key)
        if not path.exists() or _private(path) != pem:
            _write(path, pem)
        _write(self.folder / _MEMBERSHIP, content)
        return membership

    def _loaded(self, path: Path) -> Membership:
        values = _decoded(_private(path, _MOST_MEMBERSHIP_BYTES), str(path))
        if not _PARTS <= set(values) <= _PARTS | _LATER_PARTS:
            whose = "an older" if set(values) < _PARTS else "another"
            raise RequestError(
                f"{path} is of {whose} version of Edge, or damaged",
                remedy=f"begin anew: mv {self.folder} {self.folder}.old, then edge pair",
            )
        others, key = _names(values.pop("others"), str(path)), values.pop("key")
        taken_in, past = (values.pop(name, b"") for name in ("taken_in", "past"))
        membership = read_membership(identity=self._identity(), **values)
        membership = replace(
            membership,
            others=others,
            taken_in=_certificates(taken_in, str(path)),
            past=read_past(past, str(path)),
        )
        if not key:
            return membership
        return replace(membership, authority=_authority(key, membership.cluster, str(path)))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A lock between processes, so that none reads a partial change."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = _lock_file(self.folder / "lock")
            try:
                lock(descriptor, waits=True)
                yield
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _unusable(self.folder, error) from error


def token(membership: Membership) -> bytes:
    """A token: its holder can join the cluster by itself. For scripts; as secret as a key.

    Raises RequestError without the cluster's key.
    """
    if membership.authority is None:
        raise RequestError(
            "this device does not have the cluster's key; write the token on the device that made "
            "the cluster"
        )
    return _encoded(
        {
            "cluster": membership.cluster.public_bytes(Encoding.DER),
            "key": key_pem(membership.authority.key),
            "tag_key": membership.tag_key,
            "expelled": membership.expelled.signed,
        }
    )


def enrolled_by_token(text: bytes, whose: str, name: str, identity: Identity) -> Membership:
    """The membership of a device that holds a token. Raises RequestError naming `whose` token it
    is."""
    values = _decoded(text, whose)
    if set(values) != {"cluster", "key", "tag_key", "expelled"}:
        raise RequestError(f"{whose} is not a cluster's token")
    try:
        certificate = x509.load_der_x509_certificate(values["cluster"])
    except MALFORMED as error:
        raise RequestError(f"{whose} is not a cluster's token: {error}") from error
    authority = _authority(values["key"], certificate, whose)
    if len(values["tag_key"]) != TAG_KEY_BYTES:
        raise RequestError(f"{whose} is damaged: it has no key for tags")
    member = Membership.enrolled(authority, values["tag_key"], name, identity)
    return replace(member, by_token=True).hearing(values["expelled"])


def read_token(path: Path) -> bytes:
    """A token file. Raises RequestError, also if others can read it."""
    return _private(path)


def write_token(path: Path, membership: Membership) -> None:
    """Write a token file. Raises RequestError, also if the file exists."""
    if path.exists():
        raise RequestError(f"{path} is there already", remedy="remove it, or name another file")
    _write(path, token(membership))


def _authority(pem: bytes, certificate: x509.Certificate, whose: str) -> Authority:
    key = read_key(pem, whose)
    try:
        public_key = certificate.public_key()
        # Self-signed, so it is the founder's certificate, whatever other certificates say.
        certificate.verify_directly_issued_by(certificate)
    except MALFORMED as error:
        raise RequestError(f"{whose} cannot be read: {error}") from error
    if public_key != key.public_key():
        raise RequestError(f"{whose} is damaged: its parts are of different clusters")
    return Authority(key=key, certificate=certificate)


def _told(membership: Membership) -> dict[str, bytes]:
    authority = membership.authority
    return {
        "certificate": membership.certificate.public_bytes(Encoding.DER),
        "cluster": membership.cluster.public_bytes(Encoding.DER),
        "key": b"" if authority is None else key_pem(authority.key),
        "tag_key": membership.tag_key,
        "expelled": membership.expelled.signed,
        "others": json.dumps(dict(membership.others)).encode(),
        "taken_in": joined(
            each.public_bytes(Encoding.DER) for each in membership.taken_in.values()
        ),
        "past": told_past(membership.past),
    }


def _certificates(content: bytes, whose: str) -> dict[str, x509.Certificate]:
    found: dict[str, x509.Certificate] = {}
    for each in parted(content, whose):
        try:
            certificate = x509.load_der_x509_certificate(each)
            key = certificate.public_key()
        except MALFORMED as error:
            raise RequestError(f"{whose} cannot be read: {error}") from error
        if not isinstance(key, PublicKey):
            raise RequestError(f"{whose} cannot be read: a certificate has a key of another kind")
        found[key_id(key)] = certificate
    return found


def _names(text: bytes, whose: str) -> dict[str, str]:
    try:
        return {str(id): str(name) for id, name in json.loads(text).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise RequestError(f"{whose} cannot be read: {error}") from error


def _encoded(values: Mapping[str, bytes]) -> bytes:
    texts = {name: base64.b64encode(value).decode() for name, value in values.items()}
    return json.dumps(texts).encode()


def _decoded(text: bytes, whose: str) -> dict[str, bytes]:
    try:
        values: Any = json.loads(text)
        return {name: base64.b64decode(value, validate=True) for name, value in values.items()}
    except (ValueError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise RequestError(f"{whose} cannot be read: {error}") from error


_Version = tuple[int, int, int]


def _version(found: os.stat_result) -> _Version:
    """A value that differs for each content of a file."""
    return found.st_mtime_ns, found.st_ino, found.st_size


def _lock_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _private(path: Path, most_bytes: int = _MOST_FILE_BYTES) -> bytes:
    """The content of a small file that only its owner can access."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not is_own(found, or_root=True) or others_may(found, 0o077):
                raise RequestError(
                    f"{path} can be read or changed by others",
                    remedy="make it yours alone: chmod 600",
                )
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise _unusable(path, error) from error
    if len(content) > most_bytes:
        raise RequestError(f"{path} is too large")
    return content


def _write(path: Path, content: bytes) -> None:
    """Write atomically; no other user can read it at any time. Raises RequestError."""
    draft = path.with_name(f"{path.name}.partial")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> RequestError:
    return RequestError(
        f"cannot use {path}: {error.strerror}",
        remedy=f"{CONFIG_VARIABLE} names another folder for keys",
    )


def _next_epoch(file: int) -> int:
    """The next epoch: one more than the file's, or the time if that is greater. Stored in the file.

    The time helps if the file is restored from a backup, the file if the clock is set back. If both
    happen, or in a copied folder, two starts differ by chance only.
    """
    before = read_at(file, _EPOCH_DIGITS, 0).strip()
    last = int(before) if before.isdigit() and int(before) < _MOST_EPOCH else 0
    epoch = max(last + 1 + secrets.randbelow(1 << 16), time.time_ns() // 1000)
    write_at(file, b"%0*d" % (_EPOCH_DIGITS, epoch), 0)
    return epoch
