"""Close connections that do not send the headers of a request in time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def protocol(header_seconds: float) -> type[HttpToolsProtocol]:
    """Return uvicorn's HTTP protocol with a time limit for the headers of a request.

    uvicorn itself waits forever for the rest of a request line or of headers, so that a client that sends one byte per
    minute (slow loris) occupies a connection for as long as it likes.
    """

    class Guarded(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._start()

        def on_headers_complete(self) -> None:
            self._stop()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _start(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(header_seconds, self._close)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _close(self) -> None:
            self._deadline = None
            self.transport.abort()

    return Guarded
