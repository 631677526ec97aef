"""The cluster's methods that measure or change a model; each calls a study."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Unpack

from edge.api.async_model import AsyncModel
from edge.api.hub_download import model_path
from edge.api.progress_bars import progress_bars
from edge.host import block_kernels
from edge.host.cache_paths import cache_root
from edge.models.spec import FILE_BLOCKS
from edge.option_fields import checks_calls, with_overrides
from edge.planning.load_options import LoadOptions, LoadOverrides
from edge.progress import OnProgress
from edge.protocol.peer_info import PeerInfo
from edge.studies.count_experts import CountedExperts, count_experts
from edge.studies.quality import Quality, QualityOptions, measure_quality
from edge.studies.quantize import Quantized, QuantizeOptions, quantize_model
from edge.studies.study import Study
from edge.weights.checkpoint import Checkpoint


@checks_calls
class ClusterStudies(ABC):
    """The methods of a cluster for quality, quantization and counting of experts."""

    @abstractmethod
    async def load(
        self,
        path: str | Path,
        options: LoadOptions | None = None,
        *,
        progress: bool | OnProgress | None = None,
    ) -> AsyncModel:
        """Load a model."""

    @abstractmethod
    def _opened(
        self, path: str | Path, options: LoadOptions
    ) -> AbstractAsyncContextManager[tuple[Checkpoint, Sequence[PeerInfo]]]:
        """The checkpoint, and the peers for it."""

    async def quality(
        self,
        path: str | Path,
        options: LoadOptions | None = None,
        *,
        against: str | Path = "float32",
        text: str | None = None,
        windows: int = 6,
        window_tokens: int = 384,
        progress: bool | OnProgress | None = None,
        **overrides: Unpack[LoadOverrides],
    ) -> Quality:
        """The loss of a load with these options against a reference that reads the same text.

        against: "float32": the same checkpoint in float32; or the folder of another checkpoint with
        the same vocabulary, in float32. text: None: a bundled text of about 2,600 tokens. The model
        reads `windows` pieces of `window_tokens` tokens, each from an empty context. The logits of
        the reference are on disk meanwhile: 1.4 GB for 2,304 positions and 150,000 tokens.

        Raises RequestError for a text that is too short, another vocabulary or a full disk, and the
        errors of `load`.
        """
        options = with_overrides(LoadOptions, options, overrides)
        async with self._opened(path, options) as (checkpoint, peers):
            options = options.for_peers(checkpoint, peers)  # so that the format is named
        study = await self._study(path, options, text, progress)
        if against != "float32":
            against = await model_path(against, progress)
        wanted = QualityOptions(windows=windows, window_tokens=window_tokens)
        return await measure_quality(study, wanted, against=against)

    async def quantize(
        self,
        path: str | Path,
        out: str | Path,
        options: LoadOptions | None = None,
        *,
        bits: float | None = None,
        text: str | None = None,
        windows: int = 24,
        window_tokens: int = 256,
        progress: bool | OnProgress | None = None,
    ) -> Quantized:
        """Quantize a model by the inputs of its matrices (GPTQ), into the new folder `out`.

        The peers run the model in int8, by the plan of `options`, and sum up the inputs of its
        matrices while it reads `windows` pieces of `window_tokens` tokens of the text, or writes as
        many without a text. Then this device rounds one matrix after the other. After an
        interruption the same call goes on. bits: mean bits of a weight, scales included, spread
        over the matrices so that the loss is least; None: the kinds of matrices of dtype "int4".
        The folder is in blocks of GGUF file types if every peer has kernels for them; otherwise, or
        with `packs_blocks`, it is in compressed-tensors, which other programs read, too.

        Raises RequestError for a folder that exists or a text that is too short, CapacityError for
        a full disk, and the errors of `load`.
        """
        options = with_overrides(LoadOptions, options, {})
        async with self._opened(path, options) as (_checkpoint, peers):
            has_blocks = block_kernels.library() is not None
            has_blocks = has_blocks and not any(FILE_BLOCKS in peer.lacks for peer in peers)
        study = await self._study(path, options, text, progress)
        wanted = QuantizeOptions(bits=bits, windows=windows, window_tokens=window_tokens)
        return await quantize_model(study, out, wanted, has_blocks=has_blocks)

    async def count_experts(
        self,
        path: str | Path,
        options: LoadOptions | None = None,
        *,
        text: str | None = None,
        progress: bool | OnProgress | None = None,
    ) -> CountedExperts:
        """Count how often tokens are routed to each expert of a model.

        The peers run the model, by the plan of `options`, while it reads up to 3,072 tokens of the
        text, or writes as many without a text. Later plans for the same files use the counts to
        place whole experts, and to predict how many are found in memory.

        Raises RequestError for a model without experts or a text that is too short, CapacityError
        for a full disk, and the errors of `load`.
        """
        options = with_overrides(LoadOptions, options, {})
        return await count_experts(await self._study(path, options, text, progress))

    async def _study(
        self,
        path: str | Path,
        options: LoadOptions,
        text: str | None,
        progress: bool | OnProgress | None,
    ) -> Study:
        return Study(
            load=partial(self.load, progress=progress),
            path=await model_path(path, progress),
            options=options,
            text=text,
            cache_root=cache_root(),
            bars=partial(progress_bars, progress),
        )
