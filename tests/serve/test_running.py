"""Start and stop the server: API keys, back-pressure, graceful shutdown, invalid arguments."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cli.command_line import assert_rejected, fqvit
from tests.serve.running import CLASSIFIER, DETECTOR, message, png, running


def test_the_api_key_protects_models_and_metrics_but_not_the_health_check(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("correct-horse\n")
    with running(CLASSIFIER, "--api-key-file", key) as server:
        right, wrong = {"Authorization": "Bearer correct-horse"}, {"Authorization": "Bearer correct-horsf"}
        for headers in ({}, wrong, {"Authorization": "correct-horse"}, {"Authorization": "Basic correct-horse"}):
            response = server.client.post("/v1/classify", content=png(), headers=headers)
            assert response.status_code == 401 and "Authorization: Bearer KEY" in message(response)
        assert server.client.get("/metrics").status_code == 401
        assert server.client.post("/v1/classify", content=png(), headers=right).status_code == 200
        assert server.client.get("/metrics", headers=right).status_code == 200
        for path in ("/healthz", "/", "/docs", "/openapi.json"):
            assert server.client.get(path).status_code == 200


def test_the_api_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FQVIT_API_KEY", "from-the-environment")
    with running(CLASSIFIER) as server:
        assert server.client.get("/v1/models").status_code == 401


def test_a_full_queue_rejects_further_requests_with_status_429() -> None:
    large = png(0, (400, 600))
    with running(DETECTOR, "--queue", 2, "--threads", 1) as server, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: httpx.post(f"{server.url}v1/detect", content=large, timeout=60), range(12)))
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 429}, codes
        rejected = next(answer for answer in answers if answer.status_code == 429)
        assert rejected.headers["Retry-After"] == "1" and "Try again" in message(rejected)
        assert server.client.post("/v1/detect", content=large).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_lets_accepted_requests_finish(number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup: the server would ignore the signal, too
        pytest.skip(f"{number.name} is ignored in this session")
    file = png()
    head = f"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(file)}\r\n\r\n".encode()
    with running(CLASSIFIER) as server:
        address = (server.client.base_url.host, server.client.base_url.port)
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(head + file[:10])
            time.sleep(0.3)
            server.process.send_signal(number)
            assert refuses(server.url)
            connection.sendall(file[10:])
            assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
        assert server.process.wait(30) == 0
        assert server.process.stderr is not None and server.process.stderr.read() == ""


def refuses(url: str) -> bool:
    """Return whether the server refuses new connections within about ten seconds."""
    for _ in range(100):
        try:
            httpx.get(f"{url}healthz")
        except httpx.TransportError:
            return True
        time.sleep(0.1)
    return False


def test_concurrent_clients_get_the_answers_to_their_own_requests() -> None:
    files = [png(seed) for seed in range(8)]
    with running(CLASSIFIER) as server:
        expected = [httpx.post(f"{server.url}v1/classify", content=file).json() for file in files]
        wrong: list[int] = []

        def ask(number: int) -> None:
            with httpx.Client(timeout=60) as client:
                for turn in range(20):
                    index = (number + turn) % len(files)
                    if client.post(f"{server.url}v1/classify", content=files[index]).json() != expected[index]:
                        wrong.append(index)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_invalid_files_and_options_are_rejected_before_the_server_starts(tmp_path: Path) -> None:
    (tmp_path / "x.fqvit").write_bytes(b"nonsense")
    short = tmp_path / "short"
    short.write_text("abc")
    copy = tmp_path / CLASSIFIER.name
    copy.write_bytes(CLASSIFIER.read_bytes())
    assert_rejected(fqvit("serve", tmp_path / "x.fqvit", "--port", 0), "x.fqvit")
    assert_rejected(fqvit("serve", tmp_path / "missing.fqvit", "--port", 0), "missing.fqvit")
    assert_rejected(fqvit("serve", CLASSIFIER, copy, "--port", 0), "a second file named fqvit_v1")
    assert_rejected(fqvit("serve", CLASSIFIER, "--port", 70000), "--port 70000: expected 0 to 65535.")
    assert_rejected(fqvit("serve", CLASSIFIER, "--host", "no.such.host.invalid"), "no.such.host.invalid")
    assert_rejected(fqvit("serve", CLASSIFIER, "--batch", 0), "--batch 0: expected at least 1.")
    assert_rejected(fqvit("serve", CLASSIFIER, "--timeout", "nan"), "--timeout nan: expected a number of seconds")
    assert_rejected(fqvit("serve", CLASSIFIER, "--threads", 0), "--threads 0")
    assert_rejected(fqvit("serve", CLASSIFIER, "--api-key-file", short), "at least 8 ASCII characters")
    assert_rejected(fqvit("serve", CLASSIFIER, "--api-key-file", tmp_path / "none"), "none: cannot be read")


def test_a_port_in_use_is_rejected() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert_rejected(fqvit("serve", CLASSIFIER, "--port", taken.getsockname()[1]), "cannot be used")


def test_missing_packages_are_reported_with_the_install_command() -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None; from fqvit.__main__ import main;"
        f" sys.argv = ['fqvit', 'serve', {str(CLASSIFIER)!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install 'fqvit[serve]'" in done.stderr
