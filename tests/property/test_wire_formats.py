"""Encoding and decoding: sizes, error bounds, and what is not finite, for any numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from edge.transport import WIRE_FORMATS, WireRule
from edge.transport.wire_format import BLOCK_NUMBERS, Codec, WireFormatName, open_codec

FORMATS: tuple[WireFormatName, ...] = ("float16", "int8")
quick = settings(max_examples=80)

finite = arrays_of.arrays(
    np.float32, st.integers(0, 200), elements=st.floats(-(2.0**100), 2.0**100, width=32)
)
anything = arrays_of.arrays(np.float32, st.integers(0, 200), elements=st.floats(width=32))


def encoded(codec: Codec, numbers: np.ndarray) -> np.ndarray:
    message = np.full(codec.num_bytes(numbers.size), 0xA5, np.uint8)
    codec.encode(numbers, message)
    return message


def decoded(codec: Codec, message: np.ndarray, count: int) -> np.ndarray:
    numbers = np.full(count, 3e38, np.float32)
    codec.decode(message, numbers)
    return numbers


@quick
@given(finite)
def test_float16_is_the_nearest_float16_within_its_range(numbers: np.ndarray) -> None:
    codec = open_codec("float16")
    back = decoded(codec, encoded(codec, numbers), numbers.size)
    expected = np.clip(numbers, -65504, 65504).astype(np.float16).astype(np.float32)
    assert back.tobytes() == expected.tobytes()


@quick
@given(finite)
def test_int8_errs_by_half_a_step_of_its_block(numbers: np.ndarray) -> None:
    codec = open_codec("int8")
    back = decoded(codec, encoded(codec, numbers), numbers.size)
    for start in range(0, numbers.size, BLOCK_NUMBERS):
        block = numbers[start : start + BLOCK_NUMBERS].astype(np.float64)
        step = max(np.abs(block).max() / 127, 1e-36)
        error = np.abs(back[start : start + BLOCK_NUMBERS] - block)
        assert error.max() <= step * 0.5001


@quick
@given(st.integers(1, 32), st.floats(2.0**127, 3.4028234663852886e38, width=32))
def test_the_largest_numbers_do_not_become_infinite(count: int, largest: float) -> None:
    codec = open_codec("int8")
    numbers = np.full(count, -largest, np.float32)
    back = decoded(codec, encoded(codec, numbers), count)
    assert (back / numbers <= 1).all()
    assert np.allclose(back, numbers, rtol=1e-6)


@quick
@given(anything)
def test_what_is_not_finite_stays_visible(numbers: np.ndarray) -> None:
    float16, int8 = open_codec("float16"), open_codec("int8")
    back = decoded(float16, encoded(float16, numbers), numbers.size)
    assert (np.isnan(back) == np.isnan(numbers)).all()
    assert (np.abs(back[~np.isnan(back)]) <= 65504).all()
    back = decoded(int8, encoded(int8, numbers), numbers.size)
    for start in range(0, numbers.size, BLOCK_NUMBERS):
        block = slice(start, start + BLOCK_NUMBERS)
        is_finite = bool(np.isfinite(numbers[block]).all())
        assert (np.isfinite(back[block]) == is_finite).all()


@quick
@given(st.sampled_from(FORMATS), anything)
def test_the_same_numbers_are_the_same_bytes_whatever_was_encoded_before(
    name: WireFormatName, numbers: np.ndarray
) -> None:
    used, fresh = open_codec(name), open_codec(name)
    for count in (3, 640, 65):
        encoded(used, np.full(count, -1e9, np.float32))
        decoded(used, np.full(used.num_bytes(count), 0xFF, np.uint8), count)
    message = encoded(fresh, numbers)
    assert encoded(used, numbers).tobytes() == message.tobytes()
    back = decoded(fresh, message, numbers.size)
    assert decoded(used, message, numbers.size).tobytes() == back.tobytes()


@quick
@given(st.sampled_from(FORMATS), st.integers(0, 200), st.randoms(use_true_random=False))
def test_any_bytes_of_the_right_size_can_be_decoded(
    name: WireFormatName, count: int, random: object
) -> None:
    codec = open_codec(name)
    message = np.frombuffer(random.randbytes(codec.num_bytes(count)), np.uint8)  # type: ignore[attr-defined]
    first, second = (decoded(codec, message, count) for _ in range(2))
    assert first.tobytes() == second.tobytes()


@quick
@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_messages_of_whole_blocks_lie_one_after_the_other(first: int, second: int) -> None:
    """So that a sum in slices rounds each number as a sum of the whole does."""
    codec = open_codec("int8")
    whole = codec.num_bytes(BLOCK_NUMBERS * first + second)
    assert whole == codec.num_bytes(BLOCK_NUMBERS * first) + codec.num_bytes(second)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_message_of_another_size_is_refused(name: WireFormatName, off_by: int) -> None:
    codec = open_codec(name)
    numbers = np.zeros(64, np.float32)
    message = np.zeros(codec.num_bytes(64) + off_by, np.uint8)
    with pytest.raises(ValueError, match="64 numbers take a message of"):
        codec.encode(numbers, message)
    with pytest.raises(ValueError, match="64 numbers take a message of"):
        codec.decode(message, numbers)


def test_float32_has_no_codec() -> None:
    with pytest.raises(ValueError, match="travels as it is"):
        open_codec("float32")


@pytest.mark.parametrize(
    "fields", [{"format": "int4"}, {"above_bytes": -1}, {"above_bytes": 1.5}, {"above_bytes": True}]
)
def test_a_rule_that_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="wire"):
        WireRule(**fields)  # type: ignore[arg-type]


def test_a_rule_concerns_float32_above_its_size() -> None:
    for name in WIRE_FORMATS:
        rule = WireRule(format=name, above_bytes=40)
        assert rule.encodes(np.zeros(11, np.float32)) == (name != "float32")
        assert not rule.encodes(np.zeros(10, np.float32))
        assert not rule.encodes(np.zeros(11, np.int32))
