"""How does text become tokens, and tokens text?

Tokenizer            text ↔ token ids, chats → prompts     (tokenizer.py)
TextStream           token ids → streaming text            (stream.py)
TokenizerFiles       the files of a folder or a GGUF file  (files.py, gguf.py)
AnswerForm           the model's format of answers         (answer_forms.py, tool_call_forms.py)
AnswerParser         an answer → thinking, text and calls  (answer_parser.py)
Grammars             a grammar → the allowed next tokens   (grammar.py, tool_call_grammars.py)
tool_schemas         Python functions → JSON schemas       (tool_schema.py)
read_end_ids         the end tokens                        (generation_config.py)
read_sampling        the default sampling parameters       (generation_config.py)
unused_settings      the settings that Edge ignores        (generation_config.py)
"""

from edge.text.files import TokenizerFiles, read_tokenizer_files
from edge.text.generation_config import read_end_ids, read_sampling, unused_settings
from edge.text.stream import TextStream
from edge.text.tokenizer import Tokenizer

__all__ = [
    "TextStream",
    "Tokenizer",
    "TokenizerFiles",
    "read_end_ids",
    "read_sampling",
    "read_tokenizer_files",
    "unused_settings",
]
