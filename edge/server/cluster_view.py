"""The cluster as a server's clients see it: JSON for the page, `edge top` and scripts. Pure."""

from __future__ import annotations

from typing import Any

from edge.api.async_model import AsyncModel

Json = dict[str, Any]


def cluster_view(model: AsyncModel, *, answers: int) -> Json:
    """What runs where, and how fast it should be. No secret is in it, and no prompt.

    model: its name, format and context. devices: in the order of the plan, what each has of the
    model. predicted: of a reply alone, null where the devices were not measured. answers: under way
    or waiting. recoveries: how it went on after devices were lost, the first time first.
    """
    proposal = model.proposal
    predicted = proposal.choice.predicted
    return {
        "model": {
            "name": model.name,
            "dtype": proposal.dtype,
            "context_tokens": model.context_tokens,
            "is_over": model.is_over,
            "is_recovering": model.is_recovering,
        },
        "recoveries": [
            {
                "reason": recovery.reason,
                "pause_s": recovery.pause_s,
                "answers": recovery.requests,
            }
            for recovery in model.recoveries
        ],
        "devices": [
            {
                "name": model.peers[row.device].name,
                "stage": row.stage,
                "layers": [row.layers.start, row.layers.stop],
                "has": row.in_words,
                "streamed_layers": row.streamed_layers,
                "memory_bytes": row.memory.total,
                "left_bytes": row.left_bytes,
            }
            for row in proposal.rows
        ],
        "predicted": None
        if predicted is None
        else {
            "tokens_per_s": predicted.tokens_per_s,
            "first_token_s": predicted.first_token_s,
        },
        "answers": answers,
    }
