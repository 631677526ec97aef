"""`edge replies`: shows and removes unfinished answers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from edge.answers.journal_folder import JournalEntry
from edge.answers.journal_records import JournalContent
from edge.api.kept_reply import kept_replies
from edge.cli.commands.cache import age_in_words
from edge.cli.records import Columns, json_option, make_table, print_json, print_table
from edge.errors import RequestError, printable


@click.group("replies", short_help="Show or remove unfinished answers.")
def command() -> None:
    """Show or remove unfinished answers of `edge run`: interrupted, or ended by an error.

    Each is a file with the prompt and the tokens so far, which only you can read. A finished answer
    is not kept. Beyond 64, the oldest are removed.

    \b
    Examples:
      edge replies show
      edge run --resume last             continue the latest one
      edge run --resume 3f2a9c01
      edge replies clean 3f2a9c01
      edge replies clean --all
    """


@command.command()
@json_option
def show(as_json: bool) -> None:
    """Show unfinished answers, the latest first."""
    found = [_told(*each) for each in kept_replies().read()]
    if as_json:
        print_json(found)
    elif found:
        print_table(make_table(found, _COLUMNS))
    else:
        click.echo("No answer is kept.")


@command.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", "everything", is_flag=True, help="All that are not under way.")
def clean(ids: tuple[str, ...], everything: bool) -> None:
    """Remove the answers with these IDS. Those under way stay."""
    if not ids and not everything:
        raise click.UsageError("nothing is chosen; give ids, or --all")
    replies = kept_replies()
    there = {each.id for each in replies.entries()}
    if unknown := sorted(set(ids) - there):
        raise RequestError(
            f"no reply {printable(unknown[0], 80)!r} is kept here",
            remedy="`edge replies show` lists the kept ones",
        )
    removed = replies.remove(there if everything else set(ids))
    click.echo(f"{removed} removed.")


def _told(entry: JournalEntry, kept: JournalContent | RequestError) -> dict[str, Any]:
    terms = None if isinstance(kept, RequestError) else kept.head.terms
    return {
        "id": entry.id,
        "model": None if isinstance(kept, RequestError) else printable(kept.head.load.path),
        "prompt_tokens": None if terms is None else len(terms.prompt),
        "new_tokens": None if isinstance(kept, RequestError) else len(kept.tokens),
        "max_new_tokens": None if terms is None else terms.max_new_tokens,
        "written_s": entry.written_s,
        "is_under_way": entry.is_under_way,
        "why_not": str(kept) if isinstance(kept, RequestError) else None,
    }


_COLUMNS: Columns[Mapping[str, Any]] = {
    "id": itemgetter("id"),
    "model": lambda each: each["model"] and Path(each["model"]).name,
    "prompt": lambda each: f"{each['prompt_tokens']} tokens" if each["model"] else "",
    "answer": lambda each: (
        f"{each['new_tokens']} of {each['max_new_tokens']} tokens" if each["model"] else ""
    ),
    "last token": lambda each: age_in_words(time.time() - each["written_s"]),
    "state": lambda each: each["why_not"] or ("under way" if each["is_under_way"] else ""),
}
