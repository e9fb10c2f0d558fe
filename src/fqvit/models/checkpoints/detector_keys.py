"""Map key names of released detector checkpoints to those of our modules, and back.

The supported layouts are mmdetection 2.x and 3.x ("mmdetection") and the first Swin detection release ("swin"). They differ in
the key names of the backbone and in the channel order of patch merging. Batch norms are folded into the convolutions.
See also: detect/model/load.py (builds the model), keymaps.py (layouts of classifiers).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from fqvit.errors import FqvitError

DetectorLayout = Literal["mmdetection", "swin"]

# Keys to ignore: buffers that can be recomputed, and training state.
IGNORED = re.compile(r"relative_position_index$|attn_mask$|num_batches_tracked$|^data_preprocessor\.|^ema_")
# Layer numbers of three or more digits occur only in damaged files.
ABSURD = re.compile(r"\.\d{3,}\.")
BATCH_NORM = re.compile(r"(.+)\.bn\.(weight|bias|running_mean|running_var)")
BATCH_NORM_EPS = 1e-5

# (released name, our name). {0}, {1}, {2}: numbers; {p}: weight or bias.
# Releases of Mask R-CNN, which has one box head and one mask head, omit {0} in the names of both heads.
HEADS = (
    ("neck.lateral_convs.{0}.conv.{p}", "pyramid.neck.lateral.{0}.{p}"),
    ("neck.fpn_convs.{0}.conv.{p}", "pyramid.neck.output.{0}.{p}"),
    ("rpn_head.rpn_conv.{p}", "pyramid.rpn_head.conv.{p}"),
    ("rpn_head.rpn_cls.{p}", "pyramid.rpn_head.objectness.{p}"),
    ("rpn_head.rpn_reg.{p}", "pyramid.rpn_head.deltas.{p}"),
    ("roi_head.bbox_head.{0}.shared_convs.{1}.conv.{p}", "box_heads.{0}.convs.{1}.conv.{p}"),
    ("roi_head.bbox_head.{0}.shared_fcs.{1}.{p}", "box_heads.{0}.fcs.{1}.linear.{p}"),
    ("roi_head.bbox_head.{0}.fc_cls.{p}", "box_heads.{0}.classes.{p}"),
    ("roi_head.bbox_head.{0}.fc_reg.{p}", "box_heads.{0}.deltas.{p}"),
    ("roi_head.mask_head.{0}.convs.{1}.conv.{p}", "mask_heads.{0}.convs.{1}.conv.{p}"),
    ("roi_head.mask_head.{0}.upsample.{p}", "mask_heads.{0}.upsample.{p}"),
    ("roi_head.mask_head.{0}.conv_logits.{p}", "mask_heads.{0}.logits.{p}"),
)
_BLOCK = "pyramid.backbone.layers.{0}.blocks.{1}."
_TABLE = "relative_position_bias_table"
BACKBONES: dict[DetectorLayout, tuple[tuple[str, str], ...]] = {
    "mmdetection": (
        ("backbone.patch_embed.projection.{p}", "pyramid.backbone.patch_embed.proj.{p}"),
        ("backbone.patch_embed.norm.{p}", "pyramid.backbone.patch_embed.norm.{p}"),
        ("backbone.stages.{0}.blocks.{1}.norm{2}.{p}", _BLOCK + "norm{2}.{p}"),
        ("backbone.stages.{0}.blocks.{1}.attn.w_msa.qkv.{p}", _BLOCK + "attn.qkv.{p}"),
        ("backbone.stages.{0}.blocks.{1}.attn.w_msa.proj.{p}", _BLOCK + "attn.proj.{p}"),
        ("backbone.stages.{0}.blocks.{1}.attn.w_msa." + _TABLE, _BLOCK + "attn." + _TABLE),
        ("backbone.stages.{0}.blocks.{1}.ffn.layers.0.0.{p}", _BLOCK + "mlp.fc1.{p}"),
        ("backbone.stages.{0}.blocks.{1}.ffn.layers.1.{p}", _BLOCK + "mlp.fc2.{p}"),
        ("backbone.stages.{0}.downsample.norm.{p}", "pyramid.backbone.layers.{0}.downsample.norm.{p}"),
        ("backbone.stages.{0}.downsample.reduction.{p}", "pyramid.backbone.layers.{0}.downsample.reduction.{p}"),
        ("backbone.norm{0}.{p}", "pyramid.backbone.norm{0}.{p}"),
    ),
    "swin": (
        ("backbone.patch_embed.proj.{p}", "pyramid.backbone.patch_embed.proj.{p}"),
        ("backbone.patch_embed.norm.{p}", "pyramid.backbone.patch_embed.norm.{p}"),
        ("backbone.layers.{0}.blocks.{1}.norm{2}.{p}", _BLOCK + "norm{2}.{p}"),
        ("backbone.layers.{0}.blocks.{1}.attn.qkv.{p}", _BLOCK + "attn.qkv.{p}"),
        ("backbone.layers.{0}.blocks.{1}.attn.proj.{p}", _BLOCK + "attn.proj.{p}"),
        ("backbone.layers.{0}.blocks.{1}.attn." + _TABLE, _BLOCK + "attn." + _TABLE),
        ("backbone.layers.{0}.blocks.{1}.mlp.fc1.{p}", _BLOCK + "mlp.fc1.{p}"),
        ("backbone.layers.{0}.blocks.{1}.mlp.fc2.{p}", _BLOCK + "mlp.fc2.{p}"),
        ("backbone.layers.{0}.downsample.norm.{p}", "pyramid.backbone.layers.{0}.downsample.norm.{p}"),
        ("backbone.layers.{0}.downsample.reduction.{p}", "pyramid.backbone.layers.{0}.downsample.reduction.{p}"),
        ("backbone.norm{0}.{p}", "pyramid.backbone.norm{0}.{p}"),
    ),
}
OUR_MERGING = re.compile(r"pyramid\.backbone\.layers\.(\d+)\.downsample\.(norm|reduction)\.(?:weight|bias)")
# 1x1 convolutions in a release are linear layers here.
ONE_BY_ONE = re.compile(
    r"pyramid\.neck\.lateral\.\d+\.weight|pyramid\.rpn_head\.(objectness|deltas)\.weight|mask_heads\.\d+\.logits\.weight"
)
FIRST_FC = re.compile(r"box_heads\.(\d+)\.fcs\.0\.linear\.weight")


@dataclass(frozen=True)
class Released:
    """A released checkpoint, converted for our modules.

    cascade: whether the model is a Cascade Mask R-CNN, whose box heads are numbered
    tensors: {released name: tensor}, with batch norms folded
    state: {our name: tensor}, the same tensors in our channel order
    Tensors with unknown names are kept in both, so that later errors can name them.
    """

    layout: DetectorLayout
    cascade: bool
    tensors: dict[str, Tensor]
    state: dict[str, Tensor]


def from_release(tensors: dict[str, Tensor], label: str) -> Released:
    """Convert the weights of a released checkpoint for our modules."""
    kept = {key: value for key, value in tensors.items() if not IGNORED.search(key)}
    absurd = next((key for key in kept if ABSURD.search(key)), None)
    if absurd is not None:
        raise FqvitError(f"{label}: '{absurd[:80]}' has a layer number above 99. The checkpoint is damaged.")
    layout = layout_of(kept, label)
    kept = _fold_batch_norms(kept, label)
    renames = [_rename(theirs, ours) for theirs, ours in (*BACKBONES[layout], *HEADS)]
    state: dict[str, Tensor] = {}
    for key, value in kept.items():
        name = re.sub(r"^(roi_head\.(?:bbox|mask)_head)\.(?!\d)", r"\1.0.", key)
        ours = next((match.expand(new) for old, new in renames if (match := old.fullmatch(name))), key)
        if merging := OUR_MERGING.fullmatch(ours):
            # In a release, patch merging belongs to the end of a stage; here, to the start of the next one.
            ours = ours.replace(f"layers.{merging[1]}.", f"layers.{int(merging[1]) + 1}.", 1)
            value = _merging_order(value, layout, key, label)
        elif ONE_BY_ONE.fullmatch(ours) and value.ndim == 4:
            value = value.flatten(1) if value.shape[2:] == (1, 1) else value
        if ours in state:
            raise FqvitError(f"{label}: '{key}' is present under two names. Remove one of them.")
        state[ours] = value.float()
    for key in [key for key in state if FIRST_FC.fullmatch(key)]:
        state[key] = _channels_last(state[key], _channels_before(state, key))
    cascade = any(key.startswith("roi_head.bbox_head.0.") for key in kept)
    return Released(layout, cascade, kept, state)


def to_release(state: dict[str, Tensor], layout: DetectorLayout) -> dict[str, Tensor]:
    """Convert the weights of a Detector to a released layout: the inverse of from_release."""
    cascade = "box_heads.1.classes.weight" in state
    released = {}
    for key, value in state.items():
        if OUR_MERGING.fullmatch(key) and layout == "mmdetection":
            value = _released_merging_order(value)
        elif ONE_BY_ONE.fullmatch(key):
            value = value[:, :, None, None]
        elif FIRST_FC.fullmatch(key):
            channels = _channels_before(state, key)
            value = value.view(len(value), -1, channels).transpose(1, 2).flatten(1)
        released[released_name(key, layout, cascade)] = value.contiguous()
    return released


def released_name(key: str, layout: DetectorLayout, cascade: bool) -> str:
    """Return the name that one of our parameters has in a released layout."""
    if merging := OUR_MERGING.fullmatch(key):
        key = key.replace(f"layers.{merging[1]}.", f"layers.{int(merging[1]) - 1}.", 1)
    renames = (_rename(ours, theirs) for theirs, ours in (*BACKBONES[layout], *HEADS))
    theirs = next((match.expand(new) for old, new in renames if (match := old.fullmatch(key))), key)
    return theirs if cascade else re.sub(r"^(roi_head\.(?:bbox|mask)_head)\.0\.", r"\1.", theirs)


def layout_of(tensors: dict[str, Tensor], label: str) -> DetectorLayout:
    if any(key.startswith("backbone.stages.") for key in tensors):
        return "mmdetection"
    if any(key.startswith("backbone.layers.") for key in tensors):
        return "swin"
    if any(re.match(r"(layers\.\d+\.)?blocks\.0\.attn\.", key) for key in tensors):
        raise FqvitError(
            f"{label}: weights of a classifier, expected a Swin-based detector. Use `fqvit quantize` for classifiers."
        )
    few = ", ".join(list(tensors)[:3])
    raise FqvitError(f"{label}: not a Swin-based detector (found {few}, ...), expected keys like backbone.stages.0.blocks.0.")


@cache
def _rename(old: str, new: str) -> tuple[re.Pattern[str], str]:
    """Return a pattern for names of the form `old`, and a template for `match.expand` that gives the new name."""
    pattern = re.sub(r"\\\{(\d)\\\}", r"(?P<n\1>\\d+)", re.escape(old)).replace(r"\{p\}", "(?P<p>weight|bias)")
    return re.compile(pattern), re.sub(r"\{(\d)\}", r"\\g<n\1>", new).replace("{p}", r"\g<p>")


def _fold_batch_norms(tensors: dict[str, Tensor], label: str) -> dict[str, Tensor]:
    """Fold y = gamma * (conv(x) - mean) / sqrt(var + eps) + beta into the weight and bias of the convolution."""
    out = {key: value for key, value in tensors.items() if not BATCH_NORM.fullmatch(key)}
    for stem in {match[1] for key in tensors if (match := BATCH_NORM.fullmatch(key))}:
        names = [f"{stem}.bn.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        missing = next((name for name in [f"{stem}.conv.weight", *names] if name not in tensors), None)
        if missing is not None:
            raise FqvitError(f"{label}: lacks '{missing}', needed for '{stem}.bn'. The checkpoint is incomplete.")
        weight, (gamma, beta, mean, var) = tensors[f"{stem}.conv.weight"].double(), (tensors[name].double() for name in names)
        if weight.ndim != 4 or any(part.shape != weight.shape[:1] for part in (gamma, beta, mean, var)):
            raise FqvitError(f"{label}: the shapes of '{stem}.bn' and '{stem}.conv.weight' do not match. The file is damaged.")
        bias = tensors.get(f"{stem}.conv.bias", torch.zeros_like(mean)).double()
        factor = gamma / (var + BATCH_NORM_EPS).sqrt()
        out[f"{stem}.conv.weight"] = weight * factor[:, None, None, None]
        out[f"{stem}.conv.bias"] = (bias - mean) * factor + beta
    return out


def _merging_order(value: Tensor, layout: DetectorLayout, key: str, label: str) -> Tensor:
    """Reorder the last axis (the 4 * C inputs of patch merging) to the order of our modules, which is the same as Swin's.

    mmdetection orders the inputs by channel, then position (0, 0), (0, 1), (1, 0), (1, 1);
    Swin orders them by position (0, 0), (1, 0), (0, 1), (1, 1), then channel.
    """
    if layout == "swin":
        return value
    if value.ndim == 0 or value.shape[-1] % 4:
        raise FqvitError(
            f"{label}: '{key}' has shape {list(value.shape)}, expected a last axis divisible by 4. The file is damaged."
        )
    positions = value.unflatten(-1, (value.shape[-1] // 4, 4)).transpose(-1, -2)  # type: ignore[no-untyped-call]
    return positions[..., [0, 2, 1, 3], :].flatten(-2)  # type: ignore[no-any-return]


def _released_merging_order(value: Tensor) -> Tensor:
    """Undo _merging_order for mmdetection."""
    positions = value.unflatten(-1, (4, value.shape[-1] // 4))[..., [0, 2, 1, 3], :]  # type: ignore[no-untyped-call]
    return positions.transpose(-1, -2).flatten(-2)  # type: ignore[no-any-return]


def _channels_before(state: dict[str, Tensor], fc: str) -> int:
    """Return C of the input [side, side, C] of a box head's first linear layer; 0 if it is unknown."""
    match = FIRST_FC.fullmatch(fc)
    assert match is not None
    convs = [key for key in state if re.fullmatch(rf"box_heads\.{match[1]}\.convs\.\d+\.conv\.weight", key)]
    last = max(convs, key=lambda key: int(key.split(".")[3]), default="pyramid.neck.output.0.weight")
    return state[last].shape[0] if last in state and state[last].ndim else 0


def _channels_last(weight: Tensor, channels: int) -> Tensor:
    """Reorder the columns of a weight from [C, side, side] to [side, side, C].

    A weight of an unexpected shape is returned unchanged; a later check reports it.
    """
    if weight.ndim != 2 or channels == 0 or weight.shape[1] % channels:
        return weight
    return weight.view(len(weight), channels, -1).transpose(1, 2).flatten(1)
