"""`fqvit detect quantize`: quantize a float detector with calibration images to one .fqvit file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fqvit.cli import inputs
from fqvit.cli.commands.quantize import account, bits_of, recipe_of
from fqvit.cli.output import say, say_json, warn_of_skipped
from fqvit.detect.image_files import ImageFiles
from fqvit.detect.settings import read_settings
from fqvit.errors import FqvitError
from fqvit.quant.recipe import DEFAULT_RECIPE, RECIPES, check_integer, with_methods
from fqvit.system.progress import busy, track
from fqvit.system.text import facts, size

if TYPE_CHECKING:
    from fqvit.detect.calibrate import DetectorCalibration
    from fqvit.detect.model.detector import FloatDetector
    from fqvit.detect.program import DetectorProgram

MODELS = ("mask_rcnn", "cascade_mask_rcnn")


def run(
    model: str | None,
    weights: Path | None,
    settings: Path | None,
    calib: Path | None,
    images: int | None,
    recipe_name: str | None,
    bits: str | None,
    max_loss: float | None,
    max_size: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    recipe = recipe_of(recipe_name or DEFAULT_RECIPE, bits, images, None, max_loss, max_size=max_size)
    if bits is not None and (recipe_name is None or recipe_name in RECIPES):  # a recipe file keeps its own methods
        recipe = with_methods(recipe)
    check_integer(recipe)
    if model is not None and model not in MODELS:
        raise FqvitError(f"{model}: unknown detector, expected {' or '.join(MODELS)}. Correct the name or leave it out.")
    if weights is None:
        raise FqvitError("detect quantize: no checkpoint given. Pass the weights of a detector (--weights FILE).")
    if calib is None:
        raise FqvitError("detect quantize: no images given. Pass a folder of images (--calib DIR); labels are not needed.")
    changes = None if settings is None else read_settings(settings)
    files = ImageFiles.in_folder(calib).limit(recipe.images)
    if out is not None:
        inputs.check_output(out, weights, settings, recipe_name)
    inputs.require_torch("detect quantize")
    from fqvit.detect.calibrate import calibrate_detector
    from fqvit.detect.file import file_size
    from fqvit.detect.fixed.constants import check_settings
    from fqvit.detect.model.load import load_detector
    from fqvit.evaluate.inspect import inspect_part
    from fqvit.models.device import keep_freed_memory

    keep_freed_memory()
    detector = load_detector(weights, changes)
    if model is not None and model != detector.name:
        raise FqvitError(f"{weights}: is a {detector.name}, expected a {model}. Leave out the name, or pass other weights.")
    config = detector.module.config
    check_settings(detector.settings, len(config.backbone.depths) + 1, config.stages)
    target = out or Path(f"{detector.name}.fqvit")
    inputs.check_output(target)
    start = time.perf_counter()
    readable = (image for _, image in track(files, len(files), "calibrating", "images"))
    calibration = calibrate_detector(
        detector, readable, recipe, progress=track, size_of=lambda found: file_size(_program(detector, found))
    )
    skipped = warn_of_skipped(files)
    calibrated = time.perf_counter()
    with busy("lowering"):
        program = _program(detector, calibration)
        program.save(target)
    lowered = time.perf_counter()
    parts = [inspect_part(part) for _, part in program.parts()]
    ops, floats, sites = (sum(counts) for counts in zip(*((len(p.ops), p.floats, len(p.sites)) for p in parts), strict=True))
    float_bytes = 4 * sum(parameter.numel() for parameter in detector.module.parameters())
    written = target.stat().st_size
    if as_json:
        say_json(
            {
                "file": str(target),
                "model": detector.name,
                "source": detector.source,
                "recipe": recipe.name,
                "bits": bits_of(recipe),
                "stages": program.stages,
                "classes": program.classes,
                "calibration_images": calibration.pyramid.images,
                "skipped": skipped,
                "ops": ops,
                "float_ops": floats,
                "sites": sites,
                "float_bytes": float_bytes,
                "bytes": written,
                "fingerprint": program.fingerprint(),
                "seconds": round(lowered - start, 3),
                "calibration_seconds": round(calibrated - start, 3),
                "choice": None if calibration.choice is None else msgspec.to_builtins(calibration.choice),
            }
        )
        return
    if calibration.choice is not None:
        say(account(calibration.choice, "classification accuracy on proposals") + "\n")
    spent = f"calibrated in {calibrated - start:.1f} s, lowered and proved in {lowered - calibrated:.1f} s"
    stages = "1 stage" if program.stages == 1 else f"{program.stages} stages"
    say(
        facts(
            [
                ("model", f"{detector.name}, {stages}, {program.classes} classes ({detector.source.split(' sha256')[0]})"),
                ("recipe", f"{recipe.name} {bits_of(recipe)} (weights/activations/attention)"),
                ("images", f"{calibration.pyramid.images} ({calib}), {spent}"),
                ("programs", f"{len(parts)}: {ops} ops, {floats} floating-point ops, {sites} quantized sites"),
                ("written", f"{target}, {size(written)} (float32: {size(float_bytes)})"),
                ("fingerprint", program.fingerprint()),
            ]
        )
    )


def _program(detector: FloatDetector, calibration: DetectorCalibration) -> DetectorProgram:
    from fqvit.detect.lower import LoweredDetector
    from fqvit.detect.program import DetectorProgram

    return DetectorProgram.of(detector, LoweredDetector(detector, calibration))
