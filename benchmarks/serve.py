"""Measure the throughput of `fqvit serve` under load, against the bare engine on the same cores.

    .venv/bin/python benchmarks/serve.py FILE.fqvit --image photo.jpg
    .venv/bin/python benchmarks/serve.py FILE.fqvit --image photo.jpg --rounds 1 --seconds 600     # does memory grow?

Each round runs the engine alone on prepared pixels, the Python API on image files (which decodes them), and the server with
requests of `wrk` (package wrk of Debian) on loopback: one image per request, as a file that the server decodes. All use every
core; wrk takes its share of them. The results are medians over rounds of images per second and of the ratios, latencies,
errors, and the server's memory over time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import fqvit
from fqvit.data.images import read_image
from fqvit.distributed.workers import cores
from fqvit.inference.model import Model, ProgramModel
from fqvit.runtime.native import Engine

SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/octet-stream"
local file = io.open("{image}", "rb")
wrk.body = file:read("*a")
"""


def engine_rate(engine: Engine, pixels: np.ndarray, seconds: float) -> float:
    """Return images per second of the engine alone. pixels: u8 [N, H, W, C]"""
    images, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        engine.run(pixels)
        images += len(pixels)
    return images / (time.perf_counter() - started)


def api_rate(model: Model, image: Path, seconds: float) -> float:
    """Return images per second of fqvit.load(...).embed, which decodes the files."""
    images, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        images += len(model.embed([image] * 64))
    return images / (time.perf_counter() - started)


def load(url: str, image: Path, clients: int, seconds: int) -> dict[str, float]:
    """Send requests for some seconds. Returns rate [requests/s], p50 and p99 [ms], errors."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(SCRIPT.format(image=image.resolve()))
        script.flush()
        command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds}s", "--latency", "--timeout", "30s", "-s", script.name, url]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"Requests/sec:\s+([\d.]+)", text)
    assert found is not None, text
    failed = sum(int(n) for n in re.findall(r"Non-2xx or 3xx responses: (\d+)", text))
    sockets = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text)
    failed += sum(int(n) for n in sockets.groups()) if sockets else 0
    latencies = {share: milliseconds(value) for share, value in re.findall(r"(50|99)%\s+([\d.]+\w+)", text)}
    return {"rate": float(found[1]), "p50": latencies["50"], "p99": latencies["99"], "errors": failed}


def milliseconds(text: str) -> float:
    """Read a time as wrk prints it: 12.3us, 4.56ms, 1.23s."""
    units = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s|m)", text).groups()  # type: ignore[union-attr]
    return float(number) * units[unit]


class Memory:
    """Samples the resident memory of a process once per second, in bytes."""

    def __init__(self, process: int) -> None:
        self.samples: list[int] = []
        self._file = Path(f"/proc/{process}/statm")
        self._end = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._end.wait(1.0):
            self.samples.append(int(self._file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))

    def stop(self) -> None:
        self._end.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--task", default="classify", choices=("classify", "embeddings"))
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=int, default=10, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk: not found. Install it (apt install wrk).")
    model = fqvit.load(options.file)
    assert isinstance(model, ProgramModel)
    engine = model.engine
    pixels = np.stack([read_image(options.image, engine.header.preprocess)] * options.batch)
    command = [
        sys.executable,
        "-m",
        "fqvit",
        "serve",
        str(options.file),
        "--port",
        "0",
        "--batch",
        str(options.batch),
        "--json",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["url"] + f"v1/{options.task}"
    load(url, options.image, options.clients, 1)  # warm up
    memory = Memory(server.pid)
    rounds = []
    for _ in range(options.rounds):
        seconds = min(options.seconds, 10)
        alone = {"engine": engine_rate(engine, pixels, seconds), "api": api_rate(model, options.image, seconds)}
        rounds.append(alone | load(url, options.image, options.clients, options.seconds))
    memory.stop()
    server.terminate()
    code = server.wait(60)
    middle = {name: statistics.median(one[name] for one in rounds) for name in ("engine", "api", "rate", "p50", "p99")}
    tenth = max(1, len(memory.samples) // 10)
    result = middle | {
        "ratio": statistics.median(one["rate"] / one["engine"] for one in rounds),
        "ratio_api": statistics.median(one["rate"] / one["api"] for one in rounds),
        "errors": sum(one["errors"] for one in rounds),
        "memory_first": max(memory.samples[:tenth]),
        "memory_last": max(memory.samples[-tenth:]),
        "cores": cores(),
        "clients": options.clients,
        "exit_code": code,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"engine alone      {result['engine']:.1f} images/s on {result['cores']} cores, batches of {options.batch}")
    print(f"with decoding     {result['api']:.1f} images/s")
    ratios = f"{result['ratio']:.3f} of the engine, {result['ratio_api']:.3f} of the engine with decoding"
    print(f"server            {result['rate']:.1f} images/s with {options.clients} clients: {ratios}")
    print(f"latency           median {result['p50']:.1f} ms, p99 {result['p99']:.1f} ms; {result['errors']} errors")
    first, last = (result[f"memory_{part}"] / 1e6 for part in ("first", "last"))
    print(f"memory            {first:.1f} MB in the first tenth, {last:.1f} MB in the last")


if __name__ == "__main__":
    main()
