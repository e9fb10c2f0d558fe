"""Profile a program in the engine: time per kind of op, and the slowest ops.

Speeds (multiply-accumulates per second) are compared with the peak: what the micro-kernel of the matrix products reaches on
data in the L1 cache (runtime/native.py, measure_peak).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fqvit.bench.measure import bench_images
from fqvit.runtime.native import Engine, Peak
from fqvit.system.text import table

PROFILE_ROUNDS = 20
TOP = 12


@dataclass(frozen=True)
class OpTime:
    """Time of an op or of a kind of op. name: the buffer that the op writes; for a kind of op, the number of ops"""

    name: str
    tag: str
    seconds: float
    macs: int

    @property
    def gmacs(self) -> float:
        """10^9 multiply-accumulates per second."""
        return self.macs / self.seconds / 1e9 if self.seconds > 0 else 0.0


def profile(file: Path, rounds: int = PROFILE_ROUNDS) -> list[OpTime]:
    """Return the median time of every op for one image on one thread, after fusion."""
    engine = Engine(file, 1)
    image = bench_images(engine.header, 1)
    engine.run(image)
    # One round per call: for several rounds the engine returns the minimum, not the median.
    found = [engine.profile(image[0], 1) for _ in range(rounds)]
    return [
        OpTime(op.buffer, op.op, statistics.median(each[i].seconds for each in found), op.macs) for i, op in enumerate(found[0])
    ]


def by_tag(times: Sequence[OpTime]) -> list[OpTime]:
    """Sum the times by kind of op, slowest first."""
    kinds: dict[str, list[OpTime]] = {}
    for time in times:
        kinds.setdefault(time.tag, []).append(time)
    sums = [OpTime(str(len(ops)), tag, sum(op.seconds for op in ops), sum(op.macs for op in ops)) for tag, ops in kinds.items()]
    return sorted(sums, key=lambda op: -op.seconds)


def text(times: Sequence[OpTime], peak: Peak) -> str:
    total = sum(time.seconds for time in times)
    head = ("ops", "kind", "ms", "share", "MMAC", "GMAC/s", "of peak")
    kinds = [_cells(time, total, peak) for time in by_tag(times)]
    kinds.append(_cells(OpTime(str(len(times)), "all", total, sum(time.macs for time in times)), total, peak))
    top = [_cells(time, total, peak) for time in sorted(times, key=lambda op: -op.seconds)[:TOP]]
    return "\n\n".join(
        (
            f"Time per op, one image, one thread. 100 % of peak is {peak.gmacs:.1f} GMAC/s.",
            table(head, kinds, left=2),
            f"The {len(top)} slowest ops",
            table(("writes", *head[1:]), top, left=2),
        )
    )


def summary(times: Sequence[OpTime]) -> dict[str, object]:
    """Return the fields of --json."""

    def plain(time: OpTime) -> dict[str, object]:
        return {**vars(time), "gmacs": round(time.gmacs, 3)}

    return {
        "kinds": [{**plain(time), "name": time.tag, "count": int(time.name)} for time in by_tag(times)],
        "ops": [plain(time) for time in times],
    }


def _cells(time: OpTime, total: float, peak: Peak) -> tuple[str, ...]:
    speed = (f"{time.macs / 1e6:,.1f}", f"{time.gmacs:.1f}") if time.macs else ("", "")
    share = f"{100 * time.gmacs / peak.gmacs:.0f} %" if time.macs else ""
    return (time.name, time.tag, f"{1000 * time.seconds:.3f}", f"{100 * time.seconds / total:.1f} %", *speed, share)
