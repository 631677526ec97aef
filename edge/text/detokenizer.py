"""Streaming detokenizers: the text is exactly that of decoding all tokens at once.

Knows the decoders of `tokenizer.json`, but neither stop strings nor requests. Cases in which text
depends on later tokens, and their treatment:

* Byte-level vocabularies (GPT-2, Llama 3, Qwen): a character may be split over tokens. The bytes go
  through an incremental UTF-8 decoder, which holds back at most three of them.
* Byte fallback (Llama 2, Gemma): a run of byte tokens `<0xE4>` is text only as a whole; one wrong
  byte turns every byte of the run into U+FFFD. So a run is held back until another token ends it.
* A space is stripped from the very first word (Metaspace, Strip). So new tokens are decoded behind
  a few earlier ones, a moving window, and the text of those alone is cut off.
* Any other decoder across tokens: all text is held back until the end.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import tokenizers

from edge.errors import RequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXT_TOKENS = 8  # tokens of the prompt that a window starts with; one with text is enough
_CONTEXT_BYTES = 4  # the longest UTF-8 character


class StreamDecoder(Protocol):
    """Turns a growing sequence of tokens into text that is never taken back."""

    def push(self, token_id: int) -> str:
        """The text that this token settles; often empty."""

    def finish(self) -> str:
        """The rest, in which incomplete characters are U+FFFD. Called once, after the last push."""


class Vocabulary:
    """The parts of a tokenizer that decoding needs, looked up once."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        marks: Collection[str] = (),
        same_as: Mapping[int, int] | None = None,
    ) -> None:
        """marks: special tokens that are shown as text, such as those around tool calls. same_as:
        ids of repeated tokens, with the id of the token that has their text."""
        self._backend = backend
        self._same_as = same_as or {}
        added = backend.get_added_tokens_decoder()
        self._has_marks = any(token.special and token.content in marks for token in added.values())
        # Checked by decoding and not only by the flag, because `tokenizers` shows a special token
        # whose spelling its normalizer changes.
        self._special_ids = frozenset(
            token_id
            for token_id, token in added.items()
            if token.special
            and token.content not in marks
            and not backend.decode([token_id], skip_special_tokens=True)
        )
        self._decoders = _decoder_chain(backend)

    def piece(self, token_id: int) -> str | None:
        """The token as spelt in the vocabulary; None: decoding skips it, as special or unknown.

        Unknown ids are real: many models compute logits for a vocabulary padded to a round size.
        """
        token_id = self._same_as.get(token_id, token_id)
        if token_id in self._special_ids:
            return None
        return self._backend.id_to_token(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all these tokens at once; special ones are skipped, except marks."""
        if self._same_as:
            token_ids = [self._same_as.get(each, each) for each in token_ids]
        if not self._has_marks:
            return self._backend.decode(token_ids, skip_special_tokens=True)
        shown = [each for each in token_ids if each not in self._special_ids]
        return self._backend.decode(shown, skip_special_tokens=False)

    def text_of(self, token_id: int) -> str:
        """The text of one token within a text, with its space; a special one as spelt."""
        if self.piece(token_id) is None:
            return self._backend.id_to_token(self._same_as.get(token_id, token_id)) or ""
        alone, twice = self.decode([token_id]), self.decode([token_id, token_id])
        if "\ufffd" in alone:  # parts of characters may join
            return alone
        return twice[len(alone) :] if twice.startswith(alone) else alone

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes that the token adds within a text; None: it is special or unknown.

        Raises RequestError if they depend on other tokens.
        """
        if (piece := self.piece(token_id)) is None:
            return None
        kinds = [decoder["type"] for decoder in self._decoders]
        if kinds == ["ByteLevel"]:
            return _piece_bytes(piece)
        if not kinds or not _is_local(self._decoders):
            raise _no_bytes(kinds)
        for decoder in self._decoders:
            match decoder:
                case {"type": "ByteFallback"} if byte := _BYTE_TOKEN.fullmatch(piece):
                    return bytes([int(byte[1], 16)])
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    piece = piece.replace(old, new)
                case {"type": "Metaspace", "replacement": str(mark)}:
                    piece = piece.replace(mark, " ")
                case {"type": "ByteFallback" | "Fuse" | "Strip"}:
                    pass
                case _:
                    raise _no_bytes(kinds)
        return piece.encode()

    def own_bytes(self, token_id: int) -> bytes | None:
        """The result of `bytes_of`; None also if the bytes depend on other tokens."""
        try:
            return self.bytes_of(token_id)
        except RequestError:
            return None

    def stream(self, prompt_ids: Sequence[int]) -> StreamDecoder:
        """A decoder for the tokens that follow the prompt."""
        kinds = [decoder["type"] for decoder in self._decoders]
        if kinds == ["ByteLevel"]:
            return ByteLevelStream(self, prompt_ids)
        if _is_local(self._decoders):
            return WindowStream(self, prompt_ids, byte_fallback="ByteFallback" in kinds)
        return WholeStream(self, prompt_ids)


class ByteLevelStream:
    """Every token is bytes; text is their UTF-8."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in prompt_ids[-_CONTEXT_BYTES:]:  # a character may be cut by the prompt's end
            self.push(token_id)

    def push(self, token_id: int) -> str:
        piece = self._vocabulary.piece(token_id)
        return "" if piece is None else self._utf8.decode(_piece_bytes(piece))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowStream:
    """Decodes new tokens behind a short window of earlier ones.

    Each token is decoded a bounded number of times, so the cost per token does not grow.
    """

    def __init__(
        self, vocabulary: Vocabulary, prompt_ids: Sequence[int], *, byte_fallback: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._byte_fallback = byte_fallback
        context, last_run = self._split_prompt(prompt_ids)
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        utf8.decode(bytes(byte for _, byte in last_run))
        num_incomplete = len(utf8.getstate()[0])  # of a character that the prompt's end cuts
        cut = [token_id for token_id, _ in last_run[len(last_run) - num_incomplete :]]
        self._window = context + cut
        self._num_read = len(context)  # tokens of the window whose text has been handed out
        self._read_text = vocabulary.decode(context)

    def push(self, token_id: int) -> str:
        piece = self._vocabulary.piece(token_id)
        if piece is None:
            return ""
        self._window.append(token_id)
        return "" if self._byte(piece) is not None else self._read()

    def finish(self) -> str:
        return self._read() if len(self._window) > self._num_read else ""

    def _byte(self, piece: str) -> int | None:
        """The byte that a piece falls back to, None for any other piece."""
        match = _BYTE_TOKEN.fullmatch(piece) if self._byte_fallback else None
        return int(match[1], 16) if match else None

    def _split_prompt(self, prompt_ids: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """The prompt's last tokens that are not bytes, and the bytes that follow them.

        Bytes further back are left out: a window must not join one run of bytes to another.
        """
        context: list[int] = []
        last_run: list[tuple[int, int]] = []
        for token_id in reversed(prompt_ids):
            if (piece := self._vocabulary.piece(token_id)) is None:
                continue
            if (byte := self._byte(piece)) is None:
                context.append(token_id)
            elif not context and len(last_run) < _CONTEXT_BYTES:
                last_run.append((token_id, byte))
            if len(context) == _CONTEXT_TOKENS:
                break
        return context[::-1], last_run[::-1]

    def _read(self) -> str:
        """Hand out the window's new text, then move the window on."""
        text = self._vocabulary.decode(self._window)
        new = text[len(self._read_text) :]
        # The next window must decode to some text, so that the decoder strips the start of the
        # window, and not of the tokens behind it.
        for keep in (1, 2, 4, _CONTEXT_TOKENS):
            if context := self._vocabulary.decode(self._window[-keep:]):
                self._window, self._read_text = self._window[-keep:], context
                break
        else:
            self._read_text = text
        self._num_read = len(self._window)
        return new


class WholeStream:
    """A detokenizer for decoders whose text may change until the last token: returns it at the
    end."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._ids = list(prompt_ids)
        self._prompt_text = vocabulary.decode(self._ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return ""

    def finish(self) -> str:
        return self._vocabulary.decode(self._ids).removeprefix(self._prompt_text)


def _decoder_chain(backend: tokenizers.Tokenizer) -> list[dict[str, object]]:
    """The decoders in the order they run; an absent one joins the tokens with spaces."""
    if backend.decoder is None:
        return []

    def flat(decoder: dict[str, object]) -> Iterable[dict[str, object]]:
        inner = decoder.get("decoders")
        if decoder["type"] == "Sequence" and isinstance(inner, list):
            for child in inner:
                yield from flat(child)
        else:
            yield decoder

    return list(flat(json.loads(backend.decoder.__getstate__())))


def _is_local(chain: Sequence[dict[str, object]]) -> bool:
    """Whether a token's text depends only on the presence of text before it, byte runs apart."""
    fused = False
    for decoder in chain:
        match decoder:
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": str(pattern)}}:
                if fused and len(pattern) != 1:
                    return False
            case {"type": "Replace"} if not fused:
                pass
            case {"type": "Strip", "stop": int(stop)}:
                if stop:
                    return False
            case {"type": "WordPiece" | "BPEDecoder"} if len(chain) == 1:
                pass
            case {"type": "Metaspace" | "ByteFallback"} if not fused:
                pass
            case _:
                return False
    return True


def _no_bytes(kinds: Sequence[object]) -> RequestError:
    made_by = ", ".join(map(str, kinds)) or "putting spaces between them"
    return RequestError(
        "this model's answers cannot follow a grammar or schema: the text of its tokens is made by "
        f"{made_by}",
        remedy="leave both out",
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_ALPHABET = _byte_alphabet()


def _piece_bytes(piece: str) -> bytes:
    """The bytes a piece of a byte-level vocabulary stands for."""
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:  # an added token, spelt as plain text
        return piece.encode()
