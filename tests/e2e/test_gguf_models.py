"""Models in GGUF over real daemons give what `transformers` gives for the weights in the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import edge
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.offload import BLOCK_TYPES
from tests.support.checkpoints import TinyCheckpoint, make_checkpoint
from tests.support.gguf_files import Type, write_gguf
from tests.support.plans import make_plan, streaming
from tests.support.processes import Daemon
from tests.support.processes import edge as run_edge
from tests.support.slow_cases import repeats_are_slow, shown_in_parts
from tests.support.small_tokenizers import CHAT_TEMPLATE, byte_fallback, byte_level

Checkpoints = Callable[..., TinyCheckpoint]

LARGEST_DIFFERENCE = 1e-4
NEW_TOKENS = 12
PROMPT_TOKENS = 24

QUANTISED = [
    getattr(Type, block.name)
    for block in BLOCK_TYPES.values()
    if block.is_read and block.dtype is None
]
LARGEST_ERROR_OF_CODES = 1e-3
LARGEST_ERROR_OF_INTEGER_INPUTS = 0.08
"""With every type, 0.072 by AVX2 alone."""
LARGEST_ERROR_WITH_STATES = 0.1
"""A state carries what it took in from token to token: 0.061."""


@pytest.mark.parametrize(
    ("name", "kind", "layout"),
    # What a file of each family holds is compared in `tests/unit/weights/test_gguf_checkpoints.py`,
    # and every type is in a file of the next test.
    repeats_are_slow(
        [
            ("llama", Type.Q4_0, "tensor_3"),
            ("llama_with_biases", Type.F16, "tensor_5"),
            ("llama_in_blocks", Type.Q4_K, "pipeline_2"),
            ("llama_in_blocks", Type.Q6_K, "tensor_3"),
            ("mistral", Type.BF16, "tensor_3"),
            ("qwen2_in_blocks", Type.Q5_1, "tensor_3"),
            ("qwen3_in_blocks", Type.Q8_0, "pipeline_3"),
            ("gemma2_in_blocks", Type.Q4_0, "tensor_3"),
            ("gemma3_in_blocks", Type.Q8_0, "tensor_3"),
            ("gemma4", Type.F16, "pipeline_2"),
            ("gemma4_moe", Type.BF16, "mixed_2_then_3"),
            ("gemma4_in_blocks", Type.Q8_0, "tensor_3"),
            ("glm4", Type.F32, "tensor_3"),
            ("granite", Type.F16, "pipeline_2"),
            ("phi3_in_blocks", Type.Q5_1, "tensor_3"),
            ("ministral3", Type.F16, "tensor_3"),
            ("mixtral", Type.F16, "tensor_3"),
            ("qwen2_moe_in_blocks", Type.Q4_0, "tensor_3"),
            ("qwen3_moe_in_blocks", Type.Q8_0, "pipeline_2"),
            ("gpt_oss_in_blocks", Type.MXFP4, "mixed_2_then_3"),
            ("glm4_moe", Type.BF16, "tensor_3"),
            ("lfm2_in_blocks", Type.Q4_1, "tensor_3"),
            ("lfm2_moe_in_blocks", Type.Q5_0, "pipeline_3"),
            ("qwen3_5_in_blocks", Type.Q4_0, "tensor_3"),
            ("qwen3_5_moe_in_blocks", Type.Q8_0, "pipeline_2"),
            ("qwen3_next_in_blocks", Type.Q5_1, "mixed_2_then_3"),
        ],
        of=(2,),
    ),
)
def test_logits_and_greedy_tokens_equal_transformers(
    five_peers: edge.Cluster,
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    name: str,
    kind: int,
    layout: str,
) -> None:
    made = tiny_checkpoint(name)
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, made.path, kind=kind)
    prompt = meant.prompt(PROMPT_TOKENS)
    plan = make_plan(meant.spec, layout, model=path.name)
    with five_peers.load(path, dtype="float32", plan=plan) as model:
        logits = model.logits(prompt)
        reply = model.generate(prompt, max_new_tokens=NEW_TOKENS)
    expected = meant.logits(prompt)
    assert np.abs(logits - expected).max() <= LARGEST_DIFFERENCE
    meant.check_greedy(prompt, reply.token_ids, NEW_TOKENS)


def experts_of_several_types(name: str) -> int:
    """A shared expert is held finer than the others, as people do."""
    if "shexp" in name:
        return int(Type.Q8_0)
    return int(Type.Q6_K if "down_exps" in name else Type.Q4_0)


MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def every_type_in_turn(name: str) -> int:
    """Neighbours differ, and the matrices of the four layers have all types between them."""
    layer, _, matrix = name.removeprefix("blk.").removesuffix(".weight").partition(".")
    if matrix not in MATRICES:
        return int(Type.Q8_0)
    number = len(MATRICES) * int(layer) + MATRICES.index(matrix)
    return int(QUANTISED[number % len(QUANTISED)])


CODES = [
    ("llama_in_blocks", every_type_in_turn),
    ("gemma4_in_blocks", Type.Q4_0),
    ("phi3_in_blocks", Type.Q4_0),
    ("qwen2_moe_in_blocks", experts_of_several_types),
    ("gpt_oss_in_blocks", Type.MXFP4),
    ("lfm2_in_blocks", Type.Q4_0),
    ("qwen3_5_in_blocks", Type.Q4_0),
]


@pytest.mark.parametrize(
    ("name", "kind", "accuracy"),
    repeats_are_slow([(*codes, accuracy) for accuracy in ("high", "fast") for codes in CODES]),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_codes_are_computed_with_as_the_file_has_them(
    five_peers: edge.Cluster,
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    name: str,
    kind: int | Callable[[str], int],
    accuracy: Accuracy,
) -> None:
    """Of phi3 cut out of fused matrices, of experts out of tensors with those of a layer, of linear
    attention in another order."""
    made = tiny_checkpoint(name)
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, made.path, kind=kind)
    prompt = meant.prompt(PROMPT_TOKENS)
    expected = meant.logits(prompt)
    layout = "tensor_2" if name == "llama_in_blocks" else "tensor_3"
    plan = make_plan(
        meant.spec, layout, model=path.name, column_multiple=32 if type(kind) is Type else 256
    )
    most = LARGEST_ERROR_OF_CODES
    if accuracy == "fast":
        rounded = (LARGEST_ERROR_OF_INTEGER_INPUTS, LARGEST_ERROR_WITH_STATES)
        most = rounded[meant.spec.has_states]
    with five_peers.load(path, plan=plan, accuracy=accuracy) as model:
        assert model.proposal.dtype == "as stored"
        assert relative_error(model.logits(prompt), expected) <= most


def as_people_mix_them(name: str) -> int:
    """Values finer than keys, and "down" finer in some layers, so that layers are unlike."""
    if "attn_v" in name or name in ("output.weight", "blk.1.ffn_down.weight"):
        return int(Type.Q6_K)
    return int(Type.F16 if name == "blk.2.ffn_down.weight" else Type.Q4_K)


@pytest.mark.parametrize("packed", [False, True], ids=["blocks", "packed"])
@pytest.mark.parametrize(
    "layout",
    [
        "mixed_2_then_3",
        *(
            pytest.param(each, marks=shown_in_parts("e2e/test_exactness_quantized.py"))
            for each in ("pipeline_2", "tensor_3")
        ),
    ],
)
@pytest.mark.linux_ways
def test_a_file_of_several_types(
    five_peers: edge.Cluster,
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    layout: str,
    packed: bool,
) -> None:
    """However it is cut, also with layers read from disk, which gives the same bits; in the file's
    blocks, and packed for devices that lack their kernels, which may cut columns within them."""
    made = tiny_checkpoint("llama_in_blocks")
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, made.path, kind=as_people_mix_them)
    prompt = meant.prompt(PROMPT_TOKENS)
    plan = make_plan(meant.spec, layout, model=path.name, column_multiple=32 if packed else 256)
    words = "4 bits in blocks of 32 with offsets" if packed else "blocks of Q4_K"
    found = []
    for each in (plan, streaming(plan, 3)):
        options = edge.LoadOptions(plan=each, accuracy="high", packs_blocks=packed)
        with five_peers.load(path, options) as model:
            found.append(model.logits(prompt))
            assert words in model.proposal.weights
    assert relative_error(found[0], meant.logits(prompt)) <= LARGEST_ERROR_OF_CODES
    np.testing.assert_array_equal(found[0], found[1])


@shown_in_parts("e2e/test_gguf_models.py", "e2e/test_whole_experts.py")
@pytest.mark.linux_ways
def test_blocks_of_experts_are_read_from_disk(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Whole layers, and experts one by one, with the bits of those in memory."""
    made = tiny_checkpoint("qwen2_moe_in_blocks")
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, made.path, kind=experts_of_several_types)
    prompt = meant.prompt(PROMPT_TOKENS)
    plan = make_plan(meant.spec, "mixed_2_then_3", model=path.name, column_multiple=256)
    found = []
    for each in (plan, streaming(plan, 1), streaming(plan, 2)):
        with five_peers.load(path, plan=each, accuracy="high") as model:
            found.append(model.logits(prompt))
            assert "blocks of Q6_K" in model.proposal.weights
    assert relative_error(found[0], meant.logits(prompt)) <= LARGEST_ERROR_OF_CODES
    for logits in found[1:]:
        np.testing.assert_array_equal(found[0], logits)


def relative_error(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@shown_in_parts("unit/weights/test_gguf_checkpoints.py", "e2e/test_exactness_quantized.py")
def test_int4_gives_what_the_same_weights_give_from_a_folder(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    made = tiny_checkpoint("llama_in_blocks")
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, made.path, kind=Type.Q4_1)
    prompt = meant.prompt(PROMPT_TOKENS)
    found = []
    for place in (path, meant.path):
        plan = make_plan(meant.spec, "tensor_2", model=place.name, column_multiple=256)
        with five_peers.load(place, dtype="int4", plan=plan) as model:
            found.append(model.logits(prompt))
    np.testing.assert_array_equal(found[0], found[1])


def test_commands_take_a_file(tmp_path: Path) -> None:
    """`run` and `chat`, with the chat template of the file, and `plan`; also a folder of it."""
    made = make_checkpoint(tmp_path / "made", "larger_llama")
    byte_level().save(str(made.path / "tokenizer.json"))
    folder = tmp_path / "downloads"
    folder.mkdir()
    path = folder / "small.gguf"
    settings = {
        "chat_template": CHAT_TEMPLATE,
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
        "ggml.add_bos_token": True,
    }
    write_gguf(path, made.path, kind=Type.Q8_0, tokenizer_settings=settings)
    found = run_edge("inspect", path, "--json")
    assert json.loads(found.out)["form"] == "GGUF"
    with Daemon(tmp_path / "peer", "--no-announce") as daemon:
        here = ("--peer", daemon.address)
        planned = run_edge("plan", path, *here)
        assert planned.code == 0, planned.err
        assert "small.gguf" in planned.out
        replies = [
            run_edge("run", place, "-p", "The quick", *more, *here, "-n", "4")
            for place, more in ((path, ()), (folder, ()), (path, ("--raw",)))
        ]
        assert [reply.code for reply in replies] == [0, 0, 0], replies[-1].err
        assert replies[0].out == replies[1].out
        assert replies[0].out.strip()
        talk = run_edge("chat", path, *here, "-n", "4", stdin="Hello\n")
        assert talk.code == 0, talk.err
        assert talk.out.strip()


PHI_3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + '\n' + "
    "message['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' + '\n' }}{% endif %}"
)
"""Of its form: a new line behind each mark, which its tokenizer takes off."""


def test_a_chat_of_phi_3_has_the_tokens_of_transformers(tmp_path: Path) -> None:
    """The file does not say that marks take the white space behind them."""
    import tokenizers
    import transformers

    tokenizer = byte_fallback()
    marks = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(mark, normalized=False, rstrip=mark != "<|endoftext|>")
            for mark in marks
        ]
    )
    count = tokenizer.get_vocab_size()
    config = transformers.Phi3Config(
        vocab_size=count,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        original_max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    transformers.set_seed(0)
    made = tmp_path / "made"
    transformers.Phi3ForCausalLM(config).save_pretrained(made)
    tokenizer.save(str(made / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(made / "tokenizer.json"), bos_token="<s>", eos_token="<|endoftext|>"
    )
    path = tmp_path / "phi-3.gguf"
    settings = {
        "chat_template": PHI_3_TEMPLATE,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "ggml.add_bos_token": False,
    }
    meant = write_gguf(path, made, tokenizer_settings=settings)
    talks: list[list[dict[str, str]]] = [
        [{"role": "user", "content": "The quick brown fox"}],
        [
            {"role": "system", "content": "It's small."},
            {"role": "user", "content": "  two  spaces,\n\nnew lines "},
            {"role": "assistant", "content": "I'm sure."},
            {"role": "user", "content": "\tand tabs?"},
        ],
    ]
    with (
        edge.Cluster.local(peers=1, threads=1) as cluster,
        cluster.load(path, dtype="float32", context_tokens=512) as model,
    ):
        for talk in talks:
            text = theirs.apply_chat_template(
                talk, chat_template=PHI_3_TEMPLATE, tokenize=False, add_generation_prompt=True
            )
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert theirs.convert_ids_to_tokens(ids[-1:]) == ["<|assistant|>"]
            reply = model.chat(talk, max_new_tokens=NEW_TOKENS, temperature=0)
            assert reply.statistics["prompt_tokens"] == len(ids)
            same = model.generate(ids, max_new_tokens=NEW_TOKENS, temperature=0)
            assert reply.token_ids == same.token_ids
            meant.check_greedy(ids, reply.token_ids, NEW_TOKENS)
