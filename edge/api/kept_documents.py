"""The documents of this user, and the tokens that prompts with one of them begin with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from edge.answers.documents import (
    DocumentFolder,
    Message,
    after_documents,
    text_after_documents,
)
from edge.errors import RequestError
from edge.host.state_paths import state_root
from edge.text import Tokenizer

_UNLIKE = ("Answer.", "1 + 1 = 2")
"""Texts without a common beginning."""


def kept_documents() -> DocumentFolder:
    """The documents of this user."""
    return DocumentFolder(state_root() / "documents")


def conversation_after(
    tokenizer: Tokenizer, messages: Sequence[Message], texts: Sequence[str]
) -> list[Message]:
    """The conversation with these texts at its beginning, where the chat template puts them into
    the prompt."""
    if not texts:
        return list(messages)
    role = "system" if _has_system_messages(tokenizer) else "user"
    return after_documents(messages, texts, role=role)


def document_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids that every prompt with this document begins with: of conversations with a
    system message or without, or of texts where the model has no chat template."""
    if tokenizer.has_chat_template:
        talks: list[list[Message]] = [[{"role": "user", "content": said}] for said in _UNLIKE]
        if _has_system_messages(tokenizer):
            talks += [[{"role": "system", "content": said}, *talks[0]] for said in _UNLIKE]
        prompts = [
            tokenizer.encode_chat(conversation_after(tokenizer, talk, [text])) for talk in talks
        ]
    else:
        prompts = [tokenizer.encode(text_after_documents(said, [text])) for said in _UNLIKE]
    alike = takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))
    return [ids[0] for ids in alike]


def _has_system_messages(tokenizer: Tokenizer) -> bool:
    """Whether the chat template has messages of the system: some refuse or ignore them."""
    user: Message = {"role": "user", "content": _UNLIKE[0]}
    system: Message = {"role": "system", "content": _UNLIKE[1]}
    try:
        return tokenizer.encode_chat([system, user]) != tokenizer.encode_chat([user])
    except RequestError:
        return False
