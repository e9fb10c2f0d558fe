"""Start `fqvit serve` in a process of its own, and make images for it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
CLASSIFIER, EMBEDDER, TOKENS = GOLDEN / "fqvit_v1.fqvit", GOLDEN / "widths_v2.fqvit", GOLDEN / "tokens_v1.fqvit"
DETECTOR = GOLDEN / "detectors" / "opencv_v1.fqvit"


class Running:
    """A server that accepts requests. client: sends requests to it"""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.client = httpx.Client(base_url=url, timeout=60)


@contextmanager
def running(*arguments: object) -> Iterator[Running]:
    """Run `fqvit serve` with these arguments on a free port, and stop it at the end."""
    command = [sys.executable, "-m", "fqvit", "serve", *map(str, arguments), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        server = Running(process, json.loads(line)["url"])
        with server.client:
            yield server
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
        process.stderr.close()


def png(seed: int = 0, size: tuple[int, int] = (20, 30)) -> bytes:
    """Return a random image as a PNG file. size: height, width"""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def opened(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file))


def message(response: httpx.Response) -> str:
    """Return the message of an error, which must have the format that OpenAI clients expect."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    return str(error["message"])
