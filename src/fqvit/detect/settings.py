"""What a detector's weights do not tell: image size, anchors, thresholds. The defaults are those of the Swin releases."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fqvit.errors import FqvitError

# Bounds keep what follows finite, and what a stranger's file can ask for small.
Positive = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
Mean = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
Proposals = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Detected = Annotated[int, msgspec.Meta(ge=1, le=1_000)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Stds = tuple[Positive, Positive, Positive, Positive]


class DetectSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """short, long: images are resized until a side meets one of them, keeping their shape
    mean, std: of pixels / 255, one a colour (red, green, blue)
    anchor_scale: side of a square anchor over its level's stride   anchor_ratios: height over width
    finest: boxes of less than twice this side (root of the area) are cut from the first level
    proposals_a_level, proposals, proposal_iou: kept before suppression, after it, and its overlap
    score, iou, detections: least score, overlap within a class, most detections an image   mask: least probability of a pixel
    stds: of the deltas of each stage of the box heads; those of proposals are 1
    classes: names in the order of the logits   categories: their COCO ids; without them 1, 2, 3, ...
    """

    short: Count = 800
    long: Count = 1333
    mean: tuple[Mean, Mean, Mean] = (0.485, 0.456, 0.406)
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    anchor_scale: Positive = 8.0
    anchor_ratios: tuple[Positive, ...] = (0.5, 1.0, 2.0)
    strides: tuple[Count, ...] = (4, 8, 16, 32, 64)
    finest: Annotated[float, msgspec.Meta(ge=1e-6, le=8192)] = 56.0
    proposals_a_level: Proposals = 1000
    proposals: Proposals = 1000
    proposal_iou: Share = 0.7
    score: Share = 0.05
    iou: Share = 0.5
    detections: Detected = 100
    mask: Share = 0.5
    stds: tuple[Stds, ...] = ((0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1), (0.033, 0.033, 0.067, 0.067))
    classes: tuple[str, ...] = ()
    categories: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers = (
            *self.mean,
            *self.std,
            self.anchor_scale,
            *self.anchor_ratios,
            self.finest,
            *(x for s in self.stds for x in s),
        )
        if not all(map(math.isfinite, numbers)):
            # ValueError, because msgspec then adds the path of the fault while it reads a file.
            raise ValueError("numbers must be finite")
        if len(set(self.categories)) != len(self.categories):
            raise ValueError("a category twice")
        if any("\ud800" <= letter <= "\udfff" for name in self.classes for letter in name):
            raise ValueError("a class name that is no text")

    def category(self, label: int) -> int:
        """The COCO category id of a class number."""
        return self.categories[label] if self.categories else label + 1


def read_settings(path: str | Path) -> dict[str, Any]:
    """Some of the fields, from a TOML or JSON file: what is to be changed."""
    where = Path(path)
    try:
        text = where.read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a mark
        table = json.loads(text) if where.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise FqvitError(f"{path}: cannot be read ({error.strerror}). Pass a .toml or .json file of settings.") from None
    except (ValueError, RecursionError) as error:
        kind = "JSON" if where.suffix == ".json" else "TOML"
        raise FqvitError(f"{path}: not {kind} ({error}). docs/detection.md lists the settings.") from None
    if not isinstance(table, dict):
        raise FqvitError(f"{path}: a {type(table).__name__}, expected names and values. docs/detection.md lists the settings.")
    try:
        changed(DetectSettings(), table)
    except FqvitError as error:
        raise FqvitError(f"{path}: {error}") from None
    return table


def changed(settings: DetectSettings, fields: Mapping[str, Any]) -> DetectSettings:
    """`settings` with other values of some fields."""
    try:
        return msgspec.convert({**msgspec.to_builtins(settings), **fields}, DetectSettings)
    except msgspec.ValidationError as error:
        raise FqvitError(f"{str(error).replace('`', '').replace('$.', '')}. docs/detection.md lists the settings.") from None
