"""Settings of a detector that its weights do not contain: image size, anchors, thresholds.

The defaults are those of the released Swin detectors.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fqvit.errors import FqvitError

# These bounds keep derived numbers finite and limit the work that an untrusted file can cause.
Positive = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
Mean = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
Proposals = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Detected = Annotated[int, msgspec.Meta(ge=1, le=1_000)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Stds = tuple[Positive, Positive, Positive, Positive]
LISTED = "docs/reference/detection.md lists the settings."


class DetectSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a detector. Lengths are in pixels.

    short, long: upper limits of an image's short and long side; images are resized, with their aspect ratio kept, to the
        largest size within both limits
    mean, std: of pixels / 255, one per colour (red, green, blue)
    anchor_scale: side of a square anchor / stride of its level   anchor_ratios: height / width   strides: one per level
    finest: the RoI features of boxes with sqrt(area) < 2 * finest come from the first level, < 4 * finest from the second, ...
    proposals_a_level, proposals: proposals kept per level before NMS, and per image after NMS   proposal_iou: threshold of NMS
    score: scores of detections are above this   iou: threshold of the NMS within a class
    detections: at most this many per image   mask: smallest probability of a pixel in a mask
    stds: standard deviations of box deltas, one set per stage; those of proposals are 1
    classes: names in the order of the logits   categories: their COCO ids; 1, 2, 3, ... if empty
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
        # While it decodes or converts, msgspec turns a ValueError raised here into a ValidationError. It adds the path of these
        # settings (not of the field) if another object contains them. A direct call of the constructor raises the ValueError.
        if not all(map(math.isfinite, numbers)):
            raise ValueError("numbers must be finite")
        if len(set(self.categories)) != len(self.categories):
            raise ValueError("a category occurs twice")
        if any("\ud800" <= letter <= "\udfff" for name in self.classes for letter in name):
            raise ValueError("a class name is not valid Unicode")

    def category(self, label: int) -> int:
        """Return the COCO category id of a class index."""
        return self.categories[label] if self.categories else label + 1


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read and validate a TOML or JSON file with new values for some fields; see `changed`."""
    where = Path(path)
    try:
        text = where.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
        table = json.loads(text) if where.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise FqvitError(f"{path}: cannot be read ({error.strerror}). Pass a .toml or .json file of settings.") from None
    except (ValueError, RecursionError) as error:
        kind = "JSON" if where.suffix == ".json" else "TOML"
        raise FqvitError(f"{path}: not {kind} ({error}). {LISTED}") from None
    if not isinstance(table, dict):
        raise FqvitError(f"{path}: a JSON {type(table).__name__}, expected an object of settings and their values. {LISTED}")
    try:
        changed(DetectSettings(), table)
    except FqvitError as error:
        raise FqvitError(f"{path}: {error}") from None
    return table


def changed(settings: DetectSettings, fields: Mapping[str, Any]) -> DetectSettings:
    """Return a validated copy of `settings` with new values for some fields."""
    try:
        return msgspec.convert({**msgspec.to_builtins(settings), **fields}, DetectSettings)
    except msgspec.ValidationError as error:
        raise FqvitError(f"{str(error).replace('`', '').replace('$.', '')}. {LISTED}") from None
