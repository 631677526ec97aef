"""A shard's graphs with their sessions, and the files that they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edge.backends.embedding_rows import EmbeddingRows
from edge.backends.onnx.segments import GraphSegment
from edge.backends.ort.streaming import StreamedLayers
from edge.backends.watched_file import WatchedFile


@dataclass(frozen=True, slots=True)
class OpenGraphs:
    """The graphs of a shard in execution order, each with its session."""

    segments: tuple[GraphSegment, ...]
    sessions: tuple[Any, ...]
    streamed: StreamedLayers | None
    """The source of the weights of loose segments."""
    embedding: EmbeddingRows | None
    """The embedding's rows on disk, which the first stage reads."""
    mapped: WatchedFile | None
    """The file that the graphs may still read."""

    def check(self) -> None:
        """Raises CheckpointError if the file of weights has changed."""
        if self.mapped is not None:
            self.mapped.check()

    def begin(self, index: int) -> None:
        """Wait until the segment's weights are in memory."""
        if self.streamed is not None and self.segments[index].streamed is not None:
            self.streamed.begin(index)

    def end(self, index: int) -> None:
        """Release the segment's weights after it was computed."""
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
