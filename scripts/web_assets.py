"""Write the embedded model and the sample images of the web page: `make web`.

The model is fmnist_swin with two outputs, logits and an embedding. The samples are Fashion-MNIST test images, two per class, as
PNG files.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
from pathlib import Path

# Must be set before numpy and torch are imported. Matrices this small are slower on several threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from PIL import Image

import fqvit
from fqvit.models.embedded import FMNIST_CLASSES, calibration_images, test_images
from fqvit.quant.recipe import DEFAULT_RECIPE
from fqvit.system.files import write_atomically

MODEL = "fmnist_swin"
PER_CLASS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=Path("build/web"))
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    model = fqvit.load_model(MODEL)
    calibration = fqvit.calibrate(
        model, calibration_images(), fqvit.load_recipe(DEFAULT_RECIPE), outputs=("logits", "embedding")
    )
    fqvit.lower(model, calibration).save(folder / f"{MODEL}.fqvit")
    write_atomically(folder / "samples.json", lambda path: path.write_text(json.dumps(samples(), indent=1) + "\n"))


def samples() -> list[dict[str, str]]:
    """Return the name and the PNG file of each sample, in base64."""
    images, labels = test_images()
    found = []
    for label, name in enumerate(FMNIST_CLASSES):
        for number, index in enumerate((labels == label).nonzero()[0][:PER_CLASS]):
            stream = io.BytesIO()
            Image.fromarray(images[index, :, :, 0]).save(stream, "png", optimize=True)
            title = name.replace("/", " or ")
            found.append({"name": f"{title} {number + 1}.png", "png": base64.b64encode(stream.getvalue()).decode()})
    return found


if __name__ == "__main__":
    main()
