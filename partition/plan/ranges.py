"""Cutting a number of units into contiguous ranges, in proportion to shares; the KV heads of a
range of query heads.

Knows integers only.
"""

import math
from collections.abc import Sequence
from fractions import Fraction


def split_by_shares(total: int, shares: Sequence[float], multiple: int = 1) -> tuple[range, ...]:
    """Cut 0..total into one contiguous range for each share, proportional to the shares.

    Every cut is a multiple of `multiple`. The remainder of `total` after its last multiple goes to
    the last share above 0. A share of 0 gets an empty range. Sizes are found by the method of
    largest remainders, in exact arithmetic; of equal remainders the first wins.

    ValueError: a negative total, a multiple below 1, no share above 0, a share that is not finite.
    """
    if total < 0 or multiple < 1:
        raise ValueError(f"Cannot cut {total} into multiples of {multiple}.")
    if not any(share > 0 for share in shares):
        raise ValueError("At least one share must be more than 0.")
    units, rest = divmod(total, multiple)
    sizes = [count * multiple for count in largest_remainders(units, shares)]
    sizes[max(index for index, share in enumerate(shares) if share > 0)] += rest
    return consecutive(sizes)


def consecutive(sizes: Sequence[int]) -> tuple[range, ...]:
    """Ranges of these sizes, one after the other from 0."""
    ranges: list[range] = []
    start = 0
    for size in sizes:
        ranges.append(range(start, start + size))
        start += size
    return tuple(ranges)


def largest_remainders(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `total`, each within 1 of its exact proportion.

    ValueError: a share that is negative or not finite, or none above 0.
    """
    if any(not math.isfinite(share) or share < 0 for share in shares):
        raise ValueError("Shares must be finite and not negative.")
    weights = [Fraction(share) for share in shares]
    whole = sum(weights)
    if not whole:
        raise ValueError("At least one share must be more than 0.")
    quotas = [total * weight / whole for weight in weights]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda index: counts[index] - quotas[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def apportion(
    total: int, shares: Sequence[int], *, least: Sequence[int], most: Sequence[int]
) -> list[int] | None:
    """Largest remainders with limits: `least[i] <= result[i] <= most[i]`, or None if impossible.

    Shares are positive. Counts that would break a limit are set to it, and the rest is divided
    among the others, again in proportion. Each round fixes the limit (least or most) that is broken
    by more units in all. So the rest always lies between the sums of the remaining limits, and the
    loop ends with an answer.
    """
    if any(low > high for low, high in zip(least, most, strict=True)):
        return None
    if not sum(least) <= total <= sum(most):
        return None
    counts = [0] * len(shares)
    free = list(range(len(shares)))
    while free:
        sizes = dict(
            zip(free, largest_remainders(total, [shares[index] for index in free]), strict=True)
        )
        above = sum(max(0, sizes[index] - most[index]) for index in free)
        below = sum(max(0, least[index] - sizes[index]) for index in free)
        limits = most if above >= below else least
        fixed = [
            index
            for index in free
            if (sizes[index] > most[index] if above >= below else sizes[index] < least[index])
        ]
        if not fixed:
            for index in free:
                counts[index] = sizes[index]
            break
        for index in fixed:
            counts[index] = limits[index]
            total -= limits[index]
            free.remove(index)
    return counts


def kv_group_size(heads: range, num_heads: int, num_kv_heads: int) -> int:
    """How many consecutive local query heads share one local KV head, for a shard with `heads`.

    The largest g such that no run of g local heads spans two KV heads of the model: g divides the
    number of heads and the local position of every border between KV heads. 0 when there are no
    heads. ValueError when `heads` are not heads of the model.
    """
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly.")
    if not heads:
        return 0
    if heads.step != 1 or heads.start < 0 or heads.stop > num_heads:
        raise ValueError(f"{heads} is not a run of the {num_heads} query heads.")
    group = num_heads // num_kv_heads
    first_crossing = group - heads.start % group
    if first_crossing >= len(heads):
        return len(heads)
    size = math.gcd(len(heads), first_crossing)
    second_crossing = first_crossing + group
    return math.gcd(size, group) if second_crossing < len(heads) else size


def kv_heads(shard_heads: range, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Which KV head of the model each local KV head is, for a shard with these query heads.

    Attention on a shard is plain grouped-query attention: with n local KV heads, local query head i
    attends local KV head i // (len(shard_heads) / n). Where a shard's heads straddle the model's
    groups unevenly, it holds some KV heads more than once to make that so. With 8 heads on 2 KV
    heads:

        heads 0..8 -> (0, 1)        heads 4..8 -> (1,)
        heads 0..6 -> (0, 0, 1)     heads 3..5 -> (0, 1)

    Weights, caches and byte counts all follow this one function. Raises ValueError as
    `kv_group_size` does; no heads give ().
    """
    size = kv_group_size(shard_heads, num_heads, num_kv_heads)
    if not size:
        return ()
    group = num_heads // num_kv_heads
    return tuple(head // group for head in shard_heads[::size])
