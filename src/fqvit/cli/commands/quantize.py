"""`fqvit quantize`: quantize a float checkpoint with calibration images to one .fqvit file."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

import msgspec

from fqvit.cli import inputs
from fqvit.cli.output import about_inputs, say, say_json, warn, warn_of_assumptions
from fqvit.distributed.workers import Workers
from fqvit.errors import FqvitError
from fqvit.models.locate import located
from fqvit.models.requests import parse_outputs
from fqvit.quant.recipe import (
    DEFAULT_RECIPE,
    RECIPES,
    Recipe,
    check_integer,
    load_recipe,
    with_bits,
    with_methods,
    with_profile,
)
from fqvit.system.progress import track
from fqvit.system.text import facts, size, table

if TYPE_CHECKING:
    from fqvit.quant.calibration import Choice, Measure


def run(
    *,
    model_name: str | None,
    weights: str | None,
    settings: dict[str, Any],
    calib: Path | None,
    recipe_name: str | None,
    bits: str | None,
    profile: str | None,
    device: str,
    outputs: str | None,
    features: str | None,
    images: int | None,
    k: int | None,
    max_loss: float | None,
    max_size: str | None,
    classes: Path | None,
    save_recipe: Path | None,
    save_calibration: Path | None,
    calibration_file: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    workers = Workers.from_environment()
    if outputs is not None:
        parse_outputs(outputs)
    if features is not None and outputs is not None:
        raise FqvitError("--features: deprecated, and --output is given already. Leave out --features.")
    if calibration_file is None:
        recipe = recipe_of(recipe_name or DEFAULT_RECIPE, bits, images, k, max_loss, profile, max_size)
        if bits is not None and (recipe_name is None or recipe_name in RECIPES):  # a recipe file keeps its own methods
            recipe = with_methods(recipe)
        check_integer(recipe)
    else:
        given = {
            "calib": calib,
            "recipe": recipe_name,
            "bits": bits,
            "profile": profile,
            "output": outputs,
            "features": features,
            "images": images,
            "k": k,
            "max-loss": max_loss,
            "max-size": max_size,
        }
        extra = next((f"--{option}" for option, value in given.items() if value is not None), None)
        if extra is not None:
            raise FqvitError(f"{calibration_file}: a calibration has its own settings. Leave out {extra} or --calibration.")
        text = _text_of(calibration_file)
    model_name, weights = located(model_name, weights)
    inputs.check_hub(model_name, weights)
    if save_recipe is not None and save_recipe.suffix != ".toml":
        raise FqvitError(f"--save-recipe {save_recipe}: expected a name that ends in .toml.")
    for path in (out, save_recipe, save_calibration):
        if path is not None:
            inputs.check_output(path, weights, classes, calibration_file, recipe_name)
    written = [path for path in (out, save_recipe, save_calibration) if path is not None]
    twice = next((path for path in written if written.count(path) > 1), None)
    if twice is not None:
        raise FqvitError(f"{twice}: given for two outputs. Choose another name for one of them.")
    inputs.require_torch("quantize")
    from fqvit.ir.file import file_size
    from fqvit.lowering.lower import lower
    from fqvit.models.device import device_of
    from fqvit.quant.calibrate import calibrate
    from fqvit.quant.calibration import Calibration

    device_of(device)
    model = inputs.float_model(model_name, weights, classes, **settings)
    if workers.first:
        inputs.warn_of_other_name(model, weights)
        warn_of_assumptions(model)
    target = Path(f"{model.name}.fqvit") if out is None else out
    inputs.check_output(target)
    start = time.perf_counter()
    if calibration_file is not None:
        try:
            calibration = Calibration.from_json(text)
        except FqvitError as error:
            raise FqvitError(f"{calibration_file}: {error}") from None
        recipe, where, skipped = calibration.recipe, str(calibration_file), 0
    else:
        pictures = inputs.unlabelled(calib, "--calib", model.name, model.preprocess, recipe.images, workers)
        inputs.warn_of_different_machines(workers)
        wanted: dict[str, Any] = {"outputs": outputs} if outputs is not None else {}
        if features is not None:
            wanted = {"features": features}
        with catch_warnings():
            simplefilter("ignore", DeprecationWarning)  # --features is reported below
            calibration = calibrate(
                model,
                pictures.source,
                recipe,
                device=device,
                progress=track,
                workers=workers,
                size_of=lambda found: file_size(lower(model, found)),
                **wanted,
            )
        if features is not None and workers.first:
            new = {"pooled": "embedding", "tokens": "tokens, which leaves out the class token"}[features]
            warn(f"--features {features} is deprecated. Use --output {new}.")
        pictures.report()
        where, skipped = pictures.where, pictures.skipped
    if not workers.first:
        return
    calibrated = time.perf_counter()
    program = lower(model, calibration)
    program.save(target)
    lowered = time.perf_counter()
    if save_recipe is not None:
        from fqvit.quant.recipe_file import save_recipe as write_recipe

        write_recipe(calibration.recipe, save_recipe)
    if save_calibration is not None:
        from fqvit.system.files import write_atomically

        write_atomically(save_calibration, lambda temporary: temporary.write_text(calibration.to_json(), encoding="utf-8"))
    from fqvit.evaluate.inspect import inspect

    found, header = inspect(program, target), program.header
    result = {
        "file": str(target),
        "model": model.name,
        "source": model.source,
        "assumed": model.assumed,
        "recipe": recipe.name,
        "bits": bits_of(recipe),
        "calibration_images": calibration.images,
        "skipped": skipped,
        "output": header.output.kind,
        "outputs": [output.label for output in header.outputs],
        "ops": len(program.ops),
        "float_ops": found.floats,
        "sites": len(header.sites),
        "bytes": found.total,
        "overhead_percent": round(found.overhead, 2),
        "fingerprint": program.fingerprint(),
        "workers": workers.size,
        "seconds": round(lowered - start, 3),
        "calibration_seconds": round(calibrated - start, 3),
        "choice": None if calibration.choice is None else msgspec.to_builtins(calibration.choice),
    }
    if as_json:
        say_json(result)
        return
    spent = f"calibrated in {calibrated - start:.1f} s, lowered and proved in {lowered - calibrated:.1f} s"
    names = f", plus {size(found.names)} of class names" if found.names else ""
    only_features = all(output.kind != "logits" for output in header.outputs)
    advice = "; for features, --recipe embedding is more accurate" if only_features and recipe.name == DEFAULT_RECIPE else ""
    if recipe.weight_bits < 8 and found.bits_per_weight > 7.5:
        advice += f"; {recipe.weight_bits}-bit weights are stored in 8 bits, so the file is as large as with 8-bit weights"
    rows = [
        ("model", f"{model.name} ({model.source.split(' sha256')[0]})"),
        *(row for row in about_inputs(model) if row != ("assumed", "nothing")),
        ("recipe", f"{recipe.name} {bits_of(recipe)} (weights/activations/attention){advice}"),
        ("images", f"{calibration.images} ({where}), {spent}"),
        ("output", ", ".join(output.label for output in header.outputs)),
        ("program", f"{len(program.ops)} ops, {found.floats} floating-point ops, {len(header.sites)} quantized sites"),
        ("written", f"{target}, {size(found.total)} ({found.overhead:.1f} % more than its weights{names})"),
        ("fingerprint", program.fingerprint()),
    ]
    if calibration.choice is not None:
        say(account(calibration.choice) + "\n")
    say(facts(rows))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FqvitError(f"{path}: cannot be read ({error.strerror}). Pass a file written by --save-calibration.") from None
    except UnicodeDecodeError:
        raise FqvitError(f"{path}: not UTF-8 text. Pass a file written by --save-calibration.") from None


def recipe_of(
    name: str,
    bits: str | None,
    images: int | None,
    k: int | None,
    max_loss: float | None,
    profile: str | None = None,
    max_size: str | None = None,
) -> Recipe:
    """Load a recipe and apply the options of the command to it."""
    recipe = load_recipe(name)
    if profile is not None:
        recipe = _named(with_profile(recipe, profile), profile)
    if bits is not None:
        recipe = with_bits(recipe, bits)
    if images is not None:
        if images < 1:
            raise FqvitError(f"--images {images}: expected at least 1.")
        recipe = msgspec.structs.replace(recipe, images=images)
    if k is not None:
        if not 0 <= k <= 8:
            raise FqvitError(f"--k {k}: the largest exponent of the Power-of-Two Factor, expected 0 to 8.")
        recipe = msgspec.structs.replace(recipe, k=k)
    if max_loss is not None:
        if recipe.max_loss is None:
            raise FqvitError(f"--max-loss {max_loss:g}: recipe {recipe.name} has no loss limit. Use --recipe auto.")
        if not 0 <= max_loss <= 100:
            raise FqvitError(f"--max-loss {max_loss:g}: expected 0 to 100 percentage points of top-1 accuracy.")
        recipe = msgspec.structs.replace(recipe, max_loss=max_loss)
    if max_size is not None:
        if not recipe.widths:
            raise FqvitError(f"--max-size {max_size}: recipe {recipe.name} does not search for bit widths. Use --recipe auto.")
        recipe = msgspec.structs.replace(recipe, max_size=_bytes_of(max_size))
    return recipe


def _bytes_of(text: str) -> int:
    """Parse a number of bytes: 4500000, 4500kB or 4.5MB, where 1 MB is 1,000,000 bytes as everywhere in fqvit."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?) ?(B|kB|MB|GB)?", text)
    found = 0 if match is None else int(float(match[1]) * {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}[match[2] or "B"])
    if found < 1:
        raise FqvitError(f"--max-size {text}: expected a number of bytes, such as 4500000, 4500kB or 4.5MB.")
    return found


def _named(recipe: Recipe, profile: str) -> Recipe:
    """Rename a recipe after applying a profile: to PROFILE if it equals the built-in recipe PROFILE, else to NAME-PROFILE."""
    own = msgspec.structs.replace(recipe, name=profile)
    return own if own == RECIPES.get(profile) else msgspec.structs.replace(recipe, name=f"{recipe.name}-{profile}")


def account(choice: Choice, measured: str = "top-1") -> str:
    """Format what recipe auto chose: one row per part whose bit width was raised, and per layer whose weights were narrowed.

    KL: in rows "start" and "end", the Kullback-Leibler divergence from the float model; in other rows, the change of it.
    measured: the metric whose expected loss is given
    """
    start, end = choice.start, choice.end
    rows = [("start", "", "", "", *_measure(start))]
    rows += [
        (raised.unit, raised.role, str(raised.sites), f"{raised.before} -> {raised.after}", f"{-raised.gain:+.4f}", "", "")
        for raised in choice.raised
    ]
    rows += [
        (layer, "weights", "", " -> ".join(map(str, bits)), f"{cost:+.4f}", "", "") for layer, bits, cost in _narrowed(choice)
    ]
    rows.append(("end", "", "", "", *_measure(end)))
    heads = ("part", "role", "sites", "bits", "KL", "agreement", "expected loss")
    parts = f"{len(choice.raised)} of {choice.units} parts raised"
    if choice.layers:
        parts += f", weights of {len({step.layer for step in choice.narrowed})} of {choice.layers} layers narrowed"
    limit = f"limit: {choice.max_loss:g}" if choice.max_size is None else f"file limit: {choice.max_size:,} bytes"
    verdict = f"{parts}; expected loss {end.loss:.2f} percentage points of {measured} ({limit}), on {choice.images} images"
    if not choice.reached and choice.max_size is not None:
        verdict += f". The file has {choice.bytes:,} bytes and cannot be smaller; use a larger --max-size"
    elif not choice.reached:
        verdict += ". The limit cannot be reached; try --bits 8/8/8 or a larger --max-loss"
    return f"{table(heads, rows, left=2)}\n{verdict}"


def _narrowed(choice: Choice) -> list[tuple[str, list[int], float]]:
    """Return each narrowed layer with its bit widths, in order, and the KL divergence that narrowing adds."""
    found: dict[str, tuple[list[int], float]] = {}
    for step in choice.narrowed:
        bits, cost = found.get(step.layer, ([step.before], 0.0))
        found[step.layer] = [*bits, step.after], cost + step.cost
    return [(layer, bits, cost) for layer, (bits, cost) in found.items()]


def _measure(m: Measure) -> tuple[str, str, str]:
    return f"{m.kl:.4f}", f"{m.agreement:.1f} %", f"{m.loss:.2f}"


def bits_of(recipe: Recipe) -> str:
    """Format the bit widths as W/A/ATTN."""
    return f"{recipe.weight_bits}/{recipe.activation_bits}/{recipe.attention_bits}"
