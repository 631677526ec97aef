"""How does text become tokens, and tokens text?

Tokenizer            text ↔ token ids, chats → prompts        (tokenizer.py)
TextStream           token ids → text that grows              (stream.py)
TokenizerFiles       what a folder or a GGUF file says of one (files.py, gguf.py)
AnswerForm           how a model writes its answers           (answer_forms.py, call_forms.py)
AnswerParser         an answer → what is said, thought, called (answer_parser.py)
Grammars             what an answer must be → which tokens may come (grammar.py, forced_calls.py)
tool_schemas         Python functions → schemas for templates  (tool_schema.py)
read_end_ids         where answers end                        (generation_config.py)
read_sampling        how its makers choose tokens             (likewise)
unused_settings      what else they say of that               (likewise)
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
