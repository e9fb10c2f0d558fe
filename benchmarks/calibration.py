"""Measure the time of calibration relative to a float forward pass on the same images, for several recipes.

Every calibration runs between two float forward passes, so that other load affects all of them alike. The result of a recipe is
the median over rounds of its time divided by the mean of these two passes. Weights are random: times do not depend on them.

    make bench
    .venv/bin/python benchmarks/calibration.py --model deit_tiny --images 64 --rounds 7
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from fqvit.models import zoo
from fqvit.models.device import keep_freed_memory
from fqvit.models.graph import trace
from fqvit.models.load import FloatModel, build
from fqvit.models.pixels import normalise
from fqvit.quant.calibrate import SiteObserver, observe_batch
from fqvit.quant.plan import plan
from fqvit.quant.recipe import RECIPES

# The recipes to measure, each with the largest acceptable ratio. The limit is printed, not enforced.
LIMITS = {"minmax": 1.5, "ema": 1.5, "fq-vit": 1.5, "percentile": 3.0, "omse": 3.0}


def timed(work: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


def random_model(name: str) -> FloatModel:
    row = zoo.find(name)
    torch.manual_seed(0)
    return FloatModel(row.name, build(row.config).eval(), row.preprocess, None, "random")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu", action="store_true", help="measure CPU time instead of wall time, for shared machines")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as `fqvit quantize` does
    clock = time.process_time if arguments.cpu else time.perf_counter
    model = random_model(arguments.model)
    graph = trace(model.module)
    p = model.preprocess
    pixels = np.random.default_rng(0).integers(0, 256, (arguments.images, p.height, p.width, p.channels), np.uint8)
    batches = [normalise(pixels[i : i + 16], p) for i in range(0, len(pixels), 16)]

    def forward() -> None:
        for batch in batches:
            graph.run(batch)

    def calibration(name: str) -> Callable[[], object]:
        recipe = RECIPES[name]
        sites = plan(graph, recipe)

        def work() -> None:
            observers = {site: SiteObserver(sites[site], recipe) for site in sites}
            for batch in batches:
                observe_batch(graph, batch, observers)

        return work

    jobs = {name: calibration(name) for name in LIMITS}
    forward()
    ratios: dict[str, list[float]] = {name: [] for name in jobs}
    seconds = []
    for _ in range(arguments.rounds):
        for name, job in jobs.items():
            # Time a forward pass directly before and after the calibration, so that a slow moment affects all of them.
            before = timed(forward, clock)
            mine = timed(job, clock)
            after = timed(forward, clock)
            seconds += [before, after]
            ratios[name].append(2 * mine / (before + after))
    kind = "CPU" if arguments.cpu else "wall"
    each = 1000 * statistics.median(seconds) / arguments.images
    setting = f"{arguments.model}, {arguments.images} images, {arguments.threads} threads"
    print(f"{setting}: float forward pass {each:.1f} ms per image ({kind} time)")
    for name, found in ratios.items():
        print(f"{name:12} {statistics.median(found):5.2f} x forward   (limit {LIMITS[name]})")


if __name__ == "__main__":
    main()
