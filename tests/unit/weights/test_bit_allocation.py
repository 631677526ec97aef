"""Which bits each matrix is given."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.weights.bit_allocation import Choices, KindChoice, allocate_bits
from edge.weights.block_matrices import Blocks

KINDS = (
    Blocks(4, 128, zero_points=True),
    Blocks(4, 64, zero_points=True),
    Blocks(4, 32, zero_points=True),
    Blocks(8, 128),
)
ROLES = ("head", *(f"layers.{layer}.{local}" for layer in range(7) for local in ("a.w", "b.w")))


def choices_of(sensitivity: float, *, num_weights: int = 1000) -> tuple[KindChoice, ...]:
    """Losses fall by a factor with each kind."""
    return tuple(
        KindChoice(kind=kind, num_bytes=num_weights * size // 16, loss=sensitivity / part)
        for kind, size, part in zip(KINDS, (9, 10, 11, 18), (1, 1.3, 1.8, 250), strict=True)
    )


@st.composite
def models(draw: st.DrawFn) -> dict[str, tuple[KindChoice, ...]]:
    return {
        role: choices_of(draw(st.floats(1e-6, 1)), num_weights=draw(st.integers(1, 100)) * 16)
        for role in ROLES
    }


def smallest_bytes(choices: Choices) -> int:
    return sum(min(choice.num_bytes for choice in each) for each in choices.values())


def spent(found: dict[str, KindChoice]) -> int:
    return sum(choice.num_bytes for choice in found.values())


def lost(found: dict[str, KindChoice]) -> float:
    return sum(choice.loss for choice in found.values())


@given(models(), st.floats(1, 2))
def test_no_more_is_spent_than_there_is(
    choices: dict[str, tuple[KindChoice, ...]], part: float
) -> None:
    budget = part * smallest_bytes(choices)
    found = allocate_bits(choices, budget)
    assert found.keys() == choices.keys()
    assert all(found[role] in each for role, each in choices.items())
    assert spent(found) <= budget


@given(models())
def test_with_room_for_all_everything_is_finest(choices: dict[str, tuple[KindChoice, ...]]) -> None:
    budget = sum(each[-1].num_bytes for each in choices.values())
    assert all(choice.kind == KINDS[-1] for choice in allocate_bits(choices, budget).values())


@given(models())
def test_layers_are_of_few_sorts(choices: dict[str, tuple[KindChoice, ...]]) -> None:
    """So plans tell few kinds of layers apart."""
    found = allocate_bits(choices, 1.3 * smallest_bytes(choices))
    sorts = {
        tuple(found[f"layers.{layer}.{local}"].kind for local in ("a.w", "b.w"))
        for layer in range(7)
    }
    assert len(sorts) <= 3


@given(st.lists(st.floats(1e-3, 1), min_size=3, max_size=3), st.integers(27, 54))
def test_it_is_close_to_the_best(sensitivities: list[float], size: int) -> None:
    """A greedy choice stops where the next step does not fit; one step is all that it may lack."""
    roles = ("head", "layers.0.a.w", "layers.1.a.w")
    choices = {role: choices_of(each) for role, each in zip(roles, sensitivities, strict=True)}
    budget = size * 1000 / 16
    found = allocate_bits(choices, budget)
    best = min(
        lost(dict(zip(roles, several, strict=True)))
        for several in product(*choices.values())
        if spent(dict(zip(roles, several, strict=True))) <= budget
    )
    largest_step = max(each[0].loss for each in choices.values())
    assert best <= lost(found) <= best + largest_step


def test_what_is_sensitive_comes_first() -> None:
    choices = {role: choices_of(1.0) for role in ROLES}
    choices["layers.3.b.w"] = choices_of(50.0)
    found = allocate_bits(choices, smallest_bytes(choices) + 3 * 9 * 1000 / 16 + 9)
    assert found["layers.3.b.w"].kind == Blocks(8, 128)
    assert found["head"].kind == KINDS[0]


def test_layers_of_other_sizes_are_chosen_for_alone() -> None:
    choices = {role: choices_of(1.0) for role in ROLES}
    choices["layers.0.a.w"] = tuple(
        replace(each, kind=Blocks(each.kind.bits, 16)) for each in choices_of(1.0)
    )
    found = allocate_bits(choices, 2.01 * smallest_bytes(choices))
    assert {choice.kind for role, choice in found.items() if role != "layers.0.a.w"} == {KINDS[-1]}


def with_2_bits(choices: Choices) -> dict[str, tuple[KindChoice, ...]]:
    """Half as large as the coarsest, which loses six times as little."""
    return {
        role: (
            replace(
                each[0],
                kind=Blocks(2, 64, zero_points=True),
                num_bytes=each[0].num_bytes // 2,
                loss=6 * each[0].loss,
            ),
            *each,
        )
        for role, each in choices.items()
    }


@given(models(), st.floats(0.5, 0.99))
def test_with_less_room_some_have_2_bits(
    choices: dict[str, tuple[KindChoice, ...]], part: float
) -> None:
    budget = part * smallest_bytes(choices)
    found = allocate_bits(with_2_bits(choices), budget)
    assert spent(found) <= budget
    assert any(choice.kind.bits == 2 for choice in found.values())


@pytest.mark.parametrize("part", [0.0, 1.0])
def test_at_least_the_smallest(part: float) -> None:
    choices = {role: choices_of(1.0) for role in ROLES}
    found = allocate_bits(choices, part * smallest_bytes(choices))
    assert spent(found) == smallest_bytes(choices)
