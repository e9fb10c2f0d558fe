"""Format measurements as rows for tables, --json and CSV files."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fqvit.bench.measure import Measured, Note
from fqvit.bench.rounds import COARSE, MILLI, Timing
from fqvit.system.text import table


@dataclass(frozen=True)
class Row:
    """One candidate in one setting. Times are in milliseconds per image, load_s in seconds.

    ratio: time relative to the first program, in CPU or wall time (see clock)   peak_mb: None if the system does not report it
    peak_share: multiply-accumulates per second, relative to those of the micro-kernel on all threads; None for peers
    """

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
    peak_share: float | None = None


def clock(threads: int, coarse: bool = COARSE) -> str:
    """Return the clock that ratios use: CPU time for one thread, because other processes disturb it least, else wall time.

    coarse: whether the system counts CPU time too coarsely to use it
    """
    return "cpu" if threads == 1 and not coarse else "wall"


def rows(timings: Sequence[Timing], found: Measured | None = None) -> list[Row]:
    """Return the rows of one setting. Ratios are relative to the first one.

    found: has the peak speed of the CPU and the multiply-accumulates per image of each program; without it, peak_share is None
    """
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
            peak_share=None if found is None else peak_share(timing, found),
        )
        for timing in timings
    ]


def peak_share(timing: Timing, found: Measured) -> float | None:
    """Return the share of the peak that a program reaches; None for peers, whose multiply-accumulates are not counted."""
    macs, peak = found.macs.get(timing.name), found.peak
    if macs is None or peak is None:
        return None
    seconds = timing.median(clock(timing.threads)) / MILLI
    return round(macs / seconds / (1e9 * peak.gmacs * timing.threads), 4)


def setting_text(timings: Sequence[Timing], found: Measured) -> str:
    threads, batch = timings[0].threads, timings[0].batch
    kind = "CPU" if clock(threads) == "cpu" else "wall"
    head = ("ms per image", "CPU", "min", "wall", "min", "peak MB", "of peak", f"{kind} ratio", "runs")
    cells = [
        (
            row.name,
            *(_milli(value) for value in (row.cpu_median, row.cpu_min, row.wall_median, row.wall_min)),
            "-" if row.peak_mb is None else f"{row.peak_mb:.0f}",
            "" if row.peak_share is None else f"{100 * row.peak_share:.0f} %",
            f"{row.ratio:.2f}",
            str(row.runs),
        )
        for row in rows(timings, found)
    ]
    return f"{count(threads, 'thread')}, batch {batch}\n{table(head, cells)}"


def text(found: Measured) -> str:
    """Return one table per setting, then the legend and notes."""
    parts = [setting_text(timings, found) for timings in found.timings]
    about = [f"{name}: {note.text}." for name, note in found.notes.items() if any(_ran(found, name))]
    if found.source is not None:
        about.append(f"Weights of the peers: {found.source}.")
    about += [f"Skipped {skipped.peer}: {skipped.reason}" for skipped in found.skipped]
    legend = (
        "Times: median and minimum of all timed runs, without loading. Peak MB: memory of the whole process."
        " Ratio: relative to the first row."
    )
    if found.peak is not None:
        per_image = " or ".join(f"{macs / 1e9:.2f}" for macs in dict.fromkeys(found.macs.values()))
        legend += (
            f"\nOf peak: {per_image} billion multiply-accumulates per image, relative to the {found.peak.gmacs:.0f} billion per"
            f" second and thread that the {found.peak.isa} micro-kernel reaches here on data in the L1 cache."
        )
    return "\n\n".join([*parts, "\n".join([legend, *about])])


def summary(found: Measured) -> dict[str, object]:
    """Return the content of --json."""
    settings = []
    for timings in found.timings:
        threads, batch = timings[0].threads, timings[0].batch
        results = []
        for row in rows(timings, found):
            note = found.notes.get(row.name, Note(None, ""))
            fields = {key: value for key, value in vars(row).items() if key not in ("threads", "batch")}
            results.append({**fields, "exact": note.exact, "note": note.text})
        settings.append({"threads": threads, "batch": batch, "ratio_of": clock(threads), "results": results})
    return {
        "machine": machine(),
        "instruction_set": None if found.peak is None else found.peak.isa,
        "peak_gmacs": None if found.peak is None else round(found.peak.gmacs, 3),
        "macs": found.macs,
        "settings": settings,
        "peer_weights": found.source,
        "skipped": [vars(skipped) for skipped in found.skipped],
        "warnings": found.warnings,
    }


def machine() -> dict[str, object]:
    """Return the name of the CPU and its integer instruction sets."""
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
