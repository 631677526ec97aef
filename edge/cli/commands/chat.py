"""`edge chat`: a conversation."""

from __future__ import annotations

import click

from edge.answers.terms import GenerationOptions
from edge.api.kept_documents import kept_documents
from edge.cli.chat.commands import as_question, is_command, run_command, suggestions
from edge.cli.chat.conversation import Conversation
from edge.cli.chat.kept_chats import LAST, KeptChats
from edge.cli.chat.line_input import is_a_terminal, line_input, typed_ahead
from edge.cli.chat.settings import Settings
from edge.cli.chat.talk import TerminalTalk
from edge.cli.options import (
    ClusterOptions,
    cluster_options,
    generation_options,
    model_options,
    open_cluster,
    preferring_one,
)
from edge.cli.reply_view import adapt_option, tell_why_not_predicted
from edge.cli.sentences import tell
from edge.errors import EdgeError, RequestError, shown
from edge.planning.load_options import LoadOptions


@click.command(
    "chat",
    short_help="Chat with a model.",
    context_settings={"allow_extra_args": True},  # refused below, with a remedy
)
@model_options()
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option(
    "--resume",
    metavar="ID",
    is_flag=False,
    flag_value=LAST,
    help="Continue the last conversation of this device, or the one with this id.",
)
@click.option(
    "--keep/--no-keep",
    default=True,
    help="Keep the conversation on this device, for --resume.  [default: keep]",
)
@generation_options
@adapt_option
@cluster_options
@click.pass_context
def command(
    context: click.Context,
    model: str,
    system: str | None,
    resume: str | None,
    keep: bool,
    options: LoadOptions,
    peers: ClusterOptions,
    adapt: bool,
    generation: GenerationOptions,
) -> None:
    """Chat with MODEL, a folder, a GGUF file or org/name, by its own chat template.

    Ctrl-C stops an answer and keeps the text so far; twice, or Ctrl-D, leaves. /help shows the
    commands of a conversation. Without a terminal, each line of standard input is a turn.

    \b
    Examples:
      edge chat path/to/checkpoint                                  on peers found by zeroconf
      edge chat path/to/checkpoint --local 1 --temperature 0.7
      edge chat path/to/checkpoint --resume                         the last conversation
      edge chat path/to/checkpoint --system "Answer in one sentence." --peer 192.168.1.7:5000
    """
    if context.args:
        raise click.UsageError(
            f"Got unexpected extra argument {shown(context.args[0])}; ask when the conversation "
            "has begun, or write edge run MODEL -p TEXT",
            context,
        )
    if resume is not None and system is not None:
        raise click.UsageError("a kept conversation has its own system message; leave out --system")
    chats = KeptChats()
    begun = Conversation(system=system) if resume is None else chats.open(resume)
    is_terminal = is_a_terminal()
    peers = preferring_one(peers, options)
    with typed_ahead(), open_cluster(peers, options, model=model) as cluster:
        kept_documents().texts(generation.context)  # raises an error for one that is not there
        loaded = cluster.load(model, options)
        tell_why_not_predicted(loaded)
        talk = TerminalTalk(
            cluster,
            loaded,
            model,
            options,
            Settings(generation=generation),
            begun,
            adapt=adapt,
            is_terminal=is_terminal,
        )
        if begun.turns:
            talk.check(conversation=begun)  # that it has room in the context
        if is_terminal:
            tell(talk.banner())
            if begun.turns:
                tell(f"{len(begun.turns)} turns; the conversation continues from there")
        lines = line_input(suggestions)
        while (line := lines.ask()) is not None:
            try:
                if not is_command(line):
                    talk.ask(as_question(line))
                elif not run_command(talk, line):
                    break
                if keep:
                    chats.keep(talk.conversation, model=talk.model_name)
            except RequestError as error:
                tell(f"edge: {error}")
            except EdgeError as error:
                if not is_terminal:
                    raise
                tell(
                    f"edge: {error}; the conversation is still here: /save keeps it, and the next "
                    "question loads the model again, on the peers that are left"
                )
            except KeyboardInterrupt:  # before the answer began
                if not is_terminal:
                    raise
                talk.was_stopped = True
                tell("[stopped before an answer began; the conversation is as it was]")
            lines.interrupted, talk.was_stopped = talk.was_stopped, False
