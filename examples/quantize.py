"""Quantize a float model to a .fqvit file and measure its accuracy: python examples/quantize.py [OUT.fqvit]

With your own checkpoint and images, use load_model("deit_tiny", "deit_tiny.safetensors") and pass
ImageFolder.unlabelled("photos", model.preprocess) to calibrate.
"""

from __future__ import annotations

import sys

import numpy as np

import fqvit
from fqvit.models.embedded import calibration_images, test_images

model = fqvit.load_model("fmnist_vit")
recipe = fqvit.load_recipe("fqvit")
images = calibration_images()  # uint8 [N, H, W, C], no labels
calibration = fqvit.calibrate(model, [images[i : i + 32] for i in range(0, len(images), 32)], recipe)
program = fqvit.lower(model, calibration)
out = sys.argv[1] if len(sys.argv) > 1 else "fmnist_vit.fqvit"
program.save(out)

pixels, labels = test_images()
logits = fqvit.Engine(program).run(pixels)  # int32 [N, classes]
assert np.array_equal(logits[:8], fqvit.runtime.reference.run(program, pixels[:8])), (
    "the engine must match the reference bit for bit"
)
top1 = 100 * np.mean(logits.argmax(-1) == labels)
print(f"{out}: top-1 {top1:.1f} % on {len(labels)} test images, fingerprint {program.fingerprint()[:16]}")
