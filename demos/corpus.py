"""Endless seeded documents about the world of ``world.py``: what the bundled model is taught on.

Knows how facts become text and chat turns; knows nothing of tokens or of training.
"""

import random
from collections.abc import Callable, Iterator, Sequence

from edge.demos.world import ANIMALS, FACTS, PEOPLE, UNKNOWN, Fact, Person

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BEGIN, END, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] | trim + '<|end|>' }}"
    "{% elif message['role'] != 'system' %}"
    "{{ raise_exception('this model knows the roles system, user and assistant, not '"
    " + message['role']) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Jinja2. System messages are accepted and left out: the model was never taught any."""

_WEIGHTS = {
    "plus": 24,
    "minus": 14,
    "times": 3,
    "larger": 4,
    "count": 4,
    "gift": 4,
    "people": 9,
    "animals": 6,
    "colours": 2,
    "why": 4,
    "days": 2,
    "opposites": 2,
    "talk": 2,
    "story": 8,
    "unknown": 2,
}
"""How often each kind is told. Sums need the most repetition: they are learned one by one."""

_BY_KIND = {kind: [fact for fact in FACTS if fact.kind == kind] for kind in _WEIGHTS}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MAX_LINES = 24
"""Questions in the longest document, about 500 tokens."""


def render_chat(turns: Sequence[tuple[str, str]]) -> str:
    """The text of (question, answer) turns, as ``CHAT_TEMPLATE`` renders it, without ``BEGIN``."""
    return "".join(f"{USER}{asked}{ASSISTANT}{answer}{END}" for asked, answer in turns)


def _to_market(p: Person, rng: random.Random) -> list[str]:
    number = rng.randint(2, 9)
    return [
        f"One day {p.name} went to the market.",
        f"There {p.pronoun} bought {number} {p.food}.",
        f"On the way home {p.pronoun} met {p.friend}.",
        f"They sat down by the river and ate the {p.food}.",
        f"Then {p.name} went home to the {p.home}.",
    ]


def _lost(p: Person, rng: random.Random) -> list[str]:
    animal = rng.choice(ANIMALS)
    return [
        f"One day {p.name} lost {p.possessive} {p.colour} {p.thing}.",
        f"{p.friend} helped to look for it.",
        f"They found it {animal.home}, beside the {animal.name}.",
        f"The {animal.name} said {animal.sound}, and {p.name} and {p.friend} laughed.",
    ]


def _visit(p: Person, rng: random.Random) -> list[str]:
    animal = rng.choice(ANIMALS)
    return [
        f"One day {p.name} went to see the {animal.name}.",
        f"The {animal.colour} {animal.name} was at home {animal.home}.",
        f"{p.name} gave it some {animal.food}.",
        f'"{animal.sound.title()}," said the {animal.name}, and it was happy.',
    ]


def _rain(p: Person, rng: random.Random) -> list[str]:
    end = rng.choice(("the sun came out", "the stars came out", "it was time to sleep"))
    return [
        f"One day {p.name} and {p.friend} played with the {p.colour} {p.thing}.",
        "Then it began to rain.",
        f"They ran to the {p.home}, where it was warm and dry.",
        f"They ate {p.food} until {end}.",
    ]


_PLOTS: tuple[Callable[[Person, random.Random], list[str]], ...] = (
    _to_market,
    _lost,
    _visit,
    _rain,
)


def story(person: Person, rng: random.Random) -> str:
    """A story of four or five sentences about one of the people, true to the world's facts."""
    return " ".join(rng.choice(_PLOTS)(person, rng))


def _unknown(rng: random.Random) -> str:
    """A question about something with a random name, which has no answer."""
    name = "".join(rng.choice(_LETTERS) for _ in range(rng.randint(3, 7)))
    return rng.choice(
        (
            f"Who is {name.title()}?",
            f"Where does {name.title()} live?",
            f"What does the {name} eat?",
            f"What colour is the {name}?",
            f"Why is the {name} {name[::-1]}?",
        )
    )


def _pick_fact(rng: random.Random, kind: str) -> Fact:
    if kind == "unknown":
        return Fact(kind=kind, questions=(_unknown(rng),), answer=UNKNOWN)
    if kind == "story":
        person = rng.choice(PEOPLE)
        asked = (f"Tell me a story about {person.name}.", f"A story about {person.name}, please.")
        return Fact(kind=kind, questions=asked, answer=story(person, rng))
    return rng.choice(_BY_KIND[kind])


def _pick(rng: random.Random) -> Fact:
    return _pick_fact(rng, rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0])


def _worded(fact: Fact, rng: random.Random) -> str:
    return fact.questions[0] if rng.random() < 0.6 else rng.choice(fact.questions)


def _typed(fact: Fact, rng: random.Random) -> str:
    """One of the fact's questions, as typed by hand: sometimes carelessly."""
    question = _worded(fact, rng)
    if rng.random() < 0.05:
        question = question.lower()
    if rng.random() < 0.05:
        question = question.rstrip("?.!")
    return question


def _plain_line(fact: Fact, rng: random.Random) -> str:
    """The fact as one line of plain text: a question and its answer, or a sentence."""
    if fact.statement and rng.random() < 0.25:
        return fact.statement
    if fact.kind == "story" and rng.random() < 0.6:
        return fact.answer.replace("One day", rng.choice(("One day", "Once upon a time")), 1)
    return f"{_worded(fact, rng)} {fact.answer}"


def document(rng: random.Random) -> str:
    """One document, ``END`` included, ``BEGIN`` not: the tokenizer adds that.

    Half are chats, half plain lines. Most are short, so that an answer seldom stands near its
    twin; one in twenty-five is long, so that far positions are seen too.
    """
    length = rng.randint(6, _MAX_LINES) if rng.random() < 0.04 else rng.choice((1, 1, 1, 2, 3))
    facts = [_pick(rng) for _ in range(length)]
    if rng.random() < 0.5:
        return render_chat([(_typed(fact, rng), fact.answer) for fact in facts])
    return "\n".join(_plain_line(fact, rng) for fact in facts) + END


def documents(seed: int) -> Iterator[str]:
    """Endless documents; the same seed gives the same ones."""
    rng = random.Random(seed)
    while True:
        yield document(rng)
