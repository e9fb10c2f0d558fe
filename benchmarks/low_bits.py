"""Measure recipes on fixed subsets of the calibration images: accuracy and agreement of the integer programs.

Prints one row per recipe and subset: top-1, agreement with the float model, mean Kullback-Leibler divergence in nats, and the
CPU seconds of calibration; then the means over subsets, with the 95 % interval of the difference from float, paired by image.

    .venv/bin/python benchmarks/low_bits.py deit_tiny --weights F.safetensors --calib DIR --data DIR --recipes w6a6,w4a4
"""

from __future__ import annotations

import time

import numpy as np
from model_arguments import model_parser

import fqvit
from fqvit.models.graph import run_float, trace
from fqvit.models.pixels import normalise
from fqvit.study.methods import parse
from fqvit.system.progress import track


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def subset_indices(total: int, size: int, subset: int) -> list[int]:
    """Return evenly spaced indices, which subset i shifts by i. size 0: all but those with index i modulo 5."""
    if size == 0:
        return [i for i in range(total) if i % 5 != subset]
    spread = 2 * np.linspace(0, (total - 1) // 2, size).astype(int)
    return ((spread + subset) % total).tolist()


def main() -> None:
    parser = model_parser(__doc__, "w6a6,w4,w4a4")
    parser.add_argument("--subsets", default="0,1,2,3,4", help="comma-separated numbers of subsets, 0 to 4")
    parser.add_argument("--size", type=int, default=256, help="images per subset; 0: four fifths of all images")
    arguments = parser.parse_args()
    model = fqvit.load_model(arguments.model, arguments.weights)
    folder = fqvit.ImageFolder.unlabelled(arguments.calib, model.preprocess)
    data = fqvit.ImageFolder.labelled(arguments.data, model.preprocess, model.module.config.classes)
    batches = list(track(data.batches(16), -(-len(data) // 16), "reading"))
    truth = np.concatenate([batch.labels for batch in batches])
    graph = trace(model.module)
    exact = np.concatenate([run_float(graph, normalise(batch.images, model.preprocess)).numpy() for batch in batches])
    exact_log = log_softmax(exact.astype(np.float64))
    right = exact.argmax(1) == truth
    print(f"float: top-1 {100 * right.mean():.1f}")
    for method in parse(arguments.recipes, None):
        assert method.recipe is not None
        differences, agreements = [], []
        for subset in map(int, arguments.subsets.split(",")):
            chosen = folder.take(subset_indices(len(folder), arguments.size, subset))
            start = time.process_time()
            calibration = fqvit.calibrate(model, chosen, method.recipe)
            spent = time.process_time() - start
            program = fqvit.lower(model, calibration)
            engine = fqvit.Engine(program)
            logits = np.concatenate([engine.run(batch.images) for batch in batches]) * program.header.output.scale
            found = logits.argmax(1)
            kl = (np.exp(exact_log) * (exact_log - log_softmax(logits))).sum(1).mean()
            differences.append((found == truth).astype(float) - right)
            agreements.append(100 * np.mean(found == exact.argmax(1)))
            print(
                f"{method.label}, subset {subset}: top-1 {100 * np.mean(found == truth):.1f}, "
                f"agreement {agreements[-1]:.1f} %, KL {kl:.4f}, {spent:.0f} CPU s",
                flush=True,
            )
        paired = 100 * np.mean(differences, 0)
        margin = 1.96 * paired.std(ddof=1) / np.sqrt(len(paired))
        print(
            f"{method.label}: {paired.mean():+.2f} [{paired.mean() - margin:+.2f}, {paired.mean() + margin:+.2f}] against float"
            f", agreement {np.mean(agreements):.1f} %"
        )


if __name__ == "__main__":
    main()
