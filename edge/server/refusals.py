"""What a client is told when its request cannot be served: one fact, said in each dialect's way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from edge.errors import CapacityError, EdgeError, PeerError, RequestError

Dialect = Literal["openai", "anthropic", "ollama"]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
RETRY_AFTER_S = 2
"""A request waits for others' tokens, so soon there is room."""


@dataclass(slots=True)
class Refusal(Exception):  # noqa: N818 - it is an answer, not a defect
    """A status, a sentence, and what in the request it is about."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    closes: bool = False
    """Nothing more is read of the connection."""

    def body(self, dialect: Dialect) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "api_error")
        if dialect == "anthropic":
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        if dialect == "ollama":
            return {"error": self.message}
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        found = {"Connection": "close"} if self.closes else {}
        if self.status in {429, 503}:
            found["Retry-After"] = str(RETRY_AFTER_S)
        elif self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found


def refusal_of(error: EdgeError) -> Refusal:
    """What an error of the engine is to a client."""
    if isinstance(error, RequestError):
        is_long = "and the context" in str(error)
        return Refusal(400, str(error), code="context_length_exceeded" if is_long else None)
    if isinstance(error, CapacityError | PeerError):
        return Refusal(503, str(error))
    return Refusal(500, str(error))
