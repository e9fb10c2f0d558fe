"""Show which sites of DINOv2 cause the error of its embedding: quantize the sites of one role, or the weights, in simulation.

    .venv/bin/python benchmarks/embeddings_sites.py --data ../shared/data --recipes fqvit,embedding

Calibrates on subset 0 of embeddings.py, with weights rounded to nearest. Prints 1 - mean cosine to the float model over images
of imagenet/calib that are in no subset, and their neighbour error against the float embeddings of all other images of
imagenet/calib (embeddings_noise.py defines it). Reads these float embeddings from --work; run embeddings.py first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import numpy as np
import torch
from embeddings import MODELS, SPACING, SUBSETS, Floats, cosines
from embeddings_noise import NEAREST, kept, normal
from torch import Tensor
from version import ROOT

from fqvit.data.images import ImageFolder
from fqvit.frontend.load import load_model
from fqvit.models.graph import Node
from fqvit.models.pixels import normalise
from fqvit.quant.calibrate import calibrate
from fqvit.quant.recipe import load_recipe
from fqvit.quant.simulate import Simulation

ROLES = ("residual", "norm", "qkv", "scores", "attention", "context", "hidden", "gelu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with weights/ and imagenet/")
    parser.add_argument("--recipes", default="fqvit,embedding", help="comma-separated names of recipes")
    parser.add_argument("--images", type=int, default=128, help="calibration images")
    parser.add_argument("--held-out", type=int, default=32, help="images to measure with")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "embeddings")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, weights = MODELS["dinov2"]
    model = load_model(name, arguments.data / "weights" / weights, size=224)
    source = ImageFolder.unlabelled(arguments.data / "imagenet" / "calib", model.preprocess)
    chosen = range(0, SPACING * arguments.images, SPACING)
    others = [i for i in range(len(source)) if i % SPACING >= SUBSETS]
    held_out = [others[i * len(others) // arguments.held_out] for i in range(arguments.held_out)]
    calibration_images, images = (np.stack([source.read(i) for i in part]) for part in (chosen, held_out))
    gallery = kept(arguments.work / "dinov2" / "float-gallery")
    print(f"1 - mean cosine to float, and neighbour error in thousandths, {len(images)} images")
    for recipe in arguments.recipes.split(","):
        nearest = msgspec.structs.replace(load_recipe(recipe), rounding="nearest")
        simulation = Simulation(model, calibrate(model, [calibration_images], nearest))
        exact = embeddings(simulation, images, roles=(), weights=False)
        for label, roles, rounded in [("all", ROLES, True), ("weights", (), True), *((role, (role,), False) for role in ROLES)]:
            found = embeddings(simulation, images, roles, rounded)
            error = neighbour_error(found, gallery, held_out)
            print(f"{recipe:10} {label:10} {1 - cosines(found, exact).mean():.5f} {error:5.2f}", flush=True)


def neighbour_error(found: Floats, gallery: Floats, own: list[int]) -> float:
    """Return the neighbour error of embeddings [N, C] against exact ones [G, C], in thousandths. own: their rows in gallery"""
    exact = normal(gallery)
    cosine = exact[own] @ exact.T
    cosine[np.arange(len(own)), own] = -1
    nearest = np.argsort(-cosine, 1)[:, :NEAREST]
    error = np.take_along_axis(normal(found) @ exact.T - cosine, nearest, 1)
    return 1000 * float((error - error.mean(1, keepdims=True)).std())


@torch.no_grad()
def embeddings(simulation: Simulation, images: np.ndarray, roles: tuple[str, ...], weights: bool) -> np.ndarray:
    """Return the embeddings [N, C] with the sites of these roles quantized, and the weights if wanted."""

    def visit(node: Node, y: Tensor) -> Tensor:
        return simulation.visit(node, y) if node.leaf.role in roles else y

    def call(node: Node, inputs: list[Tensor]) -> Tensor:
        y: Tensor = simulation.call(node, inputs) if weights else node.leaf(*inputs, *node.params)
        return y

    batches = [normalise(images[i : i + 8], simulation.model.preprocess) for i in range(0, len(images), 8)]
    return torch.cat([simulation.graph.run(batch, visit, call) for batch in batches]).numpy()


if __name__ == "__main__":
    main()
