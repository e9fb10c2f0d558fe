"""Measure what each part of recipe `fqvit` contributes: change one setting at a time, in simulation.

Calibrates on half of the calibration images and compares with the float model on the other half: agreement of the top class,
Kullback-Leibler divergence, and the expected loss of top-1 (quant/methods/auto.py). Choose settings with this script,
so that the test images of accuracy.py stay held out.

    .venv/bin/python benchmarks/ideas.py vit_tiny --weights F.safetensors --calib DIR
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from msgspec.structs import replace

import fqvit
from fqvit.models.device import keep_freed_memory
from fqvit.models.graph import run_float, trace
from fqvit.models.pixels import normalise
from fqvit.quant.methods.auto import measure
from fqvit.quant.recipe import Recipe, SiteRule
from fqvit.system.progress import track

BATCH = 16


def with_site(recipe: Recipe, role: str, **rule: object) -> Recipe:
    return replace(recipe, sites={**recipe.sites, role: SiteRule(**rule)})  # type: ignore[arg-type]


def variants() -> dict[str, Recipe]:
    ours, paper, w4 = (fqvit.load_recipe(name) for name in ("fqvit", "fq-vit", "w4"))
    without_residual = {role: rule for role, rule in ours.sites.items() if role != "residual"}
    return {
        "fqvit": ours,
        "residual stream: 8 bits with PTF": replace(ours, residual="ptf", sites=without_residual),
        "attention: 4-bit LIS as in the paper": replace(ours, attention="log2"),
        "attention: 8 bits, relative to the row maximum": replace(ours, attention_bits=8),
        "attention: 8 bits, uniform": replace(ours, attention="uniform", attention_bits=8),
        "one scale for all channels of norms": with_site(ours, "norm", observer="minmax"),
        "one scale for all channels of GELU": with_site(ours, "gelu", observer="minmax"),
        "one scale for all channels of V and context": with_site(
            with_site(ours, "qkv", observer="minmax"), "context", observer="minmax"
        ),
        "GELU: scales within a factor 2^3": replace(ours, k=3),
        "GELU: scales within a factor 2^6": replace(ours, k=6),
        "fc1 outputs: 8 bits": with_site(ours, "hidden", bits=8),
        "fc1 outputs: 12 bits": with_site(ours, "hidden", bits=12),
        "scores: 10 bits": with_site(ours, "scores", bits=10),
        "branch outputs: 8-bit codes": replace(ours, branches="codes"),
        "fc1 outputs and scores: OMSE": with_site(
            with_site(ours, "hidden", bits=10, observer="omse"), "scores", observer="omse"
        ),
        "weights: error-compensated": replace(ours, rounding="compensated"),
        "w4": w4,
        "w4: groups of 64": replace(w4, weight_group=64),
        "w4: groups of 32": replace(w4, weight_group=32),
        "w4: rounded to the nearest": replace(w4, rounding="nearest"),
        "w4: no groups": replace(w4, weight_group=0),
        "fq-vit": paper,
        **low_variants("w6a6"),
        **low_variants("w4a4"),
    }


def low_variants(name: str) -> dict[str, Recipe]:
    """Return a recipe with fewer than 8 bits, and single changes of it with weights that are compensated but not learned."""
    recipe = fqvit.load_recipe(name)
    base = replace(recipe, rounding="compensated")
    found = {
        f"{name}, learned": recipe,
        f"{name}": base,
        f"{name}: rounded to the nearest, observed ranges": replace(base, rounding="nearest", ranges="observed", gelu="even"),
        f"{name}: observed ranges": replace(base, ranges="observed", gelu="even"),
        f"{name}: evenly spaced GELU codes": replace(base, gelu="even"),
        f"{name}: attention levels that are powers of two": replace(base, levels="powers"),
        f"{name}: keys as computed": replace(base, keys="plain"),
        f"{name}: observed range of scores": replace(base, scores="observed"),
        f"{name}: one scale for all channels of norms": with_site(base, "norm", observer="minmax"),
        f"{name}: attention of 8 bits": replace(base, attention_bits=8),
        f"{name}: neurons doubled": replace(base, mlps="doubled"),
        f"{name}: weights without groups": replace(base, weight_group=0),
    }
    return {row: each for row, each in found.items() if row == name or each != base}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--calib", required=True)
    parser.add_argument("--images", type=int, default=512, help="half for calibration, half for comparison")
    parser.add_argument("--only", help="only rows whose name contains this text")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    model = fqvit.load_model(arguments.model, arguments.weights)
    folder = fqvit.ImageFolder.unlabelled(arguments.calib, model.preprocess).limit(arguments.images)
    pixels = np.concatenate([batch.images for batch in track(folder.batches(), len(folder) // BATCH, "reading")])
    seen, kept = pixels[0::2], pixels[1::2]
    unseen = [kept[i : i + BATCH] for i in range(0, len(kept), BATCH)]
    graph = trace(model.module)
    exact = torch.cat([run_float(graph, normalise(batch, model.preprocess)) for batch in unseen])
    print(f"{model.name}: calibrated on {len(seen)} images, compared on {len(kept)} other images")
    print("| | agreement, % | KL divergence | expected loss of top-1 | seconds to calibrate |\n|---|---|---|---|---|")
    for name, recipe in variants().items():
        if arguments.only and arguments.only not in name:
            continue
        start = time.perf_counter()
        calibration = fqvit.calibrate(model, [seen], recipe)
        seconds = time.perf_counter() - start
        simulation = fqvit.Simulation(model, calibration)
        found = measure(exact, torch.cat([simulation.run(batch) for batch in unseen]))
        print(f"| {name} | {found.agreement:.1f} | {found.kl:.4f} | {found.loss:.2f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
