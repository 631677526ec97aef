"""An encoder graph and a decoder graph with caches: one input encoded once, then token by token.

The caches, and what the decoder reads of the encoder, stay in the process of the decoder's part. A
step sends it the newest tokens and gets logits. After a loss all tokens so far are computed again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.concurrency.blocking import uninterrupted
from edge.errors import CheckpointError, PeerError
from edge.graphs.export_folder import HIDDEN
from edge.graphs.kept import Kept
from edge.graphs.merged_decoder import CACHE_SWITCH
from edge.graphs.onnx_file import GraphValue, OnnxFile, numpy_type
from edge.graphs.search_terms import SearchTerms
from edge.protocol.peer_info import gather_all
from edge.runs.graphs.beam_search import TokenSearch
from edge.runs.graphs.cut_graph import CutGraph
from edge.runs.graphs.opened_parts import OpenedParts
from edge.runs.graphs.remote_part import Arrays, DeviceGoneError, RemotePart

_ENCODED, _MASK, _IDS, _POSITIONS = (
    "encoder_hidden_states", "encoder_attention_mask", "input_ids", "cache_position",
)  # fmt: skip
_PAST, _PRESENT = "past_key_values.", "present."
_MOST_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """An answer of `generate`."""

    token_ids: tuple[int, ...]
    """Tokens that were chosen, without the one that ends them."""
    score: float
    """The sum of log-probabilities over `length ** length_penalty`; 0 of greedy search."""
    is_complete: bool
    """Whether a token ended it; otherwise it is as long as was allowed."""


class DecoderForm:
    """The inputs and outputs of a decoder graph, by what they are for."""

    def __init__(self, file: OnnxFile) -> None:
        """Raises CheckpointError for a graph of another form."""
        self.inputs = {each.name: each for each in file.inputs}
        outputs = [each.name for each in file.outputs]
        self.caches = {
            name: _PAST + name.removeprefix(_PRESENT)
            for name in outputs
            if name.startswith(_PRESENT)
        }
        """Outputs, and the inputs whose next values they are."""
        self.own = tuple(n for n in self.caches.values() if ".decoder." in n)
        """Caches that grow with each token; the others are filled by the first step."""
        self.held = tuple(name for name in (_ENCODED, _MASK) if name in self.inputs)
        known = {*self.caches.values(), *self.held, _IDS, CACHE_SWITCH, _POSITIONS}
        problem = (
            "has no logits and caches, named present.0.decoder.key"
            if "logits" not in outputs or not self.own
            else f"has no input {CACHE_SWITCH}"
            if not {CACHE_SWITCH, _IDS, *self.caches.values()} <= self.inputs.keys()
            else f"has an input {min(self.inputs.keys() - known)!r:.80}, which is not known"
            if self.inputs.keys() - known
            else next(
                (
                    f"does not tell heads and sizes of {name!r:.80}"
                    for name in self.caches.values()
                    if not _has_sizes(self.inputs[name])
                ),
                None,
            )
        )
        if problem is not None:
            raise CheckpointError(
                f"{file.path} {problem}",
                remedy="export it by optimum: optimum-cli export onnx --task ...-with-past",
            )

    def sample(self, encoded: NDArray[Any], rows: int, tokens: int) -> dict[str, NDArray[Any]]:
        """The largest step: `rows` rows with `tokens` tokens in their caches."""
        found = self.begin(np.zeros((rows, 1), np.int64), encoded)
        for name in self.caches.values():
            length = tokens if name in self.own else encoded.shape[1]
            found[name] = self._cache(name, rows, length)
        found[CACHE_SWITCH] = np.array([True])
        if _POSITIONS in found:
            found[_POSITIONS] = np.array([tokens])
        return found

    def begin(self, ids: NDArray[np.int64], encoded: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The inputs of the first step. encoded: float [1, places, width]."""
        rows = len(ids)
        found: dict[str, NDArray[Any]] = {
            _IDS: ids,
            CACHE_SWITCH: np.array([False]),
            _ENCODED: np.repeat(encoded, rows, axis=0),
            _MASK: np.ones((rows, encoded.shape[1]), np.int64),
            _POSITIONS: np.arange(ids.shape[1]),
            **{name: self._cache(name, rows, 0) for name in self.caches.values()},
        }
        return {name: found[name] for name in self.inputs}

    def _cache(self, name: str, rows: int, length: int) -> NDArray[Any]:
        value = self.inputs[name]
        assert value.shape is not None, "checked"
        heads, width = value.shape[1], value.shape[3]
        return np.zeros((rows, int(heads or 0), length, int(width or 0)), numpy_type(value.dtype))


def _has_sizes(value: GraphValue) -> bool:
    return (
        value.shape is not None
        and len(value.shape) == 4
        and all(isinstance(value.shape[axis], int) for axis in (1, 3))
    )


class CachedDecoding:
    """Two loaded graphs that answer together; for one event loop. Close with `aclose`."""

    def __init__(self, encoder: CutGraph, decoder: CutGraph) -> None:
        self.encoder, self.decoder = encoder, decoder
        self.form = DecoderForm(decoder.file)
        self._slots = itertools.count()
        # Memory is reserved for the caches of one answer.
        self._turn = asyncio.Lock()

    async def encode(self, inputs: Mapping[str, Any]) -> NDArray[Any]:
        """What the encoder makes of one input: float [1, places, width]."""
        return (await self.encoder.run(inputs))[HIDDEN]

    async def generate(
        self,
        encoded: NDArray[Any],
        prompt: Sequence[int],
        terms: SearchTerms,
        on_token: Callable[[], object] | None = None,
    ) -> Generated:
        """Tokens behind the prompt, for what `encode` gave. Answers wait for each other."""
        async with self._turn:
            slot, search = str(next(self._slots)), TokenSearch(terms, prompt)
            opened: OpenedParts | None = None
            begun: list[OpenedParts] = []
            """Those that may keep caches of this answer, also of a step that was given up."""
            tries = 0
            try:
                while True:
                    now = await self.decoder.current()
                    if not begun or begun[-1] is not now:
                        begun.append(now)
                    try:
                        logits = await self._step(now, slot, search, encoded, opened is not now)
                    except DeviceGoneError as error:
                        await uninterrupted(self.decoder.lost(now, error))
                        opened = None
                        continue
                    except PeerError:
                        tries, opened = tries + 1, None
                        if tries == _MOST_TRIES:
                            raise
                        continue
                    opened = now
                    _check_tokens(terms, logits.shape[-1])
                    if not search.take(logits[:, -1]):
                        break
                    if on_token is not None:
                        on_token()
            finally:
                for part in (part for each in begun for part in each.parts):
                    part.forget(slot)
        tokens = search.answer
        ended = bool(tokens) and tokens[-1] in terms.eos_token_ids
        return Generated(
            token_ids=tuple(tokens[:-1] if ended else tokens),
            score=search.score,
            is_complete=ended,
        )

    async def aclose(self) -> None:
        """Free both graphs on the peers. May be called again."""
        await gather_all((self.encoder.aclose(), self.decoder.aclose()))

    async def _step(
        self,
        opened: OpenedParts,
        slot: str,
        search: TokenSearch,
        encoded: NDArray[Any],
        is_first: bool,
    ) -> NDArray[Any]:
        form = self.form
        rows = np.array(search.rows, np.int64)
        if is_first:
            arrays = form.begin(rows, encoded)
        else:
            arrays = {_IDS: rows[:, -1:], CACHE_SWITCH: np.array([True])}
            if _POSITIONS in form.inputs:
                arrays[_POSITIONS] = np.array([rows.shape[1] - 1])
        own = search.order if search.order != tuple(range(len(rows))) else ()
        between = opened.between | {"logits"}

        async def one(_number: int, remote: RemotePart, known: Arrays) -> Arrays:
            inputs, outputs = remote.part.inputs, remote.part.outputs
            kept = Kept(
                slot=slot,
                take=()
                if is_first
                else tuple(n for n in inputs if n in form.held or n in form.caches.values()),
                keep={
                    output: name
                    for output, name in form.caches.items()
                    if output in outputs and name in inputs and (is_first or name in form.own)
                },
                hold=tuple(n for n in inputs if n in form.held) if is_first else (),
                give=tuple(n for n in outputs if n in between),
                order=() if is_first else own,
                ordered=tuple(n for n in inputs if n in form.own),
            )
            return await remote.run(known, kept)

        return (await opened.flow(arrays, one))["logits"]


def _check_tokens(terms: SearchTerms, vocabulary: int) -> None:
    named = [
        *terms.eos_token_ids, *terms.suppress_tokens, *terms.begin_suppress_tokens,
        *terms.only_tokens,
        *(t for t in (terms.forced_bos_token_id, terms.forced_eos_token_id) if t is not None),
    ]  # fmt: skip
    if max(named, default=0) >= vocabulary:
        raise CheckpointError(
            f"generation_config.json names token {max(named)}, and the decoder has {vocabulary}",
            remedy="give the file that belongs to the graphs",
        )
