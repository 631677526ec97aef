"""How the tokens of an encoder–decoder export are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTerms:
    """How tokens are chosen. Names are those of transformers' GenerationConfig."""

    max_new_tokens: int
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    min_new_tokens: int = 0
    no_repeat_ngram_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    only_tokens: tuple[int, ...] = ()
    """If there are any, no other is chosen."""
