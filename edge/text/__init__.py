"""How does text become tokens, and tokens text?

Tokenizer            text ↔ token ids, chats → prompts        (tokenizer.py)
TextStream           token ids → text that grows              (stream.py)
GenerationDefaults   where answers end, how to sample         (generation_config.py)
"""

from edge.text.generation_config import GenerationDefaults, read_generation_defaults
from edge.text.stream import TextStream
from edge.text.tokenizer import Tokenizer

__all__ = ["GenerationDefaults", "TextStream", "Tokenizer", "read_generation_defaults"]
