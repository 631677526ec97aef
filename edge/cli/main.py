"""The command line: its commands, and the end of a failed one.

A failure is one sentence on stderr and an exit code: 1 for errors, 2 for wrong usage, 130 for
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
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from edge.cli.hangup import HungUp, give_up
from edge.cli.usage_errors import as_sentence, remedy_of, unknown_command
from edge.errors import EdgeError
from edge.host.instructions import check_instructions
from edge.system.heap import restart_with_malloc_settings
from edge.system.kind import why_no_wheels
from edge.system.signals import end_by
from edge.system.terminal import TerminalError, has_hung_up
from edge.version import __version__

COMMANDS = {
    "peer": "Run the daemon that lends this device to the cluster.",
    "peers": "Show the peers of a cluster.",
    "ps": "Show the loaded models and their users.",
    "doctor": "Check this device and its peers; suggest remedies.",
    "pair": "Make two devices members of one cluster.",
    "cluster": "Show this device's cluster, or expel a device.",
    "memory": "Set the memory limit of a running peer.",
    "models": "List the models on this disk, and how they would run.",
    "cache": "Show or remove Edge's files on disk.",
    "inspect": "Describe a checkpoint and the memory that it needs.",
    "plan": "Show the plan for a model and its predicted speed.",
    "run": "Answer one prompt.",
    "keep": "Keep a document that answers begin with.",
    "replies": "Show or remove unfinished answers.",
    "chat": "Chat with a model.",
    "serve": "Serve a model over HTTP.",
    "top": "Show the live state of a server's model.",
    "graph": "Run any ONNX graph, cut over the peers.",
    "bench": "Measure a model's speed and its bottleneck.",
    "quality": "Measure the quality loss of a weight format.",
    "quantize": "Quantize a model with calibration (GPTQ).",
    "demo": "List the bundled demos, or run one.",
    "completion": "Complete commands and options in a shell.",
}


_STDERR = 2


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

    Or all on this machine, to try it:  edge run path/to/checkpoint -p "Hello" --local 1
    """


def main(arguments: list[str] | None = None) -> Any:
    """Run a command, by default that of this process's arguments; never returns."""
    try:
        _run(arguments)
    except KeyboardInterrupt:  # in the moment in which the command ended
        sys.exit(130)
    except _Terminated:
        end_by(signal.SIGTERM)  # the parent process sees the signal
    finally:
        if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # Nothing is left to close, and Python would show a traceback while it ends.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(arguments: list[str] | None) -> NoReturn:
    _prepare_streams()
    logging.basicConfig(format="edge: %(message)s")
    if arguments is None:
        signal.signal(signal.SIGTERM, _leave)
        if sys.argv[1:2] == ["peer"]:
            restart_with_malloc_settings()
        # A command's imports stay alive: garbage collection of them takes a quarter of an idle
        # daemon's compute time (0.48 instead of 0.63 s without it).
        gc.disable()
    wants_json = "--json" in (sys.argv if arguments is None else arguments)
    try:
        check_instructions()
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
    except EdgeError as error:
        click.echo(f"edge: {error}", err=True)
        if wants_json:
            _tell_json(error.code, str(error), error.remedy)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if (error.name or "edge").partition(".")[0] == "edge":
            raise
        reason = why_no_wheels() or "install Edge anew, with pip"
        click.echo(f"edge: the package {error.name} is missing; {reason}", err=True)
        sys.exit(1)
    except (HungUp, TerminalError):
        give_up(sys.stdout, sys.stderr)
        raise HungUp from None
    except BrokenPipeError:
        give_up(sys.stdout)  # its reader has gone
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
    """Print an error as JSON for scripts; see `edge/errors.py`."""
    click.echo(json.dumps({"error": {"code": code, "message": message, "remedy": remedy}}))


class _Terminated(SystemExit):
    """Raised at SIGTERM. Event loops let a SystemExit through; it closes what is open and restores
    the terminal."""


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
    raise _Terminated


def _prepare_streams() -> None:
    """Write characters that a terminal cannot show as `?`, so that no answer stops at one.

    The place of a closed stream is taken, so that no library writes its errors into a socket.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)
    if sys.stdout is None:  # started with its output closed
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # refused later, with a sentence
