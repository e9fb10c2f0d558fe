"""Serve the web page on this machine: a few files from memory, to browsers on the same machine only.

The headers isolate the page from other origins, so that browsers offer shared memory and precise clocks. Requests whose
Host header names another host are rejected, so that a page on the internet cannot read the program by making its own host name
resolve to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from socket import socket
from urllib.parse import urlsplit

from fqvit.errors import FqvitError

HOST = "127.0.0.1"
MAX_CONNECTIONS = 32
TIMEOUT = 30.0  # seconds without a byte, after which a connection is closed
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".wasm": "application/wasm"}
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """An HTTP server for fixed files. files: name -> content; index.html is also served at /."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, files: Mapping[str, bytes], port: int = 0) -> None:
        if not 0 <= port <= 65535:
            raise FqvitError(f"--port {port}: expected 0 to 65535.")
        self.files = {"/" + name: content for name, content in files.items()}
        self.free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise FqvitError(f"--port {port}: cannot be used ({error.strerror or error}). Choose another one.") from error

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def process_request(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        """Start a thread for a connection, or close the connection if too many are open."""
        if not self.free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.free.release()
            raise

    def process_request_thread(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that break: browsers close them at any time."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fqvit", ""
    timeout = TIMEOUT

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = urlsplit(self.path).path
        content = self.server.files.get("/index.html" if path == "/" else path)
        if self.headers.get("Host") not in {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}:
            self.send_error(HTTPStatus.FORBIDDEN, "Wrong host")
        elif content is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self.send_response(HTTPStatus.OK)
            kind = TYPES[".html"] if path == "/" else TYPES.get(PurePosixPath(path).suffix, "application/octet-stream")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
