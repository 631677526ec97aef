"""Structured output: grammars, and the allowed next tokens of an answer.

`llguidance` parses; this module adds JSON schemas and limits. The allowed tokens depend on the
grammar and the answer's tokens alone, so they are the same for every plan.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from edge.errors import RequestError
from edge.kernels.sampling.rules import Bits
from edge.text.detokenizer import Vocabulary
from edge.text.forced_tokens import ForcedTokens, Foresight
from edge.text.schema_errors import fault, sentence
from edge.text.schema_keywords import MOST_DEPTH
from edge.text.schema_meaning import followed
from edge.text.thinking import USUAL_MARKS, ThinkingMarks

if TYPE_CHECKING:
    import llguidance

MOST_GRAMMAR_BYTES = 256 << 10
"""Most bytes of a grammar; usual schemas have a few KiB."""

_WHITE_SPACE = r" |\n[ \t]{0,24}"
"""White space between the parts of a JSON text, limited because small models would write it without
end."""

_KEPT_GRAMMARS = 16
"""Compiled grammars that are cached: a client's next request usually has the same schema."""

_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # of 1 to 2 KiB
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Limits of time and memory: the first two are used at 50,000 and 14,000 a millisecond."""

JsonSchema = Mapping[str, Any] | Literal["object"]
"""A JSON schema; "object" is any JSON object."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Rules in llguidance's Lark syntax, with `start` (see its syntax.md)."""

    rules: str

    def __post_init__(self) -> None:
        if not isinstance(self.rules, str) or not self.rules.strip():
            raise RequestError("a grammar must be a text with a rule called start")
        try:
            size = len(self.rules.encode())
        except UnicodeEncodeError:
            raise RequestError("a grammar must be valid Unicode") from None
        if size > MOST_GRAMMAR_BYTES:
            raise RequestError(
                f"the grammar or schema has {size} bytes, and {MOST_GRAMMAR_BYTES} are the most",
                remedy="make it shorter",
            )


def schema_grammar(schema: JsonSchema) -> Grammar:
    """A grammar of the JSON texts of a schema. Raises RequestError if it is not a JSON object."""
    return Grammar(f"start: {json_rule(schema)}")


def json_rule(schema: JsonSchema) -> str:
    """The right side of a rule for the JSON texts of a schema."""
    if isinstance(schema, str) and schema == "object":
        schema = {"type": "object"}
    if not isinstance(schema, Mapping):
        raise RequestError('a JSON schema must be an object, or "object" for any JSON object')
    _check_depth(schema)
    try:
        text = json.dumps(
            {**followed(schema), "x-guidance": {"whitespace_pattern": _WHITE_SPACE}},
            allow_nan=False,
        )
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"the JSON schema is no JSON: {error}", remedy="use JSON's types"
        ) from None
    return f"%json {text}"


def text_rule(text: str) -> str:
    """The right side of a rule for this text alone."""
    return json.dumps(text)


class Matcher:
    """The state of one answer in its grammar. For one thread at a time."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocab_size: int,
        forced: ForcedTokens | None = None,
    ) -> None:
        """forced: guesses; None: there are none."""
        self._matcher = matcher
        self._bytes = -(-vocab_size // 8)
        self._foresight = None if forced is None else Foresight(forced)

    @property
    def guesses(self) -> tuple[int, ...]:
        """Tokens that probably follow, because the grammar forces their text; see Foresight."""
        return () if self._foresight is None else self._foresight.guesses(self._matcher)

    @property
    def was_guessed(self) -> bool:
        """Whether the newest token was one of the guesses before it."""
        return self._foresight is not None and self._foresight.was_guessed

    def allowed_after(self, tokens: Sequence[int]) -> list[Bits]:
        """The allowed tokens behind each of these tokens. The list ends where one is not allowed,
        or the grammar's limits of work are exceeded."""
        ahead, found = Matcher(self._matcher.deep_copy(), 8 * self._bytes), list[Bits]()
        with contextlib.suppress(RequestError):
            for token in tokens:
                ahead.take(token)
                found.append(ahead.allowed())
        return found

    def allowed(self) -> Bits:
        """The allowed next tokens, at least one; the end tokens when the grammar is complete.

        Raises RequestError if that exceeds the grammar's limits of work.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: self._bytes]
        if self._matcher.is_error() or not bits.any():
            raise RequestError(
                "the answer's grammar cannot go on: "
                f"{sentence(self._matcher.get_error()) or 'no token is left'}",
                remedy="make it simpler",
            )
        return bits

    def take(self, token: int) -> None:
        """Advance by a token. Raises RequestError for one that is not allowed."""
        if self._foresight is not None:
            self._foresight.guesses(self._matcher)  # as they are before it
        if not self._matcher.consume_token(token):
            raise RequestError(
                f"token {token} is not of the answer's grammar: "
                f"{sentence(self._matcher.get_error())}",
                remedy="ask again",
            )
        if self._foresight is not None:
            self._foresight.take(token)


class Grammars:
    """Makes matchers for one model's tokens. Thread-safe; one per model, lazily set up by the first
    matcher."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        vocab_size: int,
        end_ids: frozenset[int],
        marks: ThinkingMarks = USUAL_MARKS,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        """vocab_size: the number of logits. end_ids: the end tokens. marks: the thinking marks.
        encode: the tokens of a text, without special ones around it; None: nothing is guessed."""
        self._marks = marks
        self._encode = encode
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._lock = threading.Lock()
        self._tokens: llguidance.LLTokenizer | None = None
        self._forced: ForcedTokens | None = None
        self._compiled: OrderedDict[tuple[str, bool], llguidance.LLMatcher] = OrderedDict()

    def begin(
        self, grammar: Grammar, *, is_thinking: bool = False, guesses: bool = False
    ) -> Matcher:
        """A matcher at the beginning of an answer.

        is_thinking: the prompt begins the model's thinking, and the grammar begins behind it.
        guesses: `Matcher.guesses` are wanted. The first call takes a second, later ones
        milliseconds. Raises RequestError with the fault of an invalid grammar.
        """
        key = (grammar.rules, is_thinking)
        with self._lock:
            if self._tokens is None:
                self._tokens = self._read_tokens()
            tokens, known = self._tokens, self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
                return self._begun(known, guesses=guesses)
        made = _compile(tokens, grammar, self._marks if is_thinking else None)
        Matcher(made, self._vocab_size).allowed()  # the first one is the most expensive
        with self._lock:
            self._compiled[key] = made
            while len(self._compiled) > _KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            return self._begun(made, guesses=guesses)

    def _begun(self, made: llguidance.LLMatcher, *, guesses: bool) -> Matcher:
        return Matcher(made.deep_copy(), self._vocab_size, self._forced if guesses else None)

    def _read_tokens(self) -> llguidance.LLTokenizer:
        import llguidance

        if not self._end_ids:
            raise RequestError(
                "the model knows no token that ends an answer, so no grammar can end one; name "
                "its eos_token_id in generation_config.json"
            )
        held = [self._vocabulary.bytes_of(token) for token in range(self._vocab_size)]
        if self._encode is not None:
            byte_tokens = {
                each[0]: token for token, each in enumerate(held) if each and len(each) == 1
            }
            self._forced = ForcedTokens(self._vocabulary.bytes_of, byte_tokens, self._encode)
        special = {token for token, each in enumerate(held) if each is None} | {*self._end_ids}
        tokens = _Tokens(
            tokens=[each or b"" for each in held],
            special_token_ids=sorted(special),
            eos_token_id=self._end_ids[0],
        )
        return llguidance.LLTokenizer(
            tokens,  # type: ignore[arg-type]
            n_vocab=self._vocab_size,
            eos_token=self._end_ids,
            slices=llguidance.LLTokenizer.json_slices(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """A vocabulary in llguidance's interface."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, _text: object) -> list[int]:
        """Tokenize a forced text; our grammars force none."""
        raise AssertionError("no text is forced")


def _compile(
    tokens: llguidance.LLTokenizer, grammar: Grammar, thinking: ThinkingMarks | None
) -> llguidance.LLMatcher:
    import llguidance

    # No forcing: the model may split a required text into any tokens.
    start = '%llguidance {"no_forcing": true}\nstart: @answer'
    if thinking is not None:
        start = start.replace("@answer", r"thought /[ \n]{0,8}/ @answer")
        start += f"\nthought[suffix={text_rule(thinking.close)}]: /(?s:.*)/"
    made = llguidance.LLMatcher(
        tokens,
        json.dumps(
            {
                "grammars": [
                    {"lark_grammar": start},
                    {"name": "answer", "lark_grammar": grammar.rules},
                ]
            }
        ),
        log_level=0,
        limits=llguidance.LLParserLimits(**_LIMITS),  # type: ignore[arg-type]
    )
    if made.is_error():
        raise RequestError(fault(made.get_error(), grammar.rules, _check))
    return made


def _check(schema: Mapping[str, Any]) -> str:
    import llguidance

    rules = {"grammars": [{"lark_grammar": f"start: %json {json.dumps(schema)}"}]}
    limits = llguidance.LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
    return str(llguidance.LLMatcher.validate_grammar(json.dumps(rules), limits=limits))


def _check_depth(schema: Mapping[str, Any]) -> None:
    layer: list[Any] = [schema]
    for _depth in range(MOST_DEPTH):
        layer = [
            each
            for held in layer
            for each in (held.values() if isinstance(held, Mapping) else held)
            if isinstance(each, Mapping | list | tuple)
        ]
        if not layer:
            return
    raise RequestError(
        f"the JSON schema has more than {MOST_DEPTH} levels", remedy="make it flatter"
    )
