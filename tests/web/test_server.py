"""Test the server of `fqvit web --serve`: its files and headers, what it rejects, and how it ends."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fqvit.errors import FqvitError
from fqvit.web.server import MAX_CONNECTIONS, Server


@pytest.fixture
def server() -> Iterator[Server]:
    with Server({"index.html": b"<p>page</p>", "model.fqvit": b"\x01\x02", "model.fqvit.js": b"x"}) as started:
        thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield started
        started.shutdown()
        thread.join()


def ask(server: Server, path: str, method: str = "GET", host: str | None = None) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def test_files_have_their_types_and_the_isolation_headers(server: Server) -> None:
    expected = {
        "/": "text/html; charset=utf-8",
        "/model.fqvit": "application/octet-stream",
        "/model.fqvit.js": "text/javascript; charset=utf-8",
    }
    for path, kind in expected.items():
        response, body = ask(server, path)
        assert response.status == 200 and response.headers["Content-Type"] == kind and len(body) > 0
        assert response.headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert response.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
    assert ask(server, "/index.html?x=1")[1] == b"<p>page</p>"
    response, body = ask(server, "/", "HEAD")
    assert response.headers["Content-Length"] == "11" and body == b""


def test_other_paths_methods_and_hosts_are_rejected(server: Server) -> None:
    assert ask(server, "/../etc/passwd")[0].status == 404
    assert ask(server, "/", "POST")[0].status == 501
    assert ask(server, "/", host="example.com")[0].status == 403
    assert ask(server, "/", host=f"localhost:{server.server_port}")[0].status == 200


def test_too_many_connections_are_closed_and_the_server_recovers(server: Server) -> None:
    waiting = [socket.create_connection(("127.0.0.1", server.server_port), timeout=10) for _ in range(MAX_CONNECTIONS + 1)]
    assert waiting[-1].recv(1) == b""  # closed: all threads are in use
    for connection in waiting:
        connection.close()
    for _ in range(100):
        try:
            assert ask(server, "/")[0].status == 200
            break
        except (OSError, http.client.HTTPException):
            threading.Event().wait(0.05)
    else:
        pytest.fail("the server did not recover")


def test_a_port_in_use_is_reported(server: Server) -> None:
    with pytest.raises(FqvitError, match=f"--port {server.server_port}: cannot be used"):
        Server({}, server.server_port)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for child processes")
def test_ctrl_c_ends_the_server_without_a_message(small_page: Path) -> None:
    use_small_page = f"from pathlib import Path; from fqvit.web import page; page.page_path = lambda: Path({str(small_page)!r})"
    script = f"{use_small_page}; from fqvit.__main__ import main; main()"
    command = [sys.executable, "-c", script, "web", "--serve", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT and err == ""
