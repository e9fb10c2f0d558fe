"""Measure integer programs of small models of four families on Fashion-MNIST: top-1, agreement with float, exactness.

    .venv/bin/python training/train_families.py all -o build/families      # or use the stored weights
    .venv/bin/python benchmarks/families.py --weights build/families

Each model is plain torch code (training/families.py). It is captured, calibrated on the 512 training images of the package,
lowered and run by the native engine on all 10,000 test images; the first 16 are compared with the reference bit by bit. Appends
one row per model and recipe to results/families.csv. Exits with status 1 if a program differs from the reference or if the
default recipe loses more than 0.3 points of top-1.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from version import ROOT, commit

import fqvit
from fqvit.frontend.capture import capture
from fqvit.models.embedded import FMNIST_CLASSES, FMNIST_PREPROCESS, calibration_images
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.recipe import DEFAULT_RECIPE, Recipe
from fqvit.runtime import reference
from fqvit.runtime.native import Engine

sys.path.insert(0, str(ROOT / "training"))
from families import FAMILIES, load
from train_fmnist import DEBIAN_FOLDER, read_split

FIELDS = (
    "model",
    "recipe",
    "bits",
    "images",
    "float top-1",
    "integer top-1",
    "agreement",
    "exact",
    "ms per image",
    "machine",
    "commit",
)
RESULTS = ROOT / "benchmarks" / "results" / "families.csv"
BAR = 0.3  # largest accepted loss of top-1 of the default recipe, in points
EXACT = 16  # images that are compared with the reference
BATCH = 100

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(FAMILIES)}; all by default")
    parser.add_argument("--weights", type=Path, default=ROOT / "training" / "weights", help="folder with NAME.safetensors")
    parser.add_argument("--data", type=Path, default=DEBIAN_FOLDER, help="folder with Fashion-MNIST's idx .gz files")
    parser.add_argument("--recipes", default="fqvit,fq-vit,minmax", help="comma-separated names of recipes")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = (part.numpy() for part in read_split(arguments.data, "t10k"))
    recipes = [fqvit.load_recipe(name) for name in arguments.recipes.split(",")]
    passed = True
    for name in arguments.names or FAMILIES:
        path = arguments.weights / f"{name}.safetensors"
        module = load(name, path)
        model = FloatModel(name, capture(module, (1, 28, 28)), FMNIST_PREPROCESS, FMNIST_CLASSES, path.name)
        predicted = float_predictions(module, images[..., None])
        for recipe in recipes:
            row, ok = measure(model, recipe, images[..., None], labels, predicted)
            passed &= ok
            print(dict(zip(FIELDS, row, strict=True)), flush=True)
            append(arguments.output, row)
    sys.exit(0 if passed else 1)


@torch.no_grad()
def float_predictions(module: nn.Module, images: Images) -> Labels:
    """Return the classes predicted by the original module, not by its captured form."""
    return np.concatenate([module(normalise(batch, FMNIST_PREPROCESS)).argmax(1).numpy() for batch in batches(images)])


def batches(images: Images) -> list[Images]:
    return np.split(images, range(BATCH, len(images), BATCH))


def measure(model: FloatModel, recipe: Recipe, images: Images, labels: Labels, predicted: Labels) -> tuple[list[object], bool]:
    """Return the row of one recipe, and whether the program is exact and, for the default recipe, loses at most BAR."""
    program = fqvit.lower(model, fqvit.calibrate(model, calibration_images(), recipe))
    engine = Engine(program, threads=1)
    start = time.process_time()
    integer = np.concatenate([engine.run(batch).argmax(1) for batch in batches(images)])
    milliseconds = 1e3 * (time.process_time() - start) / len(images)
    same = np.array_equal(engine.run(images[:EXACT]), reference.run(program, images[:EXACT]))
    float_top1, top1, agreement = (100 * np.mean(hit) for hit in (predicted == labels, integer == labels, predicted == integer))
    bits = f"{recipe.weight_bits}/{recipe.activation_bits}/{recipe.attention_bits}"
    numbers = [f"{float_top1:.2f}", f"{top1:.2f}", f"{agreement:.2f}", "yes" if same else "no", f"{milliseconds:.3f}"]
    row: list[object] = [model.name, recipe.name, bits, len(labels), *numbers, platform.machine(), commit()]
    return row, same and (recipe.name != DEFAULT_RECIPE or top1 >= float_top1 - BAR)


def append(path: Path, row: list[object]) -> None:
    new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(FIELDS)
        writer.writerow(row)


if __name__ == "__main__":
    main()
