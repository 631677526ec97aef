"""The options of a load, as its user gives them: one object from the rim to the peers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from edge.errors import RequestError, shown
from edge.kernels.kv_cache.cache_size import keeps_remainders
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.membership.identity import LEAST_DIGITS, read_ids
from edge.memory.step_memory import has_states
from edge.models.spec import ModelSpec
from edge.option_fields import checks_calls, option
from edge.partition import Parallel, Plan, Workload
from edge.protocol.messages import MOST_TRUSTED
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import Wire
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import (
    AUTO,
    BLOCK_SIZES,
    Dtype,
    KvDtype,
    WeightFormat,
    check_format,
    kv_bits,
    kv_dtype,
    weight_format,
)

Streaming = Literal["auto", "on", "off"]
"""Whether layers may be read from disk for each token."""

ExpertCut = Literal["auto", "columns", "whole"]
"""What of its layers' experts a device has that shares layers with others."""

Standby = Literal["auto", "none", "kv"]

Replan = Literal["auto", "off"]

MOST_WAIT_S = 7 * 24 * 3600.0

DEFAULT_CONTEXT_TOKENS = 4096
"""What is planned for where nobody says a context. It becomes longer where there is memory left:
`longest_context.py`."""

MAX_REQUESTS_AT_ONCE = 64
"""Requests in one step; the CPU kernels gain little from more than 32."""

STATES_AT_ONCE = 4
"""Requests under way, where each has states however short it is: 50 MiB for Qwen3.5-9B. More where
more are asked for. As many more states are saved, for prompts that begin alike."""

CHUNK_TOKENS = 256
"""Prompt tokens per step: large enough to fill the matrix kernels, small enough to pipeline."""

SHORTER_CHUNK_TOKENS = 128
"""The same with remainders of keys and values: scores over the whole context are then in memory
three times for each row."""


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


def _check_devices(ids: object) -> None:
    if not isinstance(ids, tuple | list) or not all(isinstance(each, str) for each in ids):
        raise RequestError(f"prefixes_of must be ids of devices, not {shown(ids)}")
    if len(ids) > MOST_TRUSTED:
        raise RequestError(
            f"prefixes_of has {len(ids)} devices", remedy=f"{MOST_TRUSTED} is the most"
        )
    for each in ids:
        parse_devices(each)


@checks_calls
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded, and planned for. Raises RequestError for what can never be."""

    plan: Parallel | Plan = "auto"
    """"auto" (what should answer soonest: one peer, some or all), "pipeline" or "tensor" (every
    peer), or a `partition.Plan` whose devices are peers' ids or names. Several peers are measured
    before their first plan for a model; that is kept for the next time."""

    dtype: Dtype = option(
        AUTO,
        help="What weights are held in. auto: as they are in the file or folder, if they are "
        "quantised there, else int4. int4 keeps 8 bits where models are most sensitive (the "
        "head, keys, values, and down in a part of the layers); int4-pure has 4 everywhere. "
        "int3 and int2 have 2 in half of the weights, and in most: they lose much, small models "
        "too much.",
    )

    lora: str | Path | None = option(
        None,
        metavar="FOLDER",
        parse=Path,
        help="A LoRA adapter that is added to the weights, as the package peft writes it.",
    )
    """What is quantised on disk is made floats first, and rounded with what the adapter adds."""

    block_size: int | None = option(
        None,
        choices=BLOCK_SIZES,
        help="Weights that share a scale: smaller is closer, larger faster.  "
        "[default: 64 for most of int4, up to 128 in int3 and int2, else 32]",
    )

    accuracy: Accuracy = option(
        "fast",
        help="fast rounds the inputs of int4 and int8 products to 8 bits; high adds what that "
        "leaves over, in up to twice the time.",
    )
    """"fast" changes a product by 0.5 % (of its norm) and the logits of random models by 1.4 to
    3.7 %. "high": 0.002 % of a product, for 1.3 to 1.9 times the time of its products per decoded
    token and 2 times while the prompt is read. The weights stay as they are, so changing it sends
    nothing to peers that have them."""

    context_tokens: int | None = option(
        None,
        flags=("--context",),
        at_least=1,
        metavar="TOKENS",
        help="Longest prompt and answer together.  [default: the model's, as far as half of the "
        "memory that is left has room]",
    )
    """None: what the model has, as far as half of the memory that the plan leaves has room for it
    and no device becomes one that the model cannot lose; at least 4096, or what a longer `workload`
    needs. With rounded keys and values just that, because their scales depend on it; and no more
    than what a model with longer rotary positions for longer contexts has without these."""

    concurrency: int = option(
        1,
        at_least=1,
        at_most=MAX_REQUESTS_AT_ONCE,
        help="Requests at once: memory is kept for this many of the longest context.",
    )
    """Requests that fit together share each step; further ones wait."""

    batch_invariant: bool = option(
        False,
        help="Let no bit of an answer depend on who else is answered, nor on what of its prompt "
        "was an answer before. int4 then answers one request alone a fifth slower, and the next "
        "turn of a conversation reads the last answer again; CPU peers only.",
    )
    """In int4, and in int8 with blocks of 128, a row is rounded slightly differently when
    others are in its step. Float32 and blocks of 32 need nothing for it and lose nothing."""

    wire: Wire = option(
        "float32",
        help="What activations travel in between peers. float16 and int8 send a half and under a "
        "third of the bytes and change results; auto rounds where that saves time.",
    )
    """"float32" is exact. "float16" changes the logits of random float32 models by up to 0.11 % of
    the largest; "int8", in blocks of 32, sends 28 % and changes them by up to 3.1 %. "auto" rounds
    only what it saves time to round by the links that were measured, to int8 if the products round
    their inputs to 8 bits as well, else to float16."""

    kv_dtype: KvDtype = option(
        "float32",
        help="What keys and values are kept in; int8 and int4 take a quarter and an eighth. With "
        "another --context they are rounded slightly differently.",
    )
    """"int8" and "int4" have one scale for each channel, measured while loading by a chunk of 128
    fixed tokens (fewer where the context or the peers' KV memory has no room for them) and for the
    places that this context has: another context_tokens may mean slightly other scales, and where
    two tokens are nearly as likely, another answer. With "int4" a CPU sees the first token and the
    96 newest without rounding, and a request also takes what those lack. The logits of the
    bundled model change by 0.5 % of their norm with either, those of random models by up to 3 and
    11 %. Prompts are read more slowly. With "int4" a prompt that begins like
    another goes on from a saved state, in the same session alone."""

    share_prefixes: bool = option(
        False,
        help="Let other members of the cluster find the beginnings of prompts that peers keep in "
        "memory and on disk (--kv-disk), where they name this device (--prefixes-of); else only "
        "this device finds them.",
    )
    """What a peer keeps of keys and values is found, and read on disk, by who has their key: this
    device, or each member of the cluster."""

    prefixes_of: tuple[str, ...] | None = option(
        None,
        parse=parse_devices,
        repeats=True,
        metavar="ID,…",
        help="Also find the beginnings that these devices have left with --share-prefixes, which "
        "this one then does, too: ids, or their first 16 digits, as `edge cluster show` lists "
        "them. Name those that you trust: whoever leaves a beginning can leave a wrong one, which "
        "changes what is answered.",
    )
    """What others have left is never taken for what these or this device have."""

    workload: Workload | None = None
    """What the plan should be fast at; 512 tokens of prompt and 128 of answer if None."""

    stream: Streaming = option(
        "auto",
        help="Read layers from disk for each token, as fast as the disk is. auto: where the model "
        "fits no other way; on: also where that should be faster; off: never.",
    )
    """With "auto", how many layers and the predicted speed are told before the load. With "off", a
    model that fits nowhere is refused. A plan by hand says it itself (`streamed_layers`)."""

    experts: ExpertCut = option(
        "auto",
        help="How devices that share a layer have its experts. columns: a part of every one; "
        "whole: each all of some; auto: whole where edge plan --calibrate was told how often each "
        "is used, and that is predicted to be faster, else columns.",
    )
    """Whole ones are placed so that devices are done at the same time, by how many tokens go
    through each; a fast device with little memory gets those that most go through. A plan by hand
    says it itself (`experts` of its shards)."""

    standby: Standby = option(
        "auto",
        help="What is kept on this device against the loss of another. auto: copies of the keys "
        "and values of answers, up to 128 MiB, where the network is fast; kv: also of prompts, up "
        "to 1 GiB, over any network, and devices without a part keep the weights in memory that "
        "they would take over; none: answers are computed again.",
    )
    """Each peer sends what its layers keep of up to 32 tokens at once ("kv": 8): for each token 8
    bytes for each element of its keys, in every layer. With "auto" it does so on one machine, and
    where the devices of the plan were measured to reach each other with 100 MB/s. Answers under way
    at a loss then go on as soon as the model is loaded and their prompts are read; with "kv", as
    soon as it is loaded."""

    wait_for_peers_s: float = option(
        0.0,
        flags=("--wait-for-peers",),
        metavar="SECONDS",
        help="When a device is lost and the model does not fit on those that are left, wait so "
        "long for one that comes, before answers under way end with an error.",
    )

    replan: Replan = option(
        "auto",
        help="auto: use a device that joins while the model runs, where the pause for that pays "
        "for itself within a minute; off: after a loss, where it is known or waited for.",
    )
    """What joins is measured first, unless it was before. Answers under way go on with the same
    tokens; where another plan would round otherwise, it waits until none is under way. A plan by
    hand is only gone back to."""

    observes: bool = False
    """Sum up the inputs of all products, to round the weights by, or of a model with experts count
    who goes through which; see `edge.weights.observation`. The former takes memory and time."""

    def __post_init__(self) -> None:
        if self.prefixes_of is not None:
            _check_devices(self.prefixes_of)
        if not isinstance(self.lora, str | Path | None):
            raise RequestError(f"lora must be the path of a folder, not {shown(self.lora)}")
        wait_s = self.wait_for_peers_s
        if type(wait_s) not in (int, float) or not 0 <= wait_s <= MOST_WAIT_S:
            raise RequestError(
                f"wait_for_peers_s must be 0 to {MOST_WAIT_S:g} seconds, not {shown(wait_s)}"
            )
        check_format(self.dtype, self.block_size, self.accuracy)
        kv_dtype(self.kv_dtype)

    @property
    def keeps_shape(self) -> bool:
        """After a loss, a plan of the same stages and slices is preferred: what is kept fits no
        other one."""
        return self.standby == "kv" and self.kv_dtype != "float32"

    def weight_format(self, checkpoint: Checkpoint) -> WeightFormat:
        """What its weights are held in."""
        return weight_format(
            checkpoint.spec,
            self.dtype,
            self.block_size,
            self.accuracy,
            own=checkpoint.own_encoding,
        )

    def limits(self, spec: ModelSpec) -> StepLimits:
        """How large steps of this model may get. RequestError for a context it does not have."""
        context = self.context_tokens
        if context is None:
            wished = self.workload.context_tokens if self.workload is not None else 0
            context = min(max(DEFAULT_CONTEXT_TOKENS, wished), spec.context_tokens)
        if type(context) is not int or not 1 <= context <= spec.context_tokens:
            raise RequestError(
                f"context_tokens must be 1 to {spec.context_tokens} for this model, not "
                f"{shown(context)}"
            )
        states = has_states(spec, self.kv_dtype)
        most = STATES_AT_ONCE if states else MAX_REQUESTS_AT_ONCE
        chunk = SHORTER_CHUNK_TOKENS if keeps_remainders(kv_bits(self.kv_dtype)) else CHUNK_TOKENS
        requests = max(self.concurrency, most)
        return StepLimits(
            context_tokens=context,
            chunk_tokens=min(chunk, context),
            requests=requests,
            cached_tokens=context * self.concurrency,
            observes=self.observes,
            batch_invariant=self.batch_invariant,
            saved_states=requests if states and not self.observes else 0,
        )

    @property
    def trusted(self) -> tuple[str, ...]:
        """`prefixes_of`, as ids are compared."""
        return tuple(id for each in self.prefixes_of or () for id in parse_devices(each))


class LoadOverrides(TypedDict, total=False):
    """The fields of LoadOptions that a caller sets by name, for who checks types."""

    plan: Parallel | Plan
    dtype: Dtype
    lora: str | Path | None
    block_size: int | None
    accuracy: Accuracy
    context_tokens: int | None
    concurrency: int
    batch_invariant: bool
    wire: Wire
    kv_dtype: KvDtype
    workload: Workload | None
    share_prefixes: bool
    prefixes_of: tuple[str, ...] | None
    stream: Streaming
    experts: ExpertCut
    standby: Standby
    wait_for_peers_s: float
    replan: Replan
