"""Conversations as prompts: token ids, the tools that an answer may call, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edge.answers.terms import GenerationOptions
from edge.api.kept_documents import conversation_after, kept_documents
from edge.api.loaded_model import LoadedModel
from edge.api.tool_choice import chosen, with_calls
from edge.errors import RequestError
from edge.models.pictures import Tile
from edge.pictures.messages import (
    has_pictures,
    taken_out,
    with_results_behind,
    without_results,
)
from edge.pictures.reader import PlacedPictures
from edge.text.tool_schema import Tool, tool_schemas

Messages = str | Sequence[Mapping[str, object]]
"""A conversation: objects with role and content; or the text of a user's only message."""


def chat_prompt(
    model: LoadedModel,
    messages: Messages,
    options: GenerationOptions,
    *,
    tools: Sequence[Tool] | None,
    tool_choice: str,
    variables: Mapping[str, object] | None,
) -> tuple[list[int], GenerationOptions, Sequence[Tool], Sequence[Tile]]:
    """Token ids of a conversation, how to answer it, the tools that the answer may call, and
    what is read of its pictures."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    messages, pictures = read_pictures(model, messages)
    if texts := kept_documents().texts(options.context):
        messages = conversation_after(model.required_tokenizer, messages, texts)
    options = replace(options, context=())
    schemas, must = chosen(tool_schemas(tools) or (), tool_choice)
    ids = model.required_tokenizer.encode_chat(
        messages,
        tools=schemas or None,
        thinking=options.thinking,
        variables=variables,
        pictures=pictures,
    )
    if schemas and not model.required_tokenizer.has_told_tools(
        ids, messages, thinking=options.thinking, variables=variables, pictures=pictures
    ):
        raise RequestError(
            f"the chat template of {model.name} takes no tools, and ignores these",
            remedy="leave tools out, or use a model that was trained to call tools",
        )
    options = with_calls(
        options,
        model.required_tokenizer.answer_form,
        tools=schemas,
        must=must,
        several=tool_choice in ("auto", "required"),
    )
    return ids, options, schemas, () if pictures is None else pictures.tiles


def read_pictures(
    model: LoadedModel, messages: Sequence[Mapping[str, object]]
) -> tuple[Sequence[Mapping[str, object]], PlacedPictures | None]:
    """The messages for the chat template, and their pictures; None: there are none.

    A model that reads none is told so in the place of pictures of tools' results. Raises
    RequestError for pictures that cannot be read, and for a user's where the model reads none.
    """
    if not has_pictures(messages):
        return messages, None
    if (reader := model.picture_reader) is None:
        messages = without_results(messages)
        if not has_pictures(messages):
            return messages, None
        raise RequestError(
            f"{model.name} reads no images",
            remedy="leave them out, or use a model that does, such as SmolVLM",
        )
    if not reader.sees_results:
        messages = with_results_behind(messages)
    found, files = taken_out(messages)
    return found, reader.read(files)
