"""The KV cache of one layer as GPU kernels see it: contiguous or in blocks, of 16, 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge.kernels.triton_launch import FLOATS, check

_BITS_OF_CODES = {torch.int8: 8, torch.uint8: 4}
_DTYPES = (*FLOATS, *_BITS_OF_CODES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvCache:
    """Keys and values of every sequence, read and written in place.

    keys, values [blocks, num_kv_heads, block_tokens, n]. Without a block table block b is sequence
    b, and block_tokens its context. With one, int32 [sequences, blocks of a sequence], token t of
    sequence s lies in block table[s, t // block_tokens] at t % block_tokens.

    A float cache has n = head_size. Codes as in `token_cache.py` are int8 with n = head_size or
    uint8 with n = head_size / 2, and need scales float [blocks, num_kv_heads, block_tokens,
    groups]. Raises ValueError where these contradict each other.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    block_table: Tensor | None = None

    def __post_init__(self) -> None:
        shape = (None, None, None, None)
        check("keys", self.keys, dtypes=_DTYPES, shape=shape, contiguous=False)
        check(
            "values", self.values, dtypes=(self.keys.dtype,), shape=self.keys.shape,
            like=self.keys, contiguous=False,
        )  # fmt: skip
        if self.keys.stride() != self.values.stride():
            raise ValueError(
                f"keys lie with strides {self.keys.stride()}, values with {self.values.stride()}; "
                "pass both in one layout"
            )
        self._check_scales()
        if self.block_table is not None:
            check(
                "block_table", self.block_table, dtypes=(torch.int32,), shape=(None, None),
                like=self.keys,
            )  # fmt: skip
            if self.block_tokens & (self.block_tokens - 1):
                raise ValueError(f"a block holds {self.block_tokens} tokens, not a power of two")

    def _check_scales(self) -> None:
        if self.bits is None:
            if self.key_scales is not None or self.value_scales is not None:
                raise ValueError(f"a cache of {self.keys.dtype} has no scales")
            return
        if self.key_scales is None or self.value_scales is None:
            raise ValueError(f"a cache of {self.bits} bits needs key_scales and value_scales")
        groups = self.key_scales.shape[-1] if self.key_scales.ndim else 0
        shape = (*self.keys.shape[:3], groups)
        for name, scales in (("key_scales", self.key_scales), ("value_scales", self.value_scales)):
            check(name, scales, dtypes=FLOATS, shape=shape, like=self.keys)
        if not groups or self.head_size % groups:
            raise ValueError(f"heads of {self.head_size} do not divide into {groups} groups")
        if groups > 1 and self.group_size & (self.group_size - 1):
            raise ValueError(f"groups of {self.group_size} are not a power of two")

    @property
    def bits(self) -> int | None:
        """Bits of a code; None in a float cache."""
        return _BITS_OF_CODES.get(self.keys.dtype)

    @property
    def num_kv_heads(self) -> int:
        return int(self.keys.shape[1])

    @property
    def block_tokens(self) -> int:
        return int(self.keys.shape[2])

    @property
    def head_size(self) -> int:
        return int(self.keys.shape[3]) * (2 if self.bits == 4 else 1)

    @property
    def group_size(self) -> int:
        """Elements that share a scale; the head size in a float cache."""
        return self.head_size // (1 if self.key_scales is None else self.key_scales.shape[-1])

    @property
    def num_sequences(self) -> int:
        return int((self.keys if self.block_table is None else self.block_table).shape[0])

    @property
    def capacity(self) -> int:
        """Tokens that one sequence may have."""
        blocks = 1 if self.block_table is None else self.block_table.shape[1]
        return blocks * self.block_tokens
