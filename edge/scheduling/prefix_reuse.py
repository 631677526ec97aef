"""Prefix reuse: which cached prefix a prompt continues from, and what finished requests leave.

Pure. A prompt may continue from a kept KV cache, from a request under way, or from prefixes that
peers have from earlier plans; or it waits for a request under way that will have more of its
prefix. `prefixes.py` decides which keys and values are useful. If layers have states, only
positions with a saved state count (`saved_states.py`); peers that are asked report theirs, and are
told which of them to restore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edge.protocol.step import SHORTEST_STEP
from edge.scheduling.orders import KeptCache, Match
from edge.scheduling.prefixes import (
    FEWEST_TOKENS,
    PrefixCacheIndex,
    common_tokens,
    cut,
    joined,
)
from edge.scheduling.request_state import RequestState
from edge.scheduling.residency import Residency
from edge.scheduling.saved_states import Save, SavedStates


class Left(NamedTuple):
    """Changes since the last call; see the fields of `Orders`."""

    save: tuple[Save, ...]
    finish: tuple[str, ...]
    keep: dict[str, KeptCache]
    drop: tuple[str, ...]


NOTHING_LEFT = Left((), (), {}, ())


class PrefixReuse:
    """Prefix reuse among the requests of one plan. Results do not depend on it."""

    def __init__(
        self,
        active: Mapping[str, RequestState],
        residency: Residency,
        prefixes: PrefixCacheIndex,
        saved: SavedStates | None,
        *,
        chunk_tokens: int,
    ) -> None:
        """active: the requests under way. saved: None unless layers have states."""
        self._active = active
        self._residency = residency
        self._prefixes = prefixes
        self._saved = saved
        self._chunk_tokens = chunk_tokens
        self._saves: list[Save] = []
        self._kept: dict[str, KeptCache] = {}
        self._never_kept: list[str] = []
        """Ended requests that became useless before the peers were told to keep them."""
        self._stateless: list[str] = []
        """Kept requests that became useless."""
        residency.found = self._found

    def __contains__(self, request: str) -> bool:
        """Whether anything of the request is kept."""
        return request in self._prefixes

    def match(self, entry: RequestState) -> Match | None:
        """The prefix that the request continues from, taken from its owner if it moves. None: it
        starts from nothing."""
        prompt = tuple(entry.tokens[: entry.prompt_tokens])
        found = self._prefixes.find(prompt, entry.salt)
        if found is not None and not entry.may_have(found.singly, found.tokens):
            found = None
        tokens = 0 if found is None else found.tokens
        other = max(self._alike(entry), default=None, key=lambda each: each[0])
        if other is not None and other[0] > tokens:
            if self._saved is not None:
                self._saved.used(other[1].request, other[0])
            return Match(
                prompt=prompt,
                salt=entry.salt,
                source=other[1].request,
                tokens=other[0],
                singly=cut(other[1].singly, other[0]),
            )
        if found is not None:
            moves = found.is_whole or not self._residency.kept.fits(found.request)
            if self._saved is not None:
                self._saved.used(found.request, tokens)
            if moves:
                self._residency.kept.drop(found.request)
                self._prefixes.drop(found.request)
                if self._saved is not None:
                    self._saved.move(found.request, entry.request, tokens)
            else:
                self._residency.kept.used(found.request)
            return Match(
                prompt=prompt,
                salt=entry.salt,
                source=found.request,
                tokens=tokens,
                moves=moves,
                singly=found.singly,
            )
        most = self._prefixes.whole_units(len(prompt) - SHORTEST_STEP, ())
        if most >= self._prefixes.fewest_tokens:
            return Match(prompt=prompt, salt=entry.salt, tokens=entry.point)
        return None

    def beginning(self, prompt: Sequence[int], salt: str, under_way: int) -> int:
        """Tokens of a prompt that a request with it would not compute: of a kept cache, or of the
        `under_way` tokens that it shares with a request under way."""
        kept = self._prefixes.find(prompt, salt)
        shared = self._prefixes.whole_units(min(under_way, len(prompt) - SHORTEST_STEP), ())
        return max(kept.tokens if kept else 0, shared if shared >= FEWEST_TOKENS else 0)

    def point(self, points: Sequence[int]) -> int:
        """Where to restore states, of the tokens at which every shard can; 0 if that is useless."""
        return max((each for each in points if each >= self._prefixes.fewest_tokens), default=0)

    def matched(self, entry: RequestState, tokens: int) -> int:
        """Number of its tokens that need not be computed, if every shard has the first `tokens`."""
        if self._saved is None:
            return self._prefixes.useful(tokens, entry.prompt_tokens, entry.singly)
        computed = tokens if tokens == entry.asked else 0  # a shorter prefix has no state
        if not computed:
            self._saved.drop(entry.request)
        return computed

    def awaits_another(self, entry: RequestState) -> bool:
        """Whether another request under way will soon have at least one more chunk of its
        prefix."""
        awaited = self._active.get(entry.awaited)
        if awaited is not None and awaited.computed < entry.awaited_tokens:
            return awaited.will_go_on
        for other in self._active.values():
            if other.state == "coming" or not other.will_go_on or other.salt != entry.salt:
                continue
            common = common_tokens(entry.prompt, other.prompt)
            if self._saved is not None:
                most = min(common, len(entry.prompt) - SHORTEST_STEP)
                useful = common = self._parting(self._saved, most, other)
            else:
                useful = self._prefixes.useful(common, len(entry.prompt), other.singly)
            if useful < self._chunk_tokens:
                continue
            if other.computed < common:
                entry.awaited, entry.awaited_tokens = other.request, common
                return True
        return False

    def plan_saves(self, entry: RequestState) -> None:
        """Decide where states of a prompt are saved, once its found prefix is known."""
        if self._saved is None or entry.rows is not None:
            return
        prompt_tokens = entry.prompt_tokens
        others = [
            each for each in self._active.values() if each is not entry and each.salt == entry.salt
        ]
        alike = [common_tokens(entry.prompt, other.prompt) for other in others]
        alike += self._prefixes.common(entry.prompt, entry.salt)
        points = self._saved.worth_saving(prompt_tokens, entry.computed, alike, self._chunk_tokens)
        entry.saves.update(
            entry.before_block(
                self._prefixes.whole_units(min(each, prompt_tokens - SHORTEST_STEP), entry.singly)
            )
            for each in points
        )
        least = entry.computed + self._prefixes.fewest_tokens
        begun = [first for first, _ in entry.singly]
        entry.saves = {
            each
            for each in entry.saves
            # No token is left alone between two steps.
            if each >= least and each + 1 not in begun
        }

    def computed(self, entry: RequestState) -> None:
        """More of its prompt was handed out; save the state after it if that was planned."""
        if self._saved is not None and entry.computed in entry.saves:
            self._save(self._saved, entry)

    def leaves(self, entry: RequestState, *, has_ended: bool) -> bool:
        """A request has ended. Returns whether its cache is kept. has_ended: see
        `decide._release`."""
        is_kept = self._keep(entry, has_ended=has_ended)
        if not is_kept and self._saved is not None:
            self._saved.drop(entry.request)
        return is_kept

    def take(self) -> Left:
        """The changes since the last call."""
        keep = {name: self._as_saved(name, kept) for name, kept in self._kept.items()}
        left = Left(tuple(self._saves), tuple(self._never_kept), keep, tuple(self._stateless))
        self._saves.clear()
        self._never_kept.clear()
        self._kept.clear()
        self._stateless.clear()
        return left

    def evict(self, matches: Mapping[str, Match]) -> tuple[str, ...]:
        """Evict kept caches for lack of room, but none that a match continues from."""
        spared = [each.source for each in matches.values()]
        dropped = self._residency.kept.evict(self._prefixes.cost, spared)
        for name in dropped:
            self._prefixes.drop(name)
            if self._saved is not None:
                self._saved.drop(name)
        return dropped

    def _found(self, request: str) -> int:
        """Tokens of a request that need not be computed at present."""
        entry = self._active[request]
        if entry.rows is not None:
            return 0
        kept = self._prefixes.find(entry.tokens[: entry.prompt_tokens], entry.salt)
        return max([0 if kept is None else kept.tokens, *(each for each, _ in self._alike(entry))])

    def _alike(self, entry: RequestState) -> Iterator[tuple[int, RequestState]]:
        """Requests under way with a common prefix, and their number of useful tokens."""
        for other in self._active.values():
            if other.rows is not None or other.memory.place != "memory":
                continue
            if other.state == "going" and other.salt == entry.salt:
                common = min(common_tokens(entry.prompt, other.prompt), other.computed)
                tokens = self._prefixes.useful(
                    common, len(entry.prompt), other.singly, of=other.request
                )
                if tokens and entry.may_have(other.singly, tokens):
                    yield tokens, other

    def _parting(self, saved: SavedStates, common: int, other: RequestState) -> int:
        """Where to save a state of another request that shares `common` tokens with a later one and
        has not reached them; 0 if nowhere."""
        point = self._prefixes.whole_units(common, other.singly)
        if point <= other.computed:
            return 0
        parting = saved.parting(point, other.saves)
        if parting == point:
            other.saves.add(point)
        return parting

    def _save(self, saved: SavedStates, entry: RequestState) -> None:
        """Save the state after its computed tokens. A kept request that thereby loses its last
        state is dropped."""
        tokens = np.asarray(entry.tokens[: entry.computed], np.int64)
        save, gone = saved.save(entry.request, tokens)
        self._saves.append(save)
        if gone is not None and gone in self._prefixes:
            self._prefixes.drop(gone)
            self._residency.kept.drop(gone)
            was_told = self._kept.pop(gone, None) is None
            (self._stateless if was_told else self._never_kept).append(gone)

    def _keep(self, entry: RequestState, *, has_ended: bool) -> bool:
        """Keep the cache of an ended request if it may be useful. Returns whether it is kept."""
        if entry.rows is not None or entry.state != "going":
            return False
        singly = entry.singly
        for span in entry.answered_singly:
            singly = joined(singly, span)
        tokens = self._prefixes.worth_keeping(entry.computed, singly)
        saves_end = False
        if self._saved is not None:
            saves_end = self._saved.saves_ends and has_ended and tokens == entry.computed
            tokens = tokens if saves_end else self._saved.last(entry.request, tokens)
        if not tokens or not self._residency.keep(entry.memory):
            return False
        if self._saved is not None and saves_end:
            self._save(self._saved, entry)
        kept = entry.tokens[:tokens]
        self._prefixes.keep(entry.request, kept, cut(singly, tokens), entry.salt)
        self._kept[entry.request] = KeptCache(
            tokens=tokens, answer=tuple(kept[entry.prompt_tokens :])
        )
        return True

    def _as_saved(self, request: str, kept: KeptCache) -> KeptCache:
        """The kept cache, cut at its last saved state if layers have states: another request may
        have replaced the last one."""
        if self._saved is None:
            return kept
        tokens = self._saved.last(request, kept.tokens)
        answer_tokens = max(0, len(kept.answer) - (kept.tokens - tokens))
        return KeptCache(tokens=tokens, answer=kept.answer[:answer_tokens])
