"""A checkpoint's generation settings: end tokens and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from edge.errors import CheckpointError
from edge.kernels.sampling.parameters import SamplingParameters
from edge.text.files import read_json

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


_WITHOUT_EFFECT: Mapping[str, object] = {
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "diversity_penalty": 0.0,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "target_lookbehind": 10,
    "typical_p": 1.0,
    "use_cache": True,
}
"""The defaults of fields in transformers."""

_OF_THE_FILE = {"do_sample", "transformers_version", "chat_format"}
"""Fields that are used, or do not affect answers, apart from `_SAMPLING`, names that end in
_token_id and names that begin with _."""


def read_end_ids(path: Path) -> tuple[int, ...]:
    """The end tokens of a checkpoint's folder; empty: none is known.

    From generation_config.json, else from config.json. Raises CheckpointError if neither file
    exists, or, naming file and field, for a value of a wrong type.
    """
    generation_file, config_file = path / "generation_config.json", path / "config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    config = read_json(config_file) if config_file.is_file() or not generation else {}
    text_config = config.get("text_config")  # multimodal models have it there
    sources: list[tuple[Mapping[str, object], Path]] = [
        (generation, generation_file),
        (config, config_file),
        (text_config if isinstance(text_config, Mapping) else {}, config_file),
    ]
    for source, file in sources:
        if (value := source.get("eos_token_id")) is not None:
            return _ids(value, file)
    return ()


def read_sampling(path: Path) -> SamplingParameters:
    """The sampling parameters of generation_config.json in a checkpoint's folder.

    With the defaults of transformers: greedy without do_sample, and else top_k is 50. Raises
    CheckpointError, naming the field, for an invalid value.
    """
    file = path / "generation_config.json"
    values = read_json(file) if file.is_file() else {}
    given = {name: values[name] for name in _SAMPLING if values.get(name) is not None}
    if values.get("do_sample") is True:
        given = {"temperature": 1.0, "top_k": 50, **given}
    else:  # without sampling, its fields are not checked
        given = {name: value for name, value in given.items() if _is_fit(name, value)}
        given["temperature"] = 0.0
    return sampling_of(given, str(file))


def unused_settings(path: Path) -> tuple[str, ...]:
    """Fields of generation_config.json that change answers in transformers, but not here."""
    file = path / "generation_config.json"
    values = read_json(file) if file.is_file() else {}
    return tuple(
        name
        for name, value in values.items()
        if name not in _SAMPLING
        and name not in _OF_THE_FILE
        and not name.endswith("_token_id")
        and not name.startswith("_")
        and value not in (None, False, [], {}, _WITHOUT_EFFECT.get(name))
    )


def _is_fit(name: str, value: object) -> bool:
    if name == "repetition_penalty":  # it affects greedy choices, too
        return True
    try:
        SamplingParameters(**{name: value})  # type: ignore[arg-type]
    except ValueError:
        return False
    return True


def sampling_of(values: Mapping[str, object], source: str) -> SamplingParameters:
    """Sampling parameters from values by field. Raises CheckpointError naming `source` and the
    field."""
    chosen: dict[str, Any] = dict(values)
    if chosen.get("top_k") == -1:  # some publishers write -1 for "all"
        chosen["top_k"] = 0
    try:
        return SamplingParameters(**chosen)
    except ValueError as error:
        raise CheckpointError(
            f"{source}: {error}", remedy="correct the file or download it again"
        ) from error


def _ids(value: object, file: Path) -> tuple[int, ...]:
    """Ids from a whole number or a list of them, in order, without duplicates."""
    found: dict[int, None] = {}
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, bool) or not isinstance(item, int) or not -1 <= item < 2**31:
            raise CheckpointError(
                f"{file}: eos_token_id must be whole numbers of at least 0, not {shown(value)}",
                remedy="correct the file or download it again",
            )
        if item >= 0:  # some publishers write -1 for "none"
            found[item] = None
    return tuple(found)
