"""What was measured, as rows: for tables, for --json and for CSV files. Runs nothing."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fqvit.bench.measure import Measured, Note
from fqvit.bench.rounds import COARSE, Timing
from fqvit.system.text import table


@dataclass(frozen=True)
class Row:
    """Milliseconds an image; ratio: this one's time over the first program's, by the setting's clock. peak_mb: None where the
    system does not tell."""

    name: str
    threads: int
    batch: int
    cpu_median: float
    cpu_min: float
    wall_median: float
    wall_min: float
    peak_mb: float | None
    load_s: float
    ratio: float
    runs: int


def clock(threads: int, coarse: bool = COARSE) -> str:
    """CPU time is what a neighbour on the machine changes least; with several threads wall time is the point, and where CPU
    time is `coarse`, it is all there is."""
    return "cpu" if threads == 1 and not coarse else "wall"


def rows(timings: Sequence[Timing]) -> list[Row]:
    """One setting. The first is what the others are compared with."""
    first = timings[0]
    return [
        Row(
            name=timing.name,
            threads=timing.threads,
            batch=timing.batch,
            cpu_median=round(timing.median("cpu"), 4),
            cpu_min=round(timing.least("cpu"), 4),
            wall_median=round(timing.median("wall"), 4),
            wall_min=round(timing.least("wall"), 4),
            peak_mb=None if timing.memory is None else round(timing.memory / 1e6, 1),
            load_s=round(timing.load, 3),
            ratio=round(timing.median(clock(timing.threads)) / first.median(clock(timing.threads)), 3),
            runs=len(timing.cpu),
        )
        for timing in timings
    ]


def setting_text(timings: Sequence[Timing]) -> str:
    threads, batch = timings[0].threads, timings[0].batch
    kind = "CPU" if clock(threads) == "cpu" else "wall"
    head = ("ms an image", "CPU", "least", "wall", "least", "peak MB", f"{kind} ratio", "runs")
    cells = [
        (
            row.name,
            *(_milli(value) for value in (row.cpu_median, row.cpu_min, row.wall_median, row.wall_min)),
            "-" if row.peak_mb is None else f"{row.peak_mb:.0f}",
            f"{row.ratio:.2f}",
            str(row.runs),
        )
        for row in rows(timings)
    ]
    return f"{count(threads, 'thread')}, batch {batch}\n{table(head, cells)}"


def text(found: Measured) -> str:
    """Every setting's table, then what has to be known to read them."""
    parts = [setting_text(timings) for timings in found.timings]
    about = [f"{name}: {note.text}." for name, note in found.notes.items() if any(_ran(found, name))]
    if found.source is not None:
        about.append(f"The peers' weights: {found.source}.")
    about += [f"Skipped {skipped.peer}: {skipped.reason}" for skipped in found.skipped]
    legend = "Median and least of all timed runs, after loading; the peak is of the whole process. Ratio: times the first."
    return "\n\n".join([*parts, "\n".join([legend, *about])])


def summary(found: Measured) -> dict[str, object]:
    """For --json."""
    settings = []
    for timings in found.timings:
        threads, batch = timings[0].threads, timings[0].batch
        results = []
        for row in rows(timings):
            note = found.notes.get(row.name, Note(None, ""))
            fields = {key: value for key, value in vars(row).items() if key not in ("threads", "batch")}
            results.append({**fields, "exact": note.exact, "note": note.text})
        settings.append({"threads": threads, "batch": batch, "ratio_of": clock(threads), "results": results})
    return {
        "machine": machine(),
        "settings": settings,
        "peer_weights": found.source,
        "skipped": [vars(skipped) for skipped in found.skipped],
        "warnings": found.warnings,
    }


def machine() -> dict[str, object]:
    """The CPU's name and the integer instruction sets that it has."""
    from fqvit import _native

    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"cpu": name, "has": [feature for feature, there in _native.cpu_features().items() if there]}


def count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _ran(found: Measured, name: str) -> list[bool]:
    return [timing.name == name for timings in found.timings for timing in timings]


def _milli(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
