"""How soon the next turn of a conversation begins, compared with its new words alone.

python -m edge.demos.bench.conversation --shape W
python -m edge.demos.bench.conversation --checkpoint smollm2-135m-float32 --append
python -m edge.demos.bench.conversation --shape small --beginning 16000 --turns 3 --new-tokens 200

A turn's prompt is all that was said and a few new tokens, and comes at once. Every second turn is
measured, so that it comes after an answer, and nothing else. For comparison, in the same minute: as
many new tokens alone, from an empty context, and the whole prompt anew, of which nothing was kept;
and what the peers themselves computed of prompts for it, in which attention looks at all that was
said.

With --compare the answers of the measured turns are made again by peers that know nothing of the
turns before. They compute all that was said in the same steps: what was an answer, one token at a
time. A reply's journal tells them which tokens these were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np

import edge
from edge.demos.bench import results
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.results import Figures
from edge.demos.bench.shapes import checkpoint, described
from edge.partition import Parallel
from edge.planning.load_options import LoadOverrides
from edge.protocol.step_times import PeerTimes
from edge.weights.formats import DTYPES, Dtype


def prompt_s(times: Sequence[PeerTimes]) -> float:
    """What the stages took for prompts, one after the other."""
    stages: dict[int, float] = {}
    for each in times:
        own = each.prompt
        took_s = own.compute_s + own.load_s + own.reduce_s + own.send_s
        stages[each.stage] = max(stages.get(each.stage, 0.0), took_s)
    return sum(stages.values())


def answering(tokens: int) -> edge.GenerationOptions:
    """Options for an answer of `tokens` tokens, whatever they are."""
    return edge.GenerationOptions(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)


@click.command()
@shape_option()
@click.option("--checkpoint", "own", type=click.Path(exists=True, path_type=Path))
@click.option("--peers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of each.")
@click.option("--plan", default="tensor", show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="int4", show_default=True)
@click.option("--turns", type=click.IntRange(2), default=6, show_default=True)
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Conversations of these."
)
@click.option("--new-tokens", type=click.IntRange(2), default=32, show_default=True, help="A turn.")
@click.option("--answer-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--beginning", type=click.IntRange(0), default=0, show_default=True, help="Before the first."
)
@click.option("--compare", is_flag=True, help="Tokens with those of peers that know nothing.")
@folder_option
@append_option
def main(
    shape: str,
    own: Path | None,
    peers: int,
    threads: int,
    plan: Parallel,
    dtype: Dtype,
    turns: int,
    rounds: int,
    new_tokens: int,
    answer_tokens: int,
    beginning: int,
    compare: bool,
    folder: Path,
    append: bool,
) -> None:
    """Time to the first token, and ratios to that of the new tokens alone."""
    context = max(2048, beginning + 64 + turns * (new_tokens + answer_tokens))
    path = checkpoint(shape, folder, context_tokens=context) if own is None else own
    random = np.random.default_rng(0)
    loading: LoadOverrides = {
        "dtype": dtype, "plan": plan, "context_tokens": context, "concurrency": 4
    }  # fmt: skip
    with (
        edge.Cluster.local(peers, threads=threads) as cluster,
        cluster.load(path, **loading) as model,
    ):

        def said(count: int) -> list[int]:
            return [int(token) for token in random.integers(3, model.vocab_size, size=count)]

        def ask(
            prompt: list[int],
            count: int,
            *,
            read: Callable[[], object] = lambda: None,
        ) -> edge.Reply:
            """`read` is called when the prompt is read: at the first token."""
            with model.stream(prompt, answering(count)) as stream:
                for index, _token in enumerate(stream):
                    if index == 0:
                        read()
            return stream.reply()

        def first_token_s(prompt: list[int]) -> float:
            return ask(prompt, 1).statistics["first_token_s"]

        measured: list[tuple[str, tuple[int, ...]]] = []
        """Journals of measured turns, and their answers."""

        def keep(prompt: list[int], answer: tuple[int, ...]) -> None:
            """A measured turn is asked once more, and left with its first token. What peers have
            under way of it ends before anything else is timed."""
            with model.stream(prompt, answering(answer_tokens), journal=True) as stream:
                next(stream)
                if stream.kept_as is None:
                    raise SystemExit("no journal can be written: see the warning above")
                measured.append((stream.kept_as, answer))
            ask(said(new_tokens), 1)

        def converse(figures: Figures) -> None:
            history = said(beginning)
            for turn in range(turns):
                history += said(new_tokens)
                if turn % 2 == 0:  # what is measured from here on is of the next turn
                    reply = ask(history, answer_tokens, read=model.measure)
                else:
                    times: list[PeerTimes] = []

                    def read(times: list[PeerTimes] = times) -> None:
                        times += model.measure()

                    reply = ask(history, answer_tokens, read=read)
                    if compare:
                        keep(history, reply.token_ids)
                    taken_s, peers_s = reply.statistics["first_token_s"], prompt_s(times)
                    alone_s = first_token_s(said(new_tokens))
                    anew_s = first_token_s([*said(1), *history])
                    figures.add("first token of a later turn", "ms", 1e3 * taken_s)
                    figures.add("first token of its new tokens alone", "ms", 1e3 * alone_s)
                    figures.add("first token, all computed anew", "ms", 1e3 * anew_s)
                    figures.add("ratio to its new tokens alone", "x", taken_s / alone_s)
                    figures.add("the peers' own time for it", "ms", 1e3 * peers_s)
                    figures.add("ratio to the peers' own time for it", "x", taken_s / peers_s)
                    figures.add("ratio to all anew", "x", taken_s / anew_s)
                history += reply.token_ids

        ask(said(new_tokens), 8)
        figures = Figures()
        for _round in range(rounds):
            converse(figures)
    for kept_as, answer in measured:
        with (
            edge.Cluster.local(peers, threads=threads) as cluster,
            edge.KeptReply.open(kept_as) as kept,
            cluster.load(kept.model, kept.options, resumes=kept) as model,
        ):
            anew = model.resume(kept).token_ids
        same = sum(each == other for each, other in zip(anew, answer, strict=True))
        figures.add("tokens as computed anew in the same steps", "%", 100.0 * same / len(answer))
    results.publish(
        figures.metrics(),
        question="the next turn of a conversation",
        variant=(
            f"at once, {peers} x {threads} threads, {plan}, "
            f"{rounds} times {turns} turns of {new_tokens} + {answer_tokens} tokens"
            f"{f' behind {beginning}' if beginning else ''}, {dtype}"
        ),
        link="TCP over loopback",
        model=described(shape) if own is None else own.name,
        keep=append,
    )


if __name__ == "__main__":
    main()
