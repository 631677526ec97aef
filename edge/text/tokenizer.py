"""Tokenization equal to `transformers.AutoTokenizer`, on `tokenizers` alone.

Knows the tokenizer files of a checkpoint, but neither models nor streaming. The rules of
transformers 5 hold where the two packages differ:

* The post-processor of tokenizer.json decides which special tokens are added. `add_bos_token` and
  `add_eos_token` of tokenizer_config.json are older, and are ignored.
* A tokenizer declared as Llama's is rebuilt from its vocabulary and merges, because published
  tokenizer.json files of that kind also put a space after every special token.
* Named special tokens that tokenizer.json does not know as such are added to it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from edge.errors import CheckpointError, EdgeError, RequestError
from edge.text.answer_forms import AnswerForm, answer_form
from edge.text.assistant_prefill import begun_answer, up_to_answer
from edge.text.chat_template import ChatTemplate
from edge.text.cleanup import clean_up_spaces
from edge.text.detokenizer import Vocabulary
from edge.text.files import (
    MATCHING_RULES,
    SpecialToken,
    TokenizerFiles,
    read_tokenizer_files,
)
from edge.text.message_texts import with_texts
from edge.text.quoted_tokens import SpecialTexts, pieces_of
from edge.text.thinking import SWITCHES
from edge.text.tokenizer_limits import check_model, check_parts, read_parts

_JOINED_PIECES = ("a <", "|b", "c")
"""Pieces that are encoded one by one to see whether a space comes between them."""
_ROWS = 1 << 32
"""No token has an id from here on."""
_LLAMA_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}

# Models whose publishers declare Llama's tokenizer although tokenizer.json holds another one.
_NOT_LLAMA = frozenset(
    {
        "ernie4_5", "ernie4_5_moe", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode",
        "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "hyperclovax",
        "internlm3", "jamba", "kimi_linear", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral",
        "ministral3", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "olmo_hybrid",
        "persimmon", "phi3", "phimoe", "qwen2", "stablelm",
    }
)  # fmt: skip


class PicturePlaces(Protocol):
    """The pictures of a conversation, as they stand in its prompt."""

    def marked(self, prompt: str) -> str:
        """The prompt with the tokens of each picture in the place of its mark."""

    def placed(self, ids: Sequence[int]) -> list[int]:
        """The tokens of a marked prompt with the ids of pictures' rows in their places."""


class Tokenizer:
    """The tokenizer of one checkpoint. Immutable after opening; thread-safe."""

    def __init__(self, files: TokenizerFiles) -> None:
        """Build from files that were read; `Tokenizer.open` reads them."""
        serialized = _build_serialized(files)
        rebuilt = _is_rebuilt_llama(files, serialized)
        named = {token: value.content for token, value in files.named_tokens.items()}
        self._special_tokens = (_LLAMA_TOKENS | named) if rebuilt else named
        self._templates = {
            name: ChatTemplate(source, origin)
            for name, (source, origin) in files.chat_templates.items()
        }
        self._path, self._file = files.path, files.file
        self._same_as = files.same_as
        end = files.named_tokens.get("eos_token")
        self._end_token = None if end is None else end.content
        with _refused(files.file):
            self._backend = _build_llama(files, serialized) if rebuilt else serialized
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = bool(files.settings.get("split_special_tokens"))
            _add_missing_tokens(self._backend, files, self._special_tokens)
            source = files.chat_templates.get("tool_use") or files.chat_templates.get("default")
            self._answer_form = answer_form(
                source[0] if source else "", lambda token: self.token_id(token) is not None
            )
            added = self._backend.get_added_tokens_decoder().values()
            self._special_texts = SpecialTexts(
                (each.content for each in added if each.special), self._answer_form.tokens
            )
            apart = [
                id
                for piece in _JOINED_PIECES
                for id in self._backend.encode(piece, add_special_tokens=False).ids
            ]
            self._pieces_join = self._backend.decode(apart) == "".join(_JOINED_PIECES)
            self.vocabulary = Vocabulary(self._backend, self._answer_form.tokens, files.same_as)
        forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        self.cleans_up_spaces = bool(files.settings.get("clean_up_tokenization_spaces")) and (
            not isinstance(self._backend.model, models.BPE) or bool(files.settings.get(forced))
        )

    @classmethod
    def open(cls, path: Path) -> Tokenizer:
        """The tokenizer in the folder of a checkpoint.

        Raises CheckpointError naming the file, the cause and the remedy.
        """
        return cls(read_tokenizer_files(path))

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.vocab_size} tokens, {self._file}>"

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. A model may compute logits for more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def tokens_digest(self) -> str:
        """A digest of all tokens and their ids."""
        tokens = self._backend.get_vocab(with_added_tokens=True)
        return hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest()

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The named special tokens by role: bos_token, eos_token, …"""
        return dict(self._special_tokens)

    @property
    def end_id(self) -> int | None:
        """The end token that the settings name; None: they name none."""
        return None if self._end_token is None else self.token_id(self._end_token)

    def token_id(self, token: str) -> int | None:
        """The id of a token as spelt in the vocabulary; None: there is none."""
        return self._backend.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a template for plain conversations."""
        return "default" in self._templates

    @property
    def answer_form(self) -> AnswerForm:
        """The format of the model's thinking and tool calls, by its chat templates."""
        return self._answer_form

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around one."""
        return self._encode(text, add_special_tokens=True)

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a part of a text, without special tokens around it."""
        return self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens. Ids outside the vocabulary have no text.

        Raises RequestError for ids that cannot be token ids at all.
        """
        if self._same_as:
            token_ids = [self._same_as.get(each, each) for each in token_ids]
        try:
            text = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(
                f"token ids must be whole numbers from 0 to {2**32 - 1} ({error})"
            ) from error
        return clean_up_spaces(text) if self.cleans_up_spaces else text

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        thinking: bool | None = None,
        variables: Mapping[str, object] | None = None,
        pictures: bool = False,
    ) -> str:
        """The prompt for a conversation, by the checkpoint's chat template.

        messages: objects with role and content, a text or a list of parts. A last message of the
        assistant without calls is continued: the prompt ends behind its content.
        tools: JSON schemas of the tools that the model may call.
        thinking: whether the model thinks before it answers; None: the template's default.
        variables: further names for the template, such as {"documents": []}. pictures: parts of
        messages may be {"type": "image"}; the prompt has the template's mark for each. Raises
        RequestError if there is no template, if the template refuses the messages or has no switch
        for thinking, and for messages that are invalid or not text.
        """
        messages = with_texts(messages, pictures=pictures)
        told, begun = begun_answer(messages) if add_generation_prompt else (messages, False)

        def rendered(switch: Mapping[str, object], *, asks: bool) -> str:
            return self._template(with_tools=tools is not None).render(
                told,
                add_generation_prompt=asks,
                tools=tools,
                variables={**self._special_tokens, **switch, **(variables or {})},
            )

        def prompt(switch: Mapping[str, object]) -> str:
            if begun:
                return up_to_answer(rendered(switch, asks=False))
            return rendered(switch, asks=add_generation_prompt)

        if thinking is None:
            return prompt({})
        for name in SWITCHES:
            # A template's variable for thinking is found by its effect on the end of the prompt.
            asked = rendered({name: thinking}, asks=True)
            if asked != rendered({name: not thinking}, asks=True):
                return asked if add_generation_prompt and not begun else prompt({name: thinking})
        raise RequestError(
            f"the chat template of {self._path.name} has no switch for thinking",
            remedy="leave it out",
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        thinking: bool | None = None,
        variables: Mapping[str, object] | None = None,
        pictures: PicturePlaces | None = None,
    ) -> list[int]:
        """The token ids of `chat`'s prompt. Special tokens in the texts of users, tools and earlier
        answers are text, except in vocabularies that put a space before each piece of text
        (Llama 2). pictures: those of the messages."""
        mark, has_pictures = "", pictures is not None
        if self._pieces_join:
            texts = with_texts(messages, pictures=has_pictures)
            messages, mark = self._special_texts.quoted(texts)
        prompt = self.chat(
            messages,
            add_generation_prompt,
            tools=tools,
            thinking=thinking,
            variables=variables,
            pictures=has_pictures,
        )
        if pictures is not None:
            prompt = pictures.marked(prompt)
        pieces = pieces_of(prompt, mark) if mark else [prompt]
        ids = [id for piece in pieces for id in self._encode(piece, add_special_tokens=False)]
        return ids if pictures is None else pictures.placed(ids)

    def has_told_tools(
        self,
        prompt_ids: Sequence[int],
        messages: Sequence[Mapping[str, object]],
        *,
        thinking: bool | None = None,
        variables: Mapping[str, object] | None = None,
        pictures: PicturePlaces | None = None,
    ) -> bool:
        """Whether a prompt that was made with tools differs from the one without."""
        try:
            alone = self.encode_chat(
                messages, thinking=thinking, variables=variables, pictures=pictures
            )
        except RequestError:  # the template needs tools
            return True
        return alone != list(prompt_ids)

    def begins_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends in the mark of thinking, which some templates write."""
        ids = [each for each in prompt_ids[-16:] if each < _ROWS]  # rows of pictures have no text
        end = self.decode(ids, skip_special_tokens=False)
        return end.rstrip().endswith(self._answer_form.thinking_marks.open.rstrip())

    def close(self) -> None:
        """End the process of the chat templates, if it runs; another chat starts a new one."""
        for template in self._templates.values():
            template.close()

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError) as error:  # lone surrogates are no Unicode text
            raise RequestError(
                "the text cannot be encoded", remedy="give a string of valid Unicode characters"
            ) from error
        with _refused(self._file):
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        known = f" (only {', '.join(sorted(self._templates))})" if self._templates else ""
        raise RequestError(
            f"the checkpoint {self._path.name} has no default chat template{known}",
            remedy="send a plain prompt, or use the model's instruction-tuned checkpoint",
        )


def _build_serialized(files: TokenizerFiles) -> tokenizers.Tokenizer:
    more = (*files.declared_tokens.values(), *files.named_tokens.values(), *files.extra_tokens)
    with _refused(files.file):
        parts = read_parts(files.serialized)
    try:
        check_parts(parts, (token.content for token in more))
        with _refused(files.file):
            backend = tokenizers.Tokenizer.from_str(files.serialized)
        check_model(backend.model)
    except ValueError as error:
        raise CheckpointError(
            f"{files.file} is refused, because a short text could take minutes or gigabytes: "
            f"{error}",
            remedy="download it again from the model's publisher",
        ) from error
    return backend


@contextlib.contextmanager
def _refused(file: Path) -> Iterator[None]:
    """Map the library's errors to CheckpointError: bare Exceptions, and panics, which are not
    Exceptions."""
    try:
        yield
    except (EdgeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise CheckpointError(
            f"{file} is not a tokenizer this version can read ({str(error)[:200]})",
            remedy="download it again, or update the `tokenizers` package",
        ) from error


def _is_rebuilt_llama(files: TokenizerFiles, serialized: tokenizers.Tokenizer) -> bool:
    return (
        files.tokenizer_class == "LlamaTokenizer"
        and files.model_type not in _NOT_LLAMA
        and '"ByteLevel"' not in files.serialized
        and isinstance(serialized.model, models.BPE)
    )


def _build_llama(files: TokenizerFiles, serialized: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Byte-fallback BPE that marks spaces as ▁, with one before the text if declared."""
    model = serialized.model
    model.byte_fallback = True
    model.dropout = None
    model.unk_token = None
    prefix = files.settings.get("add_prefix_space")
    add_prefix_space = prefix is None or bool(prefix)
    every_part = bool(files.settings.get("legacy", False))
    scheme = ("always" if every_part else "first") if add_prefix_space else "never"
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme=scheme, split=False
    )
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_prefix_space:
        chain.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(chain)
    if serialized.post_processor is not None:
        backend.post_processor = serialized.post_processor
    if not files.declared_tokens:
        backend.add_tokens(
            [token for _, token in sorted(serialized.get_added_tokens_decoder().items())]
        )
    return backend


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, files: TokenizerFiles, named: Mapping[str, str]
) -> None:
    """Add the declared and the special tokens, those with an id first, in its order."""
    known = {
        token.content: SpecialToken(content=token.content, **_rules(token))
        for token in backend.get_added_tokens_decoder().values()
    }
    wanted = {
        token.content: token
        for token in files.declared_tokens.values()
        if known.get(token.content) != token
    }
    details = {token.content: token for token in files.named_tokens.values()}
    for content in named.values():
        if content not in known:
            wanted.setdefault(content, details.get(content, SpecialToken(content=content)))
    for token in files.extra_tokens:
        if token.content not in known:
            wanted.setdefault(token.content, token)
    backend.add_tokens(
        [
            tokenizers.AddedToken(
                token.content,
                **_rules(replace(token, special=token.special or token.content in named.values())),
            )
            for token in wanted.values()
        ]
    )


def _rules(token: tokenizers.AddedToken | SpecialToken) -> dict[str, bool]:
    return {rule: getattr(token, rule) for rule in MATCHING_RULES}
