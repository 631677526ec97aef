"""The command line: which commands there are, and how their failures end.

Every failure is one sentence on stderr and an exit code: 1 for errors, 2 for wrong usage, 130 for
Ctrl-C.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import io
import json
import logging
import os
import signal
import sys
import termios
from pathlib import Path
from types import FrameType
from typing import Any

import click

from edge.cli.hangup import HungUp, give_up, has_hung_up
from edge.cli.wrong_usage import as_sentence, remedy_of, unknown_command
from edge.errors import EdgeError
from edge.host.huge_pages import restart_with_malloc_settings
from edge.version import __version__

COMMANDS = {
    "peer": "Run the daemon that lends this device to the cluster.",
    "peers": "Show the peers of a cluster.",
    "ps": "Show which models are loaded, and for whom.",
    "doctor": "Find what is wrong here, and say what helps.",
    "pair": "Make two devices members of one cluster.",
    "cluster": "Show this device's cluster, expel a device.",
    "memory": "Tell a running peer how much memory it may use.",
    "models": "List the models that are here, and how they would run.",
    "cache": "Show what Edge keeps on disk, and remove it.",
    "inspect": "Show what a checkpoint is, and what it would take.",
    "plan": "Show what would run where and how fast, without running it.",
    "run": "Answer one prompt.",
    "replies": "Show the answers that are not finished, and remove them.",
    "chat": "Talk with a model in turns.",
    "serve": "Serve a model over HTTP.",
    "top": "Show how the model of a server is doing.",
    "bench": "Measure a model's speed and what limits it.",
    "quality": "Measure what a weight format costs in quality.",
    "quantize": "Round a model by what its weights are multiplied with.",
    "demo": "List the bundled demos, or run one.",
    "completion": "Complete commands and options in a shell.",
}


class _LazyGroup(click.Group):
    """Imports a command's module only when it is called, so that `--help` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"edge.cli.commands.{cmd_name}").command
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if args[0] in COMMANDS or args[0].startswith("-"):
                raise
            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            raise click.UsageError(unknown_command(args[0], args[1:], near), ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edge")
def cli() -> None:
    """Run a language model that no single device of yours can hold, on the devices you have.

    \b
    Once, on two:        edge pair; then edge pair and the words that it shows
    On each device:      edge peer
    Then, on any one:    edge run path/to/checkpoint -p "Why is the sky blue?"

    Or all on this machine, to try it:  edge run path/to/checkpoint -p "Hello" --local 2
    """


def main(arguments: list[str] | None = None) -> Any:
    """Run a command, by default that of this process's arguments; never returns."""
    _prepare_streams()
    logging.basicConfig(format="edge: %(message)s")
    if arguments is None:
        signal.signal(signal.SIGTERM, _leave)
        if sys.argv[1:2] == ["peer"]:
            restart_with_malloc_settings()
        # What a command imports stays: to look for garbage in it, now and at the end, takes a
        # quarter of the time that an idle daemon computes (0.48 instead of 0.63 s).
        gc.disable()
    wants_json = "--json" in (sys.argv if arguments is None else arguments)
    try:
        cli.main(args=arguments, prog_name="edge", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.UsageError as error:
        told = as_sentence(error)
        told.show()
        if wants_json:
            _tell_json("wrong_usage", told.message, remedy_of(told))
        sys.exit(told.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("\nInterrupted; everything this command started was ended.", err=True)
        sys.exit(130)
    except _Terminated:
        os.kill(os.getpid(), signal.SIGTERM)  # whoever waits for this process hears the truth
    except EdgeError as error:
        click.echo(f"edge: {error}", err=True)
        if wants_json:
            _tell_json(error.code, str(error), error.remedy)
        sys.exit(1)
    except (HungUp, termios.error):
        give_up(sys.stdout, sys.stderr)
        raise HungUp from None
    except BrokenPipeError:
        give_up(sys.stdout)  # whoever read it has gone
        sys.exit(1)
    except OSError as error:
        if has_hung_up():
            give_up(sys.stdout, sys.stderr)
            raise HungUp from None
        give_up(sys.stdout)
        where = f" ({error.filename})" if error.filename else ""
        click.echo(f"edge: {error.strerror or error}{where}; check the disk", err=True)
        sys.exit(1)
    sys.exit(0)


def _tell_json(code: str, message: str, remedy: str) -> None:
    """What failed, for scripts: see `edge/errors.py`."""
    click.echo(json.dumps({"error": {"code": code, "message": message, "remedy": remedy}}))


class _Terminated(SystemExit):
    """SIGTERM came: event loops let a SystemExit through, and all that is open closes on the way,
    so that a terminal is left as it was found."""


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
    raise _Terminated


def _prepare_streams() -> None:
    """Let no character stop an answer halfway: what a terminal cannot show becomes `?`."""
    if sys.stdout is None:  # started with its output closed
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # refused later, with a sentence
