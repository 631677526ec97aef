"""Text to tokens and back, and chats, against `transformers`; the files' errors; stop strings."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders
from transformers import AutoTokenizer

from edge.errors import CheckpointError, RequestError
from edge.text import GenerationDefaults, TextStream, Tokenizer, read_generation_defaults
from edge.text_decoding import Vocabulary, WindowStream
from tests.support.small_tokenizers import (
    CHAT_TEMPLATE,
    KINDS,
    TEXTS,
    byte_fallback,
    byte_level,
    unigram,
    words,
    write_checkpoint,
)

END_DECLARED = {
    "0": {"content": "<unk>", "special": True, "normalized": False},
    "2": {"content": "</s>", "special": True, "normalized": False, "rstrip": True},
    "270": {"content": "▁the", "special": False, "normalized": False},
}

# (kind, tokenizer_config.json, model type, special_tokens_map.json)
CHECKPOINTS: list[tuple[str, dict[str, Any], str, dict[str, Any] | None]] = [
    *((kind, {}, "llama", None) for kind in KINDS),
    # The post-processor decides what is added, not these two older settings.
    ("byte_level", {"bos_token": "<|begin|>", "add_bos_token": False}, "qwen3", None),
    ("byte_level", {"eos_token": "<|end|>", "add_eos_token": True}, "llama", None),
    ("byte_level", {"tokenizer_class": "LlamaTokenizerFast"}, "llama", None),
    ("byte_level", {"tokenizer_class": "Qwen2Tokenizer"}, "granite", None),
    ("byte_fallback", {"tokenizer_class": "LlamaTokenizer"}, "llama", None),
    ("byte_fallback", {"tokenizer_class": "LlamaTokenizer", "legacy": True}, "llama", None),
    ("byte_fallback", {"tokenizer_class": "LlamaTokenizer", "legacy": None}, "", None),
    (
        "byte_fallback",
        {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": False, "pad_token": "<pad>"},
        "llama",
        None,
    ),
    (
        "byte_fallback",
        {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": END_DECLARED},
        "llama",
        {"eos_token": "ignored, because the settings declare the tokens"},
    ),
    ("byte_fallback", {"tokenizer_class": "LlamaTokenizer"}, "mistral", None),
    ("byte_fallback", {"added_tokens_decoder": END_DECLARED}, "mistral", None),
    (
        "byte_level",
        {"additional_special_tokens": ["<|user|>", "quick"], "image_token": "<|image|>"},
        "llama",
        {"eos_token": {"content": "<|end|>", "lstrip": True}, "pad_token": "<|pad|>"},
    ),
    ("byte_level", {"extra_special_tokens": {"audio_token": "fox"}}, "llama", None),
    ("byte_level", {"split_special_tokens": True}, "llama", None),
    ("byte_level", {"clean_up_tokenization_spaces": True}, "llama", None),
    (
        "byte_level",
        {
            "clean_up_tokenization_spaces": True,
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
        },
        "llama",
        None,
    ),
    ("unigram", {"clean_up_tokenization_spaces": True, "eos_token": "</s>"}, "llama", None),
    ("words", {"clean_up_tokenization_spaces": True}, "llama", None),
]


@pytest.mark.parametrize(("kind", "settings", "model_type", "special_tokens_map"), CHECKPOINTS)
def test_encode_and_decode_are_those_of_transformers(
    tmp_path: Path,
    kind: str,
    settings: dict[str, Any],
    model_type: str,
    special_tokens_map: dict[str, Any] | None,
) -> None:
    write_checkpoint(
        tmp_path,
        KINDS[kind](),
        settings,
        model_type=model_type,
        special_tokens_map=special_tokens_map,
    )
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.open(tmp_path)
    assert ours.vocab_size == len(theirs)
    assert dict(ours.special_tokens).items() >= theirs.special_tokens_map.items()
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    everything = list(range(ours.vocab_size + 5))  # a padded vocabulary has ids without a token
    assert ours.decode(everything) == theirs.decode(everything, skip_special_tokens=True)
    assert ours.decode([]) == ""


def test_a_text_is_never_cut_or_padded(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=500)
    ours = Tokenizer.open(write_checkpoint(tmp_path, tokenizer))
    assert ours.decode(ours.encode("The quick brown fox")) == "The quick brown fox"
    assert 3 < len(ours.encode("The quick brown fox")) < 500


def test_token_ids_of_single_tokens(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_fallback()))
    assert ours.token_id("</s>") == 2
    assert ours.token_id("no such token") is None


def test_what_cannot_be_encoded_or_decoded_is_the_callers_error(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level()))
    with pytest.raises(RequestError, match="valid Unicode"):
        ours.encode("half a surrogate pair: \ud83d")
    with pytest.raises(RequestError, match="token ids must be whole numbers"):
        ours.decode([1, -1])
    with pytest.raises(RequestError, match="token ids must be whole numbers"):
        ours.decode([2**40])


MESSAGES = [
    {"role": "system", "content": "  Be brief.  "},
    {"role": "user", "content": 'Größe <b>"x"</b> & 🎉?'},
]
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "blocks": (
        "  {% if messages[0]['role'] == 'system' %}\n"
        "    {%- set rest = messages[1:] %}\nsystem: {{ messages[0]['content'] }}\n"
        "  {% endif %}\n"
        "{% for m in rest %}{% if loop.index0 > 3 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% if not loop.last %}{% continue %}{% endif %}last{% endfor %}"
        "{{ tools is none }} {{ documents is none }} "
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"
    ),
    "helpers": (
        "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}{{ dict(a=1, b=messages[1].content) | tojson(indent=2) }}"
        "{{ dict.fromkeys(['k'], 3) | tojson }}"
        "{% generation %}{{ messages[1].content }}{% endgeneration %}{{ undefined_name }}"
        "{{ messages[0] | items | list }}{{ strftime_now('%Z') | length }}"
    ),
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("layout", ["settings", "named", "file"])
def test_chats_are_those_of_transformers(tmp_path: Path, source: str, layout: str) -> None:
    settings: dict[str, Any] = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    if layout == "settings":
        settings["chat_template"] = source
    elif layout == "named":
        settings["chat_template"] = [
            {"name": "tool_use", "template": "tools: {{ tools | tojson }}"},
            {"name": "default", "template": source},
        ]
    else:
        settings["chat_template"] = "the file goes first"
    write_checkpoint(tmp_path, byte_level(), settings)
    if layout == "file":
        (tmp_path / "chat_template.jinja").write_text(source)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.open(tmp_path)
    for prompt in (True, False):
        assert ours.chat(MESSAGES, add_generation_prompt=prompt) == theirs.apply_chat_template(
            MESSAGES, add_generation_prompt=prompt, tokenize=False
        )
    assert ours.encode_chat(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert ours.chat(MESSAGES, tools=tools) == theirs.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=False, tools=tools
    )


def test_chat_variables_absent_values_and_reasoning_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{{ enable_thinking }} {{ 'content' in messages[0] }} {{ messages[0].reasoning_content }}"
    )
    write_checkpoint(tmp_path, byte_level(), {"chat_template": template})
    messages = [{"role": "assistant", "content": None, "reasoning": "hm"}]
    ours = Tokenizer.open(tmp_path)
    assert ours.chat(messages, variables={"enable_thinking": False}) == "False False hm"
    assert ours.chat(
        messages, variables={"enable_thinking": False}
    ) == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, tokenize=False, enable_thinking=False
    )


def test_the_template_writes_all_special_tokens_of_a_chat(tmp_path: Path) -> None:
    settings = {"bos_token": "<|begin|>", "chat_template": CHAT_TEMPLATE}
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level(), settings))
    begin = ours.token_id("<|begin|>")
    assert ours.encode_chat(MESSAGES).count(begin) == 1
    assert ours.encode(ours.chat(MESSAGES)).count(begin) == 2


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, MESSAGES, "has no default chat template"),
        ([{"name": "rag", "template": "x"}], MESSAGES, "no default .*; it has only rag"),
        (CHAT_TEMPLATE, [], "at least one message"),
        (CHAT_TEMPLATE, ["hello"], "an object with role and content, not 'hello'"),
        (CHAT_TEMPLATE, [{"role": "user", "content": b"x"}], "text, numbers, .* not bytes"),
        ("{{ raise_exception('roles must alternate') }}", MESSAGES, "roles must alternate"),
        ("{{ 1 // 0 }}", MESSAGES, "refused these messages: .*zero"),
        ("{{ messages.nothing.further }}", MESSAGES, "refused these messages"),
        ("{{ messages.append(1) }}", MESSAGES, "refused these messages: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "refused these messages: .*unsafe"),
        ("{{ strftime_now.__globals__['os'] }}", MESSAGES, "refused these messages: .*unsafe"),
        ("{% set n = namespace(__x=1) %}", MESSAGES, "may not hold the name '__x'"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", MESSAGES, "may not hold the name '_x'"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_the_callers_error(
    tmp_path: Path, template: Any, messages: Any, message: str
) -> None:
    ours = Tokenizer.open(
        write_checkpoint(tmp_path, byte_level(), {"chat_template": template} if template else {})
    )
    with pytest.raises(RequestError, match=message):
        ours.chat(messages)


def test_a_template_that_is_not_jinja_hinders_only_chats(tmp_path: Path) -> None:
    settings = {"chat_template": "{% if %}"}
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level(), settings))
    assert ours.encode("fox")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .* not valid Jinja"):
        ours.chat(MESSAGES)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, r"tokenizer\.json is missing; give the folder"),
        ("tokenizer.json", b"{", r"tokenizer\.json is damaged: it is not JSON .*download"),
        ("tokenizer.json", b"[]", r"it holds a list, not an object"),
        ("tokenizer.json", b"{}", r"tokenizer\.json is not a tokenizer this version can read"),
        ("tokenizer.json", b"\xff\xfe", r"it is not UTF-8 text"),
        ("tokenizer.json", b"[" * 100_000, r"tokenizer\.json is damaged: it is not JSON"),
        ("tokenizer_config.json", b"3", r"tokenizer_config\.json is damaged: it holds a int"),
        ("tokenizer_config.json", b'{"tokenizer_class": 3}', "tokenizer_class must be text"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template is a int, not text"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}', "lacks its name or"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}', "must be an object"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": "y"}}', "'x' is no token id"),
        ("tokenizer_config.json", b'{"eos_token": {"contents": "x"}}', "a token must be text or"),
        ("tokenizer_config.json", b'{"extra_special_tokens": "x"}', "must be a list"),
        ("config.json", b'{"model_type": 1}', r"config\.json is damaged: model_type must be text"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, file: str, content: bytes | None, message: str
) -> None:
    write_checkpoint(tmp_path, byte_level())
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.open(tmp_path)


def test_a_file_too_large_to_be_text_is_not_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, byte_level())
    with (tmp_path / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: takes no disk
    with pytest.raises(CheckpointError, match="larger than 256 MiB"):
        Tokenizer.open(tmp_path)


def stream_of(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    prompt_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, prompt_ids, stop)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()], stream


def test_characters_split_over_tokens_appear_whole(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level()))
    text = "🫠漢e\u0302👩‍👩‍👧ẞ"
    ids = ours.encode(text)[1:]
    shown, stream = stream_of(ours, ids)
    assert len(ids) > len(text), "the characters are split"
    assert "\ufffd" not in "".join(shown)
    assert stream.text == ours.decode(ids)
    last_of_first = len(ours.encode("🫠")) - 2
    assert shown[: last_of_first + 1] == [""] * last_of_first + ["🫠"], "not sooner, not later"


def test_an_answer_that_ends_amid_a_character(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level()))
    ids = ours.encode("fox 🫠")[1:-1]
    shown, stream = stream_of(ours, ids)
    assert shown[-1] == "\ufffd"
    assert stream.text == ours.decode(ids) == "fox \ufffd"


def test_a_run_of_byte_tokens_is_shown_when_it_ends(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_fallback()))
    bytes_of = {text: [3 + byte for byte in text.encode()] for text in ("漢", "🎉")}
    fox = ours.encode("fox")[1:]
    shown, _ = stream_of(ours, [*bytes_of["漢"], *bytes_of["🎉"], *fox])
    assert shown[:7] == [""] * 7
    assert "".join(shown) == "漢🎉 fox"
    # One byte too many spoils the run: what was held back would have been wrong.
    spoilt = [*bytes_of["漢"], bytes_of["🎉"][0], *fox]
    shown, _ = stream_of(ours, spoilt)
    assert "".join(shown) == ours.decode(spoilt) == "\ufffd" * 4 + " fox"


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "LlamaTokenizer"}])
def test_the_first_space_is_kept_only_behind_a_prompt(
    tmp_path: Path, settings: Mapping[str, object]
) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_fallback(), settings))
    prompt_ids, ids = ours.encode("The quick"), ours.encode("brown fox")[1:]
    assert "".join(stream_of(ours, ids)[0]) == "brown fox"
    assert "".join(stream_of(ours, ids, prompt_ids=prompt_ids)[0]) == " brown fox"
    begin_only = prompt_ids[:1]
    assert "".join(stream_of(ours, ids, prompt_ids=begin_only)[0]) == "brown fox"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_cut_by_the_prompts_end_is_completed(tmp_path: Path, kind: str) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, KINDS[kind]()))
    ids = ours.encode("fox 🎉🫠")
    for cut in (1, 2, 3):
        shown, _ = stream_of(ours, ids[-cut:], prompt_ids=ids[:-cut])
        assert "".join(shown) == "🫠"


STOPS = [
    (["qu"], "The "),
    (["k brown f"], "The quic"),
    (["ck", "quick"], "The "),
    (["T"], ""),
    (["The quick brown fox"], ""),
    (["quack", "quicker", "quick brown!"], "The quick brown fox"),
    (["fox jumps"], "The quick brown fox"),
    (["x"], "The quick brown fo"),
    (["wn fox", "own", "brown fx"], "The quick br"),
    (["ox", "fox"], "The quick brown "),
]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("by_letter", [False, True])
@pytest.mark.parametrize(("stop", "wanted"), STOPS)
def test_stop_strings_cut_the_text(
    tmp_path: Path, kind: str, by_letter: bool, stop: list[str], wanted: str
) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, KINDS[kind]()))
    text, space = "The quick brown fox", "Ġ" if kind == "byte_level" else "▁"
    ids: list[int | None] = [*ours.encode(text)[1:]]
    if by_letter:
        ids = [ours.token_id(letter) for letter in text.replace(" ", space)]
    shown, stream = stream_of(
        ours, [token_id for token_id in ids if token_id is not None], stop=stop
    )
    assert "".join(shown) == stream.text == wanted
    assert stream.stopped == (wanted != text)


def test_text_waits_only_while_it_may_become_a_stop_string(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level()))
    ids = [ours.token_id(letter) or 0 for letter in "ababacab"]
    shown, stream = stream_of(ours, ids, stop=["abac!", "cab?"])
    assert shown == ["", "", "", "ab", "", "", "aba", "", "cab"]
    assert not stream.stopped


def test_after_a_stop_string_nothing_more_is_shown(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level()))
    stream = TextStream(ours, (), ["quick"])
    for token_id in ours.encode("The quick brown"):
        stream.push(token_id)
    assert stream.stopped
    assert stream.push(ours.token_id("a") or 0) == ""
    assert stream.finish() == ""
    assert stream.text == "The "


def test_a_stop_string_may_complete_in_the_text_held_back_to_the_end(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_fallback()))
    ids = [*ours.encode("fox")[1:], *(3 + byte for byte in "漢".encode())]
    shown, stream = stream_of(ours, ids, stop=["x漢"])
    assert "".join(shown) == "fo"
    assert stream.stopped


@pytest.mark.parametrize("stop", [[""], ["a", ""], "a", [3]])
def test_stop_strings_that_could_not_stop_anything_are_refused(tmp_path: Path, stop: Any) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level()))
    with pytest.raises(RequestError, match="stop must be a list of strings that are not empty"):
        TextStream(ours, (), stop)


def test_spaces_taken_off_the_start_are_those_of_the_whole_text(tmp_path: Path) -> None:
    backend = byte_fallback()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    )
    ours = Tokenizer.open(write_checkpoint(tmp_path, backend))
    space = ours.token_id("▁") or 0
    ids = [space] * 5 + ours.encode("fox jumps")[1:] + [space] * 5 + ours.encode("fox")[1:]
    for skipped in range(6):
        assert "".join(stream_of(ours, ids[skipped:])[0]) == ours.decode(ids[skipped:])


class RecordingVocabulary(Vocabulary):
    """Notes how many tokens each decoding took."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.lengths: list[int] = []

    def decode(self, token_ids: Sequence[int]) -> str:
        self.lengths.append(len(token_ids))
        return super().decode(token_ids)


@pytest.mark.parametrize("build", [byte_fallback, unigram, words])
def test_a_token_late_in_an_answer_costs_as_little_as_the_first(build: Any) -> None:
    backend = build()
    vocabulary = RecordingVocabulary(backend)
    prompt_ids = backend.encode("The quick brown fox " * 50).ids
    stream = WindowStream(vocabulary, prompt_ids, byte_fallback=True)
    spaces = [token_id for token_id in [backend.token_to_id("▁")] if token_id is not None] * 500
    ids = backend.encode("jumps over the lazy dog " * 50).ids + spaces
    for token_id in ids:
        stream.push(token_id)
    assert max(vocabulary.lengths) <= 9
    assert len(vocabulary.lengths) <= 5 * len(ids) + 1


def test_generation_defaults_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": 7, "pad_token_id": 5, "text_config": {"bos_token_id": 3}})
    )
    assert read_generation_defaults(tmp_path) == GenerationDefaults(
        eos_token_ids=(7,), bos_token_id=3, pad_token_id=5
    )
    (tmp_path / "generation_config.json").write_text(
        json.dumps(
            {
                "eos_token_id": [2, 9, 2],
                "bos_token_id": 1,
                "pad_token_id": -1,
                "do_sample": True,
                "temperature": 1,
                "top_k": 20,
                "top_p": 0.8,
                "min_p": 0.05,
                "repetition_penalty": 1.05,
            }
        )
    )
    assert read_generation_defaults(tmp_path) == GenerationDefaults(
        eos_token_ids=(2, 9),
        bos_token_id=1,
        do_sample=True,
        temperature=1.0,
        top_k=20,
        top_p=0.8,
        min_p=0.05,
        repetition_penalty=1.05,
    )


def test_a_checkpoint_may_say_nothing_about_generation(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert read_generation_defaults(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config\.json is missing"),
        ({"eos_token_id": "</s>"}, r"eos_token_id must be whole numbers .*correct the file"),
        ({"eos_token_id": [1, True]}, "eos_token_id must be"),
        ({"pad_token_id": 2**31}, "pad_token_id must be"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"do_sample": 1}, "do_sample must be true or false"),
    ],
)
def test_damaged_generation_settings_are_named(tmp_path: Path, content: Any, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        read_generation_defaults(tmp_path)
