"""Choose weights and bit widths of a calibrated detector: the methods of recipes w4, w6a6, w4a4 and auto.

Weights are rounded network by network, each on sampled inputs of the float detector. Bit widths are chosen for all networks
together (search.py).
See also: calibrate.py (the caller), quant/methods/ (the methods).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.model.float_models import box_model, mask_model, pyramid_model
from fqvit.detect.search import DetectorSubject
from fqvit.models.load import FloatModel
from fqvit.quant.calibration import Calibration, Choice
from fqvit.quant.methods import auto, narrow
from fqvit.quant.methods.compensate import compensate
from fqvit.quant.methods.reconstruct import reconstruct
from fqvit.quant.recipe import Recipe
from fqvit.system.progress import Progress, T

Inputs = Mapping[str, NDArray[Any]]  # of every network, as in sample.py


def models_of(detector: FloatDetector, side: int) -> dict[str, FloatModel]:
    """Return the networks of a detector, in the order of its file. side: of the pyramid's images"""
    models = {"pyramid": pyramid_model(detector, side, side)}
    stages = range(detector.module.config.stages)
    models |= {f"boxes.{stage}": box_model(detector, stage) for stage in stages}
    return models | {f"masks.{stage}": mask_model(detector, stage) for stage in stages}


def choose_bits(
    detector: FloatDetector,
    found: auto.Parts,
    wider: auto.Parts,
    inputs: Inputs,
    search: Recipe,
    size_of: Callable[[auto.Parts], int] | None,
    progress: Progress | None,
) -> tuple[dict[str, Calibration], Choice]:
    """Choose the bits of sites and of weights, for recipe auto. found, wider: as in auto.choose_parts   search: the recipe"""
    models = models_of(detector, inputs["pyramid"].shape[1])
    subject = DetectorSubject(detector, models, inputs, progress)
    chosen, choice = auto.choose_parts(subject, found, wider, progress)
    return narrow.choose_parts(subject, chosen, choice, search, size_of, progress)


def round_weights(
    detector: FloatDetector, found: auto.Parts, inputs: Inputs, progress: Progress | None
) -> dict[str, Calibration]:
    """Round or learn the weights of every network whose calibration has none yet, as its recipe says."""
    rounded = dict(found)
    for part, model in models_of(detector, inputs["pyramid"].shape[1]).items():
        rounding, shown = found[part].recipe.rounding, None if progress is None else _labelled(progress, part)
        if rounding == "compensated" and not found[part].weights:
            rounded[part] = compensate(model, found[part], inputs[part], shown)
        elif rounding == "reconstructed":
            rounded[part] = reconstruct(model, found[part], inputs[part], shown)
    return rounded


def _labelled(progress: Progress, part: str) -> Progress:
    def labelled(iterable: Iterable[T], total: int | None, label: str) -> Iterable[T]:
        return progress(iterable, total, f"{part}: {label}")

    return labelled
