"""Bounds on the backtracking of a tokenizer's regular expression, before anything is matched.

Oniguruma, which `tokenizers` uses, tries every way to split a text between the parts of a pattern.
From one position of n letters these are about ``ways`` times n to the power of ``degree``; and it
starts at each position. Published tokenizers have a degree of 0 or 1. A pattern of degree 2 took
2.3 s for 1 KB of text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_DEGREE = 1
MAX_WAYS = 64
_MAX_LENGTH = 1 << 14
_MAX_DEPTH = 32

_UNBOUNDED = -1
_MANY = 99
"""The degree of exponential cost."""

_COUNT = re.compile(r"\{(?:(\d{1,6})(,(\d{1,6})?)?|,(\d{1,6}))\}", re.ASCII)
_FLAGS = re.compile(r"\?([imsa-]*)([:)])", re.ASCII)
_NAMED = re.compile(r"\?(?:P?<[A-Za-z_]\w*>|'[A-Za-z_]\w*')", re.ASCII)
_LOOKS = ("?<=", "?<!", "?=", "?!")
_ATOMIC = ("?:", "?>")
_CODE = re.compile(
    r"\\(?:[pP]\{\^?[^{}]{1,64}\}|x\{[^{}]{1,64}\}|x[0-9A-Fa-f]{0,2}|u[0-9A-Fa-f]{4})"
)
_ASSERTIONS = frozenset("bBAzZGKyY")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternCost:
    """The cost of a part of a pattern."""

    least: int
    """The least number of letters that it matches."""
    can_fail: bool
    degree: int
    ways: int
    """Degree and ways if a part that may fail follows."""
    last_degree: int
    last_ways: int
    """Degree and ways if no such part follows."""

    @property
    def is_fixed(self) -> bool:
        """Whether it matches in at most one way."""
        return self.degree == 0 and self.ways == 1


_LETTER = PatternCost(least=1, can_fail=True, degree=0, ways=1, last_degree=0, last_ways=1)
_ASSERTION = PatternCost(least=0, can_fail=True, degree=0, ways=1, last_degree=0, last_ways=1)
_NOTHING = PatternCost(least=0, can_fail=False, degree=0, ways=1, last_degree=0, last_ways=1)


def pattern_cost(pattern: str) -> PatternCost:
    """The cost of a pattern. Raises ValueError, with the cause, for a pattern that is too expensive
    or invalid."""
    if len(pattern) > _MAX_LENGTH:
        raise ValueError(f"a pattern of {len(pattern):,} letters")
    reader = _Reader(pattern)
    cost = reader.alternatives(0)
    if reader.left:
        raise reader.refused("it has an unopened bracket")
    if cost.last_degree > MAX_DEGREE or cost.last_ways > MAX_WAYS:
        raise reader.refused("its parts can split the same letters in too many ways")
    return cost


class _Reader:
    """A parser of the part of Oniguruma's syntax that tokenizers use."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    @property
    def left(self) -> str:
        return self._pattern[self._at :]

    def refused(self, why: str) -> ValueError:
        return ValueError(f"the pattern {self._pattern!r:.80}: {why}")

    def alternatives(self, depth: int) -> PatternCost:
        if depth > _MAX_DEPTH:
            raise self.refused("its groups are nested too deeply")
        found = [self._sequence(depth)]
        while self._takes("|"):
            found.append(self._sequence(depth))
        return PatternCost(
            least=min(each.least for each in found),
            can_fail=all(each.can_fail for each in found),
            degree=max(each.degree for each in found),
            ways=self._bounded(sum(each.ways for each in found)),
            last_degree=max(each.last_degree for each in found),
            # At the end of a pattern, alternatives are tried one after the other.
            last_ways=max(each.last_ways for each in found),
        )

    def _sequence(self, depth: int) -> PatternCost:
        parts: list[PatternCost] = []
        while self.left and self.left[0] not in "|)":
            parts.append(self._repeated(self._part(depth)))
        return self._joined(parts)

    def _joined(self, parts: Sequence[PatternCost]) -> PatternCost:
        degree, ways, last_degree, last_ways = 0, 1, 0, 1
        is_followed = False
        for each in reversed(parts):
            degree += each.degree
            ways = self._bounded(ways * each.ways)
            last_degree += each.degree if is_followed else each.last_degree
            last_ways = self._bounded(last_ways * (each.ways if is_followed else each.last_ways))
            is_followed = is_followed or each.can_fail
        return PatternCost(
            least=sum(each.least for each in parts),
            can_fail=is_followed,
            degree=degree,
            ways=ways,
            last_degree=last_degree,
            last_ways=last_ways,
        )

    def _bounded(self, ways: int) -> int:
        """Cap a count above the limit, so that numbers stay small."""
        return min(ways, 2 * MAX_WAYS)

    def _repeated(self, part: PatternCost) -> PatternCost:
        while (counts := self._counts()) is not None:
            least, most = counts
            repeats_ways = not part.is_fixed and (most == _UNBOUNDED or most > 1)
            ways = 1 if most == _UNBOUNDED else most - least + 1
            degree = _MANY if repeats_ways else part.degree + (most == _UNBOUNDED)
            part = PatternCost(
                least=part.least * least,
                can_fail=part.can_fail and least > 0,
                degree=degree,
                ways=self._bounded(ways + part.ways - 1),
                # A failed further repeat ends it, if enough were matched.
                last_degree=degree if repeats_ways and least > 1 else part.last_degree,
                last_ways=part.last_ways,
            )
        return part

    def _counts(self) -> tuple[int, int] | None:
        """The bounds of the next quantifier, greedy or lazy; None: there is none."""
        known = {"*": (0, _UNBOUNDED), "+": (1, _UNBOUNDED), "?": (0, 1)}
        if self.left[:1] in known:
            counts = known[self.left[0]]
            self._at += 1
            if self.left[:1] in ("?", "+"):
                self._at += 1
            return counts
        match = _COUNT.match(self._pattern, self._at)
        if match is None:
            return None
        self._at = match.end()
        self._takes("?")
        first, comma, second, only = match.groups()
        least = int(first or 0)
        most = int(only or second or (_UNBOUNDED if comma else first))
        if most != _UNBOUNDED and not least <= most:
            raise self.refused("a quantifier's maximum is below its minimum")
        return least, most

    def _part(self, depth: int) -> PatternCost:
        letter = self.left[0]
        if letter == "(":
            self._at += 1
            return self._group(depth)
        if letter == "[":
            self._set()
            return _LETTER
        if letter == "\\":
            return self._escaped()
        self._at += 1
        if letter in "*+?":
            raise self.refused("it repeats nothing")
        return _ASSERTION if letter in "^$" else _LETTER

    def _group(self, depth: int) -> PatternCost:
        for begin in _LOOKS:
            if self._takes(begin):
                seen = self._closed(lambda: self.alternatives(depth + 1))
                return PatternCost(
                    least=0,
                    can_fail=True,
                    degree=seen.last_degree,
                    ways=seen.last_ways,
                    last_degree=seen.last_degree,
                    last_ways=seen.last_ways,
                )
        if any(map(self._takes, _ATOMIC)) or not self.left.startswith("?"):
            return self._closed(lambda: self.alternatives(depth + 1))
        if (match := _NAMED.match(self._pattern, self._at)) is not None:
            self._at = match.end()
            return self._closed(lambda: self.alternatives(depth + 1))
        match = _FLAGS.match(self._pattern, self._at)
        if match is None:
            raise self.refused("it has a kind of group that no tokenizer needs")
        self._at = match.end()
        if match[2] == ":":
            return self._closed(lambda: self.alternatives(depth + 1))
        return _NOTHING

    def _closed(self, read: Callable[[], PatternCost]) -> PatternCost:
        cost = read()
        if not self._takes(")"):
            raise self.refused("it has an unclosed bracket")
        return cost

    def _set(self) -> None:
        """Read a character class, with nested ones."""
        depth = 0
        while self.left:
            if self.left.startswith("\\"):
                self._at += 2
                continue
            if self.left.startswith("[:") and depth and ":]" in self.left:
                self._at = self._pattern.index(":]", self._at) + 2
                continue
            letter = self.left[0]
            self._at += 1
            if letter == "[":
                depth += 1
                self._takes("^")
                self._takes("]")  # a first ] is a letter of the class
            elif letter == "]":
                depth -= 1
                if not depth:
                    return
        raise self.refused("a set of letters has no end")

    def _escaped(self) -> PatternCost:
        match = _CODE.match(self._pattern, self._at)
        if match is not None:
            self._at = match.end()
            return _LETTER
        letter = self.left[1:2]
        self._at += 2
        if not letter or letter in "123456789kg":
            raise self.refused("it refers to itself")
        return _ASSERTION if letter in _ASSERTIONS else _LETTER

    def _takes(self, begin: str) -> bool:
        if not self._pattern.startswith(begin, self._at):
            return False
        self._at += len(begin)
        return True
