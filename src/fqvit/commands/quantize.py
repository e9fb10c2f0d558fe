"""`fqvit quantize`: a float checkpoint and images without labels -> one .fqvit file."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from fqvit.commands import inputs
from fqvit.commands.output import facts, say, say_json, size
from fqvit.errors import FqvitError
from fqvit.progress import track
from fqvit.quant.recipe import Recipe, load_recipe, with_bits


def run(
    model_name: str | None,
    weights: str | None,
    calib: Path | None,
    recipe_name: str,
    bits: str | None,
    device: str,
    features: str | None,
    images: int | None,
    k: int | None,
    classes: Path | None,
    save_calibration: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    recipe = recipe_of(recipe_name, bits, images, k)
    inputs.check_name(model_name)
    for path in (out, save_calibration):
        if path is not None:
            inputs.check_output(path)
    inputs.require_torch("quantize")
    from fqvit.ir.lower import lower
    from fqvit.quant.calibrate import calibrate

    model = inputs.float_model(model_name, weights, classes)
    target = Path(f"{model.name}.fqvit") if out is None else out
    inputs.check_output(target)
    pictures = inputs.unlabelled(calib, "--calib", model.name, model.preprocess, recipe.images, recipe.batch)
    start = time.perf_counter()
    batches = pictures.batches(recipe.batch, "calibrating")
    calibration = calibrate(
        model,
        (batch.images for batch in batches),
        recipe,
        device=device,
        features=features or "logits",  # type: ignore[arg-type]
    )
    for _ in batches:  # so that the pass ends and unreadable images are reported
        pass
    calibrated = time.perf_counter()
    (program,) = [lower(model, calibration) for _ in track([None], 1, "lowering", "programs")]
    program.save(target)
    lowered = time.perf_counter()
    if save_calibration is not None:
        from fqvit.files import write_atomically

        write_atomically(save_calibration, lambda temporary: temporary.write_text(calibration.to_json(), encoding="utf-8"))
    from fqvit.evaluate.inspect import inspect

    found, header = inspect(program, target), program.header
    result = {
        "file": str(target),
        "model": model.name,
        "source": model.source,
        "recipe": recipe.name,
        "bits": bits_of(recipe),
        "calibration_images": calibration.images,
        "skipped": pictures.skipped,
        "output": header.output.kind,
        "ops": len(program.ops),
        "float_ops": found.floats,
        "sites": len(header.sites),
        "bytes": found.total,
        "overhead_percent": round(found.overhead, 2),
        "fingerprint": program.fingerprint(),
        "seconds": round(lowered - start, 3),
        "calibration_seconds": round(calibrated - start, 3),
    }
    if as_json:
        say_json(result)
        return
    spent = f"calibrated in {calibrated - start:.1f} s, lowered and proved in {lowered - calibrated:.1f} s"
    rows = [
        ("model", f"{model.name} ({model.source.split(' sha256')[0]})"),
        ("recipe", f"{recipe.name} {bits_of(recipe)} (weights/activations/attention)"),
        ("images", f"{calibration.images} ({pictures.where}), {spent}"),
        ("program", f"{len(program.ops)} ops, {found.floats} floating-point ops, {len(header.sites)} quantized sites"),
        ("written", f"{target}, {size(found.total)} ({found.overhead:.1f} % over its int8 weights)"),
        ("fingerprint", program.fingerprint()),
    ]
    say(facts(rows))


def recipe_of(name: str, bits: str | None, images: int | None, k: int | None) -> Recipe:
    recipe = load_recipe(name)
    if bits is not None:
        recipe = with_bits(recipe, bits)
    if images is not None:
        if images < 1:
            raise FqvitError(f"--images {images}: expected at least 1.")
        recipe = msgspec.structs.replace(recipe, images=images)
    if k is not None:
        if not 0 <= k <= 8:
            raise FqvitError(f"--k {k}: expected 0 to 8, the largest Power-of-Two Factor.")
        recipe = msgspec.structs.replace(recipe, k=k)
    return recipe


def bits_of(recipe: Recipe) -> str:
    return f"{recipe.weight_bits}/{recipe.activation_bits}/{recipe.attention_bits}"
