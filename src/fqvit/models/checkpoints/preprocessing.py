"""Read preprocessor_config.json of transformers, and OpenCLIP's preprocess_cfg, as a Transform."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fqvit.errors import FqvitError
from fqvit.models.checkpoints.hints import words
from fqvit.models.checkpoints.transformers_config import pair
from fqvit.models.transform import Interpolation, Transform

RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # Pillow's filter numbers
# Processors for which a single number means the short side; for all others it means a square.
SHORT_SIDE = ("CLIP", "Bit", "ChineseCLIP", "ConvNext")
IRRELEVANT = words(
    """
    _processor_class auto_map data_format default_to_square device disable_grouping do_convert_rgb
    feature_extractor_type image_processor_type image_seq_length input_data_format processor_class return_tensors
    size_divisor do_reduce_labels reduce_labels use_square_size do_pad pad_size crop_pct
    """
)
USED = words(
    """
    image_mean image_std do_resize size resample do_center_crop crop_size do_normalize do_rescale rescale_factor
    """
)


def read_preprocessor(found: Mapping[str, Any], label: str, source: str = "preprocessor_config.json") -> Transform:
    """Return the preprocessing of a file; raises FqvitError for fields and values that are not understood."""
    for name, value in found.items():
        if name not in USED and name not in IRRELEVANT and value is not None:
            raise FqvitError(f"{label}: {source}: {name} {str(value)[:40]!r} is not understood. Pass a Preprocess instead.")
    if found.get("do_normalize") is False or found.get("do_rescale") is False or found.get("do_pad"):
        raise FqvitError(f"{label}: {source}: images are not normalised or are padded, expected (pixel / 255 - mean) / std.")
    factor = found.get("rescale_factor")
    if factor is not None and not math.isclose(float(factor), 1 / 255, rel_tol=1e-4):
        raise FqvitError(f"{label}: {source}: rescale_factor {factor}, expected 1/255.")
    image, resize, squash = _sizes(found, label, source)
    resample = found.get("resample")
    interpolation = None if resample is None else interpolation_of(RESAMPLE.get(resample, f"number {resample}"), label)
    return Transform(
        image=image,
        resize=resize,
        squash=squash,
        interpolation=interpolation,
        mean=finite(found.get("image_mean"), "mean", label, source),
        std=finite(found.get("image_std"), "std", label, source),
        source=source,
    )


def _sizes(found: Mapping[str, Any], label: str, source: str) -> tuple[tuple[int, int] | None, int | None, bool | None]:
    """Return the input size, the resized short side, and whether images are squashed; None for those that are not given."""
    size, crop = found.get("size"), None
    if found.get("do_center_crop") and found.get("crop_size") is not None:
        crop = _both(found["crop_size"], "crop_size", label, source)
    if found.get("do_resize") is False or size is None:
        return crop, None, None
    processor = str(found.get("image_processor_type") or found.get("feature_extractor_type") or "")
    if isinstance(size, int) and processor.startswith(SHORT_SIDE):
        size = {"shortest_edge": size}
    if isinstance(size, Mapping) and "shortest_edge" in size:
        edge = pair(size["shortest_edge"], "size", label, source)
        assert edge is not None
        return crop, edge[0], False
    both = _both(size, "size", label, source)
    if crop is None:
        return both, min(both), True
    if both[0] * crop[1] != both[1] * crop[0]:
        raise FqvitError(
            f"{label}: {source}: size {both} and crop_size {crop} have different aspect ratios. Pass a Preprocess instead."
        )
    return crop, min(both), True


def _both(size: object, name: str, label: str, source: str) -> tuple[int, int]:
    if isinstance(size, Mapping):
        if set(size) != {"height", "width"}:
            raise FqvitError(f"{label}: {source}: {name} {dict(size)}, expected height and width, or shortest_edge.")
        size = [size["height"], size["width"]]
    both = pair(size, name, label, source)
    assert both is not None
    return both


def read_openclip(found: Mapping[str, Any], label: str) -> Transform:
    """Convert OpenCLIP's preprocess_cfg, whose resize_mode is shortest (resize and crop) or squash."""
    mode = found.get("resize_mode", "shortest")
    if mode not in ("shortest", "squash"):
        raise FqvitError(f"{label}: open_clip_config.json: resize_mode '{mode}', expected 'shortest' or 'squash'.")
    interpolation = found.get("interpolation", "bicubic")
    return Transform(
        image=pair(found.get("size"), "size", label, "open_clip_config.json"),
        crop=1.0,
        squash=mode == "squash",
        interpolation=interpolation_of(interpolation, label),
        mean=finite(found.get("mean"), "mean", label, "open_clip_config.json"),
        std=finite(found.get("std"), "std", label, "open_clip_config.json"),
        source="open_clip_config.json",
    )


def interpolation_of(name: object, label: str) -> Interpolation:
    if name == "bicubic":
        return "bicubic"
    if name == "bilinear":
        return "bilinear"
    raise FqvitError(f"{label}: interpolation '{name}', expected bicubic or bilinear. Choose another model.")


def finite(values: object, name: str, label: str, source: str) -> tuple[float, ...] | None:
    """Return numbers; raises FqvitError for NaN and infinity, which a file can contain as strings."""
    if values is None:
        return None
    try:
        numbers = tuple(float(value) for value in (values if isinstance(values, list | tuple) else (values,)))
    except (TypeError, ValueError):
        raise FqvitError(f"{label}: {source}: {name} {str(values)[:40]!r}, expected numbers. The file is damaged.") from None
    wrong = next((number for number in numbers if not math.isfinite(number)), None)
    if wrong is not None:
        raise FqvitError(f"{label}: {source}: {wrong} in {name}, expected finite numbers. The file is damaged.")
    return numbers
