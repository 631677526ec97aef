"""Changes to a cluster in words."""

import pytest

from edge.partition import ClusterSpec, DeviceSpec, LinkSpec, what_if


def device(id: str, name: str) -> DeviceSpec:
    return DeviceSpec(id=id, name=name, memory_bytes=2**32, threads=1)


CLUSTER = ClusterSpec(
    devices=(device("1", "a"), device("2", "b"), device("3", "my-box"), device("4", "b")),
    links=(
        LinkSpec(source="1", target="3", latency_s=5, bytes_per_s=5),
        LinkSpec(source="1", target="2", latency_s=6, bytes_per_s=6),
    ),
)


@pytest.mark.parametrize(
    ("text", "memory_bytes"),
    [
        ("+4GiB on a", 2**33),
        ("+ 0.5 GiB on 1", 2**32 + 2**29),
        ("-1gb on a", 2**32 - 10**9),
        ("-9GiB on a", 0),
    ],
)
def test_memory(text: str, memory_bytes: int) -> None:
    changed = what_if(CLUSTER, text)
    assert [each.memory_bytes for each in changed.devices] == [memory_bytes, *[2**32] * 3]
    assert changed.links == CLUSTER.links


def test_a_link_takes_the_place_of_what_was_measured_both_ways() -> None:
    changed = what_if(CLUSTER, "link a-my-box 1ms 1Gbit")
    assert changed.links == (
        CLUSTER.links[1],
        LinkSpec(source="1", target="3", latency_s=1e-3, bytes_per_s=1.25e8),
        LinkSpec(source="3", target="1", latency_s=1e-3, bytes_per_s=1.25e8),
    )
    assert what_if(CLUSTER, "link 2-4 20 us 10 Gbit").links[-1].latency_s == pytest.approx(2e-5)


def test_without() -> None:
    changed = what_if(CLUSTER, "without my-box")
    assert [each.id for each in changed.devices] == ["1", "2", "4"]
    assert changed.links == CLUSTER.links[1:]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a known change"),
        ("more memory", "is not a known change"),
        ("+4 on a", "is not a known change"),
        ("+4parsec on a", "'parsec' is not a known unit"),
        ("+1GiB on nobody", "no device 'nobody'"),
        ("+1GiB on b", "2 devices are called 'b'; use the id"),
        ("without x", "no device 'x'"),
        ("link a-nobody 1ms 1Gbit", "does not name two devices"),
        ("link a-1 1ms 1Gbit", "does not name two devices"),
        ("link a-my-box 1ms 0Gbit", "bytes_per_s"),
        ("link a-my-box 1h 1Gbit", "is not a known change"),
        ("without " + "x" * 5000, "at most 4096 characters"),
    ],
)
def test_what_is_not_understood_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        what_if(CLUSTER, text)


def test_one_device_must_be_left() -> None:
    with pytest.raises(ValueError, match="no device left"):
        what_if(ClusterSpec(devices=CLUSTER.devices[:1]), "without a")
