"""Measure a quantized detector and its float detector in PyTorch on one image: time, memory, and time by part.

The rounds are those of classifiers (rounds.py); the workers also report the time of each part.
See also: detector_runs.py and detector_floats.py (what the workers run), report.py (tables).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fqvit.bench.detector_runs import BETWEEN, NETWORKS, IntegerRun
from fqvit.bench.measure import Measured, Note, save_array, smooth_images
from fqvit.bench.ops import OpTime
from fqvit.bench.peers import Peer, Skipped, choose
from fqvit.bench.rounds import MILLI, Candidate, Timing, run_rounds
from fqvit.detect.images import prepare, resized_size
from fqvit.detect.program import DetectorHeader
from fqvit.errors import FqvitError
from fqvit.runtime.native import measure_peak
from fqvit.system.files import write_atomically
from fqvit.system.progress import Progress, busy
from fqvit.system.text import table

OURS = "fqvit"
FLOAT = "torch fp32"
SUM = "between the networks"
PROFILE_ROUNDS = 5
NOTE = "networks eager with scaled_dot_product_attention, steps between them in numpy"


@dataclass(frozen=True)
class DetectorBench:
    """The result of measure_detector(). detections: their number per candidate; random weights are left out"""

    found: Measured
    detections: dict[str, int]


def bench_pixels(header: DetectorHeader, image: Image.Image | None) -> NDArray[np.uint8]:
    """Return the resized image u8 [h, w, 3]: the given one, or a random one of the largest size that the detector uses."""
    s = header.settings
    if image is not None:
        return prepare(image, s, header.resize).pixels
    height, width = resized_size(s.short, s.long, s.short, s.long)
    pixels: NDArray[np.uint8] = smooth_images((1, height, width, 3), seed=0)[0]
    return pixels


def measure_detector(
    file: Path,
    pixels: NDArray[np.uint8],
    libraries: Sequence[str],
    weights: str | None,
    threads: Sequence[int],
    rounds: int,
    track: Progress,
) -> DetectorBench:
    """Time the detector, and its float detector if `libraries` has torch, on one image with each number of threads.

    pixels: from bench_pixels()   weights: checkpoint of the float detector; None uses random weights of the same shapes
    """
    with busy(f"loading {file}"):
        first = IntegerRun(str(file), pixels, 1)
        count = first().shape[1]
    peers, skipped = _peers(libraries)
    found = Measured(skipped=skipped, peak=measure_peak(), macs={OURS: sum(step.macs for step in first.steps)})
    assert found.peak is not None
    found.notes[OURS] = Note(True, f"{found.peak.isa} kernels, uint8 pixels in, integers throughout")
    with tempfile.TemporaryDirectory(prefix="fqvit-bench-") as name:
        images, asked = Path(name) / "pixels.npy", Path(name) / "float.json"
        save_array(images, pixels)
        text = json.dumps({"program": str(file.resolve()), "weights": weights, "boxes": count})
        write_atomically(asked, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        candidates = [Candidate(OURS, "fqvit detector", file, images)]
        candidates += [Candidate(peer.name, "torch detector", asked, images) for peer in peers]
        for number in threads:
            timings = run_rounds(candidates, number, 1, rounds, track)
            _check(timings, file, weights, found)
            found.timings.append([timing for timing in timings if timing.failure is None])
    if any(timing.name == FLOAT for timings in found.timings for timing in timings):
        same = f"; its mask heads run on {count} boxes, too" if weights is None else ""
        found.notes[FLOAT] = Note(None, f"{version('torch')}, {NOTE}{same}")
        found.source = "random weights" if weights is None else Path(weights).name
    known = [timing for timing in found.timings[0] if timing.name == OURS or weights is not None]
    return DetectorBench(found, {timing.name: len(timing.first) for timing in known})


def _peers(libraries: Sequence[str]) -> tuple[list[Peer], list[Skipped]]:
    """Return torch if it is wanted and installed. The other runtimes have no detectors to compare with."""
    found, skipped = choose([library for library in libraries if library == "torch"])
    skipped += [Skipped(library, "detectors are compared with torch only") for library in libraries if library != "torch"]
    return found, skipped


def _check(timings: Sequence[Timing], file: Path, weights: str | None, found: Measured) -> None:
    """Raise FqvitError if the program or the given weights failed. Skip a float detector with random weights that failed."""
    for timing in timings:
        if timing.failure is not None and timing.name == OURS:
            raise FqvitError(f"{file}: {timing.failure}")
        if timing.failure is not None and weights is not None:
            raise FqvitError(timing.failure)
        if timing.failure is not None:
            found.skipped.append(Skipped(timing.name, timing.failure))


def parts_of(timing: Timing) -> dict[str, float]:
    """Return the median milliseconds of each part, in the order of a run, and of everything between the networks.

    The time between the networks of a float detector is the rest of its total time.
    """
    found = {part: MILLI * statistics.median(seconds) for part, seconds in timing.parts.items()}
    if set(BETWEEN) <= set(found):
        between = [sum(steps) for steps in zip(*(timing.parts[part] for part in BETWEEN), strict=True)]
    else:
        networks = [sum(steps) for steps in zip(*(timing.parts[part] for part in NETWORKS), strict=True)]
        between = [wall - own for wall, own in zip(timing.wall, networks, strict=True)]
    return found | {SUM: MILLI * statistics.median(between)}


def parts_text(timings: Sequence[Timing]) -> str:
    """Return the table of the times by part of one setting."""
    columns = [parts_of(timing) for timing in timings]
    totals = [sum(column[part] for part in (*NETWORKS, SUM)) for column in columns]
    rows = []
    for part in (*NETWORKS, SUM, *BETWEEN):
        cells = [part if part not in BETWEEN else f"  {part}"]
        for column, total in zip(columns, totals, strict=True):
            cells += [f"{column[part]:.2f}", f"{100 * column[part] / total:.1f} %"] if part in column else ["", ""]
        rows.append(cells)
    heads = [head for timing in timings for head in (timing.name, "share")]
    threads = "1 thread" if timings[0].threads == 1 else f"{timings[0].threads} threads"
    return f"Wall time by part, median in ms per image, {threads}\n{table(('part', *heads), rows)}"


def profile(file: Path, pixels: NDArray[np.uint8], track: Progress) -> list[OpTime]:
    """Return the median time of every op of the pyramid, of every head and of every step between networks, on one thread."""
    run = IntegerRun(str(file), pixels, 1)
    run()
    found = []
    for _ in track(range(PROFILE_ROUNDS), PROFILE_ROUNDS, "time per op"):
        run()
        found.append(run.steps)
    return [
        OpTime(step.buffer or step.op, step.op, statistics.median(each[i].seconds for each in found), step.macs)
        for i, step in enumerate(found[0])
    ]
