"""The world of the bundled model: facts agree, text is repeatable, tokenizer and files fit."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies
from jinja2.exceptions import UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

from edge.demos import corpus, world

MODEL = Path(__file__).parents[3] / "demos" / "model"
MAX_MODEL_BYTES = 5_000_000
SUM = re.compile(r"(?:What is|How much is)? ?(\d+) (\w+|[-+*]) (\d+)(?:\?| =)")
OPERATIONS = {
    "plus": int.__add__,
    "+": int.__add__,
    "minus": int.__sub__,
    "-": int.__sub__,
    "times": int.__mul__,
    "*": int.__mul__,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def facts_of(kind: str) -> list[world.Fact]:
    found = [fact for fact in world.FACTS if fact.kind == kind]
    assert found
    return found


def test_no_question_has_two_answers() -> None:
    answers: dict[str, str] = {}
    for fact in world.FACTS:
        for question in fact.questions:
            assert answers.setdefault(question, fact.answer) == fact.answer, question


def test_every_sum_difference_and_product_is_right() -> None:
    asked = 0
    for kind in ("plus", "minus", "times"):
        for fact in facts_of(kind):
            for question in fact.questions:
                match = SUM.fullmatch(question)
                assert match, question
                left, sign, right = match.groups()
                assert fact.answer == f"{OPERATIONS[sign](int(left), int(right))}.", question
                asked += 1
            assert fact.statement == f"{left} {kind} {right} is {fact.answer}"
    terms, factors = world.MAX_TERM + 1, world.MAX_FACTOR + 1
    assert asked == 4 * (terms**2 + terms * (terms + 1) // 2 + factors**2)


def test_comparisons_counting_and_word_problems_are_right() -> None:
    for fact in facts_of("larger"):
        pair = [int(number) for number in re.findall(r"\d+", fact.questions[0])]
        assert fact.answer == f"{max(pair)}."
    for fact in facts_of("gift"):
        had, more = (int(number) for number in re.findall(r"\d+", fact.questions[0]))
        assert fact.answer == f"{had + more}."
    for fact in facts_of("count"):
        first, last = (int(number) for number in re.findall(r"\d+", fact.questions[0]))
        counted = [int(number) for number in re.findall(r"\d+", fact.answer)]
        assert counted == list(range(first, last + 1))


def test_people_and_animals_agree_with_each_other() -> None:
    by_name = {person.name: person for person in world.PEOPLE}
    for person in world.PEOPLE:
        friend = by_name[person.friend]
        assert friend.friend == person.name
        assert friend is not person
    for field in ("name", "colour", "thing", "home", "food", "job"):
        assert len({getattr(person, field) for person in world.PEOPLE}) == len(world.PEOPLE)
    for field in ("name", "home", "sound"):
        assert len({getattr(animal, field) for animal in world.ANIMALS}) == len(world.ANIMALS)


def test_days_follow_each_other_round_the_week() -> None:
    day, seen = "Monday", []
    after = {fact.questions[0]: fact.answer for fact in facts_of("days")}
    for _ in world.DAYS:
        following = after[f"What day comes after {day}?"].rstrip(".")
        assert after[f"What day comes before {following}?"] == f"{day}."
        seen.append(day)
        day = following
    assert day == "Monday"
    assert set(seen) == set(world.DAYS)


def test_questions_are_many_of_every_kind_and_answered_by_facts() -> None:
    known = {question: fact for fact in world.FACTS for question in fact.questions}
    stories = [pair for pair in world.QUESTIONS if pair[0].startswith("Tell me a story")]
    kinds = Counter(known[prompt].kind for prompt, _ in world.QUESTIONS if prompt in known)
    assert len(dict(world.QUESTIONS)) == len(world.QUESTIONS) >= 40
    assert set(kinds) == {fact.kind for fact in world.FACTS}
    assert sum(kinds.values()) + len(stories) == len(world.QUESTIONS)
    for prompt, expected in world.QUESTIONS:
        if prompt in known:
            assert expected == known[prompt].answer
    for prompt, expected in stories:
        assert expected == f"One day {prompt.split()[-1].rstrip('.')} "


def test_completions_are_cut_from_statements() -> None:
    statements = {fact.statement for fact in world.FACTS}
    starts = Counter(" ".join(statement.split()[:-1]) for statement in statements)
    assert world.COMPLETIONS
    for prompt, expected in world.COMPLETIONS:
        assert f"{prompt} {expected}" in statements
        assert starts[prompt] == 1, f"{prompt!r} has several endings"


def test_an_answer_is_right_when_it_starts_as_expected() -> None:
    assert world.is_right(" 12. What is", "12.")
    assert not world.is_right(" 120.", "12.")
    assert not world.is_right("", "12.")


def test_the_same_seed_gives_the_same_documents() -> None:
    first = list(itertools.islice(corpus.documents(3), 200))
    assert first == list(itertools.islice(corpus.documents(3), 200))
    assert first != list(itertools.islice(corpus.documents(4), 200))


def test_documents_tell_only_what_the_world_knows() -> None:
    answers = {question: fact.answer for fact in world.FACTS for question in fact.questions}
    statements = {fact.statement for fact in world.FACTS}
    seen = Counter[str]()
    for text in itertools.islice(corpus.documents(5), 400):
        assert text.endswith(corpus.END)
        assert corpus.BEGIN not in text
        for turn in text.split(corpus.USER)[1:]:
            question, answer = turn.removesuffix(corpus.END).split(corpus.ASSISTANT)
            if question in answers:
                assert answer == answers[question]
                seen["chat"] += 1
        for line in text.removesuffix(corpus.END).splitlines():
            asked = next((q for q in answers if line.startswith(f"{q} ")), None)
            if line in statements:
                seen["statement"] += 1
            elif asked is not None:
                assert line == f"{asked} {answers[asked]}"
                seen["plain"] += 1
    assert all(seen[kind] > 50 for kind in ("chat", "statement", "plain")), seen


def test_chat_template_renders_what_the_model_was_taught() -> None:
    settings = json.loads((MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = ImmutableSandboxedEnvironment().from_string(settings["chat_template"])
    turns = [("Hello!", "Hello! How can I help you?"), ("What is 7 plus 5?", "12.")]
    messages = [{"role": "system", "content": "Be kind."}]
    for asked, answer in turns:
        messages.append({"role": "user", "content": f" {asked}\n"})
        messages.append({"role": "assistant", "content": answer})
    begin = settings["bos_token"]
    assert settings["eos_token"] == corpus.END
    assert template.render(messages=messages, bos_token=begin) == begin + corpus.render_chat(turns)
    prompt = template.render(messages=messages[:2], bos_token=begin, add_generation_prompt=True)
    assert prompt == f"{begin}{corpus.USER}Hello!{corpus.ASSISTANT}"
    with pytest.raises(UndefinedError, match="raise_exception"):
        template.render(messages=[{"role": "tool", "content": ""}], bos_token=begin)


@pytest.mark.parametrize(
    "text",
    [
        "What is 7 plus 5? 12.",
        "  leading, trailing and  double spaces \n\n\ttabs\r\n",
        "Grüße, 世界! مرحبا नमस्ते 🙂🏳️‍🌈",
        "\x00\x01\x7f\u200b\ufeff\U0010ffff",
        "".join(map(chr, range(1, 0x800))),
    ],
)
def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    encoded = tokenizer.encode(text)
    assert encoded.tokens[0] == corpus.BEGIN
    assert tokenizer.decode(encoded.ids) == text


@given(text=strategies.text())
def test_tokenizer_round_trips_random_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_tokenizer_knows_special_tokens_and_whole_numbers(tokenizer: Tokenizer) -> None:
    chat = corpus.render_chat([("Hello!", "Good morning!")])
    specials = [token for token in tokenizer.encode(chat).tokens if token in corpus.SPECIAL_TOKENS]
    assert specials == [corpus.BEGIN, corpus.USER, corpus.ASSISTANT, corpus.END]
    for number in range(2 * world.MAX_TERM + 1):
        assert len(tokenizer.encode(str(number), add_special_tokens=False)) == 1
        assert len(tokenizer.encode(f" {number}", add_special_tokens=False)) == 1


def test_longest_documents_fit_the_context(tokenizer: Tokenizer) -> None:
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    lengths = [len(tokenizer.encode(text)) for text in itertools.islice(corpus.documents(6), 1500)]
    assert config["max_position_embeddings"] // 2 < max(lengths)
    assert sorted(lengths)[-5] <= config["max_position_embeddings"]


def test_checkpoint_is_small_and_can_be_split(tokenizer: Tokenizer) -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= MAX_MODEL_BYTES
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["head_dim"] % 16 == 0
    assert config["hidden_size"] % 32 == config["intermediate_size"] % 32 == 0
    assert config["num_key_value_heads"] % 3 != 0, "three peers must get uneven shares"
    for name, token in (("bos", corpus.BEGIN), ("eos", corpus.END), ("pad", corpus.PAD)):
        assert config[f"{name}_token_id"] == tokenizer.token_to_id(token)
    with safe_open(MODEL / "model.safetensors", framework="np") as weights:
        names = set(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
        rows = weights.get_slice("model.embed_tokens.weight").get_shape()
    assert rows == [config["vocab_size"], config["hidden_size"]]
    assert "lm_head.weight" in names
