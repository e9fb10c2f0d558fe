"""Measure how much the choice of calibration images matters: compare programs calibrated on random subsets.

Prints the top-1 accuracy of each program and its agreement with the float model, the standard deviation of top-1, and the
lowest agreement between any two programs.

    .venv/bin/python benchmarks/stability.py deit_tiny --weights F.safetensors --calib DIR --data DIR
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

import fqvit
from fqvit.models.device import keep_freed_memory
from fqvit.models.graph import run_float, trace
from fqvit.models.pixels import normalise
from fqvit.runtime.reference import Reference
from fqvit.system.progress import track


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--calib", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--recipe", default="fqvit")
    parser.add_argument("--subsets", type=int, default=5)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--limit", type=int)
    arguments = parser.parse_args()
    keep_freed_memory()
    model = fqvit.load_model(arguments.model, arguments.weights)
    recipe = fqvit.load_recipe(arguments.recipe)
    folder = fqvit.ImageFolder.unlabelled(arguments.calib, model.preprocess)
    pixels = np.concatenate([batch.images for batch in track(folder.batches(), len(folder) // 16, "reading")])
    random = np.random.default_rng(0)
    runners = []
    for _ in range(arguments.subsets):
        chosen = np.sort(random.choice(len(pixels), arguments.size, replace=False))
        calibration = fqvit.calibrate(model, [pixels[chosen]], recipe)
        runners.append(Reference(fqvit.lower(model, calibration), "torch"))
    graph = trace(model.module)
    data = fqvit.ImageFolder.labelled(arguments.data, model.preprocess, model.module.config.classes)
    data = data.limit(arguments.limit) if arguments.limit else data
    predictions: list[list[np.ndarray]] = [[] for _ in range(arguments.subsets + 1)]
    labels = []
    for batch in track(data.batches(8), len(data) // 8, "evaluating"):
        predictions[0].append(run_float(graph, normalise(batch.images, model.preprocess)).argmax(1).numpy())
        for found, runner in zip(predictions[1:], runners, strict=True):
            found.append(runner.run(batch.images).argmax(1))
        labels.append(batch.labels)
    exact, *integer = (np.concatenate(part) for part in predictions)
    truth = np.concatenate(labels)
    top1 = [100 * float(np.mean(found == truth)) for found in integer]
    for number, found in enumerate(integer):
        print(f"subset {number}: top-1 {top1[number]:.1f}, agreement with float {100 * np.mean(found == exact):.1f} %")
    least = min(100 * float(np.mean(a == b)) for a, b in itertools.combinations(integer, 2))
    print(
        f"{model.name} {recipe.name}, {arguments.subsets} subsets of {arguments.size} images, {len(truth)} test images: "
        f"float {100 * np.mean(exact == truth):.1f}, top-1 {np.mean(top1):.2f}, standard deviation {np.std(top1, ddof=1):.2f}, "
        f"lowest agreement of any two programs {least:.1f} %"
    )


if __name__ == "__main__":
    main()
