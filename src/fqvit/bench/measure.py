"""Measure programs and their peers (the same model in other runtimes): prepare files, then time all candidates.

See also: peers.py (list of peers), prepare.py (their files), rounds.py (timing), report.py (tables).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.bench.peers import PEERS, Peer, Skipped, choose
from fqvit.bench.rounds import Candidate, Timing, ask_once, differing_logits, run_rounds
from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.ir.ops import Linear
from fqvit.ir.program import Header, Program
from fqvit.models import embedded
from fqvit.runtime.native import Engine, Peak, measure_peak
from fqvit.system.files import npy_bytes, write_atomically
from fqvit.system.progress import Progress

CALIBRATION = 8  # calibration images of the int8 peers; few are enough because times do not depend on the scales
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Note:
    """A note on one candidate. exact: whether its integer products are exact; None for float models or if unknown"""

    exact: bool | None
    text: str


@dataclass
class Measured:
    """The result of measure().

    timings: one list per setting, programs first   notes: by name of the candidate
    source: origin of the peers' weights, None without peers
    peak: peak speed of the engine's micro-kernel on this machine
    macs: multiply-accumulates per image, by name of the program
    """

    timings: list[list[Timing]] = field(default_factory=list)
    notes: dict[str, Note] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    source: str | None = None
    peak: Peak | None = None
    macs: dict[str, int] = field(default_factory=dict)


def measure(
    programs: Mapping[str, Path],
    libraries: Sequence[str],
    weights: str | None,
    settings: Sequence[tuple[int, int]],
    rounds: int,
    track: Progress,
    undecided: Mapping[str, Any] | None = None,
) -> Measured:
    """Time all programs and peers in every setting.

    programs: files of one model's programs, by their name in the table   libraries: runtimes to compare with (peers.LIBRARIES)
    weights: checkpoint of the peers' float model, None for embedded or random weights   settings: pairs (threads, batch)
    undecided: settings that cannot be read from the checkpoint, as in load_model
    """
    loaded = {name: Program.load(path) for name, path in programs.items()}
    program = next(iter(loaded.values()))
    if any(other.input_shape != program.input_shape for other in loaded.values()):
        raise FqvitError("programs: found different image sizes, expected the same. Measure them one by one.")
    peers, skipped = choose(libraries)
    found = Measured(skipped=skipped)
    found.peak = measure_peak()
    for name, path in programs.items():
        found.macs[name] = Engine(path, 1).macs
        found.notes[name] = Note(True, f"{found.peak.isa} kernels, uint8 pixels in, integers throughout")
    with tempfile.TemporaryDirectory(prefix="fqvit-bench-") as name:
        folder = Path(name)
        files = _prepare(program, peers, weights, undecided or {}, folder, found) if peers else {}
        for threads, batch in settings:
            pixels, floats = folder / f"pixels{batch}.npy", folder / f"floats{batch}.npy"
            _save_images(program, batch, pixels, floats)
            candidates = [Candidate(name, "fqvit", path, pixels) for name, path in programs.items()]
            made = [peer for peer in peers if peer.name in files]
            candidates += [Candidate(peer.name, peer.library, files[peer.name], floats) for peer in made]
            timings = run_rounds(candidates, threads, batch, rounds, track)
            _check(timings, programs, found)
            found.timings.append([timing for timing in timings if timing.failure is None])
    return found


def _prepare(
    program: Program,
    peers: Sequence[Peer],
    weights: str | None,
    undecided: Mapping[str, Any],
    folder: Path,
    found: Measured,
) -> dict[str, Path]:
    """Return the files of the peers by name. Adds notes, warnings and skipped peers to `found`."""
    calibration = folder / "calibration.npy"
    save_array(calibration, normalised(bench_images(program.header, CALIBRATION, seed=1), program.header.preprocess))
    first = next(op for op in program.ops if isinstance(op, Linear))
    height, width, channels = program.input_shape
    patch = math.isqrt(program.unpacked().constants[first.part("w")].shape[1] // channels)
    output = program.header.output
    shape = program.verify().buffers[output.buffer].shape
    question: dict[str, object] = {
        "model": program.header.model,
        "weights": weights,
        "image": [height, width, channels],
        "patch": patch,
        "source": program.header.source,
        "settings": undecided,
        "classes": shape[-1] if output.kind == "logits" else None,
        "peers": [peer.name for peer in peers],
        "folder": str(folder),
        "calibration": str(calibration),
    }
    answer = ask_once("fqvit.bench.prepare", question)
    if "mistake" in answer:
        raise FqvitError(answer["mistake"])
    if "unavailable" in answer:
        found.skipped.append(Skipped("all other runtimes", answer["unavailable"]))
        return {}
    found.source = answer["source"]
    ours = sum(program.unpacked().constants[op.part("w")].size for op in program.ops if isinstance(op, Linear))
    other = answer["source"].rpartition("sha256:")[2] != program.header.source.rpartition("sha256:")[2]
    if output.kind == "logits" and other and abs(answer["weights"] / ours - 1) > 0.02:
        found.warnings.append(
            f"the float model of the peers has {answer['weights']:,} weights, expected {ours:,} as in the program."
            " Pass the checkpoint that the program was made from (--weights FILE)."
        )
    files = {}
    for name, made in answer["peers"].items():
        if "error" in made:
            found.skipped.append(Skipped(name, made["error"]))
        else:
            files[name] = Path(made["file"])
            library = next(peer.library for peer in peers if peer.name == name)
            found.notes[name] = Note(made["exact"], f"{version(library)}, {made['note']}")
    return files


def _check(timings: Sequence[Timing], programs: Mapping[str, Path], found: Measured) -> None:
    """Raise FqvitError if a program failed, skip peers that failed, and warn if the float peers disagree."""
    for timing in timings:
        if timing.failure is not None and timing.name in programs:
            raise FqvitError(f"{programs[timing.name]}: {timing.failure}")
        if timing.failure is not None:
            found.skipped.append(Skipped(timing.name, timing.failure))
    for name, off in differing_logits(timings, [peer.name for peer in PEERS if not peer.integer]).items():
        found.warnings.append(f"{name}: logits differ from those of the other float peers by {100 * off:.1f} %.")


def bench_images(header: Header, count: int, seed: int = 0) -> Pixels:
    """Return uint8 images [count, H, W, C]: embedded test images for embedded models, else smooth random ones."""
    shape = (count, *header.input_shape)
    if header.model in embedded.MODELS:
        inside, _ = embedded.test_images()
        if inside.shape[1:] == header.input_shape:
            return np.resize(inside[seed:], shape)
    return smooth_images(shape, seed)


def smooth_images(shape: tuple[int, ...], seed: int) -> Pixels:
    """Return uint8 images [N, H, W, C]: waves of random direction and phase per channel, plus noise."""
    rng = np.random.default_rng(seed)
    out = np.empty(shape, np.uint8)
    y, x = np.mgrid[0 : shape[1], 0 : shape[2]][..., None]
    for image in out:  # one at a time: float copies of a whole batch would need much memory
        a, b, phase = rng.normal(size=(3, shape[3])) * [[0.1], [0.1], [2.0]]
        image[...] = np.clip(128 + 110 * np.sin(a * y + b * x + phase) + rng.normal(0, 12, shape[1:]), 0, 255)
    return out


def normalised(pixels: Pixels, p: Preprocess) -> NDArray[np.float32]:
    """Return the input of float models, float32 [N, C, H, W]. Equivalent to models/pixels.py, but without torch."""
    x = (pixels.astype(np.float32) / 255 - np.array(p.mean, np.float32)) / np.array(p.std, np.float32)
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2), np.float32)


def _save_images(program: Program, batch: int, pixels: Path, floats: Path) -> None:
    images = bench_images(program.header, batch)
    save_array(pixels, images)
    save_array(floats, normalised(images, program.header.preprocess))


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write an array for another process. Raises FqvitError with the path if that fails, for example on a full disk."""
    write_atomically(path, lambda temporary: temporary.write_bytes(npy_bytes(array)))
