"""Check every request before its body is read, and count it: the Host header, the API key, the metrics."""

from __future__ import annotations

import hmac
import time
from collections.abc import Set as AbstractSet

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fqvit.serve.metrics import Metrics
from fqvit.serve.schemas import Error, ErrorAnswer

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
OPEN = frozenset({"/", "/healthz", "/docs", "/openapi.json"})  # need no key, so that probes and browsers work
STATIC = "/static/"
TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class Gate:
    """The outermost layer of the application.

    key: API key; None: no key is required   loopback: accept only requests whose Host names this machine
    known: paths that the metrics name; all others count as "other", so that clients cannot create unlimited time series
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, key: bytes | None, loopback: bool, known: AbstractSet[str]) -> None:
        self.app, self.metrics, self.key, self.loopback, self.known = app, metrics, key, loopback, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request, started, status = Request(scope), time.perf_counter(), 499  # if the client leaves before the answer

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await (self._rejection(request) or self.app)(scope, receive, counted)
        finally:
            path = request.url.path
            self.metrics.finished(path if path in self.known else "other", status, time.perf_counter() - started)

    def _rejection(self, request: Request) -> Response | None:
        path = request.url.path
        if self.loopback and not _names_this_machine(request):
            return error_answer(403, "this server answers only requests to 127.0.0.1 or localhost. Start it with --host.")
        if self.key is None or path in OPEN or path.startswith(STATIC) or _has_key(request, self.key):
            return None
        return error_answer(401, "wrong or missing API key. Send the header `Authorization: Bearer KEY`.")


def _has_key(request: Request, key: bytes) -> bool:
    """Return whether a request has the API key, as `Authorization: Bearer KEY`. Takes the same time for every wrong key."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key)


def _names_this_machine(request: Request) -> bool:
    """Return whether the Host header names this machine.

    Otherwise a page on the internet whose name resolves to 127.0.0.1 could use a server that accepts only local connections
    (DNS rebinding).
    """
    return (request.url.hostname or "").lower() in LOOPBACK


def error_answer(status: int, message: str) -> Response:
    """Return an error in the shape that OpenAI clients know."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    # The rest of a body that was not read would be taken for the next request, so the connection is closed.
    headers |= {"Connection": "close"} if status in (401, 403, 413, 503) else {}
    return Response(ErrorAnswer(error=Error(message=message, type=kind)).model_dump_json(), status, headers, "application/json")
