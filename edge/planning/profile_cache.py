"""Measurements of devices and links, cached on the coordinator's disk for at most a day.

One small file for each device and model, and for each link. A file that cannot be read counts as
missing, so that its facts are measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from edge.errors import EdgeError
from edge.host.atomic_files import write_whole
from edge.models.attention import Attention
from edge.models.rotary import Rotary
from edge.models.spec import ModelSpec
from edge.offload import parse_json, read_file
from edge.partition import CrowdSpec
from edge.protocol.fields import from_json, to_json
from edge.protocol.measurements import LinkTimes, PeerProfile
from edge.protocol.peer_info import PeerInfo
from edge.weights.formats import WeightFormat
from edge.weights.proof_cases import CASES_VERSION

Measured = TypeVar("Measured", PeerProfile, LinkTimes)

ProfileKind = Literal["device", "look"]
"""A measurement, or a short look."""

MEASURED_AGAIN_AFTER_S = 24 * 3600.0

_MAX_FILE_BYTES = 1 << 20

UNSTEADY_AGAIN_AFTER_S = 600.0
"""Age at which a profile whose samples disagreed is measured again: the device was busy, and may be
idle by now."""


def device_key(peer: PeerInfo) -> str:
    """A key of a device that stays the same when its daemon restarts, until the device changes.

    A daemon's id changes at each start. Two devices on one host with the same setup may have one
    key; then they are equally fast.
    """
    return _digest(peer.host, peer.own_name, peer.identity)


class FactsCache:
    """A cache in files under `root`. now_s: the clock, in seconds since the epoch."""

    def __init__(self, root: Path, *, now_s: Callable[[], float] = time.time) -> None:
        self._root = root
        self._now_s = now_s

    def profile(
        self,
        peer: PeerInfo,
        spec: ModelSpec,
        weight_format: WeightFormat,
        *,
        of: ProfileKind = "device",
    ) -> PeerProfile | None:
        return self._known(self._path(peer, spec, weight_format, of=of), "profile", PeerProfile)

    def keep_profile(
        self,
        peer: PeerInfo,
        spec: ModelSpec,
        weight_format: WeightFormat,
        profile: PeerProfile,
        *,
        of: ProfileKind = "device",
    ) -> None:
        self._write(self._path(peer, spec, weight_format, of=of), {"profile": to_json(profile)})

    def crowds(
        self, group: Sequence[PeerInfo], spec: ModelSpec, weight_format: WeightFormat
    ) -> tuple[CrowdSpec, ...] | None:
        """The measured contention of these peers, all that are used on one host; empty where they
        could not be tried together. None where it is not cached for exactly these."""
        members = sorted(map(device_key, group))
        found: tuple[CrowdSpec, ...] | None = None
        for peer in group:
            value = self._read(self._path(peer, spec, weight_format, of="host"))
            if value.get("members") != members:
                return None
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                found = tuple(_crowd(each, peer.host) for each in value["crowds"])
        return found

    def keep_crowds(
        self,
        group: Sequence[PeerInfo],
        spec: ModelSpec,
        weight_format: WeightFormat,
        crowds: Sequence[CrowdSpec],
    ) -> None:
        """Cache it under each of these peers, so that forgetting one forgets its contention with
        the others."""
        value = {
            "members": sorted(map(device_key, group)),
            "crowds": [asdict(crowd) for crowd in crowds],
        }
        for peer in group:
            self._write(self._path(peer, spec, weight_format, of="host"), value)

    def is_proven(self, peer: PeerInfo, weight_format: WeightFormat) -> bool:
        """Whether the device computed this format rightly, as it is now."""
        return bool(self._kept(self._proof_path(peer, weight_format)))

    def keep_proven(self, peer: PeerInfo, weight_format: WeightFormat) -> None:
        self._write(self._proof_path(peer, weight_format), {})

    def forget_device(self, peer: PeerInfo) -> None:
        """Forget what was measured of a device, for all models and formats."""
        shutil.rmtree(self._root / "devices" / device_key(peer), ignore_errors=True)

    def link(self, source: PeerInfo, target: PeerInfo) -> LinkTimes | None:
        return self._known(self._link_path(source, target), "link", LinkTimes)

    def keep_link(self, source: PeerInfo, target: PeerInfo, times: LinkTimes) -> None:
        self._write(self._link_path(source, target), {"link": to_json(times)})

    def forget_link(self, one: PeerInfo, other: PeerInfo) -> None:
        """Forget what was measured of the link between the two, in either direction."""
        for path in (self._link_path(one, other), self._link_path(other, one)):
            with contextlib.suppress(OSError):
                path.unlink()

    def _path(
        self, peer: PeerInfo, spec: ModelSpec, weight_format: WeightFormat, *, of: str = "device"
    ) -> Path:
        model = _digest(*_shape(spec), *weight_format.storage, weight_format.accuracy)
        return self._root / "devices" / device_key(peer) / f"{model}-{of}.json"

    def _proof_path(self, peer: PeerInfo, weight_format: WeightFormat) -> Path:
        kinds = to_json(weight_format)["kinds"]
        name = _digest(CASES_VERSION, json.dumps(kinds), weight_format.accuracy)
        return self._root / "devices" / device_key(peer) / f"{name}-proven.json"

    def _link_path(self, source: PeerInfo, target: PeerInfo) -> Path:
        ends = [(peer.host, peer.address, *peer.addresses) for peer in (source, target)]
        return self._root / "links" / f"{_digest(*ends)}.json"

    def _known(self, path: Path, name: str, kind: type[Measured]) -> Measured | None:
        value = self._read(path)
        with contextlib.suppress(EdgeError, ValueError, KeyError, TypeError, OverflowError):
            found = from_json(kind, value[name])
            age_s = self._now_s() - value["measured_at_s"]
            if not found.is_unsteady or age_s < UNSTEADY_AGAIN_AFTER_S:
                return found
        return None

    def _read(self, path: Path) -> Mapping[str, Any]:
        """The content of a file less than a day old; empty if there is none."""
        value = self._kept(path)
        with contextlib.suppress(TypeError, KeyError):
            if 0 <= self._now_s() - value["measured_at_s"] < MEASURED_AGAIN_AFTER_S:
                return value
        return {}

    def _kept(self, path: Path) -> Mapping[str, Any]:
        """The content of a file of any age; empty if there is none."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return dict(parse_json(read_file(path, _MAX_FILE_BYTES)))
        return {}

    def _write(self, path: Path, value: Mapping[str, Any]) -> None:
        text = json.dumps({"measured_at_s": self._now_s(), **value})
        with contextlib.suppress(OSError):  # without the cache, the next plan only takes longer
            write_whole(path, text)


def _shape(spec: ModelSpec) -> tuple[object, ...]:
    """The facts of a model that decide its speed: all but values that do not change sizes."""
    kinds = [
        replace(kind, mixer=replace(kind.mixer, rotary=_same_size(kind.mixer.rotary)))
        if isinstance(kind.mixer, Attention)
        else kind
        for kind in spec.kinds
    ]
    return spec.hidden_size, spec.vocab_size, kinds, spec.layers


def _same_size(rotary: Rotary) -> Rotary:
    ones = (1.0,) * len(rotary.inverse_frequencies)
    return Rotary(inverse_frequencies=ones, is_interleaved=rotary.is_interleaved)


def _crowd(value: Mapping[str, Any], host: str) -> CrowdSpec:
    """A CrowdSpec from JSON. ValueError, KeyError, TypeError or OverflowError for other values."""
    latency_s, bytes_per_s = map(float, value["link"])
    return CrowdSpec(
        host=host,
        count=int(value["count"]),
        rows=tuple(map(int, value["rows"])),
        sum_s=tuple(map(float, value["sum_s"])),
        slower=tuple(map(float, value["slower"])),
        pace=tuple(map(float, value["pace"])),
        link=(latency_s, bytes_per_s),
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
