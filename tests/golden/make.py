"""Create the golden files: tiny random programs of every format version, images, and the outputs that they must give forever.

    python tests/golden/make.py

The script creates only missing files and never changes existing ones; tests do not run it. A new format version gets its own
files in addition to these.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from fqvit.data.preprocess import Preprocess  # noqa: E402
from fqvit.detect.calibrate import calibrate_detector  # noqa: E402
from fqvit.detect.lower import LoweredDetector  # noqa: E402
from fqvit.detect.model.load import load_detector, random_release  # noqa: E402
from fqvit.detect.program import DetectorProgram  # noqa: E402
from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary  # noqa: E402
from fqvit.ir.fixed import multiplier  # noqa: E402
from fqvit.ir.moves import Permute, Take  # noqa: E402
from fqvit.ir.ops import Linear, Mean  # noqa: E402
from fqvit.ir.program import INPUT, Header, Output, Program  # noqa: E402
from fqvit.lowering.lower import lower  # noqa: E402
from fqvit.models.config import DetectorConfig, SwinConfig  # noqa: E402
from fqvit.quant.recipe import load_recipe, with_bits  # noqa: E402
from fqvit.runtime.reference import Reference, run  # noqa: E402
from tests.detect.detectors import SETTINGS  # noqa: E402
from tests.detect.test_programs import sample_images  # noqa: E402
from tests.factories import GROUPED, calibration_of, float_model, images_for, model_of  # noqa: E402
from tests.golden.codebooks import codebooks  # noqa: E402
from tests.golden.cosine import cosine  # noqa: E402
from tests.golden.fraction import fraction  # noqa: E402
from tests.golden.widths import widths  # noqa: E402

# A small file with attention masks: 5 x 7 tokens in padded windows of 3 x 3, which are shifted in the second block.
MASKED_SWIN = SwinConfig((10, 14), 2, 1, 4, 8, (2,), (2,), 3, hidden_ratio=2)
# {file: (kind of model in factories.py or a configuration, recipe, class names, features)}
FILES = {
    "tiny_v1": ("vit", "fq-vit", ("a", "b", "c", "d", "é"), "logits"),
    "swin_v1": ("padded swin", "fq-vit", None, "logits"),
    "original_v1": ("distilled", "fq-vit-original", None, "logits"),
    "uniform_v1": ("no class token", "minmax", None, "logits"),
    "tokens_v1": ("mean", "fq-vit", None, "tokens"),
    "grouped_v1": ("vit", GROUPED, None, "logits"),
    "fqvit_v1": ("distilled", "fqvit", None, "logits"),
    "fqvit_swin_v1": (MASKED_SWIN, "fqvit", None, "logits"),
    "narrow_v2": ("vit", with_bits(load_recipe("fqvit"), "6/6/4"), None, "logits"),
}

SMALL_SWIN = SwinConfig((64, 64), 4, 3, 0, 4, (1, 1, 1, 1), (1, 1, 2, 2), 2, hidden_ratio=2, fixed_window=True)
MASK_RCNN = DetectorConfig(SMALL_SWIN, 3, channels=8, box_width=12, mask_convs=1, mask_channels=8)
CASCADE = replace(MASK_RCNN, stages=2, agnostic=True, box_convs=1, box_fcs=1, box_channels=8)
# {file in detectors/: (configuration, recipe)}
# The first two files were made by fqvit 0.1.0: they have no field `resize`.
DETECTORS = {"mask_rcnn_v1": (MASK_RCNN, "fqvit"), "cascade_v1": (CASCADE, "fq-vit"), "opencv_v1": (MASK_RCNN, "fq-vit")}


# {file in outputs/: (kind of model in factories.py, recipe, outputs)}
OUTPUTS = {
    "vit_v1": (
        "distilled",
        "fqvit",
        ("logits", "embedding", "embedding:u16:l2", "class@0:sign", "tokens@-1", "mean:l2", "tokens:u16"),
    ),
    "mean_v1": ("no class token", "fq-vit", ("embedding:sign", "embedding", "mean@0", "tokens@0", "tokens:u8:l2")),
}


# {file: a function that builds its program by hand}
BUILT = {"cosine_v1": cosine, "fraction_v1": fraction, "widths_v2": widths, "codebooks_v2": codebooks}


def make_built() -> None:
    for name, build in BUILT.items():
        if not (HERE / f"{name}.fqvit").exists():
            save(name, build())


def save(name: str, program: Program) -> None:
    images = images_for(program.header.preprocess, 6, 12)
    program.save(HERE / f"{name}.fqvit")
    np.savez_compressed(HERE / f"{name}.npz", images=images, output=run(program, images), fingerprint=program.fingerprint())


def make() -> None:
    for name, (kind, recipe, classes, features) in FILES.items():
        if (HERE / f"{name}.fqvit").exists():
            continue
        model = float_model(kind, 11, classes) if isinstance(kind, str) else model_of(kind, name, 11, classes)
        save(name, lower(model, calibration_of(model, recipe, features=features)))


def make_outputs() -> None:
    """Make programs with outputs of every kind and modifier; the arrays are named output0, output1, ..."""
    for name, (kind, recipe, outputs) in OUTPUTS.items():
        path = HERE / "outputs" / f"{name}.fqvit"
        if path.exists():
            continue
        model = float_model(kind, 11, None)
        program = lower(model, calibration_of(model, recipe, outputs=outputs))
        images = images_for(program.header.preprocess, 6, 12)
        path.parent.mkdir(exist_ok=True)
        program.save(path)
        arrays = {f"output{i}": array for i, array in enumerate(Reference(program).run_all(images))}
        np.savez_compressed(path.with_suffix(".npz"), images=images, fingerprint=program.fingerprint(), **arrays)


def elementwise() -> Program:
    """Return a program with multiply, rotary, depthwise, max and mean, on operands of every type: a gated convolution block."""
    rng, side, channels = np.random.default_rng(11), 6, 10
    row, column = np.divmod(np.arange(side * side)[:, None], side)
    rows, columns = row + np.arange(9) // 3 - 1, column + np.arange(9) % 3 - 1
    inside = (rows >= 0) & (rows < side) & (columns >= 0) & (columns < side)
    angle = rng.uniform(0, 2 * np.pi, (side * side, 5))
    constants = {
        "taps": np.where(inside, rows * side + columns, -1).astype(np.int32),
        "squares": np.arange(36).reshape(3, 2, 3, 2).transpose(0, 2, 1, 3).reshape(9, 4).astype(np.int32),
        "once": np.arange(9, dtype=np.int32)[::-1, None].copy(),
        "partner": np.array([1, 0, 3, 2, 4], np.uint16),
        "turned.table": np.rint(np.stack([np.cos(angle), np.sin(angle)]) * 2**14).astype(np.int16),
        "fill": np.full(channels, 120, np.uint8),
    }
    # The shape of each weight, the zero point of its input, and roughly the largest accumulator.
    for y, shape, zero, reach in (
        ("embedded", (channels, 3), 0, 2**16),
        ("convolved", (9, channels), 120, 2**17),
        ("gate", (channels, channels), 0, 2**17),
        ("scaled", (1, channels), 2**13, 2**18),
        ("head", (5, channels), 0, 2**12),
    ):
        w, axis = rng.integers(-128, 128, shape), 0 if y in ("convolved", "scaled") else 1
        sums = w.sum(axis)
        bias = rng.integers(-999, 999, sums.shape) - zero * sums
        pairs = [multiplier(float(ratio)) for ratio in rng.uniform(0.5, 2, sums.shape) * 256 / reach]
        constants |= {f"{y}.w": w.astype(np.int8), f"{y}.bias": bias.astype(np.int32)}
        constants[f"{y}.mult"] = np.array([mult for mult, _ in pairs], np.int32)
        constants[f"{y}.shift"] = np.array([shift for _, shift in pairs], np.uint8)
    ops = (
        Permute(y="rows", x=INPUT, view=(side * side, 3), perm=(0, 1)),
        Linear(y="embedded", x="rows", y_zero=120),
        Depthwise(y="convolved", x="embedded", index="taps", fill="fill", y_zero=(100, 140)),
        Mean(y="squeezed", x="convolved", mult=2**30, shift=35),
        Linear(y="gate", x="squeezed", y_zero=90),
        Multiply(y="gated", a="convolved", b="gate", mult=2**30, shift=36, a_zero=120, b_zero=7, y_zero=100),
        Rotary(y="turned", x="gated", partner="partner", mult=2**30, shift=41, zero=100, y_zero=2**11, bits=12),
        Take(y="windows", x="turned", index="squares"),
        Max(y="largest", x="windows"),
        Mean(y="average", x="windows", mult=2**30, shift=34, skip=1, zero=2**11, y_zero=128),
        Multiply(y="both", a="largest", b="average", mult=2**30, shift=33, a_zero=2**11, b_zero=128, y_zero=2**13, bits=14),
        Depthwise(y="scaled", x="both", index="once", fill=2**13, y_zero=128),
        Mean(y="pooled", x="scaled", mult=2**30, shift=33, y_zero=3),
        Linear(y="head", x="pooled", out="i32"),
    )
    picture = Preprocess(side, side, 3, side, "bilinear", (0.5,) * 3, (0.5,) * 3)
    header = Header(
        version=1,
        model="elementwise",
        preprocess=picture,
        ops=ops,
        output=Output("head", "logits", 1.0),
        sites={},
        recipe={},
        source="",
        images=1,
    )
    return Program(header, constants)


def make_elementwise() -> None:
    path = HERE / "elementwise_v1.fqvit"
    if path.exists():
        return
    program = elementwise()
    images = images_for(program.header.preprocess, 6, 12)
    program.save(path)
    arrays = {"images": images, "output": run(program, images), "fingerprint": np.array(program.fingerprint())}
    np.savez_compressed(path.with_suffix(".npz"), **arrays)


def make_detectors() -> None:
    shown = [image.resize((60, 44)) for image in sample_images()[:2]]
    for name, (config, recipe) in DETECTORS.items():
        path = HERE / "detectors" / f"{name}.fqvit"
        if path.exists():
            continue
        detector = load_detector(random_release(config, "mmdetection"), msgspec.structs.replace(SETTINGS, detections=12))
        lowered = LoweredDetector(detector, calibrate_detector(detector, shown, load_recipe(recipe)))
        program = DetectorProgram.of(detector, lowered)
        found = [program.ready(1, "reference").detect(program.prepare(image)) for image in shown]
        path.parent.mkdir(exist_ok=True)
        program.save(path)
        arrays = {"fingerprint": np.array(program.fingerprint()), "pictures": np.stack([np.asarray(x) for x in shown])}
        for i, one in enumerate(found):
            arrays |= {f"{part}{i}": getattr(one, part) for part in ("boxes", "scores", "labels", "probabilities")}
            arrays[f"masks{i}"] = np.packbits(np.array(list(one.masks())))
        np.savez_compressed(path.with_suffix(".npz"), **arrays)


if __name__ == "__main__":
    make()
    make_built()
    make_elementwise()
    make_outputs()
    make_detectors()
