"""Run a language model that no single device of yours can hold, on the devices you have.

import edge

with edge.Cluster.discover() as cluster:
    model = cluster.load("path/to/checkpoint", dtype="int4")
    for token in model.stream("Why is the sky blue?", max_new_tokens=64):
        print(token.text, end="", flush=True)
"""

import os
from typing import TYPE_CHECKING, Any

from edge.version import __version__

# In a checkout five packages of `edge` lie beside this folder; in an installed Edge, inside it.
# pathlib would double the time of this import.
_here = os.path.dirname(os.path.realpath(__file__))
if not os.path.isdir(os.path.join(_here, "partition")):
    __path__.append(os.path.dirname(_here))

__all__ = [
    "AsyncCluster",
    "AsyncEncoderDecoder",
    "AsyncGraph",
    "AsyncModel",
    "AsyncReplyStream",
    "CapacityError",
    "CheckpointError",
    "Cluster",
    "CountedExperts",
    "Drift",
    "Dtype",
    "EdgeError",
    "EncoderDecoder",
    "Estimate",
    "FormatQuality",
    "GeneratedTokens",
    "GenerationOptions",
    "Graph",
    "GraphEstimate",
    "GraphPlan",
    "GraphStage",
    "Inspection",
    "KeptFiles",
    "KeptReply",
    "KvDtype",
    "LoadOptions",
    "Model",
    "NetworkError",
    "Parallel",
    "PeerError",
    "PeerInfo",
    "PeerLostError",
    "PeerTimes",
    "Plan",
    "PlanError",
    "Progress",
    "PromptLengthError",
    "Proposal",
    "ProtocolError",
    "Quality",
    "Quantized",
    "Recovery",
    "Reply",
    "ReplyStream",
    "RequestError",
    "RunningCopy",
    "Said",
    "SamplingParameters",
    "Score",
    "Thought",
    "Token",
    "TokenLogprob",
    "Tokenizer",
    "ToolCall",
    "Work",
    "Workload",
    "__version__",
    "inspect",
]

if TYPE_CHECKING:
    from edge.answers.terms import GenerationOptions
    from edge.answers.text import Token, TokenLogprob
    from edge.api.async_cluster import AsyncCluster
    from edge.api.async_model import AsyncModel
    from edge.api.cluster import Cluster
    from edge.api.encoder_decoder import AsyncEncoderDecoder, EncoderDecoder, GeneratedTokens
    from edge.api.graph import AsyncGraph, Graph
    from edge.api.kept_reply import KeptReply
    from edge.api.known_models import inspect
    from edge.api.model import Model
    from edge.api.reply import AsyncReplyStream, Reply, ReplyStream
    from edge.errors import (
        CapacityError,
        CheckpointError,
        EdgeError,
        NetworkError,
        PeerError,
        PeerLostError,
        PlanError,
        PromptLengthError,
        ProtocolError,
        RequestError,
    )
    from edge.kernels.sampling.parameters import SamplingParameters
    from edge.partition import (
        Estimate,
        GraphEstimate,
        GraphPlan,
        GraphStage,
        Parallel,
        Plan,
        Workload,
    )
    from edge.planning.drift import Drift
    from edge.planning.load_options import LoadOptions
    from edge.planning.proposal import Proposal
    from edge.progress import Progress
    from edge.protocol.kept_files import KeptFiles
    from edge.protocol.peer_info import PeerInfo
    from edge.protocol.step_times import PeerTimes
    from edge.runs.copied_model import RunningCopy
    from edge.runs.model import Recovery
    from edge.scheduling.orders import Work
    from edge.studies.count_experts import CountedExperts
    from edge.studies.inspection import Inspection
    from edge.studies.quality import FormatQuality, Quality
    from edge.studies.quantize import Quantized
    from edge.studies.score import Score
    from edge.text import Tokenizer
    from edge.text.answer_parts import Said, Thought, ToolCall
    from edge.weights.formats import Dtype, KvDtype


_HOMES = {
    "AsyncCluster": "edge.api.async_cluster",
    "AsyncEncoderDecoder": "edge.api.encoder_decoder",
    "AsyncGraph": "edge.api.graph",
    "AsyncModel": "edge.api.async_model",
    "AsyncReplyStream": "edge.api.reply",
    "Cluster": "edge.api.cluster",
    "CountedExperts": "edge.studies.count_experts",
    "Drift": "edge.planning.drift",
    "Dtype": "edge.weights.formats",
    "EncoderDecoder": "edge.api.encoder_decoder",
    "Estimate": "edge.partition",
    "GeneratedTokens": "edge.api.encoder_decoder",
    "GenerationOptions": "edge.answers.terms",
    "Graph": "edge.api.graph",
    "GraphEstimate": "edge.partition",
    "GraphPlan": "edge.partition",
    "GraphStage": "edge.partition",
    "FormatQuality": "edge.studies.quality",
    "Inspection": "edge.studies.inspection",
    "KeptFiles": "edge.protocol.kept_files",
    "KeptReply": "edge.api.kept_reply",
    "KvDtype": "edge.weights.formats",
    "LoadOptions": "edge.planning.load_options",
    "Model": "edge.api.model",
    "Parallel": "edge.partition",
    "PeerInfo": "edge.protocol.peer_info",
    "PeerTimes": "edge.protocol.step_times",
    "Plan": "edge.partition",
    "Progress": "edge.progress",
    "Proposal": "edge.planning.proposal",
    "Recovery": "edge.runs.model",
    "Reply": "edge.api.reply",
    "ReplyStream": "edge.api.reply",
    "RunningCopy": "edge.runs.copied_model",
    "Said": "edge.text.answer_parts",
    "SamplingParameters": "edge.kernels.sampling.parameters",
    "Thought": "edge.text.answer_parts",
    "Token": "edge.answers.text",
    "TokenLogprob": "edge.answers.text",
    "Quality": "edge.studies.quality",
    "Quantized": "edge.studies.quantize",
    "Score": "edge.studies.score",
    "Tokenizer": "edge.text",
    "ToolCall": "edge.text.answer_parts",
    "Work": "edge.scheduling.orders",
    "Workload": "edge.partition",
    "inspect": "edge.api.known_models",
}


if not TYPE_CHECKING:  # a type checker would take any name to be one of edge's

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use, so that a daemon or `--help` starts at once."""
        import importlib

        if name not in __all__:
            raise AttributeError(f"module 'edge' has no attribute {name!r}")
        if name.endswith("Error"):
            home = "edge.errors"
        else:
            from edge.host.instructions import check_instructions

            check_instructions()  # before numpy is imported
            home = _HOMES[name]
        value = globals()[name] = getattr(importlib.import_module(home), name)
        return value

    def __dir__() -> list[str]:
        return list(__all__)
