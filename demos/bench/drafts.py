"""A draft model: on the model's own device, and on another one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import click
from safetensors import safe_open
from safetensors.numpy import save_file

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.further_head import made_up
from edge.demos.bench.guesses import QUESTIONS
from edge.demos.bench.llama_files import written_gguf
from edge.demos.bench.llama_server import served_by_llama, tokens_per_s
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import compared, random_prompt

_LAYERS = 2
"""Layers of a made-up draft model."""
_DRAFTED = (3, 6, 12)
"""Most tokens that llama.cpp drafts, its default first."""

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
    case.text("--llama-server", "", "This program of llama.cpp, beside, with the same files."),
    case.text("--llama-python", "", "A Python with gguf, which writes these files."),
    case.rounds(7),
    case.FOLDER,
)
def drafts(given: Given) -> Iterator[Found]:
    """What a draft model gains on new text: beside its large model, and on another device of one
    machine.

    All sides answer the same prompts in turn, greedily. Also the share of answers whose tokens
    are those without guesses. Beside llama.cpp, both models are GGUF files of Q4_0, and each of its
    sides is a server of its own.
    """
    figures, tokens = Figures(), dict[int, tuple[int, ...]]()
    path, draft, dtype, form = given.file, given.draft, given.dtype, given.dtype
    if path is None or draft is None:
        kind, heads = ("alike-layers", 0) if given.llama_server else ("further-head", 1)
        path = made_up(given.folder / kind, further_heads=heads)
        draft = _first_layers(path, given.folder / f"first-of-{kind}")
        if given.llama_server:
            dtype, form = "auto", "Q4_0"
            path, draft = (
                written_gguf(each, each.with_suffix(".gguf"), python=given.llama_python, form=form)
                for each in (path, draft)
            )
    with contextlib.ExitStack() as stack:

        def loaded(peers: int, draft: Path | None) -> edge.Model:
            cluster = stack.enter_context(edge.Cluster.local(peers, threads=given.threads))
            alone = cluster.propose(path, dtype=dtype, measure="nothing").plan
            if len(alone.devices) > 1:
                raise edge.RequestError("the plan leaves out no peer; take a smaller model")
            model = cluster.load(
                path,
                dtype=dtype,
                accuracy=given.accuracy,
                context_tokens=1024,
                plan=alone,
                **({"draft": draft} if draft else {"speculate": "off"}),
            )
            return stack.enter_context(model)

        models = {
            "off": loaded(1, None),
            "own device": loaded(1, draft),
            "another device": loaded(2, draft),
        }

        def asked(number: int) -> Sequence[int]:
            model = models["off"]
            if given.file is None:
                return random_prompt(model, 64, number)
            question = {"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}
            return model.tokenizer.encode_chat([question])

        def answer(side: str, number: int) -> Mapping[str, float]:
            reply = models[side].generate(
                asked(number), max_new_tokens=given.new_tokens, ignore_eos=True
            )
            known = tokens.setdefault(number, reply.token_ids)
            if number and side != "off":
                found = reply.statistics
                figures.add(f"{side}, per pass", "tokens", found.get("tokens_per_pass", 1.0))
                if drafted := found.get("drafted_tokens"):
                    right = found.get("accepted_tokens", 0.0) / drafted
                    figures.add(f"{side}, right", "share", right)
                figures.add(f"{side}, same tokens", "share", float(known == reply.token_ids))
            return {"new text": reply.tokens_per_s}

        for number in range(given.rounds + 1):  # the tokens without guesses, first
            answer("off", number)
        sides: dict[str, Callable[[int], Mapping[str, float]]] = {
            side: partial(answer, side) for side in models
        }
        if given.llama_server:
            threads = str(given.threads)
            common = ("-c", "1024", "-np", "1", "--no-webui", "-t", threads, "-tb", threads)
            further = ("-md", str(draft), "--spec-type", "draft-simple", "-td", threads)
            drafted = {
                f"drafts of {most}": (*further, "--spec-draft-n-max", f"{most}")
                for most in _DRAFTED
            }
            for name, arguments in {"off": (), **drafted}.items():
                url = stack.enter_context(
                    served_by_llama(given.llama_server, path, *common, *arguments)
                )

                def answer_of_llama(number: int, url: str = url) -> Mapping[str, float]:
                    return {"new text": tokens_per_s(url, asked(number), given.new_tokens)}

                sides[f"llama.cpp, {name}"] = answer_of_llama
        found = compared(sides, given.rounds, over="off", figures=figures)
    variant = f"{form}, {given.threads} threads, accuracy {given.accuracy}"
    variant += f", draft {draft.name}"
    yield Found(figures=found, variant=variant, model=path.name)


def _first_layers(path: Path, folder: Path) -> Path:
    """The checkpoint's embedding, first layers and head, as a model of its own."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
        config = json.loads((path / "config.json").read_text())
        config["num_hidden_layers"] = _LAYERS
        if config.pop("num_nextn_predict_layers", 0):
            config["first_k_dense_replace"] = _LAYERS
        (folder / "config.json").write_text(json.dumps(config))
        with safe_open(path / "model.safetensors", "numpy") as tensors:
            parts = (name.split(".") for name in tensors.keys())  # noqa: SIM118  no mapping
            kept = [each for each in parts if each[1] != "layers" or int(each[2]) < _LAYERS]
            found = {name: tensors.get_tensor(name) for name in map(".".join, kept)}
        save_file(found, folder / "model.safetensors")
    return folder
