"""`edge run`: one prompt, one answer."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edge.answers.terms import GenerationOptions
from edge.answers.text import TokenLogprob
from edge.api.asking import Prompt
from edge.api.kept_documents import conversation_after, kept_documents
from edge.api.kept_reply import KeptReply
from edge.api.model import Model
from edge.api.reply import Reply
from edge.cli.options import (
    ClusterOptions,
    cluster_options,
    generation_options,
    model_options,
    open_cluster,
    preferring_one,
)
from edge.cli.reply_view import (
    adapt_option,
    drift_of,
    show_parts,
    show_reply,
    show_sampling,
    tell_drift,
    tell_left_out,
    tell_why_not_predicted,
    whole_reply,
)
from edge.errors import RequestError, shown
from edge.kernels.sampling.logprobs import MOST_LOGPROBS
from edge.models.pictures import Tile
from edge.pictures.messages import Message
from edge.planning.load_options import LoadOptions
from edge.runs.model import Recovery

_CHANGEABLE = {
    "share_prefixes", "prefixes_of", "stream", "standby", "spot_check", "wait_for_peers_s",
    "replan",
}  # fmt: skip
"""Options that no token depends on."""


@click.command(
    "run",
    short_help="Answer one prompt.",
    context_settings={"allow_extra_args": True},  # refused below, with a remedy
)
@model_options(needs_model=False)
@click.option("-p", "--prompt", help="What to answer; - reads standard input.")
@click.option(
    "--image",
    "images",
    metavar="FILE",
    multiple=True,
    help="An image that the prompt is about; may be repeated.",
)
@generation_options
@adapt_option
@cluster_options
@click.option(
    "--raw",
    is_flag=True,
    help="Continue the prompt itself, without the chat template.",
)
@click.option(
    "--logprobs",
    type=click.IntRange(0, MOST_LOGPROBS),
    metavar="N",
    help="With --json, the logprob of each token and of the N likeliest at its position.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the whole reply as JSON instead of streaming."
)
@click.option(
    "--resume",
    metavar="ID",
    help="Continue an unfinished answer, instead of MODEL and a prompt: last, or its id.",
)
@click.option(  # a field of GenerationOptions
    "--journal/--no-journal",
    default=True,
    help="Keep prompt and answer on this device until the answer is finished, for --resume.  "
    "[default: journal]",
)
@click.option("--explain", is_flag=True, help="Show where the time went, beside the prediction.")
@click.pass_context
def command(
    context: click.Context,
    model: str | None,
    prompt: str | None,
    images: tuple[str, ...],
    raw: bool,
    as_json: bool,
    resume: str | None,
    options: LoadOptions,
    peers: ClusterOptions,
    adapt: bool,
    explain: bool,
    generation: GenerationOptions,
) -> None:
    """Run MODEL and stream its answer.

    MODEL is the folder of a Hugging Face checkpoint, a GGUF file, or org/name on Hugging Face, with
    org/name:Q4_K_M for one of several GGUF files. A model that is not in the Hugging Face cache is
    downloaded into it.

    The prompt is put through the model's chat template, if it has one, and the model ends the
    answer. Without a template, or with --raw, the model continues the prompt, by default for 128
    tokens.

    Daemons (`edge peer`) keep a prefix cache in free memory: a later prompt with the same beginning
    is computed from its first difference on. --explain says how many tokens were cached.

    --resume continues an answer that was interrupted, or whose devices were lost, with the same
    tokens. The model is loaded as before; give --peer or --local again.

    \b
    Examples:
      edge run HuggingFaceTB/SmolLM2-135M-Instruct -p "Why is the sky blue?"
      edge run path/to/checkpoint -p "Why is the sky blue?"           on peers found by zeroconf
      edge run path/to/checkpoint -p "What is this?" --image photo.jpg
      edge run path/to/checkpoint -p "Hello" --local 2 --parallel tensor
      edge run path/to/checkpoint -p "Hello" --peer 192.168.1.7:5000 --peer 192.168.1.9:5000
      edge run --resume last
    """
    if generation.logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs the reply's JSON; add --json")
    with contextlib.ExitStack() as stack:
        kept = None
        if resume is not None:
            _check_resumed(context)
            kept = stack.enter_context(KeptReply.open(resume))
            model, options = str(kept.model), _as_it_was(kept, options, context)
        elif context.args:
            what = "put the whole prompt in quotes" if prompt else "give the prompt with -p"
            raise click.UsageError(
                f"Got unexpected extra argument {shown(context.args[0])}; {what}", context
            )
        elif model is None or prompt is None:
            missing, remedy = "argument 'MODEL'", "write edge run MODEL -p TEXT"
            if model is not None:
                missing = "option '-p' / '--prompt'"
                remedy = "give one, or chat: edge chat MODEL"
            raise click.UsageError(f"Missing {missing}; {remedy}", context)
        if prompt == "-":
            prompt = sys.stdin.read()
        if kept is None:
            peers = preferring_one(peers, options)
        cluster = stack.enter_context(open_cluster(peers, options, model=model))
        loaded = cluster.load(model, options, resumes=kept)
        tell_why_not_predicted(loaded)
        if kept is not None:
            generation = replace(generation, max_new_tokens=_asked_tokens(kept, loaded))
            stream = loaded.stream_resume(kept)
        else:
            text: Prompt = prompt or ""
            tiles: Sequence[Tile] = ()
            in_chat = loaded.tokenizer.has_chat_template and not raw
            if in_chat:
                documents = kept_documents().texts(generation.context)
                said, pictures = loaded.read_pictures(
                    conversation_after(loaded.tokenizer, [_asked(prompt, images)], documents)
                )
                text = loaded.tokenizer.encode_chat(
                    said, thinking=generation.thinking, pictures=pictures
                )
                tiles = () if pictures is None else pictures.tiles
                generation = replace(generation, context=())
            elif images:
                why = "--raw uses none" if raw else f"{loaded.name} has none"
                raise RequestError(
                    f"images have their place in the chat template, and {why}",
                    remedy=f"leave out {'one of the two' if raw else '--image'}",
                )
            elif generation.thinking is not None:
                why = "--raw uses none" if raw else f"{loaded.name} has none"
                raise RequestError(
                    f"--thinking is a setting of the chat template, and {why}",
                    remedy=f"leave out {'one of the two' if raw else 'it'}",
                )
            else:
                generation = generation.after_text()
            stream = loaded.stream(
                text, generation, chat_tools=() if in_chat else None, tiles=tiles
            )
        if as_json:
            reply = whole_reply(stream)
            click.echo(json.dumps(_as_json(reply), ensure_ascii=False))
        else:
            reply = show_reply(loaded, stream, generation)
            tell_left_out(loaded, options)
        if explain and kept is None:
            show_sampling(loaded, reply, generation)
        times = show_parts(loaded, reply) if explain else None
        if (drift := drift_of(loaded, times)) is not None:
            tell_drift(cluster, loaded, model, options, drift, adapt=adapt)


def _asked(prompt: str | None, images: Sequence[str]) -> Message:
    """The user's message, in which images come first."""
    if not images:
        return {"role": "user", "content": prompt}
    parts = [{"type": "image", "image": Path(each)} for each in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}


def _check_resumed(context: click.Context) -> None:
    """Raises UsageError for options that would change a resumed answer."""
    fixed = {each.name for each in fields(GenerationOptions)} | {"model", "prompt", "raw", "images"}
    fixed |= {each.name for each in fields(LoadOptions)} - _CHANGEABLE
    for parameter in context.command.params:
        if parameter.name in fixed and _is_given(context, parameter.name):
            name = parameter.opts[-1] if isinstance(parameter, click.Option) else "MODEL"
            raise click.UsageError(
                f"--resume continues with the same prompt and options; leave out {name}"
            )


def _as_it_was(kept: KeptReply, given: LoadOptions, context: click.Context) -> LoadOptions:
    """The options of its model's load, with those that are given now."""
    changed = {name: getattr(given, name) for name in _CHANGEABLE if _is_given(context, name)}
    if _is_given(context, "plan_file") or _is_given(context, "parallel"):
        changed["plan"] = given.plan
    return replace(kept.options, **changed)


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _asked_tokens(kept: KeptReply, loaded: Model) -> int | None:
    """The answer's limit of tokens; None: the room in the context."""
    is_all = kept.prompt_tokens + kept.max_new_tokens == loaded.context_tokens
    return None if is_all else kept.max_new_tokens


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


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {**asdict(token), "bytes": list(token.bytes)}


def _logprobs(reply: Reply) -> list[dict[str, Any]]:
    return [
        {**_logprob(token), "top": [_logprob(each) for each in top]}
        for token, top in zip(reply.logprobs, reply.top_logprobs, strict=True)
    ]
