"""The view of `edge inspect`: a checkpoint as tables and sentences.

Names, tokens and templates come from untrusted files: all are escaped and cut before they are
printed.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edge.cli.records import Columns, make_table
from edge.cli.sentences import print_sentence
from edge.errors import printable
from edge.host.free_memory import format_size
from edge.studies.inspection import HeldAs, Inspection, KvFacts, LayerKind, StoredType
from edge.text.tokenizer_facts import TokenizerFacts
from edge.weights.formats import AS_STORED, AUTO

_LONGEST_CELL = 160
_MOST_SPANS = 6


def show_inspection(found: Inspection, *, given: str, template: bool) -> None:
    """Print an inspection. given: the user's path. template: with the whole chat templates."""
    console = Console()
    console.print(_summary(found))
    right = ("tensors", "weights", "size", "bits/weight", "bytes/weight", "in all")
    if found.layers:
        console.print(make_table(found.layers, _LAYERS, title="layers"))
    if found.stored:
        console.print(make_table(found.stored, _STORED, title="as stored", right=right))
    if found.held:
        console.print(make_table(found.held, _HELD, title="in memory", right=right))
    if found.kv:
        console.print(make_table(found.kv, _kv(found), title="keys and values"))
    if template:
        for line in _templates(found.tokenizer):
            _say(console, line)
    for line in _sentences(found, given):
        _say(console, line)


def _say(console: Console, line: str) -> None:
    print_sentence(console, line)


def _cell(text: str) -> Text:
    """A cell of plain text; Rich would read brackets and colons as markup."""
    return Text(printable(text, _LONGEST_CELL))


def _summary(found: Inspection) -> Table:
    grid = Table(title=_cell(found.name), show_header=False, box=None, pad_edge=False)
    for what, words in _facts(found):
        grid.add_row(what, _cell(words))
    return grid


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    files = f", {found.num_files} files" if found.num_files > 1 else ""
    form = "a Hugging Face folder" if found.form == "folder" else "GGUF"
    yield "form", f"{form}{files}, {format_size(found.stored_bytes)} of weights"
    yield "family", found.family or "not said"
    if found.note:
        yield "note", found.note
    if found.parameters is not None:
        yield "parameters", f"{in_short(found.parameters)} ({found.parameters:,})"
    if found.num_experts:
        yield "experts", f"{found.num_experts:,}"
    if found.quantized_by is not None:
        yield "quantised by", found.quantized_by
    if found.layers:
        yield "layers", f"{found.num_layers:,}"
    if found.hidden_size is not None:
        yield "hidden size", f"{found.hidden_size:,}"
    if found.vocab_size is not None:
        tied: dict[bool | None, str] = {
            True: "; the head is the table of embeddings",
            False: "; a head of its own",
        }
        yield "vocabulary", f"{found.vocab_size:,}{tied.get(found.tied_embeddings, '')}"
    if found.context_tokens is not None:
        yield "longest context", f"{found.context_tokens:,} tokens"
    if found.rope is not None:
        yield "rotary positions", _rope(found)
    yield from _tokenizer(found)


def _rope(found: Inspection) -> str:
    rope = found.rope
    assert rope is not None
    base = "of an unknown base" if rope.theta is None else f"base {rope.theta:,.10g}"
    if rope.scaling is None:
        return base
    factor = "" if rope.factor is None else f" by {rope.factor:g}"
    return f"{base}, scaled{factor} ({rope.scaling})"


def _tokenizer(found: Inspection) -> Iterator[tuple[str, str]]:
    facts = found.tokenizer
    if facts is None:
        if found.tokenizer_problem is None:
            yield "tokenizer", "none: token ids can be used from Python"
        return
    yield "tokenizer", f"{facts.kind}; {facts.vocab_size:,} tokens"
    if facts.special_tokens:
        named = ", ".join(
            f"{role.removesuffix('_token')} {token}" for role, token in facts.special_tokens.items()
        )
        yield "special tokens", named
    ends = ", ".join(f"{token or 'no token'} ({n})" for n, token in facts.end_tokens.items())
    yield "answers end at", ends or "nothing that the files name"
    sizes = [f"{name}: {len(text):,}" for name, text in facts.chat_templates.items()]
    yield "chat template", f"{', '.join(sizes)} characters" if sizes else "none"


def _seen(kind: LayerKind) -> str:
    if kind.is_linear:
        return "all, in a state" if kind.window is None else f"the last {kind.window:,}, in a state"
    return "all tokens" if kind.window is None else f"the last {kind.window:,}"


def _spans(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [f"{first}–{last}" if last > first else f"{first}" for first, last in spans]
    if len(shown) > _MOST_SPANS:
        return f"{', '.join(shown[:3])}, … ({len(numbers)} layers)"
    return ", ".join(shown)


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _biases(kind: LayerKind) -> str:
    flags = (("query, key, value", kind.qkv_bias), ("output", kind.output_bias),
             ("ffn", kind.mlp_bias))  # fmt: skip
    if any(has is None for _, has in flags):
        return "?"
    return ", ".join(name for name, has in flags if has) or "none"


def _in_words(held: HeldAs) -> str:
    """The format of weights in words; the row has the dtype already."""
    if held.dtype == AUTO and held.format != AS_STORED:
        return f"as {held.format}"
    return held.words if held.dtype == AUTO else held.words.removeprefix(f"{held.format}: ")


_NORMS = {None: "?", False: "usual", True: "usual, query, key"}

_LAYERS: Columns[LayerKind] = {
    "layers": lambda kind: _spans(kind.layers),
    "heads": lambda kind: _number(kind.num_heads),
    "KV heads": lambda kind: _number(kind.num_kv_heads),
    "head size": lambda kind: _number(kind.head_size),
    "ffn columns": lambda kind: _number(kind.ffn_columns),
    "sees": _seen,
    "biases": _biases,
    "norms": lambda kind: _NORMS[kind.query_key_norm],
}

_STORED: Columns[StoredType] = {
    "type": lambda each: each.type,
    "tensors": lambda each: f"{each.tensors:,}",
    "weights": lambda each: in_short(each.weights),
    "size": lambda each: format_size(each.nbytes),
    "bits/weight": lambda each: f"{each.bits_per_weight:.3g}",
}

_HELD: Columns[HeldAs] = {
    "--dtype": lambda each: each.dtype,
    "bytes/weight": lambda each: f"{each.bytes_per_weight:.3f}",
    "weights": lambda each: format_size(each.weight_bytes),
    "in all": lambda each: format_size(each.total_bytes),
    "fits": lambda each: "yes" if each.fits else "no",
    "what is held": _in_words,
}


def _kv(found: Inspection) -> Columns[KvFacts]:
    columns: dict[str, Callable[[KvFacts], str | None]] = {
        "--kv-dtype": lambda each: each.dtype,
        "a token": lambda each: format_size(each.token_bytes),
    }
    if found.context_tokens != found.default_context_tokens:
        usual = f"{found.default_context_tokens:,} tokens (usual)"
        columns[usual] = lambda each: format_size(each.default_bytes)
    longest = f"{found.context_tokens:,} tokens (longest)"
    columns[longest] = lambda each: format_size(each.longest_bytes)
    return columns


def _templates(facts: TokenizerFacts | None) -> Iterator[str]:
    for name, text in facts.chat_templates.items() if facts is not None else ():
        yield f"Chat template {printable(name, _LONGEST_CELL)}:"
        for line in text.expandtabs(4).split("\n"):
            yield printable(line, len(line))


def _sentences(found: Inspection, given: str) -> Iterator[str]:
    if found.held:
        yield (
            f"A daemon here would offer {format_size(found.usable_bytes)} of memory now. In all: "
            f"weights, keys and values of {found.default_context_tokens:,} tokens in float32, what "
            "a step computes with, and the daemon. With memory left, the context is longer."
        )
        if not any(each.fits for each in found.held):
            yield "It fits this machine in no dtype: share it with others, or read it from disk."
    if found.tokenizer_problem is not None:
        yield f"Its tokenizer cannot be used: {printable(found.tokenizer_problem)}."
    if found.problem is not None:
        yield f"Edge does not run it: {printable(found.problem)}."
    else:
        path = shlex.quote(printable(given))
        yield f"edge plan {path} tells what would run where, and how fast."


def in_short(count: int) -> str:
    """A count in short, such as 1.1 B."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
