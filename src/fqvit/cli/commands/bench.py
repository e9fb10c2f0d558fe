"""`fqvit bench`: measure the engine's time and memory, compared with other runtimes and per op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fqvit.bench import ops, report
from fqvit.bench.measure import measure
from fqvit.bench.peers import parse
from fqvit.cli.commands.detectors import refuse_settings
from fqvit.cli.output import say, say_json, warn
from fqvit.errors import FqvitError
from fqvit.ir.file import DETECTOR, kind_of
from fqvit.ir.program import Program
from fqvit.system.progress import track

OURS = "fqvit"
AGAINST = "torch,onnxruntime,openvino"
MOST = {"--batch": 1024, "--threads": 256}  # larger values are probably typos


def run(
    file: Path,
    against: str | None,
    batches: str,
    threads: str,
    rounds: int,
    weights: str | None,
    undecided: dict[str, Any],
    image: Path | None,
    by_op: bool,
    as_json: bool,
) -> None:
    is_detector = kind_of(file) == DETECTOR
    libraries = parse(against or ("torch" if is_detector else AGAINST))
    counts, sizes = numbers("--threads", threads), numbers("--batch", batches)
    if not 1 <= rounds <= 10_000:
        raise FqvitError(f"--rounds {rounds}: expected 1 to 10000.")
    if weights is not None and not weights.startswith("hf:") and not Path(weights).exists():
        raise FqvitError(f"{weights}: no such file. Pass the checkpoint of the float model (--weights FILE).")
    if is_detector:
        from fqvit.cli.commands import bench_detector

        refuse_settings(undecided)
        bench_detector.run(file, libraries, sizes, counts, rounds, weights, image, by_op, as_json)
        return
    if image is not None:
        raise FqvitError(f"--image {image}: only for detectors. Leave it out.")
    header = Program.load(file).header
    settings = [(threads, batch) for threads in counts for batch in sizes]
    found = measure({OURS: file}, libraries, weights, settings, rounds, track, undecided)
    for warning in found.warnings:
        warn(warning)
    times = ops.profile(file) if by_op else []
    if as_json:
        about: dict[str, object] = {
            "file": str(file),
            "model": header.model,
            "recipe": header.recipe.get("name"),
            "rounds": rounds,
        }
        say_json({**about, **report.summary(found), **({"by_op": ops.summary(times)} if by_op else {})})
        return
    machine = report.machine()
    assert found.peak is not None
    about_file = f"{file}: {header.model}, recipe {header.recipe.get('name')}"
    say(f"{about_file}; {machine['cpu']}, {found.peak.isa}; {report.count(rounds, 'round')}.\n")
    say(report.text(found))
    if by_op:
        say("\n" + ops.text(times, found.peak))


def numbers(option: str, words: str) -> list[int]:
    """Parse an option such as "1,8" to [1, 8]."""
    parts = [word.strip() for word in words.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 6 and 1 <= int(part) <= MOST[option] for part in parts):
        raise FqvitError(f"{option} {words}: expected numbers from 1 to {MOST[option]}, separated by commas, such as 1,8.")
    return list(dict.fromkeys(map(int, parts)))
