"""Start the server, and stop it without losing requests that it has accepted."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn

from fqvit.distributed.workers import cores
from fqvit.errors import FqvitError
from fqvit.serve.app import make_app
from fqvit.serve.gate import LOOPBACK
from fqvit.serve.hosted import Shared, host
from fqvit.serve.limits import Limits
from fqvit.serve.metrics import Metrics
from fqvit.serve.protocol import protocol

KEEP_ALIVE = 15  # seconds that an idle connection stays open


def serve(
    paths: Sequence[Path],
    address: str,
    port: int,
    limits: Limits,
    threads: int | None,
    key: bytes | None,
    started: Callable[[str, Sequence[str]], None],
) -> None:
    """Serve files until a signal stops the server. It then finishes the requests that it has accepted.

    address: host name or IP address to listen on   port: 0 selects a free port   key: API key; None: no key is required
    started: called with the URL and the names of the models once the server accepts requests
    """
    listening = _bind(address, port)
    with listening:
        metrics = Metrics()
        shared = Shared(limits, threads or cores(), metrics.ran)
        models = host(paths, shared)
        app = make_app(models, shared, metrics, key, address in LOOPBACK)
        config = uvicorn.Config(
            app,
            http=protocol(limits.header_seconds),
            ws="none",
            proxy_headers=False,
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            limit_concurrency=limits.connections,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(limits.seconds) + 1,
        )
        bound = listening.getsockname()
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        _Server(config, lambda: started(f"http://{shown}:{bound[1]}/", list(models))).run(sockets=[listening])


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready and leaves exit codes to the caller."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGINT, SIGTERM and SIGHUP, and do not raise the signal again afterwards: a requested stop is a success."""
        with super().capture_signals(), _handling("SIGHUP", self.handle_exit):
            yield
            self._captured_signals.clear()


@contextmanager
def _handling(name: str, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle a signal in the block, unless the system lacks it, it is ignored (nohup), or this is not the main thread."""
    number = getattr(signal, name, None)
    before = None if number is None else signal.getsignal(number)
    if number is None or before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _bind(address: str, port: int) -> socket.socket:
    """Return a socket that listens. Fails before the models are loaded if the address cannot be used."""
    if not 0 <= port <= 65535:
        raise FqvitError(f"--port {port}: expected 0 to 65535.")
    listening: socket.socket | None = None
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
    except OSError as error:
        if listening is not None:
            listening.close()
        reason = error.strerror or error
        raise FqvitError(f"--host {address} --port {port}: cannot be used ({reason}). Choose another one.") from error
    return listening
