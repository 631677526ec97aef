"""Removing the spaces that word-piece vocabularies leave before punctuation.

The rules are those of `clean_up_tokenization_spaces` in `tokenizer_config.json`, in their order.
"""

from __future__ import annotations

_RULES = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)

# The characters of a rule before its last one. Rules only remove spaces, so no rule crosses any
# other character, and the text up to such a character is settled.
_OPEN = " 'nvr"


def clean_up_spaces(text: str) -> str:
    """The text after all rules, each over the whole text before the next."""
    for spaced, joined in _RULES:
        text = text.replace(spaced, joined)
    return text


class SpaceCleaner:
    """A streaming `clean_up_spaces`; passes text through if not enabled."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._held = ""

    def push(self, text: str) -> str:
        """The cleaned text that later text cannot change."""
        if not self._enabled:
            return text
        text = self._held + text
        settled = len(text.rstrip(_OPEN))
        self._held = text[settled:]
        return clean_up_spaces(text[:settled])

    def finish(self) -> str:
        """The rest, when no more text comes."""
        held, self._held = self._held, ""
        return clean_up_spaces(held)
