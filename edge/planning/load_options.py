"""The options of a load, as a user gives them to the API or the command line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, TypedDict, get_args

from edge.errors import RequestError, shown
from edge.host import block_kernels
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.membership.identity import LEAST_DIGITS, read_ids
from edge.memory.step_memory import rewinds
from edge.memory.windows import can_keep_windows
from edge.models.spec import FILE_BLOCKS, ModelSpec
from edge.option_fields import checks_calls, option
from edge.partition import Parallel, Plan, Workload
from edge.protocol.peer_info import PeerInfo
from edge.protocol.session_frames import MOST_TRUSTED
from edge.protocol.step import Speculation, StepLimits
from edge.protocol.wire_rules import Wire
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import (
    AS_STORED,
    AUTO,
    BLOCK_SIZES,
    Dtype,
    KvDtype,
    WeightFormat,
    check_format,
    kv_dtype,
    weight_format,
)

Streaming = Literal["auto", "on", "off"]
"""Whether layers may be read from disk for each token."""

ExpertCut = Literal["auto", "columns", "whole"]
"""How devices that share a layer divide its experts."""

Standby = Literal["auto", "none", "kv"]

Replan = Literal["auto", "off"]

MOST_WAIT_S = 7 * 24 * 3600.0

DEFAULT_CONTEXT_TOKENS = 4096
"""The context that is planned for without `context_tokens`. It becomes longer where memory is left
(`longest_context.py`)."""

MAX_REQUESTS_AT_ONCE = 64
"""The most requests in one step; the CPU kernels gain little from more than 32."""

MOST_COPIES = 64

STATES_AT_ONCE = 4
"""Concurrent requests of a model with recurrent states, which take the same memory for any length:
50 MiB for Qwen3.5-9B. A larger `concurrency` raises it. As many further states are saved, for
prompts that begin alike."""

SAVED_WINDOWS = 16
"""Most saved windows, for prompts that begin alike. They take memory that is free otherwise."""

CHUNK_TOKENS = 256
"""Prompt tokens per step: large enough to fill the matrix kernels, small enough to pipeline."""

PICTURE_TOKENS = 288
"""The same where the rows of a picture are computed in one step: Gemma 4's have up to 280."""


def parse_devices(text: str) -> tuple[str, ...]:
    """Ids of devices, or their first digits. Raises RequestError otherwise."""
    found = read_ids(text)
    if found is None:
        raise RequestError(
            f"{shown(text)} names no devices",
            remedy="write ID or ID,ID, with the ids that `edge cluster show` lists, or their "
            f"first {LEAST_DIGITS} digits or more",
        )
    return found


def parse_copies(text: str) -> int | Literal["auto"]:
    """A number of copies, or "auto". Raises RequestError otherwise."""
    if text == "auto":
        return "auto"
    return _checked_copies(int(text) if text.isascii() and text.isdigit() else text)


def _checked_copies(copies: object) -> int:
    if type(copies) is not int or not 1 <= copies <= MOST_COPIES:
        raise RequestError(
            f"copies must be auto or a number, not {shown(copies)}",
            remedy=f"give auto, or 1 to {MOST_COPIES}",
        )
    return copies


def _check_devices(ids: object) -> None:
    if not isinstance(ids, tuple | list) or not all(isinstance(each, str) for each in ids):
        raise RequestError(f"prefixes_of must be ids of devices, not {shown(ids)}")
    if len(ids) > MOST_TRUSTED:
        raise RequestError(
            f"prefixes_of has {len(ids)} devices", remedy=f"name at most {MOST_TRUSTED}"
        )
    for each in ids:
        parse_devices(each)


@checks_calls
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded and planned. Raises RequestError for values that no model allows."""

    plan: Parallel | Plan = "auto"
    """"auto" (the fastest plan by prediction: one peer, some or all), "pipeline" or "tensor" (every
    peer), or a `partition.Plan` whose devices are peers' ids or names. Several peers are measured
    before their first plan for a model; the measurements are kept for the next time."""

    dtype: Dtype = option(
        AUTO,
        help="Weight format. auto: the format of the file or folder, if it is quantised, else "
        "int4. int4 keeps more bits where models are most sensitive (the head, keys, values, and "
        "down in a part of the layers); int4-pure has 4 everywhere. int3 and int2 "
        "have 3 and 2 in most weights: answers get much worse, those of small models useless.",
    )

    lora: str | Path | None = option(
        None,
        metavar="FOLDER",
        parse=Path,
        help="A LoRA adapter that is added to the weights, as the package peft writes it.",
    )
    """Quantised weights are decoded first; the sum of weights and adapter is rounded."""

    block_size: int | None = option(
        None,
        choices=BLOCK_SIZES,
        help="Weights that share a scale: smaller is closer, larger faster. int4, int3 "
        "and int2 are then packed, with more loss.  [default: their own, else 32]",
    )

    accuracy: Accuracy = option(
        "fast",
        help="fast rounds the inputs of int4 and int8 products to 8 bits; high computes with "
        "the rounding errors, too, in up to twice the time.",
    )
    """"fast" changes a product by 0.5 % (of its norm) and the logits of random models by 1.4 to 3.7
    %. "high" changes a product by 0.002 %. Its products take 1.3 to 1.9 times the time per decoded
    token, and 2 times in the prompt. The weights are the same, so a change sends nothing to peers
    that have them."""

    context_tokens: int | None = option(
        None,
        flags=("--context",),
        at_least=1,
        metavar="TOKENS",
        help="Longest prompt and answer together.  [default: the model's, if half of the free "
        "memory has room for it, else less]",
    )
    """None: the context of the model, as far as half of the memory that the plan leaves has room
    for it, and no device becomes one that the model cannot lose. At least 4096 tokens, or those of
    a longer `workload`. With rounded keys and values exactly that, because their scales depend on
    the context. A model whose rotary positions change for longer contexts gets no more than the
    context before that change."""

    concurrency: int = option(
        1,
        at_least=1,
        at_most=MAX_REQUESTS_AT_ONCE,
        help="Requests at once: memory is kept for this many of the longest context.",
    )
    """Requests that fit into memory together share each step; further ones wait."""

    copies: int | Literal["auto"] | None = option(
        None,
        metavar="auto|N",
        parse=parse_copies,
        help="Load the whole model on N devices, and give each request to the copy that should "
        "have its answer first. auto: as many copies as fit, while the requests at once should "
        "make 10 % more tokens per second with them than with one plan.  [default: 1]",
    )
    """A request goes where the beginning of its prompt is, unless that copy has too much to do.
    Answers of a lost copy go on on another one, with the same tokens. All copies have the same
    context, and `concurrency` counts for each. Devices that cannot hold the model alone may hold a
    copy together."""

    batch_invariant: bool = option(
        False,
        help="Compute the same bits whatever other requests run, and whether a part of the prompt "
        "was an answer before. One int4 request alone is then a fifth slower, and the next "
        "turn of a conversation computes the last answer again; CPU peers only.",
    )
    """In packed int4, and in int8 with blocks of 128, rounding of a row differs slightly when other
    rows are in its step. Float32 and blocks of 32 are always batch invariant, at no cost, but for
    guessed tokens (`speculate`), which this option turns off."""

    wire: Wire = option(
        "float32",
        help="Number format of activations between peers. float16 and int8 send a half and under "
        "a third of the bytes, and change results; auto rounds where that saves time.",
    )
    """"float32" is exact. "float16" changes the logits of random float32 models by up to 0.11 % of
    the largest. "int8", in blocks of 32, sends 28 % of the bytes and changes them by up to 3.1 %.
    "auto" rounds only where that saves time by the measured links: to int8 if the products round
    their inputs to 8 bits as well, else to float16."""

    kv_dtype: KvDtype = option(
        "float32",
        help="Number format of the KV cache; int8 and int4 take a quarter and an eighth of the "
        "memory. With another --context they are rounded slightly differently.",
    )
    """"int8" and "int4" have one scale for each channel. The scales are measured while loading,
    from a chunk of 128 fixed tokens (fewer where the context or the peers' KV memory is smaller),
    for the positions of this context. So another context_tokens may change scales slightly, and an
    answer where two tokens are nearly as likely. With "int4", a CPU keeps the first token and the
    96 newest unrounded, which takes further memory for each request. The logits of the bundled
    model change by 0.5 % of their norm with either; those of random models by up to 3 and 11 %.
    A CPU needs the library of kernels for "int4", and prefix caching goes on from saved states."""

    share_prefixes: bool = option(
        False,
        help="Let other members of the cluster use the prefix caches of this device, which peers "
        "keep in memory and on disk (--kv-disk), if they name it (--prefixes-of); else only this "
        "device uses them.",
    )
    """A prefix cache on a peer is found, and read from disk, with its key: the key of this device,
    or that of each member of the cluster."""

    prefixes_of: tuple[str, ...] | None = option(
        None,
        parse=parse_devices,
        repeats=True,
        metavar="ID,…",
        help="Also use the prefix caches of these devices, which run with --share-prefixes; this "
        "device then shares its own. Ids, or their first 16 digits, as `edge cluster show` lists "
        "them. Name only devices that you trust: a wrong prefix cache changes answers.",
    )
    """Prefix caches of other devices are never mistaken for those of this device."""

    workload: Workload | None = None
    """The workload that the plan is optimised for; 512 tokens of prompt and 128 of answer if
    None."""

    stream: Streaming = option(
        "auto",
        help="Read layers from disk for each token, at the speed of the disk. auto: where the "
        "model fits only so; on: also where that is predicted to be faster; off: never.",
    )
    """With "auto", the number of streamed layers and the predicted speed are reported before the
    load. With "off", a model that does not fit is refused. A plan by hand has its own
    `streamed_layers`."""

    experts: ExpertCut = option(
        "auto",
        help="How devices that share a layer divide its experts. columns: each has a part of every "
        "expert; whole: each has some experts; auto: whole where edge plan --calibrate counted "
        "the use of each expert and that is predicted to be faster, else columns.",
    )
    """Whole experts are placed such that devices finish at the same time, by the number of tokens
    that go through each expert. A fast device with little memory gets the most used experts. A plan
    by hand has its own `experts` of shards."""

    speculate: Speculation | None = option(
        None,
        choices=get_args(Speculation),
        help="Guess tokens, and compute several in one step. lookup: by looking up the last ones "
        "earlier in prompt and answer; auto: the same, while the answer repeats such passages; "
        "draft: by the model of --draft; mtp: by the model's further head, if it has one; "
        "off: never.  [default: draft with --draft, else off]",
    )
    """Right guesses save steps, and wrong ones are cut off, so the answer stays the same; with
    `accuracy` "fast" it may differ where two tokens are nearly as likely, because a row alone is
    rounded in another way than several. Of an answer with a schema or grammar, what that forces is
    guessed. Several answers are guessed in turn, where that is faster for each than one step.
    Answers on GPUs are not guessed, nor with `batch_invariant`, or with `kv_dtype` "int4". Each
    request may ask for another way (`GenerationOptions`). With "mtp" the device that chooses tokens
    holds the head for multi-token prediction of DeepSeek-V3, GLM-4.5 and later, and Qwen3.5, in 8
    bits; other models are refused, and only CPUs compute it."""

    draft: str | Path | None = option(
        None,
        metavar="MODEL",
        parse=str,
        help="A small model of the same vocabulary that guesses tokens: a folder, a GGUF file, or "
        "a name. It runs on a device that the plan leaves out, else beside the model.",
    )
    """Guesses are verified, so answers stay those of the model; see `speculate`. A model of another
    vocabulary is refused, as is one for which no device has room. If its device is lost, answers go
    on without it."""

    standby: Standby = option(
        "auto",
        help="What this device keeps for the loss of another. auto: copies of the keys and values "
        "of answers, up to 128 MiB, where the network is fast; kv: also of prompts, up to 1 GiB, "
        "over any network, and spare devices hold the weights in memory that they would take "
        "over; none: answers are computed again.",
    )
    """Each peer sends copies of its keys and values for up to 32 tokens at once ("kv": 8). A token
    takes 8 bytes for each element of its keys, in every layer. With "auto", peers do so on one
    machine, and where the links between the plan's devices were measured at 100 MB/s or more. After
    a loss, answers under way go on as soon as the model is loaded and their prompts are computed;
    with "kv", as soon as it is loaded."""

    spot_check: float = option(
        0.0,
        metavar="SHARE",
        help="After this share of steps, as 0.01, have a peer prove its arithmetic anew; "
        "one that computes wrongly is replaced. It takes the peer some 10 ms.",
    )

    wait_for_peers_s: float = option(
        0.0,
        flags=("--wait-for-peers",),
        metavar="SECONDS",
        help="When a device is lost and the model does not fit on the others, wait this long for "
        "a new device before answers under way end with an error.",
    )

    replan: Replan = option(
        "auto",
        help="auto: while the model runs, use a device that joins, and move layers away from one "
        "that becomes busy, if the pause pays for itself within a minute; off: only after a loss.",
    )
    """A device that joins is measured first, unless it was measured before. Answers under way go on
    with the same tokens; a plan that rounds differently waits until no answer is under way. A
    device is busy when its own part of a token takes 1.5 times as long as usual for ten seconds,
    and no longer after half a minute in which it does not. A model with a plan by hand only returns
    to that plan."""

    observes: bool = False
    """Sum up the inputs of all products, for quantization with data; in a model with experts, or
    count the tokens of each expert (see `edge.weights.observation`). The sums take memory and
    time."""

    keeps_all_tokens: bool = False
    """Layers with a sliding window keep all tokens, so that a request can be cut anywhere."""

    packs_blocks: bool = False
    """Weights are packed for ONNX Runtime's kernels, though peers might compute with blocks of
    files; see `for_peers`."""

    def __post_init__(self) -> None:
        if self.prefixes_of is not None:
            _check_devices(self.prefixes_of)
        if not isinstance(self.lora, str | Path | None):
            raise RequestError(f"lora must be the path of a folder, not {shown(self.lora)}")
        if not isinstance(self.draft, str | Path | None):
            raise RequestError(f"draft must be a model's path or name, not {shown(self.draft)}")
        if self.speculate == "draft" and self.draft is None:
            raise RequestError(
                'speculate "draft" needs a draft model', remedy="name one: draft, or --draft MODEL"
            )
        if self.draft is not None and (self.batch_invariant or self.observes):
            raise RequestError(
                "batch_invariant and observed loads guess no tokens",
                remedy="leave out the draft model",
            )
        self._check_copies()
        wait_s = self.wait_for_peers_s
        if type(wait_s) not in (int, float) or not 0 <= wait_s <= MOST_WAIT_S:
            raise RequestError(
                f"wait_for_peers_s must be 0 to {MOST_WAIT_S:g} seconds, not {shown(wait_s)}"
            )
        share = self.spot_check
        if type(share) not in (int, float) or not 0 <= share <= 1:
            raise RequestError(f"spot_check must be 0 to 1, not {shown(share)}")
        check_format(self.dtype, self.block_size, self.accuracy)
        kv_dtype(self.kv_dtype)

    @property
    def wants_copies(self) -> bool:
        """Whether there may be more than one copy."""
        return self.copies == "auto" or (self.copies or 1) > 1

    def _check_copies(self) -> None:
        if self.copies not in (None, "auto"):
            _checked_copies(self.copies)
        if self.wants_copies:
            given = {
                "a plan": self.plan != "auto",
                "a draft model": self.draft is not None,
                'standby "kv"': self.standby == "kv",
                'stream "on"': self.stream == "on",
                "observes": self.observes,
            }
            for what, is_given in given.items():
                if is_given:
                    raise RequestError(
                        f"{what} is for a model without copies",
                        remedy="leave it out, or load one copy: copies 1",
                    )

    @property
    def usually_speculates(self) -> Speculation:
        """How tokens are guessed where a request leaves it open."""
        return self.speculate or ("off" if self.draft is None else "draft")

    @property
    def has_further_head(self) -> bool:
        """Whether the model's further head is loaded."""
        return self.speculate == "mtp"

    @property
    def keeps_shape(self) -> bool:
        """After a loss, a plan with the same stages and slices is preferred, because the copied
        keys and values fit no other plan."""
        return self.standby == "kv" and self.kv_dtype != "float32"

    def weight_format(self, checkpoint: Checkpoint) -> WeightFormat:
        """The weight format of a load of this checkpoint."""
        return weight_format(
            checkpoint.spec,
            self.dtype,
            self.block_size,
            self.accuracy,
            own=checkpoint.own_encoding,
            packs_blocks=self.packs_blocks,
        )

    def for_peers(self, checkpoint: Checkpoint, peers: Iterable[PeerInfo]) -> Self:
        """These options for a load of the checkpoint on any of these peers. Blocks of files are
        packed if one of them lacks kernels for these, or this device lacks those that round."""
        found = self.weight_format(checkpoint)
        rounds_here = found.name != AS_STORED and block_kernels.library() is None
        if found.needs and (rounds_here or any(FILE_BLOCKS in peer.lacks for peer in peers)):
            return replace(self, packs_blocks=True)
        return self

    def limits(self, spec: ModelSpec, *, may_keep_windows: bool = True) -> StepLimits:
        """The largest steps of this model. may_keep_windows: layers with a sliding window may keep
        the newest tokens only. RequestError for a context that the model does not have."""
        context = self.context_tokens
        if context is None:
            wished = self.workload.context_tokens if self.workload is not None else 0
            context = min(max(DEFAULT_CONTEXT_TOKENS, wished), spec.context_tokens)
        if type(context) is not int or not 1 <= context <= spec.context_tokens:
            raise RequestError(
                f"context_tokens must be 1 to {spec.context_tokens} for this model, not "
                f"{shown(context)}"
            )
        states = rewinds(spec, self.kv_dtype)
        most = STATES_AT_ONCE if states else MAX_REQUESTS_AT_ONCE
        chunk = CHUNK_TOKENS
        if any(each.sees_pictures for each in spec.attentions.values()):
            chunk = max(chunk, PICTURE_TOKENS)
        chunk, requests = min(chunk, context), max(self.concurrency, most)
        keeps_windows = (
            may_keep_windows
            and not (self.observes or self.keeps_all_tokens)
            and can_keep_windows(spec, self.kv_dtype, context_tokens=context, chunk_tokens=chunk)
        )
        # Saved windows otherwise have memory of the layers that keep all tokens.
        is_all_windows = all(each.window for each in spec.attentions.values())
        saved = requests if states else SAVED_WINDOWS if keeps_windows else 0
        return StepLimits(
            context_tokens=context,
            chunk_tokens=chunk,
            requests=requests,
            cached_tokens=context * self.concurrency,
            observes=self.observes,
            batch_invariant=self.batch_invariant,
            saved_states=0 if self.observes else saved,
            windows=self.concurrency + is_all_windows if keeps_windows else 0,
        )

    @property
    def trusted(self) -> tuple[str, ...]:
        """`prefixes_of`, parsed into ids."""
        return tuple(id for each in self.prefixes_of or () for id in parse_devices(each))


class LoadOverrides(TypedDict, total=False):
    """The fields of LoadOptions as keyword arguments, for type checkers."""

    plan: Parallel | Plan
    dtype: Dtype
    lora: str | Path | None
    block_size: int | None
    accuracy: Accuracy
    context_tokens: int | None
    concurrency: int
    copies: int | Literal["auto"] | None
    batch_invariant: bool
    wire: Wire
    kv_dtype: KvDtype
    workload: Workload | None
    share_prefixes: bool
    prefixes_of: tuple[str, ...] | None
    stream: Streaming
    experts: ExpertCut
    speculate: Speculation | None
    draft: str | Path | None
    standby: Standby
    spot_check: float
    wait_for_peers_s: float
    replan: Replan
