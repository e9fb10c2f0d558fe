"""Rebuild the float detector of a program: its sizes from the shapes in the program, its weights from a checkpoint.

See also: load.py (any checkpoint).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.model.load import load_detector
from fqvit.detect.program import DetectorProgram
from fqvit.errors import FqvitError
from fqvit.ir.value import Value
from fqvit.models.config import DetectorConfig, SwinConfig


def config_of_program(program: DetectorProgram) -> DetectorConfig:
    """Return all sizes of the float detector. Raises FqvitError if the program is not that of a supported detector."""
    pyramid, boxes, masks = (part.verify().buffers for part in (program.pyramid, program.boxes[0], program.masks[0]))
    try:
        box_convs, mask_convs = (_count(r"convs\.(\d+)\.", part) for part in (boxes, masks))
        return DetectorConfig(
            backbone=_backbone(program.pyramid.input_shape, pyramid),
            classes=program.classes,
            channels=pyramid["neck.output.0"].channels,
            anchors=pyramid["rpn_head.objectness"].channels,
            stages=program.stages,
            box_convs=box_convs,
            box_channels=(boxes["convs.0.relu"] if box_convs else pyramid["neck.output.0"]).channels,
            box_fcs=_count(r"fcs\.(\d+)\.", boxes),
            box_width=boxes["fcs.0.relu"].channels,
            agnostic=program.classes > 1 and boxes["deltas"].channels == 4,
            mask_convs=mask_convs,
            mask_channels=masks["relu"].channels,
            box_side=program.boxes[0].input_shape[0],
            mask_side=program.masks[0].input_shape[0],
        )
    except KeyError as error:
        said = f"{program.model}: the program has no buffer {error.args[0]!r}"
        raise FqvitError(f"{said}, so its float detector cannot be rebuilt.") from None


def _backbone(image: tuple[int, int, int], buffers: Mapping[str, Value]) -> SwinConfig:
    height, width, channels = image
    embedded = buffers["backbone.patch_embed.proj"]
    stages = range(_count(r"backbone\.layers\.(\d+)\.", buffers))
    first = "backbone.layers.0.blocks.0"
    return SwinConfig(
        image=(height, width),
        patch=math.isqrt(height * width // embedded.shape[0]),
        channels=channels,
        classes=0,
        width=embedded.channels,
        depths=tuple(_count(rf"backbone\.layers\.{i}\.blocks\.(\d+)\.", buffers) for i in stages),
        heads=tuple(buffers[f"backbone.layers.{i}.blocks.0.attn.q"].shape[1] for i in stages),  # [W, H, T, D]
        window=math.isqrt(buffers[f"{first}.attn.windows"].shape[1]),  # [W, T, C]
        hidden_ratio=buffers[f"{first}.mlp.fc1"].channels // embedded.channels,
        fixed_window=True,
    )


def _count(pattern: str, names: Iterable[str]) -> int:
    return max((int(found[1]) + 1 for name in names if (found := re.match(pattern, name))), default=0)


def load_for_program(program: DetectorProgram, weights: str | Path) -> FloatDetector:
    """Load the float detector of a program, with the program's settings. Raises FqvitError if its sizes differ."""
    settings = msgspec.structs.replace(program.settings, classes=(), categories=())  # compared below, with a clearer error
    loaded = load_detector(Path(weights), settings)
    found, wanted = (_sizes(config) for config in (loaded.module.config, config_of_program(program)))
    for name, size in wanted.items():
        if found[name] != size:
            said = f"{weights}: {name} is {found[name]}, expected {size} as in the program"
            raise FqvitError(f"{said}. Pass the weights that the program was quantized from (--weights FILE).")
    return replace(loaded, settings=program.settings)


def _sizes(config: DetectorConfig) -> dict[str, object]:
    """Return all sizes by name, except for the image size: a detector takes images of any size."""
    found = asdict(config)
    backbone = found.pop("backbone")
    return found | {f"backbone.{name}": size for name, size in backbone.items() if name not in ("image", "eps")}
