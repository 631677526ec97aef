"""Somebody on the network who keeps every byte of a session, from shipping to the last token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import edge
from demos.relay import Relay
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.processes import Daemon, start_together

WINDOW_BYTES = 12
"""Three weights: no such run of random bytes comes by chance."""


def windows(content: bytes) -> set[bytes]:
    """Runs of bytes, all over the content."""
    step = max(WINDOW_BYTES, len(content) // 4)
    starts = range(0, max(1, len(content) - WINDOW_BYTES), step)
    found = {content[start : start + WINDOW_BYTES] for start in starts}
    return {window for window in found if len(set(window)) > WINDOW_BYTES // 2}


def session(
    checkpoint: TinyCheckpoint, folder: Path, *, insecure: bool
) -> tuple[bytes, set[bytes]]:
    """What passed, and the texts in it that would tell of the session."""
    names = ("left", "right")
    plan = make_plan(checkpoint.spec, "tensor_2", model=checkpoint.path.name, devices=names)
    prompt = checkpoint.prompt(40)
    options = ("--no-announce", *["--insecure"] * insecure)
    with (
        start_together(
            *(lambda name=name: Daemon(folder / name, *options, "--name", name) for name in names)
        ) as daemons,
        Relay(daemons[0].address, keeps=True) as left,
        Relay(daemons[1].address, keeps=True) as right,
    ):
        with (
            edge.Cluster.connect([left.address, right.address], insecure=insecure) as cluster,
            cluster.load(checkpoint.path, dtype="float32", plan=plan) as model,
        ):
            reply = model.generate(prompt, max_new_tokens=12).token_ids
        seen = b"|".join(bytes(each.seen) for way in (left, right) for each in way.passages)
    assert len(reply) == 12
    prompted, answered = (",".join(map(str, each)).encode() for each in (prompt[:3], reply[:1]))
    name = checkpoint.path.name.encode()
    texts = {b'"left"', b"layers.", b"session", b"vocab_size", prompted, b'"%s"' % name}
    return seen, texts | {b'"tokens":[%s]' % answered}


def test_nothing_of_it_is_in_the_traffic(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama")
    weights = [array.tobytes() for array in checkpoint.weights.values()]
    secrets = {window for weight in weights for window in windows(weight)}
    assert len(secrets) > 20

    plain, texts = session(checkpoint, tmp_path / "plain", insecure=True)
    assert all(text in plain for text in texts), "this would be seen"
    assert sum(secret in plain for secret in secrets) > len(secrets) / 2

    sealed, texts = session(checkpoint, tmp_path / "sealed", insecure=False)
    assert len(sealed) > 0.9 * len(plain)
    assert not any(text in sealed for text in texts)
    assert not any(secret in sealed for secret in secrets)
