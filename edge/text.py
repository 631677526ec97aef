"""Text in, tokens out, and back: everything the runtime needs to know of a checkpoint's language.

Tokenizer            text ↔ token ids, chats → prompts        (text_tokenizer.py)
TextStream           token ids → text that grows              (text_stream.py)
GenerationDefaults   where answers end, how to sample         (text_generation.py)
"""

from edge.text_generation import GenerationDefaults, read_generation_defaults
from edge.text_stream import TextStream
from edge.text_tokenizer import Tokenizer

__all__ = ["GenerationDefaults", "TextStream", "Tokenizer", "read_generation_defaults"]
