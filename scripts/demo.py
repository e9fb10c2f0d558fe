"""Compare the float and integer versions of the embedded models in one table: `make demo`.

Quantizes fmnist_vit and fmnist_swin with the calibration images of the package, runs the float model and the integer program on
the 1,000 embedded test images, and writes the .fqvit files to build/demo.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

# Must be set before numpy and torch are imported. Matrices this small are slower on several threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fqvit
from fqvit.evaluate.accuracy import Accuracy, Run, Scores, arrays, measure
from fqvit.evaluate.inspect import inspect
from fqvit.models.embedded import MODELS, calibration_images, test_images
from fqvit.models.graph import run_float, trace
from fqvit.models.pixels import normalise
from fqvit.quant.recipe import DEFAULT_RECIPE
from fqvit.runtime.native import instruction_sets
from fqvit.runtime.reference import Reference
from fqvit.system.progress import track
from fqvit.system.text import size, table

FOLDER = Path("build") / "demo"
BATCH = 16


def main() -> None:
    start = time.perf_counter()
    FOLDER.mkdir(parents=True, exist_ok=True)
    head = (
        "model",
        "float top-1",
        "integer top-1",
        "agreement",
        "float size",
        ".fqvit size",
        "float time",
        "integer time",
        "float ops",
    )
    rows = [row(name) for name in MODELS]
    print(table(head, rows))
    print(
        f"""
1,000 Fashion-MNIST test images each. Agreement: images for which both models predict the same class. Times are per image on
one core, in batches of {BATCH}: float with torch, integer with the native engine ({instruction_sets()[0]}). Every logit of the
engine equals that of the reference interpreter.
The integer programs are in {FOLDER}. To inspect one: .venv/bin/fqvit inspect {FOLDER / MODELS[0]}.fqvit
Done in {time.perf_counter() - start:.0f} s."""
    )


def row(name: str) -> tuple[str, ...]:
    model = fqvit.load_model(name)
    calibration = fqvit.calibrate(model, calibration_images(), fqvit.load_recipe(DEFAULT_RECIPE))
    program = fqvit.lower(model, calibration)
    path = FOLDER / f"{name}.fqvit"
    program.save(path)
    program = fqvit.Program.load(path)
    graph = trace(model.module)

    def run(images: Scores) -> Scores:
        logits: Scores = run_float(graph, normalise(images, model.preprocess)).numpy()
        return logits

    engine = fqvit.Engine(path, threads=1)
    exact, integer = score(run, f"{name} float"), score(engine.run, f"{name} integer")
    check_bits(engine, program, name)
    agreement = 100 * float((exact.predictions == integer.predictions).mean())
    float_bytes = 4 * sum(parameter.numel() for parameter in model.module.parameters())
    found = inspect(program, path)
    return (
        name,
        f"{exact.top1:.1f} %",
        f"{integer.top1:.1f} %",
        f"{agreement:.1f} %",
        size(float_bytes),
        size(found.total),
        f"{1000 * exact.seconds / exact.images:.1f} ms",
        f"{1000 * integer.seconds / integer.images:.1f} ms",
        str(found.floats),
    )


def check_bits(engine: fqvit.Engine, program: fqvit.Program, name: str) -> None:
    """Raise FqvitError if the engine and the reference differ in any logit of the test images."""
    reference, batches = Reference(program), arrays(*test_images(), BATCH)
    for batch in track(batches, len(batches), f"{name} exactness"):
        if (engine.run(batch.images) != reference.run(batch.images)).any():
            raise fqvit.FqvitError(
                f"{name}: engine and reference differ in the batch that starts with {batch.paths[0]}, expected equal logits."
                " Please report this."
            )


def score(run: Run, label: str) -> Accuracy:
    batches = arrays(*test_images(), BATCH)
    return measure(run, track(batches, len(batches), label))


if __name__ == "__main__":
    try:
        main()
    except fqvit.FqvitError as error:
        sys.exit(f"demo: {error}")
