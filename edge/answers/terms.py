"""What one answer is asked for: options as a user sets them, and the terms that follow from them.

`GenerationOptions` may leave values open. `Terms` has none open: it is made of options, a prompt
and a model, and goes with the answer from plan to plan and into its journal. A new option that
choosing a token needs is a field of `SamplingParameters`, which peers get as it is, and here a
field of the same name in both classes of options.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, TypedDict

from msgspec import Meta

from edge.errors import ProtocolError, RequestError, shown
from edge.kernels.sampling.logprobs import MOST_LOGPROBS
from edge.kernels.sampling.parameters import SamplingParameters
from edge.models.pictures import MOST_TILES, Tile, is_row
from edge.offload import parse_json, read_file
from edge.option_fields import checks_calls, option
from edge.protocol.fields import ReadBy
from edge.protocol.step import MAX_END_IDS, Rows, SamplingTerms, Speculation
from edge.scheduling.fairness import Priority, Who
from edge.text.answer_forms import AnswerForm
from edge.text.answer_parser import AnswerParser
from edge.text.grammar import MOST_GRAMMAR_BYTES, Grammar, JsonSchema, schema_grammar

_TOKENS_AFTER_TEXT = 128

_MOST_TOKENS = 1 << 20
_LONGEST_STOP = 1 << 16
_MOST_STOP_TOKENS = 32
_LONGEST_NAME = 1 << 16


def _read_schema(text: str) -> JsonSchema:
    """The schema in the file named `text`; "object" stands for any JSON object."""
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
    """Biases by token id, from a text like 198=-100,17=2.5."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReading:
    """How the text of an answer in a conversation is read: thoughts, content, calls of tools."""

    thinking: bool
    """Whether the answer begins inside a thought."""
    form: AnswerForm
    tools: Mapping[str, Mapping[str, tuple[str, ...]]]
    """Types of the arguments of each tool; see `tool_types`."""

    def parser(self) -> AnswerParser:
        return AnswerParser(self.form, thinking=self.thinking, tools=self.tools)


def _grammar(value: object) -> Grammar | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("rules"), str):
        raise ProtocolError("a grammar must be an object with rules, or null")
    return Grammar(value["rules"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """All that one answer is asked for. Raises RequestError for what cannot be asked.

    A journal holds it as it is, so it has one form on disk (`to_json`, `from_json`).
    """

    prompt: Annotated[tuple[int, ...], Meta(max_length=_MOST_TOKENS)]
    """Token ids."""
    max_new_tokens: int = 0
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    """How a token is chosen, with a seed."""
    stop: tuple[Annotated[str, Meta(max_length=_LONGEST_STOP)], ...] = ()
    """Texts that end the answer, which does not contain them."""
    end_ids: Annotated[frozenset[int], Meta(max_length=MAX_END_IDS)] = frozenset()
    """Tokens that end the answer."""
    logprobs: int | None = None
    """How many of the likeliest tokens are told with each token; None: not even its own."""
    grammar: Annotated[Grammar | None, ReadBy(_grammar)] = None
    """What the answer must be."""
    reading: AnswerReading | None = None
    """None: the whole text is content."""
    rows: Rows | None = None
    """What is wanted of each token of the prompt in place of an answer; None: an answer."""
    client: Annotated[str, Meta(max_length=_LONGEST_NAME)] = ""
    """The client that asked; fair queueing treats clients equally."""
    priority: Priority = "normal"
    cache_salt: Annotated[str, Meta(max_length=_LONGEST_NAME)] = ""
    """Prefix caches are shared only between requests with equal salts."""
    speculate: Speculation = "off"
    """Whether tokens are guessed, and several computed in one step."""
    tiles: Annotated[tuple[Tile, ...], Meta(max_length=MOST_TILES)] = ()
    """What is read of the prompt's pictures."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if self.rows is None:
            longest = self.max_new_tokens
            if type(longest) is not int or longest < 1:
                raise RequestError(f"max_new_tokens must be 1 or more, not {shown(longest)}")
            if self.sampling.min_tokens > self.max_new_tokens:
                raise RequestError(
                    f"min_tokens is {self.sampling.min_tokens}, and the answer has room for "
                    f"{self.max_new_tokens} tokens"
                )
        if any(not isinstance(each, str) or not each for each in self.stop):
            raise RequestError("stop strings must be texts that are not empty")
        if max(len(self.client), len(self.cache_salt)) > _LONGEST_NAME:
            raise RequestError(f"client and cache_salt have at most {_LONGEST_NAME} characters")
        asked = self.logprobs
        if asked is not None and (type(asked) is not int or not 0 <= asked <= MOST_LOGPROBS):
            raise RequestError(
                f"logprobs must be 0 to {MOST_LOGPROBS}, or None, not {shown(asked)}"
            )

    @property
    def who(self) -> Who:
        return Who(self.client, self.priority)

    @property
    def prompt_tokens(self) -> Sequence[int]:
        """The prompt without the rows of pictures."""
        return [id for id in self.prompt if not is_row(id)] if self.tiles else self.prompt

    def for_sampler(self, answered: int = 0) -> SamplingTerms:
        """What the last stage is told before it chooses the first token, or the next one after
        `answered` tokens that an earlier plan has chosen."""
        left = self.max_new_tokens - answered
        assert left > 0, "the answer is finished"
        return SamplingTerms(
            sampling=self.sampling,
            end_ids=self.end_ids,
            max_new_tokens=left,
            prompt_tokens=len(self.prompt),
            logprobs=self.logprobs,
            speculate=self.speculate,
        )


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
    min_tokens: int | None = option(
        None, at_least=0, help="No end of the answer before so many tokens.  [default: 0]"
    )
    """End tokens are not chosen before; a stop string, or the end of a grammar, ends it all the
    same."""
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
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the answer as well, and are its last token."""
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
    speculate: Speculation | None = None
    """Whether tokens are guessed: see `LoadOptions`. None: as the model was loaded."""
    context: Sequence[str] = option(
        (),
        flags=("--with",),
        metavar="NAME",
        help="Begin with this document, which `edge keep` has kept; may be repeated.",
    )
    """Names of kept documents that a conversation, or a text prompt, begins with, in order: see
    `Model.keep`."""
    ignore_eos: bool = False
    """The answer goes on past its end; for measuring."""
    journal: bool = False
    """Keep prompt and answer on this device until the answer is finished: see `edge.KeptReply`.
    `edge run` does so unless it is told `--no-journal`."""

    def __post_init__(self) -> None:
        self.terms((0,), end_ids=frozenset(), room=_MOST_TOKENS, usual=SamplingParameters())

    def terms(
        self,
        prompt: Sequence[int],
        *,
        end_ids: frozenset[int],
        room: int,
        usual: SamplingParameters,
        reading: AnswerReading | None = None,
        client: str = "",
        cache_salt: str = "",
        speculate: Speculation = "off",
    ) -> Terms:
        """The terms of an answer to `prompt` (token ids).

        end_ids: tokens at which the model ends. room: tokens that the context has left. usual: how
        the model chooses tokens where these options leave it open, as is `speculate`. The others:
        see Terms.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence):
            raise RequestError(f"stop must be a text or a list of texts, not {shown(stop)}")
        sampling = self.sampling(usual)
        if self.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(53))
        return Terms(
            prompt=tuple(prompt),
            max_new_tokens=room if self.max_new_tokens is None else min(self.max_new_tokens, room),
            sampling=sampling,
            stop=tuple(stop),
            end_ids=(frozenset() if self.ignore_eos else end_ids) | self._stop_token_ids,
            logprobs=self.logprobs,
            grammar=self._grammar,
            priority=self.priority,
            reading=reading,
            client=client,
            cache_salt=cache_salt,
            speculate=self.speculate or speculate,
        )

    def after_text(self) -> GenerationOptions:
        """These options for a text prompt outside a conversation: `max_new_tokens` is 128, or
        `min_tokens` where that is more, unless it is set."""
        if self.max_new_tokens is not None:
            return self
        return replace(self, max_new_tokens=max(_TOKENS_AFTER_TEXT, self.min_tokens or 0))

    @property
    def has_grammar(self) -> bool:
        """The answer keeps to a schema or a grammar."""
        return self.json_schema is not None or self.grammar is not None

    @property
    def _stop_token_ids(self) -> frozenset[int]:
        given: object = self.stop_token_ids
        if (
            isinstance(given, str | bytes | Mapping)
            or not isinstance(given, Sequence)
            or any(type(each) is not int or each < 0 for each in given)
            or len(given) > _MOST_STOP_TOKENS
        ):
            raise RequestError(
                f"stop_token_ids must be at most {_MOST_STOP_TOKENS} token ids, not {shown(given)}"
            )
        return frozenset(given)

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
        """How tokens are chosen. usual: for the options that are None."""
        given = {field.name: getattr(self, field.name) for field in fields(SamplingParameters)}
        chosen = {name: value for name, value in given.items() if value is not None}
        if isinstance(self.logit_bias, Mapping):
            chosen["logit_bias"] = dict(self.logit_bias)  # a copy: the caller may change it
        try:
            return replace(usual, **chosen)
        except ValueError as error:
            raise RequestError(str(error)) from error


class GenerationOverrides(TypedDict, total=False):
    """The fields of GenerationOptions as keywords, for type checkers."""

    max_new_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    seed: int | None
    logprobs: int | None
    thinking: bool | None
    json_schema: JsonSchema | None
    grammar: str | None
    priority: Priority
    speculate: Speculation | None
    context: Sequence[str]
    ignore_eos: bool
    journal: bool
