"""The rows that a layer with a sliding window keeps of a request's keys and values. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRows:
    """A buffer of `kept` rows for a window of `window` positions.

    After T tokens, rows 0 … L − 1 hold the newest L positions in order. With G = kept − window + 1:

        L = T                           if T ≤ kept
        L = T − G · ⌈(T − kept) / G⌉    otherwise

    So L ≥ min(T, window), the first position is a multiple of G, and rows move once in G tokens.
    Which positions are there follows from T alone. (As GroupQueryAttention of ONNX Runtime says of
    its `sliding_window_cache`.)
    """

    window: int
    kept: int

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.kept:
            raise ValueError(f"a window of {self.window} tokens in {self.kept} rows")

    def first(self, tokens: int) -> int:
        """The position in row 0 after so many tokens."""
        step = self.kept - self.window + 1
        return step * -(-max(0, tokens - self.kept) // step)

    def rows(self, tokens: int) -> int:
        """Rows in use after so many tokens: L."""
        return tokens - self.first(tokens)

    def can_cut(self, tokens: int, to: int) -> bool:
        """Whether the rows after `tokens` tokens have all that the token at position `to` sees."""
        first = self.first(tokens)
        return to <= tokens and (not first or to - self.window + 1 >= first)

    def end(self, position: int) -> int:
        """The most tokens that a request may have so that it can be cut at any position after
        `position`; at least two more than that."""
        step = self.kept - self.window + 1
        first = max(0, position + 2 - self.window) // step * step
        return first + self.kept
