"""Made-up numbers of the null back end, a function of the model's shape and the tokens.

A hidden state is a row of bits, as 0.0 and 1.0, so that rounding on the wire does not change it. A
hash of all keys and values so far selects the bits that each layer flips, and the last hidden state
selects the logits. So a token depends on every key and value of every head in every layer, and on
each sum and hop, but not on how the model is divided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.models.attention import Attention
from edge.models.spec import ModelSpec

_WORD_BITS = 64
_PEAK = 2.5
"""Factor of the Gumbel noise, which makes it as peaked as a model's logits."""

Words = NDArray[np.uint64]


def logits_after(spec: ModelSpec, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits of a whole model after these tokens: [vocab_size]."""
    ids = np.asarray(tokens, np.uint64)
    bits = np.arange(spec.hidden_size)
    state = token_bits(ids[-1:], bits)
    for layer in range(spec.num_layers):
        mixer = spec.layer(layer).mixer
        window = mixer.window if isinstance(mixer, Attention) else None
        words = attention_words(ids, ids, layer, window=window)
        state ^= word_bits(words[-1:], bits)
    found: NDArray[np.float32] = logits(state.astype(np.float32), range(spec.vocab_size))[0]
    return found


def replies(spec: ModelSpec, prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens of a greedy reply."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(spec, tokens).argmax()))
    return tokens[len(prompt) :]


def token_bits(ids: Words, bits: NDArray[np.int64]) -> NDArray[np.bool_]:
    """These bits of the tokens' embedding: [tokens, bits]."""
    return word_bits(_mixed(ids), bits)


def attention_words(
    keys: Words, values: Words, layer: int, *, window: int | None = None, first: int = 0
) -> Words:
    """A hash of each token and all before it, or those in the window, from ids [..., tokens] of
    keys and values. first: the position of the first token."""
    places = np.arange(keys.shape[-1], dtype=np.uint64) + np.uint64(((layer + 1) << 40) + first)
    each = _mixed(_mixed(keys | values << np.uint64(32)) + _mixed(places))
    words = np.add.accumulate(each, axis=-1)
    if window is not None:
        words[..., window:] = words[..., window:] - words[..., :-window]
    return words


def word_bits(words: Words, bits: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Bit i of a hidden state is bit i mod 64 of its word: [tokens, bits]."""
    shifts = (bits % _WORD_BITS).astype(np.uint64)
    return (_mixed(words)[..., None] >> shifts & np.uint64(1)).astype(np.bool_)


def logits(hidden: NDArray[np.float32], vocab: range) -> NDArray[np.float32]:
    """Logits [rows, len(vocab)] of hidden states [rows, hidden_size]."""
    ids = _mixed(np.arange(vocab.start, vocab.stop, dtype=np.uint64))
    rows = [_peaked(_mixed(ids + seed)) for seed in _seeds(hidden > 0.5)]
    return np.array(rows, np.float32).reshape(len(hidden), len(vocab))


def _seeds(states: NDArray[np.bool_]) -> Iterable[Words]:
    for state in states:
        digest = hashlib.blake2b(np.packbits(state).tobytes(), digest_size=8).digest()
        yield np.frombuffer(digest, "<u8")


def _peaked(words: Words) -> NDArray[np.float64]:
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    return -_PEAK * np.log(-np.log(uniform))


def _mixed(words: Words) -> Words:
    """A hash of each word (the finaliser of SplitMix64, Steele et al. 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
