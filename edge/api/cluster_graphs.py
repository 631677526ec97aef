"""The method of a cluster that loads a graph, with and without an event loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Unpack

from edge.api.encoder_decoder import (
    AskedPlans,
    AsyncEncoderDecoder,
    EncoderDecoder,
    load_graphs,
)
from edge.api.graph import (
    AskedPlan,
    AskedState,
    AsyncGraph,
    Graph,
    GraphAsked,
    GraphInputs,
    MoreGraphTerms,
    load_graph,
)
from edge.api.progress_bars import progress_bars
from edge.concurrency.loop_thread import LoopThread
from edge.option_fields import checks_calls
from edge.partition import Objective
from edge.progress import OnProgress
from edge.protocol.peer_info import PeerInfo


@checks_calls
class ClusterGraphs(ABC):
    """A cluster onto which graphs are loaded."""

    _graphs: list[AsyncGraph | AsyncEncoderDecoder]

    @property
    @abstractmethod
    def peers(self) -> tuple[PeerInfo, ...]:
        """The peers, as they last described themselves."""

    async def load_graph(
        self,
        path: str | Path,
        *,
        plan: AskedPlan = "auto",
        objective: Objective = "latency",
        sample: GraphInputs | None = None,
        state: AskedState = None,
        progress: bool | OnProgress | None = None,
        **more: Unpack[MoreGraphTerms],
    ) -> AsyncGraph:
        """Load an ONNX graph of any kind, cut over the peers where that takes less.

        plan: "auto", or a GraphPlan or its JSON, with names of peers. objective: the least seconds
        of one input, or the most inputs per second of a stream. sample: an array for each input, by
        which the graph is measured and the cut compared with the uncut graph; free dimensions are 1
        without it, so times and memory are of little use then. state: outputs that are inputs of
        the next run, as {"hn": "h"}, or "auto" to find them by their names; they stay on the device
        that computes them, and need not be in the sample. time_limit_s: seconds of one part of
        one input, after which a peer ends it. plan_only: measure and plan, open nothing. exit_when:
        an output and a number, as ("confidence", 0.9): an input ends early once all values of the
        output are as large. tiles: pixels of a side, and pixels that neighbours share, as (512,
        64): pictures are cut into tiles, which go to all devices that help; the sample must be
        larger than a tile. progress: as of `load`.

        Each peer gets every weight once, to be measured; of peers of one machine with one setup,
        one does. Raises CheckpointError for a file that is no graph that can be run, CapacityError
        if the peers have no room, PlanError for a plan that does not fit to the graph, RequestError
        for a sample of another form or a graph that ONNX Runtime cannot load, and PeerError if the
        results of a peer differ and no other one is left. Nothing is left on the peers then.
        """
        with progress_bars(progress) as on_progress:
            asked = GraphAsked(
                plan=plan,
                objective=objective,
                sample=sample,
                state=state,
                **more,
            )
            graph = await load_graph(path, self.peers, on_progress, asked)
        self._graphs.append(graph)
        return graph

    async def load_graphs(
        self,
        path: str | Path,
        *,
        plan: AskedPlans = "auto",
        max_tokens: int | None = None,
        max_beams: int = 4,
        input_tokens: int = 128,
        time_limit_s: float = 60.0,
        progress: bool | OnProgress | None = None,
    ) -> AsyncEncoderDecoder:
        """Load an encoder–decoder export of optimum: translation, summaries, speech.

        The folder has encoder_model.onnx, and decoder_model_merged.onnx, or decoder_model.onnx and
        decoder_with_past_model.onnx, with config.json. plan: "auto", or plans of "encoder" and
        "decoder", which may be on unlike devices. max_tokens: the longest answer with its prompt;
        None: what the model allows, at most 448. max_beams: most rows of beam search. Memory is
        reserved for both. input_tokens: the length of the input by which the encoder is measured.
        time_limit_s, progress: as of `load_graph`, whose errors it raises.
        """
        with progress_bars(progress) as on_progress:
            export = await load_graphs(
                path,
                self.peers,
                on_progress,
                plan=plan,
                max_tokens=max_tokens,
                max_beams=max_beams,
                input_tokens=input_tokens,
                time_limit_s=time_limit_s,
            )
        self._graphs.append(export)
        return export


@checks_calls
class BlockingClusterGraphs:
    """The same for callers without an event loop."""

    _cluster: ClusterGraphs
    _loop: LoopThread

    def load_graph(
        self,
        path: str | Path,
        *,
        plan: AskedPlan = "auto",
        objective: Objective = "latency",
        sample: GraphInputs | None = None,
        state: AskedState = None,
        progress: bool | OnProgress | None = None,
        **more: Unpack[MoreGraphTerms],
    ) -> Graph:
        """Load an ONNX graph of any kind, cut over the peers where that takes less.

        plan: "auto", or a GraphPlan or its JSON. objective: the least seconds of one input, or the
        most inputs per second. sample: an array for each input, by which the graph is measured.
        state: outputs that are inputs of the next run, as {"hn": "h"}, or "auto". exit_when: an
        output and a number, as ("confidence", 0.9), that end an input early. tiles: size and
        overlap of tiles of large pictures, in pixels.
        """
        loading = self._cluster.load_graph(
            path,
            plan=plan,
            objective=objective,
            sample=sample,
            state=state,
            progress=progress,
            **more,
        )
        return Graph(self._loop.run(loading), self._loop)

    def load_graphs(
        self,
        path: str | Path,
        *,
        plan: AskedPlans = "auto",
        max_tokens: int | None = None,
        max_beams: int = 4,
        input_tokens: int = 128,
        time_limit_s: float = 60.0,
        progress: bool | OnProgress | None = None,
    ) -> EncoderDecoder:
        """Load an encoder–decoder export of optimum: translation, summaries, speech.

        plan: "auto", or plans of "encoder" and "decoder". max_tokens: the longest answer with its
        prompt. max_beams: most rows of beam search.
        """
        loading = self._cluster.load_graphs(
            path,
            plan=plan,
            max_tokens=max_tokens,
            max_beams=max_beams,
            input_tokens=input_tokens,
            time_limit_s=time_limit_s,
            progress=progress,
        )
        return EncoderDecoder(self._loop.run(loading), self._loop)
