"""Draw the figures about a detector: scores of float and integer detections, and time by part.

See also: plots.py (errors of sites), detector.py (the data).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fqvit.bench.detector import SUM
from fqvit.bench.detector_runs import BETWEEN, NETWORKS
from fqvit.evaluate.detections import Match
from fqvit.report.plots import LEFT, RIGHT, WIDTH
from fqvit.report.svg import Axis, Canvas, label

MOST = 4000  # dots in the figure of scores
BAR = 15  # height of a bar in pixels
NAMES = 170  # width of the names of the parts


def scores(matches: Sequence[Match]) -> str:
    """Draw the scores of matched detections: float on the x axis, integer on the y axis. All others lie outside of the axes."""
    canvas = Canvas(WIDTH, 470)
    x, y = Axis(0, 1, LEFT + 30, LEFT + 410), Axis(0, 1, 400, 20)
    canvas.rows(y, x.start, x.end)
    for tick in x.ticks():
        canvas.line("grid", (x(tick), y.start), (x(tick), y.end))
        canvas.text("tick", (x(tick), y.start + 26), label(tick), "middle")
    canvas.line("dashed", (x(0), y(0)), (x(1), y(1)))
    pairs = [pair.scores for one in matches for pair in one.pairs]
    missing = [float(score) for one in matches for score in one.float_scores[one.float_only]]
    extra = [float(score) for one in matches for score in one.integer_scores[one.integer_only]]
    for exact, integer in pairs[:MOST]:
        canvas.circle("dot", (x(exact), y(integer)), 2.6, f"float {exact:.3f}, integer {integer:.3f}")
    for score in missing[:MOST]:
        canvas.circle("dot-far", (x(score), y(0) + 7), 2.6, f"float {score:.3f}, no integer detection")
    for score in extra[:MOST]:
        canvas.circle("dot-far", (x(0) - 7, y(score)), 2.6, f"integer {score:.3f}, no float detection")
    canvas.text("tick", ((x.start + x.end) / 2, 448), "score of the float detector", "middle")
    canvas.text("tick", (14, (y.start + y.end) / 2), "score of the integer detector", "middle", turn=-90)
    lines = (("dot", f"{len(pairs):,} matched"), ("dot-far", f"{len(missing):,} missing (below the axis)"))
    for row, (kind, words) in enumerate((*lines, ("dot-far", f"{len(extra):,} extra (left of the axis)"))):
        canvas.circle(kind, (x.end + 40, 40 + 24 * row), 3.4)
        canvas.text("word", (x.end + 52, 44 + 24 * row), words)
    said = f"{len(pairs)} matched detections, {len(missing)} only in the float detector, {len(extra)} only in the integer one."
    return canvas.finish("Scores of float and integer detections", said)


def part_times(integer: Mapping[str, float], exact: Mapping[str, float]) -> str:
    """Draw two bars per part: milliseconds of the integer detector and of the float detector in PyTorch."""
    rows = (*NETWORKS, SUM, *BETWEEN)
    step = 2 * BAR + 14
    canvas = Canvas(WIDTH, 46 + step * len(rows))
    x = Axis(0, max(*integer.values(), *exact.values()) or 1.0, NAMES, RIGHT - 90)
    canvas.circle("dot", (NAMES + 4, 12), 3.4)
    canvas.text("word", (NAMES + 14, 16), "integer detector")
    canvas.rect("bar-quiet", (NAMES + 176, 8), (NAMES + 184, 16))
    canvas.text("word", (NAMES + 192, 16), "float detector, PyTorch")
    for row, part in enumerate(rows):
        top = 36 + row * step
        canvas.text("word" if part not in BETWEEN else "tick", (NAMES - 12, top + BAR + 5), part, "end")
        for offset, (kind, times) in enumerate((("bar", integer), ("bar-quiet", exact))):
            if part not in times:
                continue
            upper = top + offset * (BAR + 2)
            canvas.rect(kind, (NAMES, upper), (max(x(times[part]), NAMES + 1), upper + BAR), f"{part}: {times[part]:.2f} ms")
            canvas.text("tick", (x(times[part]) + 8, upper + BAR - 3), f"{times[part]:.2f} ms")
    total = sum(integer[part] for part in (*NETWORKS, SUM))
    slowest = max((*NETWORKS, SUM), key=lambda part: integer[part])
    said = f"The integer detector takes {total:.1f} ms, most of it in {slowest}."
    return canvas.finish("Time by part", said)
