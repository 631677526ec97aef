"""Every kind of frame between coordinator and peers, in the order of use, and their size limits.

Calls name the record that answers them. Every peer gets posts in the same order; events report
their outcome. Both sides send `alive` a few times a second (see heartbeat.py).
"""

from __future__ import annotations

from edge.protocol.draft_frames import AskDrafts, ServeDrafts
from edge.protocol.error_codec import Failed
from edge.protocol.frame_codec import ANSWER, SMALL, table
from edge.protocol.graph_frames import ClosePart, OpenPart, ProfilePart
from edge.protocol.kept_files import Keep
from edge.protocol.kv_frames import KvRows, PutKv, Reserve, Reserved, SaveState, SwapOut, SwappedOut
from edge.protocol.measurements import Glance, MemoryRate, Probe, Profile, Prove
from edge.protocol.peer_frames import Describe, Leaving, SetMemory, TakeOver
from edge.protocol.prefix_frames import AskPrefix, MatchPrefix, PrefixMatched, PutPrefix, ReadPrefix
from edge.protocol.session_frames import (
    AskLink,
    Close,
    Connect,
    CountSteps,
    LinkSent,
    Measure,
    Observed,
    Open,
    Waits,
)
from edge.protocol.step_frames import Finish, Logits, PictureRows, RunStep, States, Tokens, YieldRun
from edge.protocol.tower_frames import CloseTower, OpenTower, PutHidden, ReadTile, TakeRows
from edge.protocol.weight_frames import MAX_MANIFEST_BYTES, Offer, Piece, Seal
from edge.transport.frame import MAX_HEADER_BYTES, FrameLimits

_ANSWER_LIMITS = FrameLimits(header_bytes=MAX_HEADER_BYTES, payload_bytes=MAX_MANIFEST_BYTES)
"""Size limit of an answer. Its call is not known yet when the limit is needed."""

FRAMES = table(
    (
        Describe, MemoryRate, Profile, Prove, Probe, Glance, SetMemory, TakeOver, Keep,
        Offer, Piece, Seal, Open, Connect, ServeDrafts, AskDrafts,
        OpenTower, PutHidden, ReadTile, TakeRows, CloseTower,
        OpenPart, ProfilePart, ClosePart,
        MatchPrefix, PrefixMatched, AskPrefix, ReadPrefix, PutPrefix, Reserve, Reserved,
        PictureRows, RunStep,
        KvRows, PutKv, Tokens, Logits, States, YieldRun, SwapOut, SwappedOut, SaveState, Finish,
        Measure, CountSteps, Observed, Close, Leaving, Failed, Waits, AskLink, LinkSent,
    )
)  # fmt: skip
"""Frames by kind."""


def limits_of(kind: str) -> FrameLimits:
    """Size limit of a frame of this kind. The kind may be any text."""
    if kind == ANSWER:
        return _ANSWER_LIMITS
    return FRAMES[kind].limits if kind in FRAMES else SMALL
