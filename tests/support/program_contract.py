"""What every back end's program promises, as checks that all of them pass.

A script as well: once a process has computed as a CPU peer does, ONNX Runtime shares one pool of
threads in it, and refuses sessions with pools of their own, which other tests have.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.backends.interface import StageProgram
from edge.backends.registry import open_backend
from edge.errors import CheckpointError, RequestError
from edge.models.latent_attention import Latent
from edge.models.rotary import Rotary
from edge.models.spec import ROUNDED_KV, WEIGHTS_ON_DISK, ModelSpec
from edge.offload import DerivedCache, KVTier, MemoryKVTier, StoreFullError
from edge.profiling.random_weights import written_weights
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.transport import SoloCollective
from edge.weights.formats import KvDtype, WeightFormat, weight_format
from edge.weights.layout import shard_layout
from tests.support.formats import uniform_format
from tests.support.plans import make_plan
from tests.support.specs import few_random_bytes, plain_spec
from tests.support.triton_shards import decode, without_self_check

SPEC = plain_spec(
    num_layers=3,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    ffn_columns=32,
    vocab_size=50,
    context_tokens=40,
    windows=(None, 3, None),
    soft_cap=2.0,
    has_post_norm=True,
    mlp_has_post_norm=True,
    activation="gelu_tanh",
    embedding_scale=2.0,
    logit_soft_cap=3.0,
)
LATENT = plain_spec(
    num_layers=3,
    hidden_size=SPEC.hidden_size,
    num_heads=3,
    num_kv_heads=1,
    head_size=16,
    rotary=Rotary(inverse_frequencies=(1.0, 0.3, 0.1)),
    latent=Latent(query_rank=13, rank=21, shared_size=6, value_size=12, bias=True),
    ffn_columns=32,
    vocab_size=SPEC.vocab_size,
    context_tokens=40,
)
"""With latent attention, whose heads share the rows that are kept."""

MODELS = {"plain": SPEC, "latent": LATENT}
LIMITS = StepLimits(context_tokens=40, chunk_tokens=8, requests=2, cached_tokens=16)
PROMPT = (7, 3, 41, 0)
LENGTH = len(PROMPT)

FLOATS = uniform_format("float32")

LARGEST_DIFFERENCE = 1e-4
"""Of float32 computed in another order."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kind:
    """A back end by its name, where its files may be, and the model of its programs."""

    name: str
    folder: Path
    spec: ModelSpec = SPEC

    @property
    def lacks(self) -> frozenset[str]:
        return open_backend(self.name, threads=1).lacks

    def kept(self, *kv_dtypes: KvDtype) -> tuple[KvDtype, ...]:
        """Those of these types in which it keeps keys and values; it refuses the others."""
        if self.spec is LATENT:  # no plan asks for others
            return tuple(each for each in kv_dtypes if each == "float32")
        if ROUNDED_KV not in self.lacks:
            return kv_dtypes
        for each in kv_dtypes:
            if each != "float32":
                with (
                    pytest.raises(RequestError, match=f"in float32, and {each} was asked for"),
                    self.program(kv_dtype=each),
                ):
                    pass
        return tuple(each for each in kv_dtypes if each == "float32")

    @contextmanager
    def program(
        self,
        *,
        layout: str = "solo",
        stage: int = 0,
        limits: StepLimits = LIMITS,
        kv_dtype: KvDtype = "float32",
        kv_tier: KVTier | None = None,
        form: WeightFormat = FLOATS,
    ) -> Iterator[StageProgram]:
        """A shard of random weights, the same ones for the same shard."""
        plan = make_plan(self.spec, layout, model="m")
        shard = shard_layout(self.spec, plan, stage=stage, rank=0)
        with (
            few_random_bytes(),
            written_weights(shard, form, self.folder) as weights,
            ExitStack() as stack,
        ):
            if self.name == "triton":
                stack.enter_context(without_self_check())
            program = open_backend(self.name, threads=1).load(
                self.spec,
                shard,
                replace(weights, packed=DerivedCache(self.folder / "packed", 1 << 30)),
                form,
                limits=limits,
                kv_dtype=kv_dtype,
                kv_tier=kv_tier,
            )
            try:
                if kv_dtype != "float32":
                    compute(program, chunk("calibration", PROMPT, rows=0))
                    program.calibrate("calibration")
                yield program
            finally:
                program.close()


def compute(program: StageProgram, step: Step, hidden: Array | None = None) -> Array:
    return program.forward(step, hidden, SoloCollective()).copy()


def chunk(request: str, tokens: tuple[int, ...], position: int = 0, *, rows: int = 1) -> Step:
    entry = StepEntry(request=request, position=position, tokens=tokens, logit_rows=rows)
    return Step(entries=(entry,))


def is_close(found: Array, expected: Array) -> bool:
    return bool(np.abs(found - expected).max() <= LARGEST_DIFFERENCE)


def steps_that_do_not_fit_are_refused_and_change_nothing(kind: Kind) -> None:
    with kind.program() as program:

        def refused(step: Step, why: str) -> None:
            with pytest.raises(RequestError, match=why):
                compute(program, step)

        refused(chunk("a", tuple(range(9))), "takes up to 2 requests or 8 tokens")
        refused(chunk("a", (SPEC.vocab_size,)), "token ids must lie in")
        refused(chunk("a", (1,), 40), "past the context of 40 tokens")
        if not program.mixes:
            (one,), (more,) = chunk("b", (1,)).entries, chunk("c", PROMPT).entries
            refused(Step(entries=(one, more)), "a chunk of a prompt beside other requests")
        expected = compute(program, chunk("a", PROMPT))
        compute(program, chunk("b", PROMPT[:3], rows=0))
        room = LIMITS.cached_tokens - LENGTH - 3
        others = [f"other {number}" for number in range(room)]
        for other in others:
            compute(program, chunk(other, (1,)))
        refused(chunk("c", (1,)), "17 tokens under way; memory is kept for 16")
        for other in others:
            program.release(other)
        for position in (3, 3 + LENGTH):
            compute(program, chunk("b", PROMPT, position, rows=0))
        compute(program, chunk("b", (1,), 3 + 2 * LENGTH))
        refused(chunk("a", (1,), LENGTH), "17 tokens under way; memory is kept for 16")
        first = LENGTH - 2
        refused(chunk("a", (1,) * 4, first), "18 tokens under way; memory is kept for 16")
        assert program.rows("a", 0, LENGTH) is not None, "it is not cut to the refused step's start"
        program.release("b")
        program.release("nobody")
        assert compute(program, chunk("c", PROMPT)).tobytes() == expected.tobytes()


def requests_share_steps_and_leave_their_room_to_others(kind: Kind) -> None:
    prompts = {"a": PROMPT[:3], "b": PROMPT, "c": PROMPT[1:3]}
    with kind.program() as program:
        alone = {}
        for name, tokens in prompts.items():
            alone[name] = compute(program, chunk(name, tokens))[0]
            program.release(name)

        def last(name: str) -> tuple[str, int, int]:
            return name, prompts[name][-1], len(prompts[name]) - 1

        def begin(name: str) -> None:
            compute(program, chunk(name, prompts[name][:-1], rows=0))

        begin("a")
        begin("b")
        for names in ("ab", "ba"):
            found = compute(program, decode(*map(last, names)))
            assert found.shape == (2, 1, SPEC.vocab_size)
            assert all(is_close(row, alone[name]) for row, name in zip(found, names, strict=True))
        program.release("a")
        begin("c")
        found = compute(program, decode(last("c"), last("b")))
        assert all(is_close(row, alone[name]) for row, name in zip(found, "cb", strict=True))


def logits_are_those_of_the_last_tokens(kind: Kind) -> None:
    """In the program's own buffer; of none, where none are wanted."""
    with kind.program() as program:
        every = compute(program, chunk("a", PROMPT, rows=LENGTH))
        assert every.shape == (1, LENGTH, SPEC.vocab_size)
        assert np.isfinite(every).all()
        program.release("a")
        assert compute(program, chunk("a", PROMPT, rows=0)).size == 0
        program.release("a")
        logits = program.logits(chunk("a", PROMPT, rows=2), None, SoloCollective())
        assert is_close(logits.array(), every[:, -2:])
        best = logits.best(3)
        if best is not None:
            assert best[0].tolist() == [np.argsort(-every[0, -1], kind="stable")[:3].tolist()]


def hidden_states_are_what_logits_are_made_of(kind: Kind) -> None:
    """Of as many rows as are wanted, and logits come after them as before."""
    with kind.program() as program:
        logits = compute(program, chunk("a", PROMPT, rows=LENGTH))
        program.release("a")
        last = compute(program, chunk("a", PROMPT, rows=1))
        program.release("a")

        def states(rows: int) -> Array:
            step = replace(chunk("a", PROMPT, rows=rows), states=True)
            found = program.logits(step, None, SoloCollective())
            if found.array().size:
                assert found.array().tobytes() == last.tobytes()
            return found.states().copy()

        every = states(LENGTH)
        assert every.shape == (1, LENGTH, SPEC.hidden_size)
        assert np.isfinite(every).all()
        program.release("a")
        assert is_close(states(1), every[:, -1:])
        program.release("a")
        assert compute(program, chunk("a", PROMPT, rows=LENGTH)).tobytes() == logits.tobytes()


def a_hidden_state_may_lie_in_the_buffer_or_elsewhere(kind: Kind) -> None:
    step = chunk("a", PROMPT)
    hidden = np.random.default_rng(0).standard_normal((1, LENGTH, SPEC.hidden_size), np.float32)
    with kind.program(layout="pipeline_3", stage=1) as program:
        elsewhere = compute(program, step, hidden)
        assert elsewhere.shape == hidden.shape
        program.release("a")
        program.receive_buffer(step)[...] = hidden
        received = compute(program, step, program.receive_buffer(step))
        assert received.tobytes() == elsewhere.tobytes() != hidden.tobytes()


def what_is_swapped_out_comes_back_to_the_bit(kind: Kind) -> None:
    """Another request has the memory meanwhile, and only what is new is written again."""
    for kv_dtype in kind.kept("float32", "int8"):
        tier = MemoryKVTier(1 << 20)
        limits = replace(LIMITS, requests=1)
        with kind.program(limits=limits, kv_dtype=kv_dtype, kv_tier=tier) as program:
            answers: list[bytes] = []
            for is_moved in (True, False):
                found = [compute(program, chunk("a", PROMPT))]
                written = []
                for position in (LENGTH, LENGTH + 1):
                    if is_moved:
                        program.swap_out("a")
                        program.swap_out("a")  # it is gone already
                        written.append(tier.written_bytes)
                        compute(program, chunk("other", PROMPT[:1], rows=0))
                        program.release("other")
                    found.append(compute(program, chunk("a", (5,), position)))
                program.release("a")
                assert tier.used_bytes == 0
                answers.append(np.concatenate(found).tobytes())
                if is_moved:
                    assert written[1] - written[0] == written[0] // LENGTH > 0
            assert answers[0] == answers[1]
            program.swap_out("nobody")


def what_has_no_room_out_of_memory_stays(kind: Kind) -> None:
    with kind.program() as program:
        expected = [
            compute(program, chunk("a", PROMPT)),
            compute(program, chunk("a", (5,), LENGTH)),
        ]
        with pytest.raises(RequestError, match="give it --kv-disk"):
            program.swap_out("a")
        with pytest.raises(RequestError, match="give it --kv-disk"):
            program.reserve("a", 9)
    with kind.program(kv_tier=MemoryKVTier(100)) as program:
        assert compute(program, chunk("a", PROMPT)).tobytes() == expected[0].tobytes()
        with pytest.raises(StoreFullError):
            program.swap_out("a")
        with pytest.raises(StoreFullError):
            program.reserve("a", 9)
        assert compute(program, chunk("a", (5,), LENGTH)).tobytes() == expected[1].tobytes()


def a_beginning_is_taken_over_or_shared(kind: Kind) -> None:
    """What follows has the same bits; of a cache that is too short, or of none, nothing is."""
    other = (*PROMPT[:3], 9, 8)
    for kv_dtype in kind.kept("float32", "int8"):
        limits = replace(LIMITS, requests=1)
        with kind.program(kv_dtype=kv_dtype, limits=limits) as program:
            compute(program, chunk("b", other[:3], rows=0))
            expected = compute(program, chunk("b", other[3:], 3))
            program.release("b")
            compute(program, chunk("a", PROMPT[:3], rows=0))
            compute(program, chunk("a", PROMPT[3:], 3))
            assert program.take("b", "a", LENGTH + 1, moves=False) == 0
            assert program.take("b", "nobody", 3, moves=True) == 0
            assert program.take("a", "a", 3, moves=True) == 0
            assert program.take("b", "a", 3, moves=False) == 3
            assert compute(program, chunk("b", other[3:], 3)).tobytes() == expected.tobytes()
            program.release("b")
            program.keep("a", 3)
            program.keep("nobody", 3)
            assert program.rows("a", 0, 4) is None
            for moves in (False, True):
                assert program.take("c", "a", 3, moves=moves) == 3
                assert (program.rows("a", 0, 3) is None) == moves
                assert compute(program, chunk("c", other[3:], 3)).tobytes() == expected.tobytes()
                program.release("c")
            compute(program, chunk("d", tuple(range(8)), rows=0))
            compute(program, chunk("d", (1, 2), 8, rows=0))
            assert program.take("e", "d", 8, moves=False) == 0, "there is no memory for both"
            assert program.take("e", "d", 2, moves=True) == 2
            assert compute(program, chunk("e", tuple(range(8)), 2)).size
            program.release("e")
            for name in ("f", "g"):
                compute(program, chunk(name, (1, 2, 3), rows=0))
            assert program.take("g", "f", 2, moves=True) == 0, "it has begun"
            assert program.rows("f", 0, 2) is None, "nobody would drop it"


def a_beginning_that_was_shared_is_shared_again_or_swapped_out_before_its_first_step(
    kind: Kind,
) -> None:
    limits = replace(LIMITS, requests=1, cached_tokens=40)
    with kind.program(limits=limits, kv_tier=MemoryKVTier(1 << 20)) as program:
        compute(program, chunk("a", PROMPT[:3], rows=0))
        expected = compute(program, chunk("a", PROMPT[3:], 3))
        assert program.take("b", "a", 3, moves=False) == 3
        assert program.take("c", "b", 3, moves=False) == 3
        program.swap_out("c")
        program.release("a")
        for name in ("c", "b"):
            assert compute(program, chunk(name, PROMPT[3:], 3)).tobytes() == expected.tobytes()
            program.release(name)


def rows_agree_where_that_is_said(kind: Kind) -> None:
    """To the last bit, in any steps of an even number of tokens, and an odd one at the end."""
    tokens = tuple(range(1, 14))
    forms: list[tuple[KvDtype, WeightFormat]] = [("float32", FLOATS), ("int8", FLOATS)]
    forms.append(("float32", uniform_format("int4", block_size=64)))
    for kv_dtype, form in forms:
        if not kind.kept(kv_dtype):
            continue
        with kind.program(kv_dtype=kv_dtype, form=form) as program:
            if not program.rows_agree:
                return
            found = []
            for sizes in ((8, 5), (2, 2, 2, 2, 2, 3), (6, 7), (4, 6, 3)):
                rows, first = [], 0
                for size in sizes:
                    step = chunk("a", tokens[first : first + size], first, rows=size)
                    rows.append(compute(program, step)[0])
                    first += size
                cached = program.rows("a", 0, len(tokens))
                assert cached is not None
                found.append(b"".join(each.tobytes() for each in (*rows, *cached)))
                program.release("a")
            assert len(set(found)) == 1


def wrong_guesses_leave_nothing_behind(kind: Kind) -> None:
    """A token has the bits that it has with one guess for each: of its keys and values, and of the
    logits behind it, in memory that is float32 or codes."""
    answer = (9, 4, 30, 8, 17, 2, 26)
    tokens = (*PROMPT, *answer)
    forms: list[tuple[KvDtype, WeightFormat]] = [("float32", FLOATS), ("int8", FLOATS)]
    forms.append(("float32", uniform_format("int4", block_size=32)))
    draw = np.random.default_rng(0)
    for kv_dtype, form in forms:
        if not kind.kept(kv_dtype):
            continue
        with kind.program(kv_dtype=kv_dtype, form=form) as program:

            def computed(name: str, guesses: Sequence[int], program: StageProgram = program) -> Any:
                """The answer's logits, keys and values, in steps with so many guesses."""
                compute(program, chunk(name, PROMPT))
                rows, position, left = [], LENGTH, list(guesses)
                while position < len(tokens):
                    count = left.pop() if left else 1
                    right = int(draw.integers(0, count + 1))
                    given = [*tokens[position : position + 1 + right]][: 1 + count]
                    wrong = [(each + 1) % SPEC.vocab_size for each in given[-1:]]
                    given += wrong * (1 + count - len(given))
                    step = chunk(name, tuple(given), position, rows=len(given))
                    good = min(1 + right, len(tokens) - position)
                    rows.append(compute(program, step)[0][:good])
                    position += good
                program.cut(name, len(tokens))
                assert program.rows(name, 0, len(tokens) + 1) is None
                found = program.rows(name, 0, len(tokens))
                assert found is not None
                found = [each.copy() for each in found]
                program.release(name)
                return np.concatenate(rows), found

            logits, cached = computed("a", ())
            for turn in range(1 if kind.name == "triton" else 3):  # interpreted kernels are slow
                again, cached_again = computed("b", draw.choice([1, 3], turn).tolist())
                if program.rows_agree:
                    np.testing.assert_array_equal(again, logits)
                    for one, other in zip(cached_again, cached, strict=True):
                        np.testing.assert_array_equal(one, other)
                else:
                    assert is_close(again, logits) or kv_dtype != "float32"


def batches_agree_where_that_is_said(kind: Kind) -> None:
    """To the last bit, alone and with one or two others, wherever its cache lies meanwhile."""
    limits = replace(LIMITS, requests=3, cached_tokens=40, batch_invariant=True)
    in_pairs = uniform_format("int4", block_size=64)
    for form in (FLOATS, in_pairs):
        found = {_answered(kind, limits, form, others) for others in BATCHES}
        assert len(found) == 1


BATCHES: tuple[tuple[str, ...], ...] = ((), ("b",), ("b", "c"), ("c",))


def _answered(
    kind: Kind, limits: StepLimits, form: WeightFormat, others: Sequence[str]
) -> bytes | None:
    """Logits, keys and values of one request beside others; None where nothing is promised."""
    with kind.program(limits=limits, form=form) as program:
        if not program.batches_agree:
            return None
        for name in (*others, "a"):
            compute(program, chunk(name, PROMPT, rows=0))
        rows = []
        for position in range(LENGTH, LENGTH + 3):
            names = ("a", *others) if position % 2 else (*others, "a")
            step = decode(*((name, 9, position) for name in names))
            rows.append(compute(program, step)[names.index("a")])
        cached = program.rows("a", 0, LENGTH + 3)
        assert cached is not None
        return b"".join(each.tobytes() for each in (*rows, *cached))


def rows_are_taken_by_a_program_like_the_one_that_gave_them(kind: Kind) -> None:
    """What follows has the same bits; nothing is given of what is not computed or not there."""
    tier = MemoryKVTier(1 << 20)
    kv_dtype = kind.kept("float32", "int8")[-1]
    with kind.program(kv_dtype=kv_dtype, kv_tier=tier) as program:
        digest = program.cache_digest
        assert program.rows("a", 0, 3) is None
        compute(program, chunk("a", PROMPT[:3], rows=0))
        assert program.rows("a", 0, 4) is None
        given = program.rows("a", 0, 3)
        assert given is not None
        kept = program.new_rows(3)
        for into, some in zip(kept, given, strict=True):
            assert into.flags.c_contiguous
            into[...] = some
        expected = compute(program, chunk("a", PROMPT[3:], 3))
        program.swap_out("a")
        assert program.rows("a", 0, 3) is None
    with kind.program(kv_dtype=kv_dtype) as program:
        assert program.cache_digest == digest
        program.put_rows("b", 0, kept)
        assert compute(program, chunk("b", PROMPT[3:], 3)).tobytes() == expected.tobytes()


def layers_that_come_from_disk_change_no_bit(kind: Kind) -> None:
    """Between any two steps, also of one request; in float32, and with 2 and 4 bits in a layer."""
    for form in (FLOATS, weight_format(SPEC, "int2")):
        with kind.program(form=form) as program:
            assert program.weight_bytes > 0
            if WEIGHTS_ON_DISK in kind.lacks:
                program.stream(0)
                with pytest.raises(RequestError, match="computes only from"):
                    program.stream(1)
                continue
            answers = []
            for counts in ((0, 0, 0, 0), (0, 3, 1, 2)):
                found = []
                for position, count in enumerate(counts):
                    program.stream(count)
                    found.append(compute(program, chunk("a", (PROMPT[position],), position)))
                program.release("a")
                answers.append(np.concatenate(found).tobytes())
            assert answers[0] == answers[1]
            assert program.disk_wait_s >= 0.0


def a_request_longer_than_memory_is_computed_alone(kind: Kind) -> None:
    tokens = tuple(range(1, 19))
    found = []
    for cached_tokens in (40, 15):  # 15: of 18 tokens, two layers of three
        limits = replace(LIMITS, cached_tokens=cached_tokens, disk_tokens=80)
        with kind.program(limits=limits, kv_tier=MemoryKVTier(1 << 20)) as program:
            for first in (0, 8, 16):
                row = compute(program, chunk("a", tokens[first : first + 8], first))
            found.append(row)
            if cached_tokens == 15:
                with pytest.raises(RequestError, match="memory is kept for 15"):
                    compute(program, chunk("b", (1,)))
            program.swap_out("a")
            compute(program, chunk("b", PROMPT))
    assert is_close(*found)


def what_is_unrounded_goes_with_its_request(kind: Kind) -> None:
    """To a tier and back, into another slot, beside others; and a slot begins without any."""
    limits, tier = replace(LIMITS, cached_tokens=40), MemoryKVTier(1 << 22)
    if not kind.kept("int4"):
        return
    with kind.program(limits=limits, kv_dtype="int4", kv_tier=tier) as program:

        def prompt(name: str) -> None:
            for first, last in ((0, 6), (6, 8), (8, 14)):
                compute(program, chunk(name, tuple(range(first, last)), first, rows=0))

        def answer(name: str) -> list[bytes]:
            steps = (chunk(name, (number,), 14 + number) for number in range(4))
            return [compute(program, step).tobytes() for step in steps]

        prompt("a")
        expected = answer("a")
        program.release("a")
        compute(program, chunk("b", PROMPT))
        prompt("a")
        program.swap_out("a")
        compute(program, chunk("b", (5,), LENGTH))
        assert answer("a") == expected
        program.release("b")
        program.release("a")
        prompt("c")
        assert answer("c") == expected


def calibration_leaves_nothing_behind(kind: Kind) -> None:
    for kv_dtype in kind.kept("int8", "int4"):
        limits = replace(LIMITS, requests=1)
        with kind.program(limits=limits, kv_dtype=kv_dtype) as program:
            expected = compute(program, chunk("a", PROMPT))
            program.release("a")
            assert compute(program, chunk("b", PROMPT)).tobytes() == expected.tobytes()


def a_program_that_is_reset_is_like_a_new_one(kind: Kind) -> None:
    with kind.program() as program:
        expected = compute(program, chunk("a", PROMPT))
        compute(program, chunk("b", PROMPT[:2]))
        if not program.reset():
            assert kind.name == "triton"
            return
        assert program.rows("a", 0, 1) is None
        assert np.array_equal(compute(program, chunk("a", PROMPT)), expected)
        compute(program, chunk("c", PROMPT))  # neither slot was still taken
    with kind.program(kv_tier=MemoryKVTier(1 << 20)) as program:
        assert not program.reset(), "the tier is its session's"


def an_interrupted_program_is_like_a_new_one_once_it_is_reset(kind: Kind) -> None:
    with kind.program() as program:
        expected = compute(program, chunk("a", PROMPT))
        program.interrupt()
        if kind.name == "ort":
            with pytest.raises(RuntimeError, match="terminate"):
                compute(program, chunk("b", PROMPT))
        if program.reset():
            assert np.array_equal(compute(program, chunk("a", PROMPT)), expected)


class _Cutting(SoloCollective):
    """Cuts a file when the first sum is taken."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def all_reduce(self, array: NDArray[Any]) -> None:
        os.truncate(self._path, 0)


def a_file_that_is_cut_in_the_middle_of_a_step_ends_only_the_step(kind: Kind) -> None:
    """Whatever is read of it then; who needs nothing more of it computes on."""
    for name in ("float32", "int8", "int4"):
        with kind.program(layout="tensor_2", form=uniform_format(name)) as program:
            compute(program, chunk("a", PROMPT[:-1]))
            (path,) = kind.folder.glob("*/weights")
            with contextlib.suppress(CheckpointError):
                step = chunk("a", PROMPT[-1:], len(PROMPT) - 1)
                program.forward(step, None, _Cutting(path))
            assert not path.stat().st_size


CHECKS: dict[str, Callable[[Kind], None]] = {
    check.__name__: check
    for check in (
        steps_that_do_not_fit_are_refused_and_change_nothing,
        requests_share_steps_and_leave_their_room_to_others,
        logits_are_those_of_the_last_tokens,
        hidden_states_are_what_logits_are_made_of,
        a_hidden_state_may_lie_in_the_buffer_or_elsewhere,
        what_is_swapped_out_comes_back_to_the_bit,
        what_has_no_room_out_of_memory_stays,
        a_beginning_is_taken_over_or_shared,
        a_beginning_that_was_shared_is_shared_again_or_swapped_out_before_its_first_step,
        rows_agree_where_that_is_said,
        wrong_guesses_leave_nothing_behind,
        batches_agree_where_that_is_said,
        rows_are_taken_by_a_program_like_the_one_that_gave_them,
        layers_that_come_from_disk_change_no_bit,
        a_request_longer_than_memory_is_computed_alone,
        what_is_unrounded_goes_with_its_request,
        calibration_leaves_nothing_behind,
        a_program_that_is_reset_is_like_a_new_one,
        an_interrupted_program_is_like_a_new_one_once_it_is_reset,
        a_file_that_is_cut_in_the_middle_of_a_step_ends_only_the_step,
    )
}


def main(arguments: Any) -> None:
    """Every check of a back end and a model, one after the other; the first that fails ends it."""
    name, folder, model = arguments
    for check, run in CHECKS.items():
        print(check, flush=True)
        run(Kind(name, Path(folder) / check, MODELS[model]))


if __name__ == "__main__":
    main(sys.argv[1:])
