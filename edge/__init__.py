"""Run a language model that no single device of yours can hold, on the devices you have.

import edge

with edge.Cluster.discover() as cluster:
    model = cluster.load("path/to/checkpoint", dtype="int4")
    for token in model.stream("Why is the sky blue?", max_new_tokens=64):
        print(token.text, end="", flush=True)
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "CheckpointError",
    "Cluster",
    "Drift",
    "EdgeError",
    "Model",
    "NetworkError",
    "PeerError",
    "PeerInfo",
    "PeerLostError",
    "PlanError",
    "Progress",
    "Proposal",
    "ProtocolError",
    "Reply",
    "ReplyStream",
    "RequestError",
    "Token",
    "Workload",
    "__version__",
]

if TYPE_CHECKING:
    from edge.api import Cluster
    from edge.drift import Drift
    from edge.errors import (
        CapacityError,
        CheckpointError,
        EdgeError,
        NetworkError,
        PeerError,
        PeerLostError,
        PlanError,
        ProtocolError,
        RequestError,
    )
    from edge.generation import Token
    from edge.model import Model
    from edge.peer_info import PeerInfo
    from edge.planning import Proposal
    from edge.progress import Progress
    from edge.reply import Reply, ReplyStream
    from partition import Workload


_HOMES = {
    "Cluster": "edge.api",
    "Drift": "edge.drift",
    "Model": "edge.model",
    "PeerInfo": "edge.peer_info",
    "Progress": "edge.progress",
    "Proposal": "edge.planning",
    "Reply": "edge.reply",
    "ReplyStream": "edge.reply",
    "Token": "edge.generation",
    "Workload": "partition",
}


def __getattr__(name: str) -> Any:
    """The API is imported at its first use, so that a daemon or `--help` starts at once."""
    import importlib

    from edge.names import require_own_packages

    if name not in __all__:
        raise AttributeError(f"module 'edge' has no attribute {name!r}")
    require_own_packages()
    home = "edge.errors" if name.endswith("Error") else _HOMES[name]
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value
