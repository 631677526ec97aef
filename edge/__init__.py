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
    "EdgeError",
    "Model",
    "NetworkError",
    "PeerError",
    "PeerInfo",
    "PeerLostError",
    "PlanError",
    "Progress",
    "ProtocolError",
    "Reply",
    "ReplyStream",
    "RequestError",
    "Token",
    "__version__",
]

if TYPE_CHECKING:
    from edge.api import Cluster, Model, Reply, ReplyStream
    from edge.coordinator import PeerInfo
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
    from edge.progress import Progress


_HOMES = {"PeerInfo": "edge.coordinator", "Token": "edge.generation", "Progress": "edge.progress"}


def __getattr__(name: str) -> Any:
    """The API is imported at its first use, so that a daemon or `--help` starts at once."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module 'edge' has no attribute {name!r}")
    home = "edge.errors" if name.endswith("Error") else _HOMES.get(name, "edge.api")
    return getattr(importlib.import_module(home), name)
