"""Sends scheduling orders to the peers, as frames in the same order for all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from edge.answers.copies import Copy
from edge.errors import CapacityError, PeerError, PeerLostError, RequestError
from edge.kernels.sampling.rules import Bits
from edge.protocol import kv_frames, prefix_frames, step_frames
from edge.protocol.fields import token_bytes
from edge.protocol.frame_codec import MOST_COPY_BYTES
from edge.protocol.peer_info import gather_all
from edge.protocol.step import Step
from edge.protocol.token_masks import write_masks
from edge.runs.connections import Connections
from edge.runs.peer_events import PeerEvents
from edge.runs.under_way import AnswersUnderWay
from edge.scheduling.orders import Orders
from edge.scheduling.state import StepUnderWay


class OrderSender:
    """Sends the orders of one run."""

    def __init__(
        self, connections: Connections, answers: AnswersUnderWay, peer_events: PeerEvents
    ) -> None:
        self._connections, self._answers, self._peer_events = connections, answers, peer_events

    async def send(self, orders: Orders) -> None:
        """Carry out these orders. Raises PeerError if a peer refuses or is lost."""
        self._tell_callers(orders)
        if orders.step is not None:  # before the step: a peer may answer before all have got it
            self._peer_events.steps.append(StepUnderWay(orders.step, orders.step_tokens))
        peers, session = self._connections, self._connections.session
        if orders.yields:
            await peers.post_sampler(step_frames.YieldRun(session=session))
        for save in orders.save:
            await peers.post(
                kv_frames.SaveState(
                    session=session, request=save.request, tokens=save.tokens, place=save.place
                )
            )
        await self._free(orders)
        for name in orders.swap_out:
            self._peer_events.swap_outs.ask(name, peers.peers)
            await peers.post(kv_frames.SwapOut(session=session, request=name))
        for name, tokens in orders.reserve.items():
            self._peer_events.reservations.ask(name, peers.peers)
            await peers.post(kv_frames.Reserve(session=session, request=name, tokens=tokens))
        for name, match in orders.match.items():
            self._peer_events.ask_prefix(name, match)
            await peers.post(
                prefix_frames.MatchPrefix(
                    session=session,
                    request=name,
                    salt=match.salt or None,
                    source=match.source,
                    tokens=match.tokens,
                    moves=match.moves,
                    prompt=token_bytes(match.prompt),
                )
            )
        for name in orders.restore:
            await self._restore(name)
        if orders.step is not None:
            terms, masks = self._answers.announced(orders.step), self._answers.masks_of(orders.step)
            step = masked = step_frames.RunStep(
                session=session, step=_as_far_as_allowed(orders.step, masks), terms=terms
            )
            if masks:
                written = write_masks(itertools.chain(*masks.values()))
                masked = replace(step, masked=tuple(masks), masks=written)
            await self._send_pictures(orders.step)
            await peers.post(step, last_stage=masked)

    async def _send_pictures(self, step: Step) -> None:
        """Send the rows of pictures that the step computes to the shards that look them up."""
        for entry in step.entries:
            answer = self._answers.get(entry.request)
            if answer is None or answer.pictures is None:
                continue
            pictures = answer.pictures.rows
            places = [at for at, id in enumerate(entry.tokens) if id in pictures]
            while places:
                first, most = places[0], 1
                while most < len(places) and places[most] == first + most:
                    most += 1
                row_bytes = pictures[entry.tokens[first]].nbytes
                most = min(most, max(1, MOST_COPY_BYTES // row_bytes))
                del places[:most]
                await self._connections.post_pictures(
                    step_frames.PictureRows(
                        session=self._connections.session,
                        request=entry.request,
                        position=entry.position + first,
                        rows=b"".join(
                            pictures[id].tobytes() for id in entry.tokens[first : first + most]
                        ),
                    )
                )

    def _tell_callers(self, orders: Orders) -> None:
        for name, why in orders.refuse.items():
            self._answers.freed(name)
            if (answer := self._answers.forget(name)) is not None:  # else cancelled meanwhile
                answer.sink.failed(RequestError(why))
        for name, found in orders.found.items():
            if (answer := self._answers.get(name)) is not None:
                answer.found_tokens, answer.singly = found.tokens, found.singly

    async def _free(self, orders: Orders) -> None:
        peers, session = self._connections, self._connections.session
        for name in orders.finish:
            self._answers.freed(name)
            await peers.post(step_frames.Finish(session=session, request=name))
        for name, kept in orders.keep.items():
            self._answers.freed(name)
            await peers.post(
                step_frames.Finish(
                    session=session,
                    request=name,
                    kept_tokens=kept.tokens,
                    answer=token_bytes(kept.answer),
                )
            )
        for name in orders.drop:
            await peers.post(step_frames.Finish(session=session, request=name))
        for name, why in orders.give_up.items():
            if (answer := self._answers.forget(name)) is not None:  # else cancelled meanwhile
                answer.sink.failed(CapacityError(why))

    async def _restore(self, name: str) -> None:
        """Send every shard the copies of its keys and values.

        Raises PeerError if a peer refuses them; the copies are then dropped.
        """
        answer = self._answers.get(name)
        if answer is None or answer.copies is None:
            return  # cancelled; the next orders tell the peers
        known, session = [*answer.terms.prompt, *answer.tokens], self._connections.session

        def calls(copies: Sequence[Copy]) -> Iterator[kv_frames.PutKv]:
            for copy in copies:
                yield kv_frames.PutKv(
                    session=session,
                    request=name,
                    first=copy.first,
                    tokens=tuple(known[copy.first : copy.last]),
                    rows=copy.rows,
                )

        given = {seat: tuple(copies) for seat, copies in answer.copies.copies.items()}
        try:
            await gather_all(
                self._connections.put_kv(seat, calls(copies)) for seat, copies in given.items()
            )
        except PeerLostError:
            raise
        except PeerError:
            answer.copies = None
            raise


def _as_far_as_allowed(step: Step, masks: Mapping[str, Sequence[Bits]]) -> Step:
    """The step with as many tokens as it has masks for."""
    if step.run == 1 or not masks:
        return step
    (rows,) = masks.values()
    return replace(step, run=len(rows))
