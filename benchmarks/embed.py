"""Measure what `fqvit embed` costs beyond the engine and the decoding of images.

    .venv/bin/python benchmarks/embed.py FILE.fqvit --data DIR [--images 256] [--rounds 5] [--threads 2]

DIR has JPEG files. Four tasks run in turn in every round: the engine on decoded images in memory, `embed` on the same decoded
images, decoding alone, and `embed` on the files. Prints the CPU time of the process (all threads together, median of the
rounds), which varies less than wall time on a busy machine, and the wall time of the fastest round. Then compares decoding in
Pillow's draft mode with full decoding. docs/measurements/embed.md has the results.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from fqvit.data.images import ImageArray, ImageFolder
from fqvit.data.preprocess import FILTERS, resized, resized_size
from fqvit.inference.embed import Job, embed_file
from fqvit.inference.model import BATCH, ProgramModel


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds and the wall seconds of a task."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def draft(paths: list[Path], short: int) -> None:
    """Compare Pillow's draft mode, which decodes JPEG files at 1/2, 1/4 or 1/8 of their size, with full decoding."""
    pixels: list[list[np.ndarray]] = [[], []]
    seconds = [0.0, 0.0]
    for path in paths:
        for mode in (0, 1):
            start = time.process_time()
            with Image.open(path) as image:
                size = resized_size(*image.size, short)
                if mode:
                    image.draft("RGB", size)
                colour = image.convert("RGB")
                found = np.asarray(resized(colour, size, FILTERS["bicubic"], (0, 0, *colour.size)), np.int16)
            seconds[mode] += time.process_time() - start
            pixels[mode].append(found)
    differences = [np.abs(a - b) for a, b in zip(*pixels, strict=True)]
    equal = sum(not difference.any() for difference in differences)
    worst, mean = max(int(d.max()) for d in differences), float(np.mean([d.mean() for d in differences]))
    full, drafted = (1000 * total / len(paths) for total in seconds)
    print(f"draft mode at short side {short}: {full:.2f} -> {drafted:.2f} ms per image,")
    print(f"  {equal} of {len(paths)} images have the same pixels; difference {mean:.2f} on average, {worst} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    model = ProgramModel(arguments.file, arguments.threads)
    files = ImageFolder.unlabelled(arguments.data, model.preprocess).limit(arguments.images)
    decoded = ImageArray(np.concatenate([batch.images for batch in files.batches(BATCH)]), None, model.preprocess)
    wanted = model.chosen(None)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.safetensors"
        tasks: dict[str, Callable[[], object]] = {
            "engine on decoded images": lambda: [
                model.engine.run_all(decoded.pixels[start : start + BATCH]) for start in range(0, len(decoded), BATCH)
            ],
            "embed on decoded images": lambda: embed_file(Job(model, decoded, wanted), out),
            "decode and resize": lambda: [None for _ in files.batches(BATCH)],
            "embed on files": lambda: embed_file(Job(model, files, wanted), out),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in tasks}
        for _ in range(arguments.rounds):
            for name, work in tasks.items():
                times[name].append(timed(work))
    cpu = {name: 1000 * statistics.median(t for t, _ in found) / len(decoded) for name, found in times.items()}
    wall = {name: 1000 * min(t for _, t in found) / len(decoded) for name, found in times.items()}
    print(f"{model.name}, {len(decoded)} images, {arguments.threads} threads, {model.engine.isa}; ms per image")
    for name in tasks:
        print(f"{name:26} {cpu[name]:8.3f} CPU {wall[name]:8.3f} wall (fastest round)")
    engine, embed, decode, whole = (cpu[name] for name in tasks)
    print(f"embed on decoded images reaches {100 * engine / embed:.1f} % of the engine's throughput")
    print(f"embed on files reaches {100 * (engine + decode) / whole:.1f} % of the throughput of engine and decoding together")
    for short in (128, 64):
        draft(files.paths, short)


if __name__ == "__main__":
    main()
