"""What requests do to a cache whose keys and values go elsewhere between steps, at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hypothesis import strategies as st

from edge.errors import RequestError
from edge.offload import StoreFullError

Action = tuple[str, str, int]
"""What is done, the names of the requests, and how many tokens a step of one of them has."""


class MovingShard(Protocol):
    """Computes, and finds in each layer what it wrote there, or fails."""

    lengths: dict[str, int]

    def step(self, requests: str, tokens: int) -> None: ...

    def swap_out(self, name: str) -> None: ...

    def release(self, name: str) -> None: ...


def actions(*, most_tokens: int, most_actions: int) -> st.SearchStrategy[list[Action]]:
    return st.lists(
        st.tuples(
            st.sampled_from(["step", "step", "step", "swap_out", "release"]),
            st.sampled_from(["a", "b", "c", "ab", "ca", "abc"]),
            st.integers(1, most_tokens),
        ),
        max_size=most_actions,
    )


def act(shard: MovingShard, wanted: Sequence[Action], *, context_tokens: int) -> None:
    """Do what is possible of it; a step that does not fit the context is left out."""
    for what, names, tokens in wanted:
        try:
            if what == "step":
                size = tokens if len(names) == 1 else 1
                if max(shard.lengths.get(name, 0) for name in names) + size <= context_tokens:
                    shard.step(names, size)
            elif what == "swap_out":
                shard.swap_out(names[0])
            else:
                shard.release(names[0])
        except StoreFullError:
            if what == "step":
                return  # the model ends: the scheduler sees to it that this cannot be
        except RequestError as error:
            if "memory is kept for" not in str(error):
                raise
