"""One conversation with a loaded model: asks, streams, shows and stops answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import click
from rich.console import Console

from edge.api.cluster import Cluster
from edge.api.kept_documents import conversation_after, kept_documents
from edge.api.model import Model
from edge.api.reply import Reply, ReplyStream
from edge.cli.chat.answer_view import AnswerView
from edge.cli.chat.conversation import Conversation, Turn
from edge.cli.chat.settings import Settings
from edge.cli.plan_view import devices_in_words, show_plan
from edge.cli.reply_view import (
    drift_of,
    figures_of,
    tell_drift,
    tell_recoveries,
    tell_remarks,
    write_token,
)
from edge.cli.sentences import print_sentence, tell
from edge.errors import RequestError, without_controls
from edge.kernels.sampling.parameters import SamplingParameters
from edge.models.pictures import Tile
from edge.planning.load_options import LoadOptions
from edge.text.answer_parser import read_answer


class TerminalTalk:
    """See `edge.cli.chat.commands.Talk`."""

    def __init__(
        self,
        cluster: Cluster,
        model: Model,
        path: str,
        options: LoadOptions,
        settings: Settings,
        conversation: Conversation,
        *,
        adapt: bool,
        is_terminal: bool,
    ) -> None:
        """adapt: plan anew when answers are slower than predicted."""
        self.conversation = conversation
        self.settings = settings
        self.was_stopped = False
        """Whether Ctrl-C stopped the last answer."""
        self._cluster, self._model, self._path, self._options = cluster, model, path, options
        self._adapt = adapt
        self._is_terminal = is_terminal
        self._console = Console() if is_terminal else None
        self._figures = ""
        """The figures of the last answer."""
        self._told = 0
        """The number of failovers that were told."""
        self._measured_again: set[tuple[str, ...]] = set()
        # Report an unusable template before the first prompt.
        self.check()

    @property
    def model_name(self) -> str:
        return self._model.name

    @property
    def usual_sampling(self) -> SamplingParameters:
        return self._model.sampling

    def banner(self) -> str:
        """The two lines at the start."""
        model = self._model
        return (
            f"{model.name} ({model.proposal.dtype}) on {devices_in_words(model.proposal)}, "
            f"context {model.context_tokens}\n"
            "/help for commands; Ctrl-C stops an answer, Ctrl-D leaves"
        )

    def check(
        self, *, settings: Settings | None = None, conversation: Conversation | None = None
    ) -> None:
        said = (conversation or self.conversation).messages()
        ids, _tiles = self._encoded([*said, {"role": "user", "content": "Hello"}], settings)
        room = self._model.context_tokens
        if conversation is not None and len(ids) >= room:
            raise RequestError(
                f"with a short question that is {len(ids)} tokens, and the context has room for "
                f"{room}",
                remedy="shorten it, or load the model with a longer --context",
            )

    def say(self, text: str) -> None:
        if self._console is None:
            click.echo(without_controls(text), err=True)
        else:
            print_sentence(self._console, without_controls(text))

    def ask(self, question: str, images: Sequence[bytes] = ()) -> None:
        self.conversation.ask(question, images)
        try:
            self.ask_again()
        except BaseException:
            # The conversation is longer than the context, or the template refuses it.
            self.conversation.forget_question()
            raise

    def ask_again(self) -> None:
        if self._model.is_over:  # a peer was lost, or a new plan is due
            self._model, self._told = self._cluster.load(self._path, self._options), 0
        tell_recoveries(self._model, self._model.recoveries[self._told :])  # since the last answer
        self._told = len(self._model.recoveries)
        answer, reply = self._answered(self.conversation.messages())
        self.conversation.answered(answer)
        if reply is None:
            tell("[stopped]")
            return
        self._figures = figures_of(self._model, reply)
        generation = self.settings.generation
        tell_remarks(self._model, reply, generation, "/set max-tokens N", "/new begins anew, ")
        self._told += len(reply.recoveries)
        tell(self._figures)
        self._look_for_drift()

    def show_figures(self) -> None:
        if not self._figures:
            raise RequestError("there is no answer yet", remedy="ask something first")
        said = self.conversation.messages()  # ends with a complete answer
        used = len(self._encoded(said, asks=False)[0])
        room = self._model.context_tokens
        self.say(f"{self._figures}\nthe conversation has {used} of the context's {room} tokens")

    def show_plan(self) -> None:
        title = (
            f"{self._model.name} on {len(self._model.plan.devices)} of {len(self._cluster.peers)}"
        )
        show_plan(self._model.proposal, title=f"{title} peers", unchanged=None, explain=False)

    def _encoded(
        self,
        messages: list[Turn],
        settings: Settings | None = None,
        *,
        asks: bool = True,
    ) -> tuple[list[int], Sequence[Tile]]:
        """The token ids of the prompt, and the tiles of its pictures. asks: an answer follows."""
        generation = (settings or self.settings).generation
        tokenizer = self._model.tokenizer
        texts = kept_documents().texts(generation.context)
        said, pictures = self._model.read_pictures(conversation_after(tokenizer, messages, texts))
        ids = tokenizer.encode_chat(said, asks, thinking=generation.thinking, pictures=pictures)
        return ids, () if pictures is None else pictures.tiles

    def _answered(self, messages: list[Turn]) -> tuple[str, Reply | None]:
        """The answer until its end, or until Ctrl-C. Raises KeyboardInterrupt for Ctrl-C before the
        first token."""
        ids, tiles = self._encoded(messages)
        said: list[str] = []
        self.was_stopped = False
        begun_s = time.monotonic()
        generation = replace(self.settings.generation, context=())  # whose texts are in the prompt
        with self._model.stream(ids, generation, chat_tools=(), tiles=tiles) as stream:
            try:
                self._show(stream, said)
            except KeyboardInterrupt:
                if not self._is_terminal or not said:
                    raise
                self.was_stopped = True
                self._figures = (
                    f"[{len(said)} tokens in {time.monotonic() - begun_s:.1f} s, when it was "
                    f"stopped, on {devices_in_words(self._model.proposal)}]"
                )
                return self._kept("".join(said)), None
            reply = stream.reply()
        return self._kept(reply.text), reply

    def _kept(self, text: str) -> str:
        """The text of an answer for the conversation. Of an answer with channels, only the final
        one, as chat templates refuse the rest."""
        form = self._model.tokenizer.answer_form
        return read_answer(text, form).content if form.call_form.has_channels else text

    def _show(self, stream: ReplyStream, said: list[str]) -> None:
        if self._console is None:
            for token in stream:
                said.append(token.text)
                write_token(token.text)
            click.echo()
            return
        settings = self.settings
        with AnswerView(
            self._console, markdown=settings.markdown, thoughts=settings.thoughts
        ) as view:
            for token in stream:
                said.append(token.text)
                view.feed(token.parts)

    def _look_for_drift(self) -> None:
        if (drift := drift_of(self._model)) is None:
            return
        adapts = self._adapt and drift.devices not in self._measured_again
        tell_drift(self._cluster, self._model, self._path, self._options, drift, adapt=adapts)
        if adapts:
            self._measured_again.add(
                drift.devices
            )  # once is enough: a second measurement would be the same
            self._model, self._told = self._cluster.load(self._path, self._options), 0
