"""The demos there are. Listing them imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """`run` prints what it shows and checks it: SystemExit with a sentence if it does not hold."""

    name: str
    summary: str
    run: Callable[[], None]


def _demo(name: str, summary: str) -> Demo:
    """The demo of the module `demos.<name>`, imported when it runs."""

    def run() -> None:
        importlib.import_module(f"edge.demos.{name}").run()

    return Demo(name=name, summary=summary, run=run)


DEMOS: tuple[Demo, ...] = (
    _demo("quickstart", "The Python API in ten lines: load over two peers, stream an answer."),
    _demo("split", "One model cut over three peers, each with a part of every layer."),
    _demo("uneven", "Shares of 4 : 2 : 1 give the same tokens as one peer."),
    _demo("mixed", "Two stages of layers, each cut over two peers: the same tokens again."),
    _demo("bigger", "A model larger than memory, read from disk for each token: the same tokens."),
    _demo("survive", "A peer is killed in the middle of a sentence: the reply goes on, the same."),
    _demo("page", "ONNX: one device finds the digits of a page, another one reads them."),
    _demo("voice", "ONNX: a voice detector with state; a peer is killed, nothing is forgotten."),
    _demo("branches", "ONNX: one model with a branch on each of two devices, at the same time."),
    _demo("zeroconf", "Two daemons are found without any address."),
)
