"""The options of an answer, as its user gives them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypedDict

from edge.coordinator.generation import GenerationRequest
from edge.coordinator.shares import Priority
from edge.errors import RequestError, shown
from edge.kernels.sampling.parameters import SamplingParameters
from edge.offload import parse_json, read_file
from edge.option_fields import checks_calls, option
from edge.text.grammar import MOST_GRAMMAR_BYTES, Grammar, JsonSchema, schema_grammar

MOST_TOKENS_OF_A_TEXT = 128
"""What a model goes on with from a text, where nobody says how long that may be."""


def _read_schema(text: str) -> JsonSchema:
    """The schema in the file of this name; `object` names no file."""
    if text == "object":
        return "object"
    try:
        schema = parse_json(read_file(Path(text), MOST_GRAMMAR_BYTES))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{text} cannot be read as a JSON schema: {error}",
            remedy="name a file with a JSON schema",
        ) from error
    if not isinstance(schema, dict):
        raise RequestError(f"{text} holds no JSON schema: it must be an object")
    return schema


def _read_biases(text: str) -> Mapping[int, float]:
    """As 198=-100,17=2.5."""
    biases: dict[int, float] = {}
    for each in text.split(","):
        id, _equals, bias = each.partition("=")
        try:
            biases[int(id)] = float(bias)
        except ValueError:
            raise RequestError(
                f"{shown(each)} is no logit bias",
                remedy="write ID=BIAS, as 198=-100, with the id of a token and a number",
            ) from None
    return biases


@checks_calls
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How one answer is made. Raises RequestError for what no model can do."""

    max_new_tokens: int | None = option(
        None,
        flags=("-n", "--max-new-tokens"),
        at_least=1,
        help="Longest answer.  [default: as long as the context has room; 128 tokens of what goes "
        "on from a text]",
    )
    """None: an answer in a conversation, or to token ids, is as long as the context has room. What
    goes on from a text has 128 tokens: a model that is asked nothing may find no end."""
    temperature: float | None = option(
        None, help="0 is greedy.  [default, here and below: as the model says, else greedy]"
    )
    """None, here and below: as the checkpoint's generation_config.json says (`model.sampling`), and
    greedy where it says nothing."""
    top_k: int | None = option(None, help="Keep this many tokens; 0 keeps all.")
    top_p: float | None = option(None, help="Keep the likeliest tokens up to this share.")
    min_p: float | None = option(
        None, help="Keep tokens at least this likely, relative to the likeliest."
    )
    repetition_penalty: float | None = option(None, help="Above 1 makes used tokens less likely.")
    frequency_penalty: float | None = option(
        None, help="Above 0 makes tokens less likely each time that the answer uses them; -2 to 2."
    )
    presence_penalty: float | None = option(
        None, help="Above 0 makes every token that the answer has used less likely; -2 to 2."
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        metavar="ID=BIAS",
        repeats=True,
        parse=_read_biases,
        help="Added to the logit of a token, by its id: -100 all but forbids it; may be repeated, "
        "or several with commas.",
    )
    """Added to logits, by token ids, of which there may be 1024: -100 all but forbids a token."""
    stop: str | Sequence[str] = option(
        (), metavar="TEXT", help="End the answer before this text; may be repeated."
    )
    seed: int | None = option(
        None,
        at_least=0,
        help="The same seed gives the same draws on any plan.  [default: a random one]",
    )
    """None picks one, told in a reply's statistics."""
    logprobs: int | None = None
    """How many of the likeliest tokens to tell with each token, 0 for how likely itself was: see
    `Token.logprob` and `Token.top_logprobs`. None costs nothing."""
    thinking: bool | None = option(
        None, help="Whether the model thinks before it answers.  [default: as its template has it]"
    )
    """Only for a conversation whose chat template has a switch for it."""
    json_schema: JsonSchema | None = option(
        None,
        metavar="FILE",
        parse=_read_schema,
        help="The answer is JSON as this JSON schema says; object: any JSON object.",
    )
    """The answer is JSON that this schema describes; "object" is any JSON object. What a thinking
    model thinks comes before. An answer that `max_new_tokens` or `stop` cut is not whole."""
    grammar: str | None = None
    """The answer is a text of this grammar, in llguidance's form of Lark."""
    priority: Priority = "normal"
    """Where requests wait for each other: "high", "normal" or "low". Of those that wait, high ones
    get four times the tokens of normal ones, and these four times those of low ones; all are
    served."""
    ignore_eos: bool = False
    """The answer goes on past its end; for measuring."""
    journal: bool = False
    """Prompt and answer are kept on this device until the answer is finished: see `edge.KeptReply`.
    `edge run` does it unless it is told `--no-journal`."""

    def __post_init__(self) -> None:
        self.request((0,), end_ids=frozenset(), room=1, usual=SamplingParameters())

    def request(
        self,
        prompt_ids: Sequence[int],
        *,
        end_ids: frozenset[int],
        room: int,
        usual: SamplingParameters,
    ) -> GenerationRequest:
        """For one prompt, of a model that ends at `end_ids` and has room for this many tokens.

        usual: how it chooses tokens where nothing else is said.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence):
            raise RequestError(f"stop must be a text or a list of texts, not {shown(stop)}")
        sampling = self.sampling(usual)
        if self.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(53))
        return GenerationRequest(
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=room if self.max_new_tokens is None else min(self.max_new_tokens, room),
            sampling=sampling,
            stop=tuple(stop),
            end_ids=frozenset() if self.ignore_eos else end_ids,
            logprobs=self.logprobs,
            grammar=self._grammar,
        )

    @property
    def has_grammar(self) -> bool:
        """The answer keeps to a schema or a grammar."""
        return self.json_schema is not None or self.grammar is not None

    @property
    def _grammar(self) -> Grammar | None:
        if not self.has_grammar:
            return None
        if self.json_schema is not None and self.grammar is not None:
            raise RequestError("an answer keeps to a json_schema or to a grammar; give one of them")
        if self.ignore_eos:
            raise RequestError(
                "an answer that ignores its end keeps to no schema or grammar",
                remedy="leave one of both out",
            )
        if self.json_schema is not None:
            return schema_grammar(self.json_schema)
        return Grammar(self.grammar or "")

    def sampling(self, usual: SamplingParameters) -> SamplingParameters:
        """How tokens are chosen, of a model that chooses them as `usual` where nothing is said."""
        given = {field.name: getattr(self, field.name) for field in fields(SamplingParameters)}
        chosen = {name: value for name, value in given.items() if value is not None}
        if isinstance(self.logit_bias, Mapping):
            chosen["logit_bias"] = dict(self.logit_bias)  # its owner may change it meanwhile
        try:
            return replace(usual, **chosen)
        except ValueError as error:
            raise RequestError(str(error)) from error


class GenerationOverrides(TypedDict, total=False):
    """The fields of GenerationOptions that a caller sets by name, for who checks types."""

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str]
    seed: int | None
    logprobs: int | None
    thinking: bool | None
    json_schema: JsonSchema | None
    grammar: str | None
    priority: Priority
    ignore_eos: bool
    journal: bool
