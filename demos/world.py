"""A small made-up world: the facts that the bundled model is taught, and questions about them.

Answers are checked against the same tables. Pure data: no file is read and no text is taken from
elsewhere. How facts become text is in ``corpus.py``.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial

MAX_TERM = 20
"""Sums and differences are made of 0 to this number; products of 0 to ``MAX_FACTOR``."""
MAX_FACTOR = 5
MAX_GIFT = 5
"""The largest number in a word problem; the smallest is 2 to have, 1 to get."""
MAX_COUNT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """One of the people; friends name each other."""

    name: str
    pronoun: str
    colour: str
    thing: str
    home: str
    food: str
    job: str
    friend: str

    @property
    def possessive(self) -> str:
        return "her" if self.pronoun == "she" else "his"


@dataclass(frozen=True, slots=True, kw_only=True)
class Animal:
    """One of the animals; ``home`` carries its preposition."""

    name: str
    home: str
    colour: str
    food: str
    sound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing the world knows.

    ``questions`` are ways to ask for it, the plainest first. ``answer`` is the one right answer.
    ``statement`` says the same as a sentence, or is empty where none reads naturally.
    """

    kind: str
    questions: tuple[str, ...]
    answer: str
    statement: str = ""


def _person(row: str) -> Person:
    names = (field.name for field in fields(Person))
    return Person(**dict(zip(names, row.split(), strict=True)))


PEOPLE = tuple(
    map(
        _person,
        (
            "Mia she red kite mill apples baker Tom",
            "Tom he blue boat harbour nuts sailor Mia",
            "Anna she green bicycle school pears teacher Ben",
            "Ben he yellow drum village plums drummer Anna",
            "Lily she white lamp tower cherries painter Sam",
            "Sam he brown hat farm carrots farmer Lily",
            "Nora she purple book library cakes writer Max",
            "Max he black ball castle pancakes guard Nora",
        ),
    )
)
ANIMALS = (
    Animal(name="cat", home="in the barn", colour="grey", food="fish", sound="meow"),
    Animal(name="dog", home="in the garden", colour="brown", food="bones", sound="woof"),
    Animal(name="cow", home="in the field", colour="white", food="grass", sound="moo"),
    Animal(name="duck", home="on the pond", colour="yellow", food="bread", sound="quack"),
    Animal(name="owl", home="in the old tree", colour="golden", food="mice", sound="hoo"),
    Animal(name="fox", home="in the forest", colour="red", food="berries", sound="yip"),
    Animal(name="frog", home="under the bridge", colour="green", food="flies", sound="croak"),
    Animal(name="crow", home="on the roof", colour="black", food="corn", sound="caw"),
)


def _pairs(text: str) -> dict[str, str]:
    """``"sky blue, rose red"`` as ``{"sky": "blue", "rose": "red"}``."""
    return dict(pair.split() for pair in text.split(", "))


COLOURS = _pairs(
    "sky blue, grass green, sun yellow, snow white, coal black, fire orange, plum purple, rose red"
)
OPPOSITES = _pairs(
    "hot cold, big small, fast slow, day night, wet dry, loud quiet, full empty, light dark"
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
REASONS = {
    "is the sky blue": "the air scatters blue light more than red light",
    "is the grass green": "it is full of a green dye that drinks sunlight",
    "is snow white": "its crystals reflect all the colours of the light",
    "is the sea salty": "rivers carry salt from the rocks to the sea",
    "is it dark at night": "our side of the earth is turned away from the sun",
    "does it rain": "small drops in the clouds join and grow heavy",
    "does ice melt": "warm air turns it back into water",
    "does the moon shine": "it reflects the light of the sun",
    "do boats float": "the water they push away holds them up",
    "do leaves fall in autumn": "the tree saves water for the winter",
    "do we sleep": "the body and the mind need rest",
    "do birds sing": "they call their friends and guard their home",
}
SMALL_TALK = {
    "Hello!": "Hello! How can I help you?",
    "Good morning!": "Good morning! How can I help you?",
    "How are you?": "I am well, thank you.",
    "Who are you?": "I am a very small language model. I know a little world.",
    "What can you do?": "I can do small sums, tell short stories and talk about a little world.",
    "What do you know?": "I know eight people, eight animals, small sums and a few reasons.",
    "Thank you.": "You are welcome.",
    "Goodbye!": "Goodbye! Come back soon.",
}
UNKNOWN = "I do not know that."


def _fact(kind: str, answer: str, statement: str, *questions: str) -> Fact:
    return Fact(kind=kind, questions=questions, answer=answer, statement=statement)


def _arithmetic(kind: str, left: int, sign: str, right: int, result: int) -> Fact:
    return _fact(
        kind,
        f"{result}.",
        f"{left} {kind} {right} is {result}.",
        f"What is {left} {kind} {right}?",
        f"What is {left} {sign} {right}?",
        f"How much is {left} {kind} {right}?",
        f"{left} {sign} {right} =",
    )


def _number_facts() -> Iterator[Fact]:
    terms, factors = range(MAX_TERM + 1), range(MAX_FACTOR + 1)
    for left in terms:
        for right in terms:
            yield _arithmetic("plus", left, "+", right, left + right)
            if right <= left:
                yield _arithmetic("minus", left, "-", right, left - right)
            if left != right:
                more, less = max(left, right), min(left, right)
                asked = f"Which is larger, {left} or {right}?"
                yield _fact("larger", f"{more}.", f"{more} is larger than {less}.", asked)
    for left in factors:
        for right in factors:
            yield _arithmetic("times", left, "*", right, left * right)
    for first in range(MAX_COUNT):
        for last in range(first + 2, min(first + 10, MAX_COUNT) + 1):
            numbers = ", ".join(map(str, range(first, last + 1)))
            yield _fact("count", f"{numbers}.", "", f"Count from {first} to {last}.")
    for p in PEOPLE:
        for had in range(2, MAX_GIFT + 1):
            for more in range(1, MAX_GIFT + 1):
                story = f"{p.name} has {had} {p.food} and gets {more} more."
                asked = f"How many {p.food} does {p.pronoun} have?"
                yield _fact("gift", f"{had + more}.", "", f"{story} {asked}")


def _people_facts() -> Iterator[Fact]:
    fact = partial(_fact, "people")
    for p in PEOPLE:
        name, toy = p.name, f"{p.colour} {p.thing}"
        has, lives = f"{name} has a {toy}.", f"{name} lives in the {p.home}."
        works, eats = f"{name} is the {p.job}.", f"{name} likes to eat {p.food}."
        friends = f"{name} and {p.friend} are friends."
        yield fact(f"A {toy}.", has, f"What does {name} have?", f"What is {name}'s toy?")
        yield fact(f"{name}.", has, f"Who has a {toy}?", f"Who owns the {toy}?")
        yield fact(f"{p.colour.title()}.", has, f"What colour is {name}'s {p.thing}?")
        where = (f"Where does {name} live?", f"Where is {name}'s home?")
        yield fact(f"In the {p.home}.", lives, *where)
        yield fact(f"{name}.", lives, f"Who lives in the {p.home}?")
        food = (f"What does {name} like to eat?", f"What does {name} eat?")
        yield fact(f"{p.food.title()}.", eats, *food)
        yield fact(f"{name}.", works, f"Who is the {p.job}?")
        yield fact(works, works, f"Who is {name}?", f"What is {name}'s job?")
        whose = (f"Who is {name}'s friend?", f"Who is the friend of {name}?")
        yield fact(f"{p.friend}.", friends, *whose)


def _animal_facts() -> Iterator[Fact]:
    fact = partial(_fact, "animals")
    for a in ANIMALS:
        the, the_start = f"the {a.name}", f"The {a.name}"
        lives, says = f"{the_start} lives {a.home}.", f"{the_start} says {a.sound}."
        where = (f"Where does {the} live?", f"Where can I find {the}?")
        yield fact(f"{a.home.capitalize()}.", lives, *where)
        yield fact(f"{the_start}.", lives, f"Who lives {a.home}?")
        looks = f"{the_start} is {a.colour}."
        yield fact(f"{a.colour.title()}.", looks, f"What colour is {the}?")
        food = (f"What does {the} eat?", f"What does {the} like to eat?")
        yield fact(f"{a.food.title()}.", f"{the_start} eats {a.food}.", *food)
        yield fact(f"{a.sound.title()}.", says, f"What does {the} say?")
        yield fact(f"{the_start}.", says, f"Who says {a.sound}?")


def _general_facts() -> Iterator[Fact]:
    for thing, colour in COLOURS.items():
        looks = f"The {thing} is {colour}."
        yield _fact("colours", f"{colour.title()}.", looks, f"What colour is the {thing}?")
    for what, reason in REASONS.items():
        yield _fact("why", f"Because {reason}.", "", f"Why {what}?", f"Tell me, why {what}?")
    for day, next_day in zip(DAYS, DAYS[1:] + DAYS[:1], strict=True):
        after = (f"What day comes after {day}?", f"Which day is after {day}?")
        yield _fact("days", f"{next_day}.", f"{next_day} comes after {day}.", *after)
        before = (f"What day comes before {next_day}?", f"Which day is before {next_day}?")
        yield _fact("days", f"{day}.", f"{day} comes before {next_day}.", *before)
    for pair in OPPOSITES.items():
        for word, other in (pair, pair[::-1]):
            statement = f"The opposite of {word} is {other}."
            asked = f"What is the opposite of {word}?"
            yield _fact("opposites", f"{other.title()}.", statement, asked)
    for said, reply in SMALL_TALK.items():
        yield _fact("talk", reply, "", said)


FACTS = (*_number_facts(), *_people_facts(), *_animal_facts(), *_general_facts())


def _sample(kind: str, count: int) -> list[Fact]:
    """Up to ``count`` facts of one kind, always the same ones."""
    of_kind = [fact for fact in FACTS if fact.kind == kind]
    return random.Random(kind).sample(of_kind, min(count, len(of_kind)))


QUESTIONS: tuple[tuple[str, str], ...] = tuple(
    dict(
        [
            ("What is 7 plus 5?", "12."),
            ("Where does the cat live?", "In the barn."),
            *(
                (fact.questions[0], fact.answer)
                for kind in dict.fromkeys(fact.kind for fact in FACTS)
                for fact in _sample(kind, len(REASONS) if kind == "why" else 7)
            ),
            *((f"Tell me a story about {p.name}.", f"One day {p.name} ") for p in PEOPLE[::2]),
        ]
    ).items()
)
"""(prompt, what the answer starts with): asked plainly or as a chat turn, both want this answer."""

COMPLETIONS: tuple[tuple[str, str], ...] = tuple(
    (" ".join(words[:-1]), words[-1])
    for kind in ("plus", "people", "animals", "colours", "days")
    for fact in _sample(kind, 5)
    if (words := fact.statement.split())
)
"""(sentence without its last word, that word): to continue, not to ask."""


def is_right(answer: str, expected: str) -> bool:
    """Whether a generated ``answer`` starts with ``expected``; leading white space is no matter."""
    return answer.lstrip().startswith(expected)
