"""The runner of the benches: `python -m edge.demos.bench` in a checkout lists its cases."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import click

from edge.errors import EdgeError

CASES = {
    "decode": ("decode", "Speed, loading and memory of a model on local peers."),
    "start": ("start", "From `edge run` to the first token, weights cached."),
    "first-reply": ("start", "A newcomer's wait: install, then a reply over two peers."),
    "two-peers": ("speeds", "What a second peer gains on one machine."),
    "llama": ("speeds", "One peer against llama.cpp, on a shape or a GGUF file."),
    "dllama": ("speeds", "Two peers against distributed-llama."),
    "whole-experts": ("whole_experts", "Whole experts against columns of each, on two peers."),
    "quality": ("quality", "What weight formats lose, Edge's and llama.cpp's."),
    "kv-formats": ("quality", "What formats of keys and values lose, and their speed."),
    "own-attention": ("attention", "Attention, by the own operator and ONNX Runtime's."),
    "gguf-types": ("gguf_types", "The same numbers as llama.cpp, for each type of GGUF."),
    "kept-bits": ("kept_bits", "A GGUF file in its own bits and packed, in one limit."),
    "bigger-than-memory": ("limited", "Models larger than a limit of memory."),
    "guesses": ("guesses", "Guessed tokens, on old and new text and in JSON."),
    "mixed-guesses": ("guesses", "Requests of mixed kinds that guesses slow down."),
    "conversation": ("conversation", "Turns of a conversation that grows."),
    "beginnings": ("beginnings", "Beginnings that another session computed before."),
    "drafts": ("drafts", "A draft model, on its own device or another."),
    "further-head": ("further_head", "A model's further head that guesses, on new text."),
    "pictures": ("pictures", "The time to read an image, and of the next turn."),
    "arriving-prompt": ("arriving_prompt", "Answers under way while a long prompt is read."),
    "serving": ("serving", "Many clients of one server."),
    "server-cost": ("server_cost", "What HTTP adds to the time of a token."),
    "security": ("security", "What keys and encryption cost."),
    "busy-device": ("busy_device", "An answer during which a device becomes busy."),
    "faults": ("faults", "Replies while peers are killed, stopped, cut off."),
    "soak": ("soak", "Replies while peers come and go, or every core is busy."),
    "local-cluster": ("predictions", "Predictions against plans on peers of this machine."),
    "predictions": ("predictions", "Predictions against pinned peers with slow networks."),
    "graph-peers": ("graph_peers", "What a second peer gains for a graph."),
    "graph-overhead": ("graph_peers", "A stage on one peer beside plain ONNX Runtime."),
    "graph-tiles": ("graph_peers", "A large picture in tiles over two peers."),
    "graph-predictions": ("graph_clusters", "Predictions for graphs on pinned peers."),
    "graph-corpus": ("graph_corpus", "Graphs of a folder, cut at every place and uncut."),
    "graph-exports": ("graph_exports", "Fills a folder for graph-corpus."),
    "gpu-kernels": ("gpu_kernels", "Triton kernels beside the limits of a GPU."),
    "gpu-decode": ("gpu_decode", "Decoding on a GPU, against its memory and transformers."),
    "gpu-stream": ("gpu_stream", "Layers that stream into a GPU, against its link."),
    "gpu-tuning": ("gpu_tuning", "The fastest tiles of a model's kernels on this GPU."),
}
"""Module and one line of each."""


class _Cases(click.Group):
    """A case's module is imported when the case is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(CASES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in CASES:
            return None
        module = importlib.import_module(f"edge.demos.bench.{CASES[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Cases"):
            formatter.write_dl([(name, line) for name, (_module, line) in CASES.items()])


@click.command(cls=_Cases, no_args_is_help=False, invoke_without_command=True)
@click.pass_context
def cases(context: click.Context) -> None:
    """Measure one case; CASE --help shows its options, METHODOLOGY.md how figures are made."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a case, by default that of this process's arguments; never returns."""
    try:
        cases.main(args=arguments, prog_name="python -m edge.demos.bench")
    except EdgeError as error:
        raise SystemExit(f"edge: {error}") from error


if __name__ == "__main__":
    main()
