"""Settings of one daemon."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from edge.errors import RequestError
from edge.host.cache_paths import cache_root
from edge.host.cgroup import usable_cores
from edge.host.free_memory import parse_folder_and_size, parse_size
from edge.option_fields import option
from edge.peer.access import UserLimits, parse_allowed, parse_user_limits
from edge.protocol.peer_info import BACKEND_CHOICES


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Settings of one daemon. Raises RequestError for a name that cannot be shown."""

    name: str = option(
        default_factory=socket.gethostname,
        help="How others see this device.  [default: the host's name]",
    )
    listen: str = option(
        "0.0.0.0:0",
        metavar="HOST:PORT",
        help="Where to listen; port 0 takes any free one, host 0.0.0.0 every interface.",
    )
    threads: int = option(
        default_factory=usable_cores,
        at_least=1,
        at_most=1024,
        help="Compute threads.  [default: cores, as far as the control group leaves their time]",
    )
    memory_bytes: int | None = option(
        None,
        flags=("--memory",),
        parse=parse_size,
        metavar="SIZE",
        help="The most that the whole process may have in memory, as 4GiB; with a GPU, of the "
        "GPU's.  [default: what is free, less a reserve]",
    )
    model_memory_bytes: int | None = option(
        None,
        flags=("--model-memory",),
        parse=parse_size,
        metavar="SIZE",
        help="Of that, the most for weights and KV caches.  [default: what the process leaves]",
    )
    host_memory_bytes: int | None = option(
        None,
        flags=("--host-memory",),
        parse=parse_size,
        metavar="SIZE",
        help="With a GPU: of the host's memory, the most for what the GPU has no room for.  "
        "[default: half of what is free, less a reserve]",
    )
    backend: str = option(
        "auto",
        choices=BACKEND_CHOICES,
        help="What computes: ort on the CPU, triton on a GPU; auto takes the GPU if it can. null "
        "computes nothing and makes up tokens, for plans and tests.",
    )
    kv_memory_bytes: int | None = option(
        None,
        flags=("--kv-memory",),
        parse=parse_size,
        metavar="SIZE",
        help="The part of it that keys and values of requests may take.  [default: what plans "
        "reserve]",
    )
    kv_disk: tuple[Path, int] | None = option(
        None,
        parse=parse_folder_and_size,
        metavar="FOLDER:SIZE",
        help="Where keys and values go for which there is no memory, as /fast/kv:20GiB: so more "
        "requests can be under way, and longer ones.",
    )
    cluster: str = option(
        "default",
        help="Only peers and coordinators of the same cluster find each other.",
    )
    interfaces: tuple[str, ...] = option(
        (),
        flags=("--interface",),
        metavar="NAME|IP",
        help="Announce only on this network interface; may be repeated.",
    )
    cache_limit_bytes: int = option(
        64 << 30,
        flags=("--cache-limit",),
        parse=parse_size,
        metavar="SIZE",
        help="Disk for cached shards; the least recently used go first.  [default: 64GiB]",
    )
    allow: tuple[str, ...] | None = option(
        None,
        parse=parse_allowed,
        metavar="use=ID,…",
        help="Which devices may have this one compute, besides itself: ids, or their first 16 "
        "digits, as `edge cluster show` lists them.  [default: every member that may use others]",
    )
    each_user: UserLimits | None = option(
        None,
        parse=parse_user_limits,
        metavar="LIMITS",
        help="The most that one device may take, as memory=4GiB,cache=20GiB,sessions=2: memory of "
        "what it has loaded and of beginnings of its prompts, disk for the weights "
        "it has sent, and as much for such beginnings, shards loaded at once.",
    )
    audit: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        help="Append a line of JSON for each model that is loaded here, and when it ends: who, "
        "what, when.",
    )
    cache_root: Path = field(default_factory=cache_root)
    announce: bool = True
    """Whether to announce by zeroconf. Otherwise others need the address."""
    processor: str = "CPU"
    """The processor's name, for display."""

    def __post_init__(self) -> None:
        if not self.name.isprintable() or len(self.name) > 100:
            raise RequestError("a peer's name must be printable and at most 100 characters")
        if not (self.cluster and self.cluster.isprintable() and len(self.cluster) <= 100):
            raise RequestError(
                "a cluster's name must be printable, and have 1 to at most 100 characters"
            )
