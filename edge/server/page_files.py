"""The page at `/`: static files, with a content security policy that allows only these."""

from __future__ import annotations

from functools import partial
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_INDEX = "index.html"


def page_routes() -> list[Route]:
    """A route for each file. The files are the same on every server and need no key."""
    routes = []
    for file in files("edge.server").joinpath("page").iterdir():
        ending = file.name.rpartition(".")[2]
        if ending in _TYPES:
            path = "/" if file.name == _INDEX else f"/page/{file.name}"
            send = partial(_send, content=file.read_bytes(), media_type=_TYPES[ending])
            routes.append(Route(path, send, methods=["GET"]))
    return routes


async def _send(_request: Request, *, content: bytes, media_type: str) -> Response:
    return Response(content, media_type=media_type, headers=_HEADERS)
