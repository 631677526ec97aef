"""A folder with an encoder–decoder export, as optimum writes it: graphs, and files beside them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError, shown
from edge.graphs.merged_decoder import merged_decoder
from edge.graphs.onnx_checks import open_onnx
from edge.graphs.onnx_file import OnnxFile
from edge.graphs.search_terms import SearchTerms
from edge.graphs.sound import FeatureSettings
from edge.text.files import TOKENIZER, read_json
from edge.text.tokenizer import Tokenizer

HIDDEN = "last_hidden_state"
FEATURES = "input_features"
_USUAL_TOKENS = 448
_MOST_BANDS, _MOST_PLACES = 1024, 1 << 16
"""Far above those of any model."""
_MERGED = "decoder_model_merged.onnx"


class ExportFolder:
    """A checked export. Raises CheckpointError for another kind of folder."""

    def __init__(self, path: Path, max_tokens: int | None, max_beams: int) -> None:
        self.path = path
        inner = path / "onnx"
        graphs = inner if (inner / "encoder_model.onnx").is_file() else path
        if not (graphs / "encoder_model.onnx").is_file():
            raise CheckpointError(
                f"{path} has no encoder_model.onnx",
                remedy="give a folder that optimum-cli export onnx wrote, or load one graph",
            )
        self.encoder = open_onnx(graphs / "encoder_model.onnx")
        if HIDDEN not in {each.name for each in self.encoder.outputs}:
            raise CheckpointError(
                f"{self.encoder.path} has no output {HIDDEN}", remedy="export it by optimum"
            )
        self.decoder = _decoder(graphs)
        self.config = read_json(path / "config.json")
        self._file = path / "generation_config.json"
        self.generation = read_json(self._file) if self._file.is_file() else self.config
        self.most_beams = max_beams
        longest = self._number("max_target_positions", "max_position_embeddings", "n_positions")
        self.most_tokens = min(max_tokens or _USUAL_TOKENS, longest or 1 << 20)
        """Tokens of an answer, with its prompt."""
        start = self._number("decoder_start_token_id", "bos_token_id")
        self.start_tokens = (0 if start is None else start,)
        self.terms = self._terms()
        self.tokenizer = Tokenizer.open(path) if (path / TOKENIZER).is_file() else None

    @property
    def takes_sound(self) -> bool:
        """Whether the encoder takes features of sound."""
        return FEATURES in {each.name for each in self.encoder.inputs}

    def encoder_sample(
        self, made_up: Mapping[str, NDArray[Any]], tokens: int
    ) -> dict[str, NDArray[Any]]:
        """A made-up input of so many tokens, or of the length of sound that the model takes."""
        found = {}
        for value in self.encoder.inputs:
            array = made_up[value.name]
            if value.name == FEATURES:
                shape = 1, *self.feature_sizes
                array = np.random.default_rng(0).normal(0, 1, shape).astype(array.dtype)
            elif array.ndim == 2 and array.dtype == np.int64:
                array = np.ones((1, tokens), np.int64)
            found[value.name] = array
        return found

    @property
    def feature_sizes(self) -> tuple[int, int]:
        """Mel bands, and frames, of the features of one piece of sound."""
        bands = self._number("num_mel_bins")
        places = self._number("max_source_positions")
        if not 0 < (bands or 0) <= _MOST_BANDS or not 0 < (places or 0) <= _MOST_PLACES:
            raise CheckpointError(
                f"{self.path / 'config.json'} has num_mel_bins {bands} and max_source_positions "
                f"{places}",
                remedy="give the file that belongs to the export",
            )
        assert bands is not None
        assert places is not None
        return bands, 2 * places

    @cached_property
    def features(self) -> FeatureSettings:
        """How sound becomes features. Raises CheckpointError if that is another model's way."""
        path = self.path / "preprocessor_config.json"
        settings = FeatureSettings.open(path)
        sizes = settings.bands, settings.piece_samples // settings.hop_samples
        if sizes != self.feature_sizes:
            raise CheckpointError(
                f"{path} makes features [{sizes[0]}, {sizes[1]}], and the encoder takes "
                f"{list(self.feature_sizes)}",
                remedy="give the file that belongs to the export",
            )
        return settings

    @property
    def languages(self) -> Mapping[str, int]:
        """The token of each language, such as <|en|>; empty: the model has one language."""
        return self._tokens("lang_to_id")

    @property
    def transcribe_tokens(self) -> tuple[int, ...]:
        """Tokens behind that of the language: words as they are spoken, without times."""
        task = self._tokens("task_to_id").get("transcribe")
        times = self._number("no_timestamps_token_id")
        return tuple(each for each in (task, times) if each is not None)

    def _tokens(self, name: str) -> dict[str, int]:
        value: Any = self.generation.get(name) or {}
        if not isinstance(value, dict) or not all(
            type(each) is int and 0 <= each < 1 << 31 for each in value.values()
        ):
            raise self._wrong(name, value)
        return value

    def _terms(self) -> SearchTerms:
        value = self.generation
        stopping: Any = value.get("early_stopping") or False
        if stopping not in (True, False, "never"):
            raise self._wrong("early_stopping", stopping)
        penalty: Any = value.get("length_penalty")
        if penalty is not None and type(penalty) not in (int, float):
            raise self._wrong("length_penalty", penalty)
        longest = self._number("max_new_tokens") or max(1, (self._number("max_length") or 1) - 1)
        if value.get("max_new_tokens") is None and value.get("max_length") is None:
            longest = self.most_tokens
        return SearchTerms(
            max_new_tokens=longest,
            num_beams=self._number("num_beams") or 1,
            length_penalty=1.0 if penalty is None else float(penalty),
            early_stopping=stopping,
            min_new_tokens=self._number("min_new_tokens") or 0,
            no_repeat_ngram_size=self._number("no_repeat_ngram_size") or 0,
            eos_token_ids=self._numbers("eos_token_id"),
            forced_bos_token_id=self._number("forced_bos_token_id"),
            forced_eos_token_id=self._number("forced_eos_token_id"),
            suppress_tokens=self._numbers("suppress_tokens"),
            begin_suppress_tokens=self._numbers("begin_suppress_tokens"),
        )

    def _number(self, *names: str) -> int | None:
        for name in names:
            for value in (self.generation.get(name), self.config.get(name)):
                if value is not None:
                    if type(value) is not int or not 0 <= value < 1 << 31:
                        raise self._wrong(name, value)
                    return value
        return None

    def _numbers(self, name: str) -> tuple[int, ...]:
        value = self.generation.get(name, self.config.get(name))
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int and 0 <= each < 1 << 31 for each in listed):
            raise self._wrong(name, value)
        return tuple(listed)

    def _wrong(self, name: str, value: object) -> CheckpointError:
        return CheckpointError(
            f"{self._file}: {name} is {shown(value)}", remedy="give the file of the export"
        )


def _decoder(graphs: Path) -> OnnxFile:
    if (graphs / _MERGED).is_file():
        return open_onnx(graphs / _MERGED)
    names = ("decoder_model.onnx", "decoder_with_past_model.onnx")
    for name in names:
        if not (graphs / name).is_file():
            raise CheckpointError(
                f"{graphs} has neither {_MERGED} nor {name}",
                remedy="export the model with caches: optimum-cli export onnx --task ...-with-past",
            )
    return merged_decoder(*(open_onnx(graphs / name) for name in names))
