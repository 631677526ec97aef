"""A shard's graphs, ready to run, and the files that they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edge.backends.embedding_rows import EmbeddingRows
from edge.backends.ort.segments import GraphSegment
from edge.backends.ort.streaming import StreamedLayers
from edge.backends.watched_file import WatchedFile


@dataclass(frozen=True, slots=True)
class OpenGraphs:
    """The graphs of a shard in execution order, each with its session, ready to run."""

    segments: tuple[GraphSegment, ...]
    sessions: tuple[Any, ...]
    streamed: StreamedLayers | None
    """Where the weights of loose segments come from."""
    embedding: EmbeddingRows | None
    """Where a loose first stage takes what other graphs look up."""
    mapped: WatchedFile | None
    """What the graphs may read from still."""

    def check(self) -> None:
        """Raises CheckpointError if what the graphs read is no longer what it was."""
        if self.mapped is not None:
            self.mapped.check()

    def begin(self, index: int) -> None:
        """The segment's weights are there, once the disk has brought them."""
        if self.streamed is not None and self.segments[index].streamed is not None:
            self.streamed.begin(index)

    def end(self, index: int) -> None:
        """The segment is computed: its weights may be let go."""
        if self.streamed is not None and self.segments[index].streamed is not None:
            self.streamed.end(index)

    def close(self) -> None:
        if self.embedding is not None:
            self.embedding.close()
        if self.streamed is not None:
            self.streamed.close()
        if self.mapped is not None:
            self.mapped.close()


NO_GRAPHS = OpenGraphs((), (), None, None, None)
