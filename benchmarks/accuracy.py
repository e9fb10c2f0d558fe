"""Measure top-1 accuracy of the float model and of integer programs, and their agreement, for several recipes.

    .venv/bin/python benchmarks/accuracy.py deit_tiny --weights FILE --calib DIR --data DIR --recipes fq-vit,minmax

Appends one row per recipe to results/accuracy.csv. It does the work of `fqvit quantize` and `fqvit eval`, and also measures the
agreement of the integer program with the float model.
"""

from __future__ import annotations

import csv
import platform
from pathlib import Path

import numpy as np
from model_arguments import model_parser
from version import commit

import fqvit
from fqvit.models.device import keep_freed_memory
from fqvit.models.graph import run_float, trace
from fqvit.models.pixels import normalise
from fqvit.runtime.native import Engine
from fqvit.study.methods import parse
from fqvit.system.progress import track

FIELDS = (
    "model",
    "recipe",
    "bits",
    "calibration images",
    "images",
    "float top-1",
    "integer top-1",
    "agreement",
    "machine",
    "commit",
)
RESULTS = Path(__file__).parent / "results" / "accuracy.csv"


def main() -> None:
    parser = model_parser(__doc__, "fq-vit")
    parser.add_argument("--limit", type=int)
    arguments = parser.parse_args()
    keep_freed_memory()
    model = fqvit.load_model(arguments.model, arguments.weights)
    graph = trace(model.module)
    for method in parse(arguments.recipes, None):
        name, recipe = method.label, method.recipe
        assert recipe is not None
        calib = fqvit.ImageFolder.unlabelled(arguments.calib, model.preprocess).limit(recipe.images)
        seen = track((batch.images for batch in calib.batches()), len(calib) // 16, f"{name}: calibration")
        calibration = fqvit.calibrate(model, seen, recipe)
        runner = Engine(fqvit.lower(model, calibration))  # bit-exact with the reference, but faster
        folder = fqvit.ImageFolder.labelled(arguments.data, model.preprocess, model.module.config.classes)
        folder = folder.limit(arguments.limit) if arguments.limit else folder
        exact, integer, labels = [], [], []
        for batch in track(folder.batches(8), len(folder) // 8, f"{name}: evaluation"):
            exact.append(run_float(graph, normalise(batch.images, model.preprocess)).argmax(1).numpy())
            integer.append(runner.run(batch.images).argmax(1))
            labels.append(batch.labels)
        e, i, y = np.concatenate(exact), np.concatenate(integer), np.concatenate(labels)
        percent = [f"{100 * np.mean(same):.1f}" for same in (e == y, i == y, e == i)]
        row = [model.name, name, method.bits, calibration.images, len(y), *percent, platform.machine(), commit()]
        print(dict(zip(FIELDS, row, strict=True)), flush=True)
        with RESULTS.open("a", newline="") as file:
            csv.writer(file).writerow(row)


if __name__ == "__main__":
    main()
