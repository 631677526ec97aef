"""The tokenizer files of a checkpoint, read and checked, but not built."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shown

from edge import offload
from edge.errors import CheckpointError

NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

MAX_FILE_BYTES = 16 << 20
"""Size limit of every text file but `TOKENIZER`; settings with 10,000 added tokens are 2 MB."""
_PROCESSOR_TEMPLATE = "chat_template.json"
TOKENIZER = "tokenizer.json"
_MAX_TOKENIZER_BYTES = 64 << 20  # the largest published one is 35 MB
MAX_TOKENIZER_VALUES = 3_000_000  # 260,000 tokens and 515,000 merges as pairs: 1.9 million


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialToken:
    """A token that is matched as a whole, and how (the fields of `tokenizer.json`)."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True


MATCHING_RULES = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The tokenizer of a checkpoint, as its files describe it.

    path: the checkpoint's. file: the one with the vocabulary, for errors.
    serialized: the text of tokenizer.json.
    tokenizer_class: as declared by the publisher, without its "Fast" ending; may be empty.
    model_type: of config.json; empty: it has none.
    named_tokens: bos_token, eos_token, … to their spelling, in the order templates receive them.
    declared_tokens: tokens the settings declare, by id; tokenizer.json may hold them already.
    extra_tokens: tokens that must exist and be special, without a known id.
    chat_templates: by name; a single one is named "default". The values are (source, file name).
    same_as: ids of repeated tokens, with the id of the token that has their text.
    """

    path: Path
    file: Path
    serialized: str
    settings: Mapping[str, object]
    tokenizer_class: str
    model_type: str
    named_tokens: Mapping[str, SpecialToken]
    declared_tokens: Mapping[int, SpecialToken]
    extra_tokens: tuple[SpecialToken, ...]
    chat_templates: Mapping[str, tuple[str, str]]
    same_as: Mapping[int, int] = field(default_factory=dict)


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read tokenizer.json and its companion files in the folder `path`.

    Raises CheckpointError, naming the file, for an absent, unreadable or malformed one.
    """
    serialized = read_text(path / TOKENIZER, most_bytes=_MAX_TOKENIZER_BYTES)
    try:
        offload.check_values(serialized, MAX_TOKENIZER_VALUES)
    except ValueError as error:
        raise _damaged(path / TOKENIZER, str(error)) from error
    settings_file = path / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.is_file() else {}
    config_file = path / "config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    declared = _declared_tokens(settings, settings_file)
    merged = dict(settings)
    map_file = path / "special_tokens_map.json"
    if "added_tokens_decoder" not in settings and map_file.is_file():  # the settings replace it
        merged.update(read_json(map_file))
    extra = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    named = {name: merged[name] for name in NAMED_SPECIAL_TOKENS if merged.get(name)}
    named |= {
        name: value
        for name, value in merged.items()
        if name.endswith("_token") and isinstance(value, str) and value
    }
    if isinstance(extra, Mapping):  # newer settings name the tokens of other modalities
        named, extra = {**named, **extra}, []
    if not isinstance(extra, list):
        raise _damaged(settings_file, "extra_special_tokens must be a list")
    by_content = {token.content: token for token in declared.values()}
    return TokenizerFiles(
        path=path,
        file=path / TOKENIZER,
        serialized=serialized,
        settings=settings,
        tokenizer_class=_text(settings, "tokenizer_class", settings_file).removesuffix("Fast")
        or _text(config, "tokenizer_class", config_file).removesuffix("Fast"),
        model_type=_text(config, "model_type", config_file),
        named_tokens={
            name: by_content.get((token := _token(value, settings_file)).content, token)
            for name, value in named.items()
        },
        declared_tokens=declared,
        extra_tokens=tuple(_token(value, settings_file) for value in extra),
        chat_templates=_chat_templates(path, settings, settings_file),
    )


def read_text(path: Path, *, most_bytes: int = MAX_FILE_BYTES) -> str:
    """A text file of the checkpoint. Raises CheckpointError if it is not readable UTF-8."""
    try:
        return offload.read_file(path, most_bytes).decode()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing",
            remedy=f"give the folder of a Hugging Face checkpoint that holds {path.name}, or "
            "download that file into it",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror})", remedy="check its permissions and the disk"
        ) from error
    except UnicodeDecodeError as error:
        raise _damaged(path, "it is not UTF-8 text") from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error


def read_json(path: Path) -> dict[str, object]:
    """A JSON object of the checkpoint. Raises CheckpointError for anything else."""
    return parse_json(read_text(path), path)


def parse_json(text: str, path: Path) -> dict[str, object]:
    """`text` as a JSON object. Raises CheckpointError, naming `path`, if it is not one."""
    try:
        value = offload.parse_json(text)
    except ValueError as error:
        raise _damaged(path, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise _damaged(path, f"it holds a {type(value).__name__}, not an object")
    return value


def _damaged(path: Path, cause: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {cause}", remedy="download it again")


def _text(settings: Mapping[str, object], name: str, path: Path) -> str:
    value = settings.get(name) or ""
    if not isinstance(value, str):
        raise _damaged(path, f"{name} must be text, not {shown(value)}")
    return value


def _token(value: object, path: Path) -> SpecialToken:
    """A token as text or as an object with its matching rules."""
    if isinstance(value, str):
        value = {"content": value}
    if isinstance(value, Mapping) and isinstance(content := value.get("content"), str):
        if not content.isascii() and any("\ud800" <= each <= "\udfff" for each in content):
            raise _damaged(path, f"the token {shown(content)} is not valid Unicode")
        special = bool(value.get("special", True))
        rules = {"normalized": not special, **value, "special": special}
        rules = {rule: bool(rules.get(rule, False)) for rule in MATCHING_RULES}
        return SpecialToken(content=content, **rules)
    raise _damaged(path, f"a token must be text or have content, not {shown(value)}")


def _declared_tokens(settings: Mapping[str, object], path: Path) -> dict[int, SpecialToken]:
    declared = settings.get("added_tokens_decoder") or {}
    if not isinstance(declared, Mapping):
        raise _damaged(path, "added_tokens_decoder must be an object")
    tokens = {}
    for token_id, value in declared.items():
        if not isinstance(token_id, str) or not re.fullmatch(r"[0-9]{1,10}", token_id):
            raise _damaged(path, f"{shown(token_id)} is no token id")
        tokens[int(token_id)] = _token(value, path)
    return dict(sorted(tokens.items()))


def _chat_templates(
    path: Path, settings: Mapping[str, object], settings_file: Path
) -> dict[str, tuple[str, str]]:
    """The chat templates: from separate files, else from the settings, else from the file of
    processors of pictures."""
    files = {"default": path / "chat_template.jinja"}
    if (folder := path / "additional_chat_templates").is_dir():
        files |= {file.stem: file for file in sorted(folder.glob("*.jinja"))}
    if found := {
        name: (read_text(file), str(file)) for name, file in files.items() if file.is_file()
    }:
        return found
    template = settings.get("chat_template")
    if template is None and (path / _PROCESSOR_TEMPLATE).is_file():
        settings_file = path / _PROCESSOR_TEMPLATE
        template = read_json(settings_file).get("chat_template")
    match template:
        case None:
            return {}
        case str(source):
            return {"default": (source, str(settings_file))}
        case list(templates):
            named = {}
            for template in templates:
                match template:
                    case {"name": str(name), "template": str(source)}:
                        named[name] = (source, str(settings_file))
                    case _:
                        raise _damaged(settings_file, "a chat_template lacks its name or template")
            return named
        case other:
            raise _damaged(settings_file, f"chat_template is a {type(other).__name__}, not text")
