"""Measure `fqvit quantize` relative to one float pass over the same images, both including decoding, in one process.

A float pass decodes the images as quantizing does and runs the float model on them. Quantizing decodes, calibrates, lowers,
verifies and saves. The two alternate, so that other load affects both alike; the result is the median over rounds of the
ratio of a quantization to the mean of the float passes directly before and after it.

    .venv/bin/python benchmarks/quantize.py --data-root DIR                     # DeiT-Tiny, 1,000 images: minutes
    .venv/bin/python benchmarks/quantize.py --data-root DIR --images 128 --threads 1 --recipes fqvit,fq-vit
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

import fqvit
from fqvit.models.device import keep_freed_memory
from fqvit.models.graph import Graph, trace
from fqvit.models.pixels import normalise

ROOT = Path(__file__).resolve().parent.parent
Seconds = tuple[float, float]  # wall time, CPU time


def timed(work: Callable[[], object]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


@torch.no_grad()
def float_pass(model: fqvit.FloatModel, graph: Graph, images: fqvit.ImageFolder, batch: int) -> None:
    for each in images.batches(batch):
        graph.run(normalise(each.images, model.preprocess))


def quantize(model: fqvit.FloatModel, images: fqvit.ImageFolder, recipe: fqvit.Recipe, folder: Path) -> None:
    calibration = fqvit.calibrate(model, images, recipe)
    fqvit.lower(model, calibration).save(folder / f"{recipe.name}.fqvit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--recipes", default="fqvit", help="comma-separated")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data-root", type=Path, default=ROOT.parent / "shared" / "data")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as `fqvit quantize` does
    weights = arguments.data_root / "weights" / f"{arguments.model}.safetensors"
    model = fqvit.load_model(arguments.model, weights)
    graph = trace(model.module)
    recipes = [
        msgspec.structs.replace(fqvit.load_recipe(name), images=arguments.images) for name in arguments.recipes.split(",")
    ]
    folder = fqvit.ImageFolder.unlabelled(arguments.data_root / "imagenet" / "calib", model.preprocess)
    images = folder.limit(arguments.images)
    float_pass(model, graph, images.limit(16), 16)
    passes = []
    found: dict[str, list[Seconds]] = {recipe.name: [] for recipe in recipes}
    ratios: dict[str, list[Seconds]] = {recipe.name: [] for recipe in recipes}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(arguments.rounds):
            before = timed(lambda: float_pass(model, graph, images, recipes[0].batch))
            for recipe in recipes:
                mine = timed(lambda recipe=recipe: quantize(model, images, recipe, Path(name)))  # type: ignore[misc]
                after = timed(lambda recipe=recipe: float_pass(model, graph, images, recipe.batch))  # type: ignore[misc]
                found[recipe.name].append(mine)
                wall, cpu = (2 * own / (first + last) for own, first, last in zip(mine, before, after, strict=True))
                ratios[recipe.name].append((wall, cpu))
                passes.append(before)
                before = after
            passes.append(before)
    count = len(images)
    wall, cpu = (statistics.median(times) for times in zip(*passes, strict=True))
    print(f"{model.name}, {count} images, {arguments.threads} threads, {arguments.rounds} rounds; seconds: wall, CPU")
    print(f"float pass      {wall:7.2f} {cpu:7.2f}   {1000 * wall / count:.1f} ms per image")
    for recipe_name, times in found.items():
        wall, cpu = (statistics.median(each) for each in zip(*times, strict=True))
        wall_ratio, cpu_ratio = (statistics.median(each) for each in zip(*ratios[recipe_name], strict=True))
        print(f"{recipe_name:15} {wall:7.2f} {cpu:7.2f}   {wall_ratio:.2f} x the float pass (wall), {cpu_ratio:.2f} x (CPU)")


if __name__ == "__main__":
    main()
