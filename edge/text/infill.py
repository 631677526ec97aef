"""Fill-in-the-middle prompts, for models that were trained for them (mostly on code)."""

from __future__ import annotations

from collections.abc import Callable

_FORMS = (
    ("<|fim_prefix|>", "{before}", "<|fim_suffix|>", "{behind}", "<|fim_middle|>"),
    ("<fim_prefix>", "{before}", "<fim_suffix>", "{behind}", "<fim_middle>"),
    ("<fim-prefix>", "{before}", "<fim-suffix>", "{behind}", "<fim-middle>"),
    ("<｜fim▁begin｜>", "{before}", "<｜fim▁hole｜>", "{behind}", "<｜fim▁end｜>"),
    ("[SUFFIX]", "{behind}", "[PREFIX]", "{before}"),
)
"""The formats of Qwen Coder and CodeGemma, StarCoder and Granite, SantaCoder, DeepSeek Coder, and
Codestral: special tokens around the texts.
"""


def infill_prompt(is_token: Callable[[str], bool], before: str, behind: str) -> str | None:
    """The prompt whose answer goes between the two texts; None: the tokenizer has no tokens for
    that. Special tokens in the texts are read as tokens, as in every prompt."""
    texts = {"{before}": before, "{behind}": behind}
    for form in _FORMS:
        if all(part in texts or is_token(part) for part in form):
            return "".join(texts.get(part, part) for part in form)
    return None
