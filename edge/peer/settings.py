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
        ":0",
        metavar="HOST:PORT",
        help="Where to listen; port 0 takes any free one. No host is every interface, host 0.0.0.0 "
        "those of IPv4.",
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
        help="Memory budget of the whole process, as 4GiB; with a GPU, of the GPU's memory.  "
        "[default: the free memory, less a reserve]",
    )
    model_memory_bytes: int | None = option(
        None,
        flags=("--model-memory",),
        parse=parse_size,
        metavar="SIZE",
        help="The most of --memory for weights and KV caches.  [default: all that is left]",
    )
    host_memory_bytes: int | None = option(
        None,
        flags=("--host-memory",),
        parse=parse_size,
        metavar="SIZE",
        help="With a GPU: host memory for weights and KV caches that do not fit on the GPU.  "
        "[default: half of the free memory, less a reserve]",
    )
    backend: str = option(
        "auto",
        choices=BACKEND_CHOICES,
        help="Back end: ort for the CPU, triton for an NVIDIA GPU, webgpu for a GPU of any vendor; "
        "auto takes a GPU if it can and it is faster. null computes nothing and makes up tokens, "
        "for plans and tests.",
    )
    allow_software_adapter: bool = option(
        False,
        help="Let webgpu use a graphics adapter in software, which is slow: for tests.",
    )
    kv_memory_bytes: int | None = option(
        None,
        flags=("--kv-memory",),
        parse=parse_size,
        metavar="SIZE",
        help="The most of --memory for KV caches of requests.  [default: what plans reserve]",
    )
    kv_disk: tuple[Path, int] | None = option(
        None,
        parse=parse_folder_and_size,
        metavar="FOLDER:SIZE",
        help="KV cache offload: a folder for keys and values that do not fit into memory, as "
        "/fast/kv:20GiB, for more and longer requests.",
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
        help="Disk for cached shards; the least recently used are evicted first.  [default: 64GiB]",
    )
    allow: tuple[str, ...] | None = option(
        None,
        parse=parse_allowed,
        metavar="use=ID,…",
        help="Devices that may use this one, besides itself: ids, or their first 16 digits, as "
        "`edge cluster show` lists them.  [default: every member that may use others]",
    )
    each_user: UserLimits | None = option(
        None,
        parse=parse_user_limits,
        metavar="LIMITS",
        help="Limits of each device, as memory=4GiB,cache=20GiB,sessions=2: memory of its loaded "
        "models and prefix caches, disk for the weights that it sent and as much again for its "
        "prefix caches, shards loaded at once.",
    )
    audit: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        help="Append a line of JSON when a model is loaded here and when it is freed: device, "
        "model, time.",
    )
    on_battery: str = option(
        "on",
        choices=("on", "off"),
        help="off: lend nothing while the device runs on its battery; answers move to others.",
    )
    idle_only: bool = option(
        False,
        help="Lend only while nobody uses the keyboard and the mouse; answers move to others.",
    )
    spare_memory_bytes: int | None = option(
        None,
        flags=("--spare-memory",),
        parse=parse_size,
        metavar="SIZE",
        help="Hand everything over when less memory than this is free, before the system swaps; "
        "lend again when twice as much is. Without --memory, models leave it free.  "
        "[default: the budget of --memory stays lent]",
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
