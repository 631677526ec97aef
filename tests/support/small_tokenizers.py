"""Small tokenizers of the kinds that published checkpoints use, trained on a few sentences."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, isn't it? It's what they've said!",
    "Peers find each other; they're small, and they share one model. I'm sure.",
    "日本語のテキストと漢字。 你好,世界! Größe, naïve café, e\u0301te\u0301.",
    "🎉🎉 👩‍👩‍👧 🇩🇪 नमस्ते สวัสดี",
    "  two  spaces,\n\nnew lines\tand tabs 12345 67890 ",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "   leading and trailing   ",
    "<s>marked</s> text<|end|> and <tool call> more",
    "unseen ẞ ꙮ 🫠 \u0000 control",
    "e\u0301 and \u00e9 differ until normalised",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}\n"
    "    {% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: bytes as printable characters, no unknown text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    return tokenizer


def byte_fallback(num_bytes: int = 256) -> Tokenizer:
    """As Llama 2: spaces are ▁, unseen characters are byte tokens, the first space is taken off."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    learner.train_from_iterator(
        CORPUS[:2],
        trainers.BpeTrainer(vocab_size=150, show_progress=False),
    )
    learnt = json.loads(learner.to_str())["model"]
    specials = ["<unk>", "<s>", "</s>"]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(num_bytes)), "▁▁"]
    pieces += [piece for piece in learnt["vocab"] if piece not in pieces]
    merges = [tuple(merge) for merge in learnt["merges"]] + [("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: place for place, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            fuse_unk=num_bytes == 256,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def few_bytes() -> Tokenizer:
    """The same with only ASCII's bytes, so that some text has no token at all."""
    return byte_fallback(num_bytes=128)


def unigram() -> Tokenizer:
    """As T5 and XLM-R: a SentencePiece unigram model with a Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS * 4,
        trainers.UnigramTrainer(
            vocab_size=180,
            special_tokens=["<unk>", "</s>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer


def words() -> Tokenizer:
    """Whole words without a decoder: tokens are joined with spaces."""
    names = ["<unk>", *dict.fromkeys(" ".join(CORPUS).split()), ".", "'", "n't", "'s", "n", "?"]
    tokenizer = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def far_reaching() -> Tokenizer:
    """A decoder that looks across tokens: later ones can change the text of earlier ones."""
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace(Regex(" ?o.?v"), "V"),
        ]
    )
    return tokenizer


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "few_bytes": few_bytes,
    "unigram": unigram,
    "words": words,
    "far_reaching": far_reaching,
}


def write_checkpoint(
    folder: Path,
    tokenizer: Tokenizer,
    settings: Mapping[str, object] | None = None,
    *,
    model_type: str = "llama",
    special_tokens_map: Mapping[str, object] | None = None,
) -> Path:
    """The tokenizer's files of a checkpoint, as a publisher would lay them out."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **(settings or {})})
    )
    if special_tokens_map is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_tokens_map))
    return folder


def letters(pieces: Sequence[str]) -> Tokenizer:
    """A byte-level vocabulary of these alone; those in angle brackets are special."""
    tokenizer = Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([piece for piece in pieces if piece.startswith("<")])
    return tokenizer
