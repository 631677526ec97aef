"""Whatever JSON files of a checkpoint hold: it is read, or a sentence says why not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import CheckpointError, RequestError
from edge.models.families import FAMILIES, read_family
from edge.text import Tokenizer, read_end_ids
from edge.text.files import parse_json
from tests.support.checkpoints import TinyCheckpoint

LONGEST_SENTENCE = 1200

numbers = st.sampled_from(
    ["1" + "0" * 400, "-1" + "0" * 4000, "1" + "0" * 5000, "1e999", "-1e999", "NaN", "1e308",
     "1e-320", "-1", "0", "1", "3", "2.5", str(2**32), str(2**64)]
)  # fmt: skip
texts = st.sampled_from(['""', '"x"', '"\\ud800"', '"\\u0000"', f'"{"x" * 5000}"', '"yarn"'])
nested = st.sampled_from([500, 900, 990, 1500, 20_000]).map(lambda depth: "[" * depth + "]" * depth)
values = st.recursive(
    numbers | texts | st.sampled_from(["true", "false", "null"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: f"[{','.join(each)}]")
        | st.dictionaries(
            st.sampled_from(["content", "special", "name", "template", "5", "9" * 5000]),
            inner,
            max_size=3,
        ).map(lambda each: "{" + ",".join(f'"{k}":{v}' for k, v in each.items()) + "}")
    ),
    max_leaves=4,
)
odd = values | nested
"""JSON texts, some of which no parser of numbers or of nested lists is glad of."""

ROPE = (
    "rope_theta", "rope_type", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor",
)  # fmt: skip
CONFIG = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "quantization_config",
    "rope_parameters", "rope_scaling", "rope_theta", "use_sliding_window", "sliding_window",
    "max_window_layers", "layer_types",
)  # fmt: skip
SETTINGS = (
    "tokenizer_class", "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens",
    "chat_template", "bos_token", "x_token", "split_special_tokens", "add_prefix_space", "legacy",
    "clean_up_tokenization_spaces",
)  # fmt: skip

few = settings(max_examples=60)


def with_value(fields: Mapping[str, Any], name: str, value: str) -> str:
    """The object as JSON, the field being this text of JSON."""
    rest = {key: each for key, each in fields.items() if key != name}
    return json.dumps(rest)[:-1] + (", " if rest else "") + f'"{name}": {value}}}'


def told(read: Callable[[], object]) -> str:
    """What is said of the values, in a sentence of some length; nothing of those that are read."""
    try:
        read()
    except (CheckpointError, RequestError) as error:
        return str(error)
    return ""


def check(read: Callable[[], object]) -> None:
    sentence = told(read)
    assert len(sentence.encode()) < LONGEST_SENTENCE


@pytest.fixture(scope="module")
def folder(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """With the tokenizer of a sound checkpoint and no other file."""
    target = tmp_path_factory.mktemp("values")
    source = tiny_checkpoint("llama").path / "tokenizer.json"
    (target / "tokenizer.json").write_bytes(source.read_bytes())
    return target


@settings(max_examples=80)
@given(st.sampled_from(FAMILIES), st.sampled_from(CONFIG), odd, st.booleans())
def test_config(
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    family: str,
    name: str,
    value: str,
    windows: bool,
) -> None:
    sound = json.loads((tiny_checkpoint("llama").path / "config.json").read_text())
    sound |= {"model_type": family}
    if windows:
        sound |= {"use_sliding_window": True, "sliding_window": 4}
    text = with_value(sound, name, value)
    check(lambda: read_family(parse_json(text, Path("config.json")), source="config.json"))


@settings(max_examples=80)
@given(
    st.sampled_from(["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]),
    st.sampled_from(ROPE),
    odd,
)
def test_rope(
    tiny_checkpoint: Callable[..., TinyCheckpoint], kind: str, name: str, value: str
) -> None:
    sound = json.loads((tiny_checkpoint("llama").path / "config.json").read_text())
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "mscale": 1.0}
    rope = with_value({**sound["rope_parameters"], **factors, "rope_type": kind}, name, value)
    text = with_value(sound, "rope_parameters", rope)
    check(lambda: read_family(parse_json(text, Path("config.json")), source="config.json"))


@few
@given(odd)
def test_generation_config(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    folder = tmp_path_factory.mktemp("generation")
    (folder / "generation_config.json").write_text(with_value({}, "eos_token_id", value))
    check(lambda: read_end_ids(folder))


@settings(max_examples=80)
@given(
    st.sampled_from(["tokenizer_config.json", "special_tokens_map.json", "config.json"]),
    st.sampled_from(SETTINGS),
    odd,
)
def test_settings_of_a_tokenizer(folder: Path, file: str, name: str, value: str) -> None:
    (folder / file).write_text(with_value({}, name, value))
    try:

        def read() -> None:
            tokenizer = Tokenizer.open(folder)
            tokenizer.decode(tokenizer.encode("hello"))
            with contextlib.closing(tokenizer):
                tokenizer.encode_chat([{"role": "user", "content": "x"}])

        check(read)
    finally:
        (folder / file).unlink()


@few
@given(
    st.sampled_from(["added_tokens", "normalizer", "decoder", "model", "post_processor"]),
    odd,
)
def test_tokenizer(folder: Path, name: str, value: str) -> None:
    file = folder / "tokenizer.json"
    sound = file.read_text()
    file.write_text(with_value(json.loads(sound), name, value))
    try:
        check(lambda: Tokenizer.open(folder).encode("hello"))
    finally:
        file.write_text(sound)
