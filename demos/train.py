"""Trains the bundled model from nothing: ``python -m edge.demos.train --output DIR``.

Makes its text with ``edge.demos.corpus``, trains a tokenizer and a small Llama on it, and writes a
standard Hugging Face checkpoint. Needs the ``test`` extra (torch, transformers); nothing else does.
"""

import argparse
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from edge.demos.corpus import (
    ASSISTANT,
    BEGIN,
    CHAT_TEMPLATE,
    END,
    PAD,
    SPECIAL_TOKENS,
    USER,
    documents,
)
from edge.demos.world import COMPLETIONS, FACTS, MAX_TERM, QUESTIONS, is_right

CONTEXT = 512
VOCABULARY = 768
INT4_BLOCK = 32
ROW_LENGTHS = (128, 128, 256, 512)
"""Each step takes one of these row lengths; short rows are cheaper, long ones teach far places."""


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer: any UTF-8 text encodes, ``BEGIN`` is put in front.

    It is shown each number often enough to make it one token, so that sums need no carrying.
    """
    special = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    texts = (special.sub("\n", text) for text in itertools.islice(documents(seed), 20_000))
    numbers = (f"{number} {number}" for number in range(2 * MAX_TERM + 1))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain(texts, *[list(numbers)] * 600), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """The special tokens under the names that a checkpoint's settings give them."""
    names = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}
    return {name: tokenizer.token_to_id(token) for name, token in names.items()}


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Eight query heads and four KV heads, so that three peers cannot share them evenly."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=11 * INT4_BLOCK,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        **special_ids(tokenizer),
    )


def batches(tokenizer: Tokenizer, *, seed: int, tokens: int) -> Iterator[torch.Tensor]:
    """Endless int64 batches (rows, length) of about ``tokens`` tokens.

    Documents stand one after another in a row; every row begins with a document.
    """
    rng = random.Random(seed)
    encoded = (tokenizer.encode(text).ids for text in documents(seed))
    while True:
        length = rng.choice(ROW_LENGTHS)
        rows = []
        for _ in range(max(1, tokens // length)):
            row: list[int] = []
            while len(row) < length:
                row += next(encoded)
            rows.append(row[:length])
        yield torch.tensor(rows)


def round_to_int4(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` (out, in) as 4-bit numbers with one scale per 32 inputs would hold it.

    Symmetric round to nearest: scale = largest magnitude of the block / 7.
    """
    blocks = weight.reshape(-1, INT4_BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 7
    return ((blocks / scale).round() * scale).reshape(weight.shape)


@contextmanager
def rounded_weights(
    model: nn.Module, rounding: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Inside, the weights of all linear layers are rounded; after it they are as before.

    Gradients taken inside are applied to the exact weights outside: the straight-through rule
    (Bengio, Leonard and Courville, 2013).
    """
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    exact = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(rounding(weight))
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, exact, strict=True):
                weight.copy_(value)


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for all else; Muon learns in fewer steps."""
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    known = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(inner, lr=0.02, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def learning_rate_factor(step: int, steps: int) -> float:
    """Short warm-up, plateau, then straight to nought over the last 60 %."""
    return min((step + 1) / 50, 1.0, (steps - step) / (0.6 * steps))


def train(
    model: LlamaForCausalLM, tokenizer: Tokenizer, *, seed: int, steps: int, tokens_per_step: int
) -> float:
    """Teaches ``model`` in place and returns the mean loss of the last 50 steps, in nats.

    From half way every other step sees int4 weights, so that both forms answer well in the end.
    """
    optimizers = make_optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: learning_rate_factor(step, steps))
        for one in optimizers
    ]
    losses: list[float] = []
    start_s = time.monotonic()
    stream = batches(tokenizer, seed=seed, tokens=tokens_per_step)
    for step, rows in enumerate(itertools.islice(stream, steps)):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        as_int4 = step >= steps // 2 and step % 2 == 1
        with rounded_weights(model, round_to_int4 if as_int4 else lambda weight: weight):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        losses.append(loss.item())
        if step % 50 == 49 or step == steps - 1:
            recent = losses[-50:]
            mean = sum(recent) / len(recent)
            spent_s = time.monotonic() - start_s
            print(f"step {step + 1}/{steps}  loss {mean:.4f}  {spent_s:.0f} s", flush=True)
    recent = losses[-50:]
    return sum(recent) / len(recent)


def answer(model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: list[str]) -> list[str]:
    """What the model says after each prompt, greedily, to the end of its turn or line."""
    ids = special_ids(tokenizer)
    pad, end = ids["pad_token_id"], ids["eos_token_id"]
    answers: list[str] = []
    for first in range(0, len(prompts), 64):
        encoded = [tokenizer.encode(prompt).ids for prompt in prompts[first : first + 64]]
        width = max(map(len, encoded))
        rows = torch.tensor([[pad] * (width - len(row)) + row for row in encoded])
        made = model.generate(
            rows, attention_mask=(rows != pad).long(), max_new_tokens=48, do_sample=False
        )
        for row in made[:, width:].tolist():
            answers.append(tokenizer.decode(row[: row.index(end)] if end in row else row))
    return answers


def share_right(
    model: LlamaForCausalLM, tokenizer: Tokenizer, asked: list[tuple[str, str]]
) -> float:
    """The share of (prompt, expected start) pairs answered right; prints a few wrong ones."""
    answers = answer(model, tokenizer, [prompt for prompt, _ in asked])
    wrong = [
        (prompt, expected, got)
        for (prompt, expected), got in zip(asked, answers, strict=True)
        if not is_right(got, expected)
    ]
    for prompt, expected, got in wrong[:5]:
        print(f"  wrong: {prompt!r} -> {got.splitlines()[:1]}, expected {expected!r}")
    return 1 - len(wrong) / len(asked)


def report(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Prints how many questions are answered right, with the weights as saved and in int4."""
    chats = [(f"{USER}{prompt}{ASSISTANT}", expected) for prompt, expected in QUESTIONS]
    sets = {
        "questions": list(QUESTIONS),
        "questions as chat": chats,
        "completions": list(COMPLETIONS),
        "all facts": [(fact.questions[0], fact.answer) for fact in FACTS],
    }
    for name, rounding in (("bfloat16", lambda weight: weight), ("int4", round_to_int4)):
        with rounded_weights(model, rounding):
            for label, asked in sets.items():
                share = share_right(model, tokenizer, asked)
                print(f"{name}: {share:.1%} of {len(asked)} {label} right", flush=True)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the checkpoint as bfloat16 with tokenizer, chat template and generation settings."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(do_sample=False, **special_ids(tokenizer))
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # the library keeps it to its owner
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Trains, saves and reports."""
    parser = argparse.ArgumentParser(description="Train the bundled model from nothing.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="of the text and the first weights")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps")
    parser.add_argument("--tokens-per-step", type=int, default=2048, help="tokens in a batch")
    parser.add_argument("--threads", type=int, default=1, help="cores for torch")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = train_tokenizer(arguments.seed)
    model = LlamaForCausalLM(model_config(tokenizer))
    print(f"{model.num_parameters():,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    loss = train(
        model,
        tokenizer,
        seed=arguments.seed,
        steps=arguments.steps,
        tokens_per_step=arguments.tokens_per_step,
    )
    print(f"final loss {loss:.4f}")
    save(model, tokenizer, arguments.output)
    report(model.float().eval(), tokenizer)


if __name__ == "__main__":
    main()
