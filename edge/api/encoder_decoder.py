"""An encoder–decoder export loaded onto the peers of a cluster, with and without an event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edge.api.graph import AskedPlan, asked_plan, cpu_peers
from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.concurrency.loop_thread import LoopThread
from edge.errors import CheckpointError, RequestError
from edge.graphs.export_folder import FEATURES, HIDDEN, ExportFolder
from edge.graphs.onnx_file import GraphValue
from edge.graphs.search_terms import SearchTerms
from edge.graphs.sound import checked_samples, log_mel, pieces, read_wav
from edge.partition import GraphPlan
from edge.progress import OnProgress
from edge.protocol.peer_info import PeerInfo
from edge.runs.graphs.cached_decoding import CachedDecoding, DecoderForm, Generated
from edge.runs.graphs.cut_graph import load_cut_graph
from edge.runs.graphs.graph_options import GraphOptions
from edge.runs.graphs.inputs import made_up_sample

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTokens:
    """An answer of an encoder–decoder export."""

    token_ids: tuple[int, ...]
    """Tokens that were chosen, without the one that ends them."""
    text: str | None
    """None: the folder has no tokenizer.json."""
    score: float
    """The sum of log-probabilities over `length ** length_penalty`; 0 of greedy search."""
    is_complete: bool
    """Whether a token ended it; otherwise it is as long as was allowed."""


class _ExportFacts:
    """What both faces of a loaded export tell."""

    def __init__(self, graphs: CachedDecoding, folder: ExportFolder) -> None:
        self._graphs, self._folder = graphs, folder

    @property
    def inputs(self) -> tuple[GraphValue, ...]:
        """Name, type and shape of each input of the encoder."""
        return self._graphs.encoder.inputs

    @property
    def takes_sound(self) -> bool:
        """Whether its input is sound, as Whisper's is."""
        return self._folder.takes_sound

    @property
    def plans(self) -> Mapping[str, GraphPlan]:
        """The plans of `encoder` and `decoder`."""
        return {"encoder": self._graphs.encoder.plan, "decoder": self._graphs.decoder.plan}

    def __repr__(self) -> str:
        devices = ", ".join(f"{k} on {', '.join(p.devices)}" for k, p in self.plans.items())
        return f"<{type(self).__name__} {self._folder.path.name}: {devices}>"


class AsyncEncoderDecoder(_ExportFacts):
    """A loaded export for one event loop. An asynchronous context manager."""

    async def generate(
        self,
        inputs: str | Sequence[int] | Mapping[str, ArrayLike],
        *,
        prompt: Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        early_stopping: EarlyStopping | None = None,
    ) -> GeneratedTokens:
        """The tokens that the decoder makes of one input.

        inputs: a text, token ids, or an array [1, ...] for each input of the encoder. prompt:
        tokens with which the decoder begins; None: its start token. num_beams: 1 is greedy, more is
        beam search as in transformers. The defaults are those of generation_config.json. The
        encoder runs once; the caches stay on the decoder's device. Answers of one export wait for
        each other. If a device is lost, all tokens so far are computed again.

        Raises RequestError for inputs or options that cannot be, and the errors of `Graph.run`.
        """
        arrays = await run_blocking(lambda: self._arrays(inputs))
        begins = list(self._folder.start_tokens if prompt is None else prompt)
        terms = self._terms(begins, max_new_tokens, num_beams, length_penalty, early_stopping)
        encoded = await self._graphs.encode(arrays)
        found = await self._graphs.generate(encoded, begins, terms)
        return self._told(found)

    async def transcribe(
        self, sound: str | Path | bytes | NDArray[np.float32], *, language: str | None = None
    ) -> GeneratedTokens:
        """The words of a sound, by an export of Whisper.

        sound: a WAV file, its bytes, or samples [samples] from -1 to 1 at the model's rate. Longer
        sound is taken in pieces, which are not matched at their borders. language: such as en;
        None: what the first piece sounds like. Raises RequestError for another kind of file, an
        unknown language, and an export that takes no sound.
        """
        folder = self._folder
        if not self.takes_sound:
            raise RequestError(
                f"{folder.path} takes no sound", remedy="load an export of Whisper's kind"
            )
        if language is not None and not folder.languages:
            raise RequestError(
                f"{folder.path} knows one language only", remedy="leave language out"
            )
        settings = folder.features
        if isinstance(sound, np.ndarray):
            samples = checked_samples(sound)
        else:
            file = sound if isinstance(sound, bytes) else Path(sound)
            samples = await run_blocking(lambda: read_wav(file, settings.samples_per_s))
        prompt, found = list(folder.start_tokens), list[GeneratedTokens]()
        for piece in pieces(samples, settings):
            features = await run_blocking(partial(log_mel, piece, settings))
            encoded = await self._graphs.encode({FEATURES: features})
            if len(prompt) == 1:
                if folder.languages:
                    prompt.append(await self._language(encoded, language))
                prompt += folder.transcribe_tokens
            terms = self._terms(prompt, None, None, None, None)
            found.append(self._told(await self._graphs.generate(encoded, prompt, terms)))
        texts = [each.text for each in found if each.text is not None]
        return GeneratedTokens(
            token_ids=tuple(token for each in found for token in each.token_ids),
            text="".join(texts).strip() if texts else None,
            score=sum(each.score for each in found) / len(found),
            is_complete=all(each.is_complete for each in found),
        )

    async def _language(self, encoded: NDArray[Any], language: str | None) -> int:
        """The token of a language, or of what the sound is in."""
        known = self._folder.languages
        if language is not None:
            name = language if language in known else f"<|{language.lower()}|>"
            if name not in known:
                raise RequestError(
                    f"the model does not know the language {language!r:.40}",
                    remedy="give a code such as en, or none",
                )
            return known[name]
        terms = SearchTerms(max_new_tokens=1, only_tokens=tuple(known.values()))
        found = await self._graphs.generate(encoded, self._folder.start_tokens, terms)
        return found.token_ids[0]

    async def aclose(self) -> None:
        """Free everything on the peers. May be called again."""
        await self._graphs.aclose()

    async def __aenter__(self) -> AsyncEncoderDecoder:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _told(self, found: Generated) -> GeneratedTokens:
        tokenizer = self._folder.tokenizer
        return GeneratedTokens(
            token_ids=found.token_ids,
            text=None if tokenizer is None else tokenizer.decode(found.token_ids),
            score=found.score,
            is_complete=found.is_complete,
        )

    def _arrays(self, inputs: str | Sequence[int] | Mapping[str, ArrayLike]) -> Mapping[str, Any]:
        if isinstance(inputs, str):
            if self._folder.tokenizer is None or self.takes_sound:
                raise RequestError(
                    f"{self._folder.path} cannot read text"
                    + ("" if self.takes_sound else ": it has no tokenizer.json"),
                    remedy="give token ids, or an array for each input of the encoder",
                )
            inputs = self._folder.tokenizer.encode(inputs)
        if isinstance(inputs, Mapping):
            arrays = {name: np.asarray(each) for name, each in inputs.items()}
        else:
            ids = np.array([list(inputs)], np.int64)
            arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
            arrays = {each.name: arrays[each.name] for each in self.inputs if each.name in arrays}
        if any(each.ndim < 1 or each.shape[0] != 1 or not each.size for each in arrays.values()):
            raise RequestError(
                "an export answers one input at a time", remedy="give arrays of shape [1, ...]"
            )
        mask = arrays.get("attention_mask")
        if mask is not None and not np.all(mask):
            raise RequestError("the input is padded", remedy="give one input, without padding")
        return arrays

    def _terms(
        self,
        prompt: Sequence[int],
        max_new_tokens: int | None,
        num_beams: int | None,
        length_penalty: float | None,
        early_stopping: EarlyStopping | None,
    ) -> SearchTerms:
        folder, terms = self._folder, self._folder.terms
        if not prompt or any(type(each) is not int or each < 0 for each in prompt):
            raise RequestError("prompt has no token ids", remedy="give at least one, or None")
        room = folder.most_tokens - len(prompt)
        asked = min(terms.max_new_tokens, room) if max_new_tokens is None else max_new_tokens
        beams = min(terms.num_beams, folder.most_beams) if num_beams is None else num_beams
        if not 1 <= asked <= room:
            raise RequestError(
                f"max_new_tokens must be 1 to {room} here, not {asked}",
                remedy="load the export with more max_tokens",
            )
        if not 1 <= beams <= folder.most_beams:
            raise RequestError(
                f"num_beams must be 1 to {folder.most_beams} here, not {beams}",
                remedy="load the export with more max_beams",
            )
        penalty = terms.length_penalty if length_penalty is None else float(length_penalty)
        stopping = terms.early_stopping if early_stopping is None else early_stopping
        if not -10 <= penalty <= 10 or stopping not in (True, False, "never"):
            raise RequestError(
                'length_penalty must be -10 to 10, and early_stopping True, False or "never"'
            )
        return replace(
            terms,
            max_new_tokens=asked,
            num_beams=beams,
            length_penalty=penalty,
            early_stopping=stopping,
        )


class EncoderDecoder(_ExportFacts):
    """A loaded export; thread-safe. A context manager. See `AsyncEncoderDecoder` for details."""

    def __init__(self, export: AsyncEncoderDecoder, loop: LoopThread) -> None:
        super().__init__(export._graphs, export._folder)
        self._own, self._loop = export, loop

    def generate(
        self,
        inputs: str | Sequence[int] | Mapping[str, ArrayLike],
        *,
        prompt: Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        early_stopping: EarlyStopping | None = None,
    ) -> GeneratedTokens:
        """The tokens that the decoder makes of one input: a text, token ids, or an array for each
        input of the encoder."""
        return self._loop.run(
            self._own.generate(
                inputs,
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                num_beams=num_beams,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
            )
        )

    def transcribe(
        self, sound: str | Path | bytes | NDArray[np.float32], *, language: str | None = None
    ) -> GeneratedTokens:
        """The words of a sound: a WAV file, its bytes, or samples from -1 to 1."""
        return self._loop.run(self._own.transcribe(sound, language=language))

    def close(self) -> None:
        """Free everything on the peers. May be called again."""
        self._loop.run(self._own.aclose())

    def __enter__(self) -> EncoderDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


AskedPlans = Literal["auto"] | Mapping[str, AskedPlan]


async def load_graphs(
    path: str | Path,
    peers: Sequence[PeerInfo],
    on_progress: OnProgress,
    *,
    plan: AskedPlans,
    max_tokens: int | None,
    max_beams: int,
    input_tokens: int,
    time_limit_s: float,
) -> AsyncEncoderDecoder:
    """See `AsyncCluster.load_graphs`."""
    for name, value, most in (
        ("max_beams", max_beams, 64),
        ("input_tokens", input_tokens, 1 << 20),
        ("max_tokens", 2 if max_tokens is None else max_tokens - 1, 1 << 20),
    ):
        if not 1 <= value <= most:
            raise RequestError(f"{name} is {value}", remedy=f"give 1 to {most:,}")
    if not 0 < time_limit_s <= 3600:
        raise RequestError("time_limit_s must be above 0, and at most 3600")
    plans = {} if plan == "auto" else dict(plan)
    if (isinstance(plan, str) and plan != "auto") or plans.keys() - {"encoder", "decoder"}:
        raise RequestError('plan must be "auto", or plans of "encoder" and "decoder"')
    folder = await run_blocking(lambda: ExportFolder(Path(path), max_tokens, max_beams))
    found = DecoderForm(folder.decoder)
    common = GraphOptions(run_limit_s=float(time_limit_s))
    sample = folder.encoder_sample(made_up_sample(folder.encoder.inputs), input_tokens)
    options = replace(common, plan=asked_plan(plans.get("encoder", "auto")))
    known = await cpu_peers(peers)
    encoder = await load_cut_graph(folder.encoder, known, sample, options, on_progress)
    try:
        encoded: NDArray[Any] = (await encoder.run(sample))[HIDDEN]
        if encoded.ndim != 3:
            raise CheckpointError(
                f"{folder.encoder.path} gives {HIDDEN} of {encoded.ndim} axes, which must be 3",
                remedy="export it by optimum",
            )
        options = replace(
            common,
            plan=asked_plan(plans.get("decoder", "auto")),
            state=found.caches,
            held=frozenset(found.held),
            sequences=1,
        )
        sample = found.sample(encoded, folder.most_beams, folder.most_tokens - 1)
        known = await cpu_peers(peers)  # the encoder has taken memory of them
        decoder = await load_cut_graph(folder.decoder, known, sample, options, on_progress)
    except BaseException:
        await uninterrupted(encoder.aclose())
        raise
    return AsyncEncoderDecoder(CachedDecoding(encoder, decoder), folder)
