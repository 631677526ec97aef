"""Pre-tokenizers of GGUF files, by their `tokenizer.ggml.pre`: the splits before BPE merges.

The patterns are those of the tokenizer.json that each kind of model was published with. A wrong
split makes wrong tokens, so an unknown name is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Step = Mapping[str, object]
"""A pre-tokenizer or normalizer in the format of tokenizer.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """The pre-tokenizer of a kind of model.

    steps: in order, before bytes become characters. gpt2_words: split by GPT-2's pattern last. nfc:
    normalize to NFC first. whole_words: a word that is a token skips merges. adds_bos: the default
    if the file does not say.
    """

    steps: tuple[Step, ...] = ()
    gpt2_words: bool = True
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


def _cut(*patterns: str) -> tuple[Step, ...]:
    return tuple(
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in patterns
    )


_EACH_DIGIT: Step = {"type": "Digits", "individual_digits": True}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
"""Combining marks stay with their letters."""
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters of scripts with case."""

_DEEPSEEK_MARKS = r"\s?" "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"

_SEED_CODER = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_VIKING = " ?[^(\\s|.,!?…。，、।۔،)]+"

_GPT2 = PreTokenizer()
_LLAMA_BPE = PreTokenizer(steps=_cut(_LLAMA3), gpt2_words=False, whole_words=True, adds_bos=True)
_QWEN = PreTokenizer(steps=_cut(_QWEN2), gpt2_words=False, nfc=True)
_DIGITS = PreTokenizer(steps=(_EACH_DIGIT,))
_LLAMA3_WORDS = PreTokenizer(steps=_cut(_LLAMA3), gpt2_words=False)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(
        steps=(
            *_cut(
                r"[\p{P}\$\+<=>\^~\|]+",
                r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
                r"\p{N}+",
                r"[0-9][0-9][0-9]",
            ),
        ),
        gpt2_words=False,
    ),
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "a.x-4.0": _GPT2,
    "granite-docling": _GPT2,
    "mellum": _GPT2,
    "trillion": _GPT2,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "lfm2": _LLAMA_BPE,
    "pixtral": _LLAMA_BPE,
    "midm-2.0": _LLAMA_BPE,
    "smaug-bpe": _LLAMA3_WORDS,
    "dbrx": _LLAMA3_WORDS,
    "glm4": _LLAMA3_WORDS,
    "chatglm-bpe": _LLAMA3_WORDS,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "megrez": _QWEN,
    "qwen35": PreTokenizer(steps=_cut(_QWEN35), gpt2_words=False, nfc=True),
    "kormo": PreTokenizer(steps=_cut(_QWEN2), gpt2_words=False),
    "minicpm5": PreTokenizer(
        steps=_cut(r"\p{N}{1,3}", _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")),
        gpt2_words=False,
        whole_words=True,
    ),
    "seed-coder": PreTokenizer(steps=_cut(_SEED_CODER), gpt2_words=False),
    "superbpe": PreTokenizer(steps=_cut(r"\p{N}+", r"(?=(\d{3})+(?!\d))"), gpt2_words=False),
    "viking": PreTokenizer(steps=(*_cut(_VIKING), _EACH_DIGIT), gpt2_words=False),
    "gpt-4o": PreTokenizer(steps=_cut(_O200K), gpt2_words=False),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "minerva-7b": _DIGITS,
    "tekken": PreTokenizer(steps=_cut(_TEKKEN), gpt2_words=False, whole_words=True, adds_bos=True),
    "deepseek-llm": PreTokenizer(
        steps=_cut(
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            _DEEPSEEK_MARKS,
            r"\s+$",
            _CJK,
            r"\p{N}+",
        ),
        gpt2_words=False,
    ),
    "deepseek-coder": PreTokenizer(
        steps=(*_cut(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK), _EACH_DIGIT),
        gpt2_words=False,
    ),
}
