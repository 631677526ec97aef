"""A checkpoint's own settings for generating: what ends its answers, how tokens are chosen."""

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
"""Values that fields have in transformers where a file says nothing."""

_OF_THE_FILE = {"do_sample", "transformers_version", "chat_format"}
"""Names, apart from `_SAMPLING` and those that end in _token_id or begin with _, of what is used or
sets nothing of an answer."""


def read_end_ids(path: Path) -> tuple[int, ...]:
    """Every token that ends an answer, of a checkpoint's folder; empty where none is known.

    From generation_config.json; what it leaves open, from config.json. Raises CheckpointError where
    neither file exists, or naming the file and the field where a value is of another kind.
    """
    generation_file, config_file = path / "generation_config.json", path / "config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    config = read_json(config_file) if config_file.is_file() or not generation else {}
    text_config = config.get("text_config")  # where models of several modalities keep theirs
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
    """How a checkpoint's makers choose tokens, by generation_config.json in its folder.

    What transformers makes of that file: greedy without do_sample, and with it top_k is 50 unless
    said otherwise. Raises CheckpointError naming the field of a value that cannot be.
    """
    file = path / "generation_config.json"
    values = read_json(file) if file.is_file() else {}
    given = {name: values[name] for name in _SAMPLING if values.get(name) is not None}
    if values.get("do_sample") is True:
        given = {"temperature": 1.0, "top_k": 50, **given}
    else:  # what only sampling uses may be whatever it is
        given = {name: value for name, value in given.items() if _is_fit(name, value)}
        given["temperature"] = 0.0
    return sampling_of(given, str(file))


def unused_settings(path: Path) -> tuple[str, ...]:
    """Fields of generation_config.json in a checkpoint's folder that would change its answers with
    transformers, and do not here."""
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
    if name == "repetition_penalty":  # greedy choices heed it
        return True
    try:
        SamplingParameters(**{name: value})  # type: ignore[arg-type]
    except ValueError:
        return False
    return True


def sampling_of(values: Mapping[str, object], source: str) -> SamplingParameters:
    """Parameters from values by the names of fields. Raises CheckpointError naming `source` and the
    field."""
    chosen: dict[str, Any] = dict(values)
    if chosen.get("top_k") == -1:  # as some publishers write "all"
        chosen["top_k"] = 0
    try:
        return SamplingParameters(**chosen)
    except ValueError as error:
        raise CheckpointError(
            f"{source}: {error}", remedy="correct the file or download it again"
        ) from error


def _ids(value: object, file: Path) -> tuple[int, ...]:
    """One whole number or a list of them; duplicates once, in the order given."""
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
