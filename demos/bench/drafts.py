"""A draft model: on the model's own device, and on another one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
from safetensors import safe_open
from safetensors.numpy import save_file

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.further_head import made_up
from edge.demos.bench.guesses import QUESTIONS
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import compared, random_prompt

_LAYERS = 2
"""Layers of a made-up draft model."""

DRAFT = click.option(
    "--draft",
    type=click.Path(exists=True, path_type=Path),
    help="The draft model; without it, a made-up model is drafted for by its first layers.",
)


@case.case(
    "what a draft model gains",
    case.FILE,
    DRAFT,
    case.dtype("int8"),
    case.number("--threads", 1),
    case.choice("--accuracy", ["fast", "high"], "fast"),
    case.number("--new-tokens", 160, least=8),
    case.rounds(7),
    case.FOLDER,
)
def drafts(given: Given) -> Iterator[Found]:
    """What a draft model gains on new text: beside its large model, and on another device of one
    machine.

    All sides answer the same prompts in turn, greedily. Also the share of answers whose tokens
    are those without guesses.
    """
    figures, tokens = Figures(), dict[int, tuple[int, ...]]()
    path, draft = given.file, given.draft
    if path is None or draft is None:
        path = made_up(given.folder / "further-head")
        draft = _first_layers(path, given.folder / "first-layers")
    with contextlib.ExitStack() as stack:

        def loaded(peers: int, draft: Path | None) -> edge.Model:
            cluster = stack.enter_context(edge.Cluster.local(peers, threads=given.threads))
            alone = cluster.propose(path, dtype=given.dtype, measure="nothing").plan
            if len(alone.devices) > 1:
                raise edge.RequestError("the plan leaves out no peer; take a smaller model")
            model = cluster.load(
                path,
                dtype=given.dtype,
                accuracy=given.accuracy,
                context_tokens=1024,
                plan=alone,
                draft=draft,
            )
            return stack.enter_context(model)

        models = {
            "off": loaded(1, None),
            "own device": loaded(1, draft),
            "another device": loaded(2, draft),
        }

        def answer(side: str, number: int) -> Mapping[str, float]:
            model = models[side]
            prompt = random_prompt(model, 64, number)
            if given.file is not None:
                question = {"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}
                prompt = model.tokenizer.encode_chat([question])
            reply = model.generate(prompt, max_new_tokens=given.new_tokens, ignore_eos=True)
            known = tokens.setdefault(number, reply.token_ids)
            if number and side != "off":
                per_pass = reply.statistics.get("tokens_per_pass", 1.0)
                figures.add(f"{side}, per pass", "tokens", per_pass)
                figures.add(f"{side}, same tokens", "share", float(known == reply.token_ids))
            return {"new text": reply.tokens_per_s}

        for number in range(given.rounds + 1):  # the tokens without guesses, first
            answer("off", number)
        sides = {side: lambda number, side=side: answer(side, number) for side in models}
        found = compared(sides, given.rounds, over="off", figures=figures)
    variant = f"{given.dtype}, {given.threads} threads, accuracy {given.accuracy}"
    variant += f", draft {draft.name}"
    yield Found(figures=found, variant=variant, model=path.name)


def _first_layers(path: Path, folder: Path) -> Path:
    """The checkpoint's embedding, first layers and head, as a model of its own."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
        config = json.loads((path / "config.json").read_text())
        config |= {"num_hidden_layers": _LAYERS, "first_k_dense_replace": _LAYERS}
        del config["num_nextn_predict_layers"]
        (folder / "config.json").write_text(json.dumps(config))
        with safe_open(path / "model.safetensors", "numpy") as tensors:
            parts = (name.split(".") for name in tensors.keys())  # noqa: SIM118  no mapping
            kept = [each for each in parts if each[1] != "layers" or int(each[2]) < _LAYERS]
            found = {name: tensors.get_tensor(name) for name in map(".".join, kept)}
        save_file(found, folder / "model.safetensors")
    return folder
