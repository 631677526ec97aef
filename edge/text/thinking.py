"""An answer that arrives piece by piece, told apart: what is thought, and what is said. Pure."""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"

SWITCHES = ("enable_thinking", "thinking")
"""Names by which chat templates are told whether the model thinks first: those of Qwen, GLM and
SmolLM, and those of Granite and DeepSeek."""


@dataclass(slots=True)
class ThinkingSplitter:
    """Tells what a model thinks from what it says: between two marks at the answer's beginning.

    thinking: some chat templates write the first mark, so the answer begins after it.
    """

    thinking: bool = False
    _held: str = ""
    _begun: bool = False
    _after_thought: bool = False

    def feed(self, text: str) -> tuple[str, str]:
        """(thought, said) of what has come and may be shown."""
        self._held += text
        if not self._begun and not self.thinking:
            start = self._held.lstrip()
            if OPEN.startswith(start[: len(OPEN)]) and len(start) < len(OPEN):
                return "", ""  # it may become the mark
            self._begun = True
            if start.startswith(OPEN):
                self.thinking = True
                self._held = start.removeprefix(OPEN)
        if not self.thinking:
            return "", self._said()
        end = self._held.find(CLOSE)
        if end < 0:
            return self._take(before_partial(self._held, CLOSE)), ""
        thought = self._take(end)
        self._begun, self.thinking, self._after_thought = True, False, True
        self._held = self._held.removeprefix(CLOSE)
        return thought, self._said()

    def rest(self) -> tuple[str, str]:
        """What was held back when the answer ended."""
        held = self._take(len(self._held))
        return (held, "") if self.thinking else ("", held)

    def _said(self) -> str:
        """Without the empty lines after a thought."""
        if self._after_thought:
            self._held = self._held.lstrip("\n")
            self._after_thought = not self._held
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


def before_partial(text: str, mark: str) -> int:
    """How much of the text comes before what may be the beginning of the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return len(text) - length
    return len(text)
