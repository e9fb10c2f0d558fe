"""Compare the time and memory of the engine with those of other runtimes for several models, as CSV.

A model uses its real weights if they are in --data-root. Otherwise its weights are normally distributed and clipped at 3 sigma
like real checkpoints, because the speed of the AVX2 product depends on how well the weights can be packed. The programs of
recipes fqvit and fq-vit run in the same rounds; ratios are relative to the first recipe.

    .venv/bin/python benchmarks/speed.py                                # the committed table: one thread, batches 1 and 8
    .venv/bin/python benchmarks/speed.py --models deit_tiny,deit_small --settings 1x8,2x8 --against none
    .venv/bin/python benchmarks/speed.py --models vit_tiny_384,vit_small_384 --settings 1x1
    .venv/bin/python benchmarks/speed.py --quick                        # what `make bench` runs; does not write the CSV file

Generated checkpoints and programs are kept in build/speed. Delete this folder after a change of the recipes.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from version import commit

import fqvit
from fqvit.bench import report
from fqvit.bench.measure import Measured, measure, smooth_images
from fqvit.bench.peers import LIBRARIES, parse
from fqvit.cli.commands.bench import numbers
from fqvit.models import zoo
from fqvit.models.device import keep_freed_memory
from fqvit.models.load import build
from fqvit.system.progress import track

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "speed.csv"
FIELDS = (
    "model",
    "weights",
    "batch",
    "threads",
    "peer",
    "CPU ms",
    "CPU ms least",
    "wall ms",
    "wall ms least",
    "peak MB",
    "load s",
    "ratio",
    "exact",
    "rounds",
    "version or kernels",
    "cpu",
    "has",
    "commit",
)
TABLE = ("deit_tiny", "deit_small", "vit_base", "swin_tiny")
RECIPES = ("fqvit", "fq-vit")
IMAGES = 16  # calibration images; few are enough because times do not depend on the scales


@torch.no_grad()
def clipped_weights(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a checkpoint of a model: weights of variance 1 / fan-in, clipped at 3 sigma; norm gains near 1; small biases."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size, sigma: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator).clamp(-3, 3) * sigma

    state = {}
    for key, value in build(zoo.find(name).config).state_dict().items():
        if "bias_table" in key or key in ("cls_token", "pos_embed"):
            state[key] = normal(value.shape, 0.2)
        elif value.ndim > 1:
            state[key] = normal(value.shape, value[0].numel() ** -0.5)
        elif "norm" in key and key.endswith("weight"):
            state[key] = 1 + normal(value.shape, 0.1)
        else:
            state[key] = normal(value.shape, 0.02)
    return state


def checkpoint(name: str, data: Path, folder: Path) -> tuple[Path, str]:
    """Return the path and kind of the weights: real if available, else clipped_weights()."""
    real = data / "weights" / f"{zoo.find(name).name}.safetensors"
    if real.is_file():
        return real, "real"
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        save_file(clipped_weights(name), path)
    return path, "normal, 3 sigma"


def pixels(model: fqvit.FloatModel, data: Path, kind: str) -> Iterator[NDArray[np.uint8]]:
    """Yield calibration images: photographs for real weights if --data-root has them, else random images."""
    if kind == "real" and (data / "imagenet" / "calib").is_dir():
        photos = fqvit.ImageFolder.unlabelled(data / "imagenet" / "calib", model.preprocess).limit(IMAGES)
        yield from (batch.images for batch in photos.batches())
        return
    p = model.preprocess
    yield smooth_images((IMAGES, p.height, p.width, p.channels), 2)


def programs(name: str, weights: Path, kind: str, recipes: tuple[str, ...], data: Path, folder: Path) -> dict[str, Path]:
    """Return the path of the program for each recipe, and quantize the model for recipes that have none yet."""
    paths = {recipe: folder / f"{name}.{recipe}.fqvit" for recipe in recipes}
    missing = [recipe for recipe, path in paths.items() if not path.is_file()]
    model = fqvit.load_model(name, weights) if missing else None
    for recipe in missing:
        assert model is not None
        print(f"{name}: quantizing, recipe {recipe}", flush=True)
        found = fqvit.calibrate(model, pixels(model, data, kind), fqvit.load_recipe(recipe))
        fqvit.lower(model, found).save(paths[recipe])
    return paths


def append(name: str, kind: str, recipes: tuple[str, ...], rounds: int, found: Measured) -> None:
    machine, fresh = report.machine(), not RESULTS.is_file()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(FIELDS)
        for timings in found.timings:
            for row in report.rows(timings):
                note = found.notes[row.name]
                ours = row.name in recipes
                times = (row.cpu_median, row.cpu_min, row.wall_median, row.wall_min)
                writer.writerow(
                    (
                        zoo.find(name).name,
                        kind,
                        row.batch,
                        row.threads,
                        f"recipe {row.name}" if ours else row.name,
                        *(f"{value:.2f}" for value in times),
                        "" if row.peak_mb is None else f"{row.peak_mb:.0f}",
                        f"{row.load_s:.2f}",
                        f"{row.ratio:.3f}",
                        {True: "yes", False: "no", None: ""}[note.exact],
                        rounds,
                        note.text.split(",")[0],
                        machine["cpu"],
                        " ".join(machine["has"]),  # type: ignore[arg-type]
                        commit(),
                    )
                )


def setting(words: str) -> tuple[int, int]:
    """Parse a setting: 1x8 is one thread and batch 8."""
    threads, _, batch = words.partition("x")
    return numbers("--threads", threads)[0], numbers("--batch", batch)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(TABLE), help="comma-separated model names")
    parser.add_argument("--settings", default="1x1,1x8", help="comma-separated THREADSxBATCH: 1x1,1x8,2x8")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="comma-separated; ratios are relative to the first")
    parser.add_argument("--against", default=",".join(LIBRARIES), help="comma-separated runtimes to compare with, or none")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--data-root",
        type=Path,
        default=ROOT.parent / "shared" / "data",
        help="folder with weights/NAME.safetensors and imagenet/calib; default: %(default)s",
    )
    parser.add_argument("--dry", action="store_true", help="print only, do not write the CSV file")
    parser.add_argument(
        "--quick", action="store_true", help="DeiT-Tiny, recipe fqvit, one thread, batch 1, five rounds; implies --dry"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.settings, arguments.recipes = "deit_tiny", "1x1", "fqvit"
        arguments.rounds, arguments.dry = 5, True
    keep_freed_memory()
    folder = ROOT / "build" / "speed"
    folder.mkdir(parents=True, exist_ok=True)
    settings = [setting(words) for words in arguments.settings.split(",")]
    recipes = tuple(arguments.recipes.split(","))
    for name in arguments.models.split(","):
        weights, kind = checkpoint(name, arguments.data_root, folder)
        files = programs(name, weights, kind, recipes, arguments.data_root, folder)
        found = measure(files, parse(arguments.against), str(weights), settings, arguments.rounds, track)
        print(f"\n{name}, weights: {kind}\n\n{report.text(found)}", *found.warnings, sep="\n", flush=True)
        if not arguments.dry:
            append(name, kind, recipes, arguments.rounds, found)


if __name__ == "__main__":
    try:
        main()
    except fqvit.FqvitError as error:
        raise SystemExit(f"speed.py: {error}") from None
