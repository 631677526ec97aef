"""Run a language model that no single device of yours can hold, on the devices you have.

import edge

with edge.Cluster.discover() as cluster:
    model = cluster.load("path/to/checkpoint", dtype="int4")
    for token in model.stream("Why is the sky blue?", max_new_tokens=64):
        print(token.text, end="", flush=True)
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_API = ("Cluster", "Model", "Reply", "ReplyStream", "Token", "PeerInfo", "Progress")
_ERRORS = (
    "CapacityError",
    "CheckpointError",
    "EdgeError",
    "NetworkError",
    "PeerError",
    "PeerLostError",
    "PlanError",
    "ProtocolError",
    "RequestError",
)

__all__ = ["__version__", *_API, *_ERRORS]

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


def __getattr__(name: str) -> Any:
    """The API is imported at its first use, so that a daemon or `--help` starts at once."""
    import importlib

    if name in _ERRORS:
        return getattr(importlib.import_module("edge.errors"), name)
    homes = {
        "PeerInfo": "edge.coordinator",
        "Token": "edge.generation",
        "Progress": "edge.progress",
    }
    if name in _API:
        return getattr(importlib.import_module(homes.get(name, "edge.api")), name)
    raise AttributeError(f"module 'edge' has no attribute {name!r}")
