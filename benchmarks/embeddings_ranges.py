"""Show how activation ranges affect the embeddings of DINOv2: vary the calibration images, gelu_floor and the width of ranges.

    .venv/bin/python benchmarks/embeddings_ranges.py --data ../shared/data

Calibrates recipe `embedding` 8/8/4 with weights rounded to nearest, which takes about a minute per variant. The integer program
then embeds training images that no variant is calibrated on. embeddings_noise.py defines the neighbour error. Reads the float
embeddings of imagenet/calib that embeddings.py keeps in --work; run that first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from embeddings import MODELS, Floats, Images, cosines, image_arrays
from embeddings_noise import kept, neighbour_error
from numpy.typing import NDArray
from version import ROOT

import fqvit
from fqvit.frontend.load import load_model
from fqvit.models.load import FloatModel
from fqvit.quant import channels
from fqvit.quant.calibrate import calibrate
from fqvit.quant.plan import SitePlan
from fqvit.quant.qparams import QParams
from fqvit.quant.recipe import load_recipe
from fqvit.runtime.native import Engine


@dataclass(frozen=True)
class Variant:
    """Calibrate on `images` images, every `spacing`-th; multiply the ranges of sites with these roles by `factor`."""

    spacing: int = 7
    images: int = 128
    floor: float = 0.9
    factor: float = 1.0
    roles: tuple[str, ...] = ()


VARIANTS = (
    Variant(),
    Variant(factor=1.25, roles=("norm",)),
    Variant(factor=1.25, roles=("gelu",)),
    Variant(factor=1.25, roles=("norm", "gelu", "context", "qkv")),
    Variant(spacing=3, images=333),
    Variant(spacing=3, images=333, floor=0.7),
    Variant(spacing=3, images=333, floor=0.5),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with weights/ and imagenet/")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "embeddings")
    parser.add_argument("--held-out", type=int, default=440, help="images to measure with")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, weights = MODELS["dinov2"]
    model = load_model(name, arguments.data / "weights" / weights, size=224)
    calib = image_arrays(arguments.data, "calib", model, arguments.work)
    others = np.array([i for i in range(len(calib)) if all(i % variant.spacing for variant in VARIANTS)])
    chosen = others[np.arange(arguments.held_out) * len(others) // arguments.held_out]
    exact = kept(arguments.work / "dinov2" / "float-gallery")[chosen]
    images = np.ascontiguousarray(calib[chosen])
    for variant in VARIANTS:
        found = embeddings(model, np.ascontiguousarray(calib[:: variant.spacing][: variant.images]), images, variant)
        cosine = cosines(found, exact)
        print(
            f"{variant}: 1 - cosine {1 - cosine.mean():.5f}, first percentile {np.quantile(cosine, 0.01):.4f},"
            f" minimum {cosine.min():.4f}, neighbour error {neighbour_error(found, exact):.2f}",
            flush=True,
        )


def embeddings(model: FloatModel, calibration_images: Images, images: Images, variant: Variant) -> Floats:
    """Calibrate a variant and return the embeddings [N, C] of its integer program as real numbers."""
    recipe = msgspec.structs.replace(load_recipe("embedding"), rounding="nearest", gelu_floor=variant.floor)
    with wider_ranges(variant.factor, variant.roles), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.fqvit"
        fqvit.lower(model, calibrate(model, [calibration_images], recipe, outputs="embedding")).save(path)
        engine = Engine(path, threads=1)
        info = engine.outputs[0]
        return np.concatenate([(engine.run(image[None]).astype(np.float32) - info.zero) * info.scale for image in images])


@contextmanager
def wider_ranges(factor: float, roles: tuple[str, ...]) -> Iterator[None]:
    """Multiply the observed ranges of sites that have these roles and one scale per channel by `factor`."""
    original = channels.qparams

    def qparams(
        site: SitePlan, low: NDArray[np.float64], high: NDArray[np.float64], value: QParams | None, floor: float = 0.0
    ) -> QParams:
        times = factor if site.role in roles else 1.0
        return original(site, low * times, high * times, value, floor)

    channels.qparams = qparams
    try:
        yield
    finally:
        channels.qparams = original


if __name__ == "__main__":
    main()
