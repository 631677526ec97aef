"""`edge run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import click

from edge.api.async_model import Prompt
from edge.api.generation_options import GenerationOptions
from edge.api.reply import Reply
from edge.cli.options import (
    ClusterOptions,
    cluster_options,
    generation_options,
    model_options,
    open_cluster,
)
from edge.cli.reply_view import (
    adapt_option,
    drift_of,
    show_parts,
    show_reply,
    show_sampling,
    tell_drift,
    tell_why_not_predicted,
)
from edge.coordinator.lasting_model import Recovery
from edge.kernels.sampling.logprobs import MOST_LOGPROBS
from edge.planning.load_options import LoadOptions

_RAW_TOKENS = 128


@click.command("run", short_help="Answer one prompt.")
@model_options()
@click.option("-p", "--prompt", required=True, help="What to answer; - reads standard input.")
@generation_options
@adapt_option
@cluster_options
@click.option(
    "--raw",
    is_flag=True,
    help="Go on from the prompt itself; else a model with a chat template is asked it.",
)
@click.option(
    "--logprobs",
    type=click.IntRange(0, MOST_LOGPROBS),
    metavar="N",
    help="With --json, how likely each token was, and the N likeliest in its place.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the whole reply as JSON instead of streaming."
)
@click.option(
    "--explain", is_flag=True, help="Show where the time went, and what was predicted of it."
)
def command(
    model: str,
    prompt: str,
    raw: bool,
    as_json: bool,
    options: LoadOptions,
    peers: ClusterOptions,
    adapt: bool,
    explain: bool,
    generation: GenerationOptions,
) -> None:
    """Run MODEL and stream its answer.

    MODEL is the folder of a Hugging Face checkpoint, a GGUF file, or org/name on Hugging Face, with
    org/name:Q4_K_M for one of several GGUF files. What is not in the Hugging Face cache yet is
    fetched into it.

    The prompt is put through the model's chat template, if it has one, and the answer is as long as
    the model makes it. Without a template, or with --raw, the model goes on from the prompt, for
    128 tokens unless told otherwise.

    \b
    Examples:
      edge run HuggingFaceTB/SmolLM2-135M-Instruct -p "Why is the sky blue?"
      edge run path/to/checkpoint -p "Why is the sky blue?"           on peers found by zeroconf
      edge run path/to/checkpoint -p "Hello" --local 2 --parallel tensor
      edge run path/to/checkpoint -p "Hello" --peer 192.168.1.7:5000 --peer 192.168.1.9:5000
    """
    if generation.logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json: it is told in the reply's JSON")
    if prompt == "-":
        prompt = sys.stdin.read()
    with open_cluster(peers, options) as cluster:
        loaded = cluster.load(model, options)
        tell_why_not_predicted(loaded)
        text: Prompt = prompt
        if loaded.tokenizer.has_chat_template and not raw:
            text = loaded.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        elif generation.max_new_tokens is None:
            generation = replace(generation, max_new_tokens=_RAW_TOKENS)  # it may know no end
        if as_json:
            reply = loaded.generate(text, generation)
            click.echo(json.dumps(_as_json(reply), ensure_ascii=False))
        else:
            reply = show_reply(loaded, text, generation)
        if explain:
            show_sampling(loaded, reply, generation)
        times = show_parts(loaded, reply) if explain else None
        if (drift := drift_of(loaded, times)) is not None:
            tell_drift(cluster, loaded, model, options, drift, adapt=adapt)


def _as_json(reply: Reply) -> dict[str, Any]:
    return {
        "text": reply.text,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
        "statistics": dict(reply.statistics),
        **({"logprobs": _logprobs(reply)} if reply.logprobs else {}),
        **(
            {"recoveries": [_recovery(each) for each in reply.recoveries]}
            if reply.recoveries
            else {}
        ),
    }


def _recovery(recovery: Recovery) -> dict[str, Any]:
    return {"reason": recovery.reason, "pause_s": recovery.pause_s}


def _logprobs(reply: Reply) -> list[dict[str, Any]]:
    return [
        {**asdict(token), "top": [asdict(each) for each in top]}
        for token, top in zip(reply.logprobs, reply.top_logprobs, strict=True)
    ]
