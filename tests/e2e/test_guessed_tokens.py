"""Guesses change the number of steps, and no token; wherever a device stands in a plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.demos.bundled import MODEL
from edge.text import Tokenizer
from tests.support.checkpoints import TinyCheckpoint, make_checkpoint
from tests.support.further_heads import add_further_head
from tests.support.packed_folders import fp8, write_packed
from tests.support.plans import bundled_plan, make_plan
from tests.support.slow_cases import repeats_are_slow, shown_in_parts

PROMPT = "Where does the cat live? The cat lives in the barn. Where does the cat live?"
NEW_TOKENS = 40
SAMPLED = {"temperature": 0.4, "seed": 3, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("layout", "sampling"),
    repeats_are_slow(product(["solo", "pipeline_3", "tensor_3"], [{}, SAMPLED])),
)
def test_tokens_are_those_without_guesses(
    five_peers: edge.Cluster, layout: str, sampling: dict[str, Any]
) -> None:
    with five_peers.load(MODEL, dtype="float32", plan=bundled_plan(layout)) as model:

        def reply(prompt: str, **options: Any) -> edge.Reply:
            return model.generate(
                prompt, max_new_tokens=80, ignore_eos=True, logprobs=1, **sampling, **options
            )

        plain = reply(PROMPT, speculate="off")
        assert "drafted_tokens" not in plain.statistics
        guessed = reply(PROMPT, speculate="lookup")
        assert guessed.token_ids == plain.token_ids == reply(PROMPT).token_ids
        figures = guessed.statistics
        assert 0 < figures["accepted_tokens"] < figures["drafted_tokens"]
        assert figures["tokens_per_pass"] > 1
        with pytest.raises(edge.RequestError, match="which was not loaded; load the model with"):
            reply(PROMPT, speculate="mtp")
        # Bits follow from the tokens, and not from how many were guessed at once.
        again = reply(PROMPT, speculate="lookup")
        assert again.logprobs == guessed.logprobs
        other = f"{PROMPT} {PROMPT}"
        asked = {"max_new_tokens": 80, "ignore_eos": True, "speculate": "lookup", **sampling}
        beside = model.generate([PROMPT, other], **asked)
        assert beside[0].token_ids == plain.token_ids
        assert beside[1].token_ids == reply(other, speculate="off").token_ids


@pytest.mark.parametrize(
    ("has", "family", "layout", "count"),
    repeats_are_slow(
        [
            ("linear attention", "qwen3_5", "pipeline_2", 90),
            ("short convolutions", "lfm2", "tensor_2", 90),
            ("windows", "olmo3", "pipeline_3", 270),
            ("windows", "gemma3", "solo", 270),
        ],
        of=[0],
    ),
)
def test_states_are_those_of_the_right_tokens(
    five_peers: edge.Cluster,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    has: str,
    family: str,
    layout: str,
    count: int,
) -> None:
    """Rows of windows move twice in so many tokens. Rewarded for it, an answer repeats itself."""
    checkpoint = tiny_checkpoint(family)
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    repeating = {"temperature": 0.5, "seed": 4, "frequency_penalty": -2.0}
    with five_peers.load(checkpoint.path, dtype="float32", plan=plan) as model:

        def reply(**options: Any) -> edge.Reply:
            return model.generate(
                checkpoint.prompt(30), max_new_tokens=count, ignore_eos=True, logprobs=1, **options
            )

        for sampling in ({}, repeating):
            plain = reply(speculate="off", **sampling)
            guessed = reply(speculate="lookup", **sampling)
            assert guessed.token_ids == plain.token_ids
            assert guessed.statistics["accepted_tokens"] < guessed.statistics["drafted_tokens"]
        assert guessed.statistics["accepted_tokens"] > 5, has
        assert reply(speculate="lookup", **repeating).logprobs == guessed.logprobs
        assert reply(speculate="auto", **repeating).token_ids == guessed.token_ids


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where_the_cat_lives": {"enum": ["in the barn", "in the house"]},
        "what_the_cat_is_called": {"type": "string", "maxLength": 8},
        "how_many_cats_there_are": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["where_the_cat_lives", "what_the_cat_is_called", "how_many_cats_there_are"],
    "additionalProperties": False,
}


def white_space() -> dict[int, float]:
    """Biases against tokens of white space alone, of which this small model would write no end."""
    vocabulary = Tokenizer.open(MODEL).vocabulary
    held = {token: vocabulary.bytes_of(token) for token in range(768)}
    return {token: -100.0 for token, each in held.items() if each and not each.strip()}


@pytest.mark.parametrize(
    ("layout", "sampling"),
    # Other layouts with a schema: `tests/unit/runs/test_guessed_tokens.py`.
    repeats_are_slow(product(["solo", "mixed_2x2"], [{}, SAMPLED]), of=[1]),
)
def test_what_a_schema_forces_takes_fewer_passes(
    five_peers: edge.Cluster, layout: str, sampling: dict[str, Any]
) -> None:
    with five_peers.load(MODEL, dtype="float32", plan=bundled_plan(layout)) as model:

        def reply(speculate: Any) -> edge.Reply:
            return model.generate(
                PROMPT,
                max_new_tokens=150,
                json_schema=SCHEMA,
                logit_bias=white_space(),
                logprobs=1,
                speculate=speculate,
                **sampling,
            )

        plain, guessed = reply("off"), reply("auto")
        assert [*json.loads(guessed.text)] == SCHEMA["required"]
        assert guessed.token_ids == plain.token_ids
        assert "drafted_tokens" not in plain.statistics
        assert guessed.statistics["tokens_per_pass"] > 1.2
        assert 0 < guessed.statistics["accepted_tokens"] <= guessed.statistics["drafted_tokens"]
        assert reply("lookup").logprobs == guessed.logprobs


@shown_in_parts("e2e/test_guessed_tokens.py", "unit/weights/test_packed_folders.py")
def test_a_further_head_in_8_bit_floats(tmp_path: Path) -> None:
    floats = make_checkpoint(tmp_path / "floats", "deepseek_v3")
    add_further_head(floats, own_tables=False, alike=True)
    write_packed(tmp_path / "packed", floats.path, fp8())
    stored = (tmp_path / "packed" / "model.safetensors").read_bytes()
    layers = json.loads((tmp_path / "packed" / "config.json").read_text())["num_hidden_layers"]
    assert f"model.layers.{layers}.self_attn.o_proj.weight_scale_inv".encode() in stored
    with (
        edge.Cluster.local(1, threads=1) as cluster,
        cluster.load(tmp_path / "packed", speculate="mtp", accuracy="high") as model,
    ):
        plain, guessed = (
            model.generate(
                floats.prompt(20), max_new_tokens=NEW_TOKENS, ignore_eos=True, speculate=each
            )
            for each in ("off", "mtp")
        )
    assert guessed.token_ids == plain.token_ids
    assert guessed.statistics["accepted_tokens"] > 0


def test_a_model_without_a_further_head(five_peers: edge.Cluster) -> None:
    with pytest.raises(edge.RequestError, match=r"no further head .* of deepseek_v3, glm4_moe"):
        five_peers.load(MODEL, speculate="mtp")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("glm4_moe", "tensor_3"),
        ("qwen3_5", "pipeline_2"),
        *(
            pytest.param("glm4_moe", layout, marks=shown_in_parts("e2e/test_guessed_tokens.py"))
            for layout in ("solo", "pipeline_2")
        ),
    ],
)
def test_a_further_head_changes_no_token(
    five_peers: edge.Cluster, tmp_path: Path, family: str, layout: str
) -> None:
    """Its guesses are as right as those of the same head behind the same states."""
    checkpoint = make_checkpoint(tmp_path / family, family)
    add_further_head(checkpoint, alike=True)
    prompt, long = checkpoint.prompt(30), checkpoint.prompt(333)
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    with five_peers.load(checkpoint.path, dtype="float32", plan=plan, speculate="mtp") as model:
        for tokens in (prompt, long):
            plain = model.generate(tokens, max_new_tokens=NEW_TOKENS, speculate="off")
            guessed = model.generate(tokens, max_new_tokens=NEW_TOKENS)
            assert guessed.token_ids == plain.token_ids
            figures = guessed.statistics
            assert NEW_TOKENS / 4 < figures["accepted_tokens"] < figures["drafted_tokens"]
    for never in (edge.LoadOptions(batch_invariant=True), edge.LoadOptions(kv_dtype="int4")):
        with pytest.raises(edge.RequestError, match="tokens are not guessed"):
            five_peers.load(checkpoint.path, never, speculate="mtp")
