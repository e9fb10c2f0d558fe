"""Bad requests get a one-line error message, and the server keeps running."""

from __future__ import annotations

import contextlib
import io
import socket
import struct
import time
import zlib
from collections.abc import Iterator

import httpx
import pytest
from PIL import Image

from tests.serve.running import CLASSIFIER, DETECTOR, Running, message, png, running


@pytest.fixture(autouse=True)
def still_alive(server: Running) -> Iterator[None]:
    """Check after each test that the server still classifies."""
    yield
    assert server.client.post("/v1/classify", content=png()).status_code == 200
    assert "fqvit_queue_images 0.0" in server.client.get("/metrics").text


def bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """Return a small PNG file that claims to have billions of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100_000))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        ("/v1/classify", b"hello", "image 0: not an image"),
        ("/v1/classify", png()[:200], "image 0: cannot be decoded"),
        ("/v1/classify", b"", "no image"),
        ("/v1/classify", bomb(), "3600000000 pixels"),
        ("/v1/classify", bomb(1000, 101), "at most 100000"),
        ("/v1/detect", b"hello", "image 0: not an image"),
        ("/v1/detect", bomb(), "3600000000 pixels"),
        ("/v1/classify?top=0", png(), "top: '0', expected 1 to 1000."),
        ("/v1/classify?top=many", png(), "top: 'many'"),
        ("/v1/detect?score=2", png(), "score: '2', expected 0 to 1."),
        ("/v1/detect?score=nan", png(), "score: 'nan'"),
        ("/v1/detect?masks=perhaps", png(), "masks: 'perhaps', expected true or false."),
        ("/v1/embeddings?encoding_format=hex", png(), "encoding_format: 'hex'"),
        ("/v1/embeddings?output=tokens", png(), "'tokens'"),
        ("/v1/embeddings?dimensions=3", png(), "dimensions: '3', expected 27."),
    ],
)
def test_errors_say_which_image_or_option_is_invalid(server: Running, path: str, content: bytes, said: str) -> None:
    response = server.client.post(path, content=content)
    assert response.status_code == 400 and said in message(response)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", 'expected {"input"'),
        (b'{"input": 3}', "input: int"),
        (b'{"input": [null]}', "input: NoneType"),
        (b'{"input": "%%%"}', "input: not base64"),
        (b'{"input": "http://127.0.0.1/secret.png"}', "This server fetches nothing"),
        (b'{"input": "file:///etc/passwd"}', "This server fetches nothing"),
        (b'{"input": []}', "no image"),
        (b'{"input": "aGVsbG8=", "top": [1]}', "top: '[1]'"),
    ],
)
def test_errors_say_what_is_wrong_with_the_json(server: Running, body: bytes, said: str) -> None:
    response = server.client.post("/v1/classify", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and said in message(response)


@pytest.mark.parametrize("kind", ["multipart/form-data", "multipart/form-data; boundary=x"])
def test_damaged_forms_are_rejected(server: Running, kind: str) -> None:
    response = server.client.post("/v1/classify", content=b"--y\r\nnonsense", headers={"Content-Type": kind})
    assert response.status_code == 400 and ("damaged form" in message(response) or "no image" in message(response))


def test_too_many_images_are_rejected(server: Running) -> None:
    response = server.client.post("/v1/classify", json={"input": ["aGVsbG8="] * 65})
    assert response.status_code == 413 and "65 images, at most 64" in message(response)
    files = [("image", (f"{number}.png", b"x")) for number in range(65)]
    assert server.client.post("/v1/classify", files=files).status_code == 400


def test_large_bodies_are_rejected_with_and_without_a_content_length(server: Running) -> None:
    response = server.client.post("/v1/classify", content=bytes(300_001))
    assert response.status_code == 413 and "more than 300000 bytes" in message(response)

    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield bytes(10_000)

    response = httpx.post(f"{server.url}v1/classify", content=parts())
    assert response.status_code == 413


def test_the_error_for_an_unknown_model_lists_the_models_for_the_task(server: Running) -> None:
    response = server.client.post("/v1/classify?model=other", content=png())
    assert response.status_code == 404 and "expected one of: fqvit_v1." in message(response)
    response = server.client.post("/v1/classify?model=opencv_v1", content=png())
    assert response.status_code == 404


def test_the_error_for_a_task_without_a_model_lists_the_loaded_models() -> None:
    with running(DETECTOR) as detector_only:
        response = detector_only.client.post("/v1/classify", content=png())
    assert response.status_code == 400 and "It serves opencv_v1 (detect)." in message(response)


def test_unknown_paths_and_methods_are_rejected(server: Running) -> None:
    assert "Not Found" in message(server.client.get("/nothing"))
    assert server.client.get("/v1/classify").status_code == 405
    assert server.client.get("/static/../app.py").status_code == 404


def test_malformed_http_gets_status_400(server: Running) -> None:
    address = (server.client.base_url.host, server.client.base_url.port)
    for text in (b"nonsense\r\n\r\n", b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n"):
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(text)
            assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_body_that_never_ends_gets_an_answer_after_the_time_limit(server: Running) -> None:
    address = (server.client.base_url.host, server.client.base_url.port)
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
        assert connection.recv(1000).startswith(b"HTTP/1.1 503")


def test_connections_without_complete_headers_are_closed(server: Running) -> None:
    address = (server.client.base_url.host, server.client.base_url.port)
    slow = [socket.create_connection(address, timeout=30) for _ in range(20)]
    started = time.monotonic()
    for number, connection in enumerate(slow):
        connection.sendall(b"POST /v1/classify HTTP/1.1\r\nHost:" if number % 2 else b"")
    assert server.client.get("/healthz").status_code == 200  # slow connections do not block other clients
    for connection in slow:
        with connection, contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert time.monotonic() - started < 25


def test_the_server_survives_clients_that_disconnect_early(server: Running) -> None:
    address = (server.client.base_url.host, server.client.base_url.port)
    for _ in range(10):
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
    time.sleep(0.2)


def test_other_host_headers_are_rejected_on_loopback(server: Running) -> None:
    response = server.client.post("/v1/classify", content=png(), headers={"Host": "evil.example"})
    assert response.status_code == 403 and "127.0.0.1 or localhost" in message(response)


def test_every_image_format_of_the_command_line_is_accepted(server: Running) -> None:
    for kind in ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF"):
        file = io.BytesIO()
        Image.new("RGB", (30, 20), (10, 200, 30)).save(file, kind)
        assert server.client.post("/v1/classify", content=file.getvalue()).status_code == 200, kind


def test_the_default_model_is_the_first_one_for_the_task(server: Running) -> None:
    assert server.client.post("/v1/classify", content=png()).json()["model"] == CLASSIFIER.stem
