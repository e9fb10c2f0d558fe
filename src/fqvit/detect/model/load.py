"""Load detector checkpoints, with all sizes inferred from the shapes of the tensors, and save detectors.

Settings that shapes do not determine are read from the metadata of .safetensors files written by save_detector; for other
files they are those of the released detectors.
See also: checkpoint.py (reads files without executing code from them) and detector_keys.py (key names) in models/checkpoints.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fqvit.detect.coco import COCO_CATEGORIES
from fqvit.detect.model.detector import Detector, FloatDetector, build_detector
from fqvit.detect.settings import DetectSettings, changed
from fqvit.errors import FqvitError
from fqvit.models.checkpoints import checkpoint, fold
from fqvit.models.checkpoints.detector_keys import DetectorLayout, Released, from_release, released_name, to_release
from fqvit.models.checkpoints.keymaps import check_block_numbers
from fqvit.models.config import DetectorConfig, SwinConfig
from fqvit.system.files import write_atomically

METADATA = "fqvit.detector"
OTHER_MODEL = "The checkpoint belongs to another model."
MOST_WINDOW = 64  # the relative position index has window^4 entries
SMALLEST = (64, 64)  # image size that the pyramid is built for; at_size makes others


def load_detector(
    weights: str | Path | Mapping[str, Tensor], settings: DetectSettings | Mapping[str, Any] | None = None
) -> FloatDetector:
    """Load a detector from a checkpoint file or a state dict, in the layout of mmdetection or of the first Swin release.

    Without `settings`, the settings in the file's metadata are used, or else the defaults, with COCO's class names if there are
    80 classes. If `settings` is a mapping, it changes some fields of these.
    """
    if isinstance(weights, Mapping):
        found, saved = checkpoint.from_mapping(weights), None
    else:
        found = checkpoint.read_checkpoint(Path(weights))
        saved = _saved_settings(Path(weights))
    explicit = (
        isinstance(settings, DetectSettings) or saved is not None or bool({"classes", "categories"} & set(settings or {}))
    )
    s = settings if isinstance(settings, DetectSettings) else changed(saved or DetectSettings(), settings or {})
    check_block_numbers(found.tensors, found.label)
    released = from_release(found.tensors, found.label)
    config = config_of(released, found.label)
    name = "cascade_mask_rcnn" if config.stages > 1 else "mask_rcnn"
    # Names and shapes are compared in the checkpoint's layout, so that an error shows the names in the file. The model is first
    # built on the meta device, because the shapes in a small file can demand a network of any size.
    with torch.device("meta"):
        want = to_release(dict(build_detector(config).state_dict()), released.layout)
    error = fold.mismatch(name, found.label, want, released.tensors, {})
    if error is not None:
        raise error
    module = build_detector(config)
    module.load_state_dict(released.state)
    return FloatDetector(name, module.eval(), _checked_settings(s, explicit, config, found.label), found.source)


def save_detector(path: str | Path, module: Detector, settings: DetectSettings, half: bool = False) -> None:
    """Write a .safetensors file in mmdetection's layout, with the settings in its metadata. half: store float16"""
    tensors = to_release(dict(module.state_dict()), "mmdetection")
    if half:
        tensors = {key: value.half() for key, value in tensors.items()}
    metadata = {METADATA: msgspec.json.encode(settings).decode()}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))


def random_release(config: DetectorConfig, layout: DetectorLayout, seed: int = 0) -> dict[str, Tensor]:
    """Return a checkpoint in a release's layout for tests, with seeded random weights about as large as trained ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Detector(config)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                elif "relative_position_bias_table" in name:
                    parameter.normal_(std=0.5)
                else:
                    # The first axis of a Deconv is its inputs; each output is a sum over this axis only.
                    inputs = parameter.shape[0] if "upsample" in name else parameter[0].numel()
                    parameter.normal_(std=inputs**-0.5)
                if name.endswith("deltas.weight"):
                    parameter.mul_(0.5)
    return to_release(dict(module.state_dict()), layout)


def config_of(released: Released, label: str) -> DetectorConfig:
    """Infer all sizes from the shapes of a checkpoint. Raises FqvitError if a tensor is missing, empty or of wrong rank."""
    state = released.state

    def shape(key: str, rank: int) -> torch.Size:
        value = state.get(key)
        if value is None or value.ndim != rank or 0 in value.shape:
            name = released_name(key, released.layout, released.cascade)
            if value is None:
                raise FqvitError(f"{label}: lacks '{name}'. The checkpoint is incomplete or belongs to another model.")
            expected = f"{rank} axes of length 1 or more"
            raise FqvitError(f"{label}: '{name}' is {list(value.shape)}, expected {expected}. The file is damaged.")
        return value.shape

    def count(pattern: str) -> int:
        return max((int(match[1]) + 1 for key in state if (match := re.match(pattern, key))), default=0)

    width, channels, patch, _ = shape("pyramid.backbone.patch_embed.proj.weight", 4)
    layers = "pyramid.backbone.layers"
    depths = tuple(
        count(rf"pyramid\.backbone\.layers\.{i}\.blocks\.(\d+)\.") for i in range(count(rf"{re.escape(layers)}\.(\d+)\."))
    )
    if 0 in depths:
        raise FqvitError(f"{label}: lacks the blocks of stage {depths.index(0)}. The checkpoint is incomplete.")
    tables = [shape(f"{layers}.{i}.blocks.0.attn.relative_position_bias_table", 2) for i in range(len(depths))]
    window = (math.isqrt(tables[0][0]) + 1) // 2
    for i, table in enumerate(tables):
        if window > MOST_WINDOW or (2 * window - 1) ** 2 != table[0] or (width * 2**i) % table[1]:
            found = f"'{layers}.{i}.blocks.0.attn.relative_position_bias_table' is {list(table)}"
            expected = (
                f"expected [(2 * window - 1)^2, heads] with one window <= {MOST_WINDOW} and heads that divide {width * 2**i}"
            )
            raise FqvitError(f"{label}: {found}, {expected}. The file is damaged.")
    hidden = shape(f"{layers}.0.blocks.0.mlp.fc1.weight", 2)[0]
    if hidden % width:
        raise FqvitError(f"{label}: MLPs of {hidden} hidden channels, expected a multiple of the width {width}. {OTHER_MODEL}")
    swin = SwinConfig(
        SMALLEST, patch, channels, 0, width, depths, tuple(t[1] for t in tables), window, hidden // width, fixed_window=True
    )
    pyramid = shape("pyramid.neck.output.0.weight", 4)[0]
    box_convs, mask_convs = count(r"box_heads\.0\.convs\.(\d+)\."), count(r"mask_heads\.0\.convs\.(\d+)\.")
    box_channels = shape("box_heads.0.convs.0.conv.weight", 4)[0] if box_convs else pyramid
    box_width, inputs = shape("box_heads.0.fcs.0.linear.weight", 2)
    classes = shape("box_heads.0.classes.weight", 2)[0] - 1
    side = math.isqrt(inputs // box_channels)
    if classes < 1 or side * side * box_channels != inputs:
        problem = (
            f"a box head of {inputs} inputs and {classes} classes, expected {box_channels} * side^2 inputs and at least 1 class"
        )
        raise FqvitError(f"{label}: {problem}. {OTHER_MODEL}")
    return DetectorConfig(
        backbone=swin,
        classes=classes,
        channels=pyramid,
        anchors=shape("pyramid.rpn_head.objectness.weight", 2)[0],
        stages=count(r"box_heads\.(\d+)\."),
        box_convs=box_convs,
        box_channels=box_channels,
        box_fcs=count(r"box_heads\.0\.fcs\.(\d+)\."),
        box_width=box_width,
        agnostic=classes > 1 and shape("box_heads.0.deltas.weight", 2)[0] == 4,
        mask_convs=mask_convs,
        mask_channels=shape("mask_heads.0.upsample.weight", 4)[1],
        box_side=side,
    )


def _saved_settings(path: Path) -> DetectSettings | None:
    """Return the settings in the metadata of a file written by save_detector, else None."""
    if path.suffix.lower() != ".safetensors":
        return None
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get(METADATA)
    try:
        return None if text is None else msgspec.json.decode(text, type=DetectSettings)
    except msgspec.MsgspecError as error:
        raise FqvitError(f"{path.name}: {METADATA} in its metadata: {error}. The file is damaged.") from error


def _checked_settings(s: DetectSettings, explicit: bool, config: DetectorConfig, label: str) -> DetectSettings:
    """Check the settings against the weights and return them, with COCO's class names if there are 80 classes.

    explicit: whether class names were given, by a DetectSettings, by the file or by a mapping; COCO's are added only if not
    """
    if not explicit and config.classes == len(COCO_CATEGORIES):
        s = msgspec.structs.replace(s, classes=tuple(COCO_CATEGORIES.values()), categories=tuple(COCO_CATEGORIES))
    for what, given in (("class names", s.classes), ("categories", s.categories)):
        if given and len(given) != config.classes:
            raise FqvitError(f"{label}: {len(given)} {what} for {config.classes} classes. Give one per class.")
    wanted = {
        "anchor_ratios": (len(s.anchor_ratios), config.anchors),
        "strides": (len(s.strides), len(config.backbone.depths) + 1),
    }
    for field, (given_number, number) in wanted.items():
        if given_number != number:
            raise FqvitError(f"{label}: {given_number} {field} in the settings, but the weights are for {number}.")
    if len(s.stds) < config.stages:
        raise FqvitError(f"{label}: stds of {len(s.stds)} stages in the settings, but the weights have {config.stages}.")
    return s
