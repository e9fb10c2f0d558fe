"""Serve a classifier over HTTP: python examples/serve.py FILE.fqvit [PORT]; then curl --data-binary @cat.jpg localhost:8000

All threads share one engine: requests run one after the other, each on all cores. For concurrent requests, create one engine
per thread with threads=1. Both give the same bits.
"""

from __future__ import annotations

import io
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image, UnidentifiedImageError

import fqvit

LARGEST = 20_000_000  # maximum size of an encoded image, in bytes


def answer(engine: fqvit.Engine, body: bytes) -> dict[str, object]:
    """Classify an encoded image."""
    pixels = engine.header.preprocess.apply(Image.open(io.BytesIO(body)))
    scores = engine.run(pixels[None])[0]
    best = int(scores.argmax())
    return {"class": best, "name": engine.classes[best] if engine.classes else None, "score": int(scores[best])}


def server(file: str, port: int) -> ThreadingHTTPServer:
    """Load a program, and return a server that classifies POSTed images."""
    engine = fqvit.Engine(file)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.headers.get("Content-Length", "0")
            length = int(text) if text.isdecimal() else -1
            if not 0 <= length <= LARGEST:
                return self.reply(413, {"error": f"Content-Length is {text}, expected 0 to {LARGEST}"})
            try:
                return self.reply(200, answer(engine, self.rfile.read(length)))
            except (fqvit.FqvitError, UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
                return self.reply(400, {"error": str(error)})

        def reply(self, status: int, body: dict[str, object]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python examples/serve.py FILE.fqvit [PORT]")
    server(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8000).serve_forever()
