"""Work that a busy thread does in between."""

from __future__ import annotations

from edge.engine.safe_point import Asides


def test_what_nobody_waits_for_any_more_is_not_done() -> None:
    """And what comes after it is."""
    done: list[int] = []
    asides = Asides()
    first, second = asides.put(lambda: done.append(1)), asides.put(lambda: done.append(2))
    assert first.cancel()
    asides.do()
    assert done == [2]
    assert second.done()


def test_what_goes_wrong_is_told_to_who_waits() -> None:
    asides = Asides()

    def fail() -> None:
        raise OSError("no disk")

    broken, whole = asides.put(fail), asides.put(lambda: None)
    asides.do()
    assert isinstance(broken.exception(), OSError)
    assert whole.result() is None
