"""Guesses at the tokens that a grammar forces on an answer.

A grammar forces bytes, which several sequences of tokens can spell, and JSON leaves white space
open. So these are guesses: the forced text as the tokenizer spells it, with white space as the
answer had it before. They follow from the grammar and the answer's tokens alone, and so does their
number: a step with guesses has other last bits than one without, and an answer must not depend on
time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from edge.kernels.sampling.rules import ids_of

if TYPE_CHECKING:
    import llguidance

MOST_TOKENS = 128
"""Guesses from one place on."""

_MOST_BYTES = 512
"""Bytes of a forced text that are looked at from one place on."""

_MOST_BRANCHES = 256
"""Tokens of which white space and one further byte may be common. More are a choice."""

_CONTEXT_TOKENS = 8
"""The newest tokens of the answer, with which a text is spelt: tokens join parts of words."""

_MOST_KNOWN = 4096
"""Tokens whose bytes are kept."""

_SPECIAL = 0xFF
"""The byte, of no text, with which llguidance begins a special token."""

_WHITE = b" \t\n\r"
_NUMBER = frozenset(bytes([byte]) for byte in b"-0123456789")
_SPACED = b":,"
"""Bytes that a space follows in an answer without white space so far."""


_RIGHT, _NEWEST = 0.9, 0.1
"""Share of right guesses that an answer begins with; weight of the newest guess in it."""

_LEAST_CHANCE = 0.3
"""Chance of a guess, after those before it, that is worth a row: on CPUs it takes from 0.07 to 0.4
times as long as a step of one."""


class Foresight:
    """The guesses of one answer.

    Guesses are made at one place for a run of tokens. The next ones are made where the run ends, or
    a token is another. So it does not matter how many tokens of a run are verified at once.
    """

    def __init__(self, forced: ForcedTokens) -> None:
        self._forced = forced
        self._end = AnswerEnd()
        self._right = _RIGHT
        self._run: tuple[int, ...] | None = ()
        """Guesses that are left of the run; None: a run begins. The first token has none, because
        it is chosen together with the end of the prompt."""
        self._expected: int | None = None
        """The token that the grammar suggests, also where the run is empty."""
        self.was_guessed = False
        """The newest token was a guess of the run."""

    def guesses(self, matcher: llguidance.LLMatcher) -> tuple[int, ...]:
        """Tokens that probably follow. The matcher is behind the tokens so far."""
        if self._run is None:
            found = self._forced.after(matcher, self._end)
            self._run, self._expected = found[: self._length(len(found))], next(iter(found), None)
        return self._run

    def take(self, token: int) -> None:
        """The answer goes on by this token. `guesses` was called before it."""
        run = self._run or ()
        expected = run[0] if run else self._expected
        if expected is not None:
            self._right += _NEWEST * ((token == expected) - self._right)
        self.was_guessed = run[:1] == (token,)
        self._run = run[1:] if self.was_guessed else None
        self._expected = None
        self._end.take(self._forced.bytes_of(token))

    def _length(self, most: int) -> int:
        """The length of a run; an odd one, which makes a step of an even number of rows, if there
        are as many guesses."""
        length, chance = 0, self._right
        while length < most and chance >= _LEAST_CHANCE:
            length += 1
            chance *= self._right
        return min(most, length + (length > 0 and length % 2 == 0))


class AnswerEnd:
    """The last bytes of an answer, and where it has white space."""

    def __init__(self) -> None:
        self._tokens: deque[bytes] = deque(maxlen=_CONTEXT_TOKENS)
        self._spaces: dict[bytes, bytes] = {}
        """The newest white space between two other bytes, and behind one."""

    @property
    def text(self) -> bytes:
        return b"".join(self._tokens)

    def take(self, token: bytes | None) -> None:
        """Go on by the bytes of a token; None: a special one."""
        if token is None:
            self._tokens.clear()
            return
        before = self.text
        stripped = before.rstrip(_WHITE)
        last, space = stripped[-1:], before[len(stripped) :]
        for byte in (token[place : place + 1] for place in range(len(token))):
            if byte in _WHITE:
                space += byte
                continue
            if last:
                self._spaces[last + byte] = self._spaces[last] = space
            last, space = byte, b""
        self._tokens.append(token)

    def space_before(self, text: bytes, byte: bytes) -> bytes:
        """The white space to expect between the answer with this text, and the byte."""
        text = self.text + text
        stripped = text.rstrip(_WHITE)
        last, begun = stripped[-1:], text[len(stripped) :]
        usual, opened = b" " if last and last in _SPACED else b"", self._spaces.get(b"{", b"")
        if last == b"," and b"\n" in opened:
            usual = opened
        space = self._spaces.get(last + byte, self._spaces.get(last, usual))
        return space[len(begun) :] if space.startswith(begun) else b""


class ForcedTokens:
    """Guesses for one model's tokens. Thread-safe."""

    def __init__(
        self,
        bytes_of: Callable[[int], bytes | None],
        byte_tokens: Mapping[int, int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """bytes_of: those of a token; None: it is special. byte_tokens: tokens of one byte each.
        encode: the tokens of a text as the model knows them."""
        self.bytes_of = lru_cache(_MOST_KNOWN)(bytes_of)
        self._byte_tokens = byte_tokens
        self._encode = encode

    def after(self, matcher: llguidance.LLMatcher, end: AnswerEnd) -> tuple[int, ...]:
        """The tokens that probably follow, as far as the grammar forces them. The matcher stays
        where it is."""
        matcher.compute_bitmask()  # which copies then need not do again
        forced = self._text(matcher.deep_copy(), end)
        found = list(self._spelt(end.text, forced)) if forced else []
        return tuple(found[: matcher.validate_tokens(found[:MOST_TOKENS])])

    def _text(self, at: llguidance.LLMatcher, end: AnswerEnd) -> bytes:
        """The forced text from here on."""
        text = b""
        while len(text) < _MOST_BYTES:
            more = at.compute_ff_bytes() or self._behind_space(at, end, text)
            if not more:
                break
            for byte in more[: _MOST_BYTES - len(text)]:
                token = self._byte_tokens.get(byte)
                if token is None or byte == _SPECIAL or not at.consume_token(token):
                    return text
                text += bytes([byte])
        return text

    def _behind_space(self, at: llguidance.LLMatcher, end: AnswerEnd, before: bytes) -> bytes:
        """White space and a byte, where the grammar forces this byte, and leaves white space before
        it open. White space alone before a number: tokens do not join them.

        before: the text since the answer's end."""
        ids = ids_of(np.frombuffer(at.compute_bitmask(), np.uint8), _MOST_BRANCHES)
        if ids is None:
            return b""
        firsts = set[bytes]()
        for id in ids.tolist():
            if not (piece := self.bytes_of(id)):
                return b""
            firsts.add(piece.lstrip(_WHITE)[:1])
        firsts.discard(b"")
        if len(firsts) == 1:
            (byte,) = firsts
            return end.space_before(before, byte) + byte
        return end.space_before(before, b"0") if firsts and firsts <= _NUMBER else b""

    def _spelt(self, before: bytes, text: bytes) -> Sequence[int]:
        """The tokens of a text behind another; empty: they are not known."""
        text = text.decode(errors="ignore").encode()  # it may end in the middle of a character
        for context in (before, b""):
            ids = self._encode((context + text).decode(errors="ignore"))
            found, left = list[int](), text
            for id in reversed(ids):
                piece = self.bytes_of(id)
                if not piece or not left.endswith(piece):
                    break
                found.append(id)
                left = left[: len(left) - len(piece)]
            if not left:
                return found[::-1]
        return []
