"""Recognise the layout of a checkpoint and rename its keys to timm's names.

This module handles timm (and the original DeiT, DINO, MAE and BEiT, which have the same names), the original Swin, Hugging
Face's ViT, DeiT and Swin (names in files and in memory, which differ since version 5 of transformers), and Google's npz.
Tensors are renamed and transposed, and q, k and v are concatenated; values do not change.
See also: layouts/ (further layouts), checkpoint.py (reads files), recognise.py and fold.py (the next steps).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.models.checkpoints.layouts import beit, clip, dino
from fqvit.models.checkpoints.layouts.rename import Renamed, join_qkv

Layout = Literal[
    "timm",
    "original swin",
    "original dinov2",
    "original dinov3",
    "openai clip",
    "openclip",
    "google npz",
    "hugging face vit",
    "hugging face swin",
    "hugging face clip",
    "hugging face dinov2",
    "hugging face dinov3",
    "hugging face beit",
    "hugging face swinv2",
]


@dataclass(frozen=True)
class Canonical:
    """A checkpoint with timm's names.

    tensors: timm name -> value   origin: timm name -> name in the checkpoint
    heads: number of heads, if the layout shows it   windows: number of windows in a Swin's first stage, if a mask shows it
    """

    layout: Layout
    tensors: dict[str, Tensor]
    origin: dict[str, str]
    heads: int | None = None
    windows: int | None = None


# Buffers, and parts that classification does not use.
IGNORED = re.compile(
    r"relative_position_index$|relative_coords_table$|attn_mask$|mask_token$|num_batches_tracked$|position_ids$"
    r"|^(\w+\.)?pooler\.dense\.|^decoder[._]"
)

# Block and stage numbers of three or more digits, more than any known model has. Files are untrusted input: without this bound
# a single name could cause a loop over millions of blocks.
ABSURD = re.compile(r"(?:^|[._])(\d{3,})(?=[./])")

GOOGLE_ROOT = re.compile(r"^(opt/target/|params/)")

_BLOCK = r"(?:Transformer/)encoderblock_(\d+)/"
GOOGLE = [
    (r"embedding/(kernel|bias)", r"patch_embed.proj.\1"),
    (r"cls", r"cls_token"),
    (r"(?:Transformer/posembed_input/)?pos_embedding", r"pos_embed"),
    (_BLOCK + r"LayerNorm_0/(scale|bias)", r"blocks.\1.norm1.\2"),
    (_BLOCK + r"LayerNorm_[12]/(scale|bias)", r"blocks.\1.norm2.\2"),
    (_BLOCK + r"MultiHeadDotProductAttention_\d/query/(kernel|bias)", r"blocks.\1.attn.q.\2"),
    (_BLOCK + r"MultiHeadDotProductAttention_\d/key/(kernel|bias)", r"blocks.\1.attn.k.\2"),
    (_BLOCK + r"MultiHeadDotProductAttention_\d/value/(kernel|bias)", r"blocks.\1.attn.v.\2"),
    (_BLOCK + r"MultiHeadDotProductAttention_\d/out/(kernel|bias)", r"blocks.\1.attn.proj.\2"),
    (_BLOCK + r"M[lL][pP]Block_\d/Dense_0/(kernel|bias)", r"blocks.\1.mlp.fc1.\2"),
    (_BLOCK + r"M[lL][pP]Block_\d/Dense_1/(kernel|bias)", r"blocks.\1.mlp.fc2.\2"),
    (r"Transformer/encoder_norm/(scale|bias)", r"norm.\1"),
    (r"pre_logits/(kernel|bias)", r"pre_logits.fc.\1"),
    (r"head/(kernel|bias)", r"head.\1"),
]

_P = r"(weight|bias)"
_HF_BLOCK = [
    (r"attention\.(?:attention\.|self\.)?(?:query|q_proj)\." + _P, r"attn.q.\1"),
    (r"attention\.(?:attention\.|self\.)?(?:key|k_proj)\." + _P, r"attn.k.\1"),
    (r"attention\.(?:attention\.|self\.)?(?:value|v_proj)\." + _P, r"attn.v.\1"),
    (r"attention\.(?:output\.dense|o_proj)\." + _P, r"attn.proj.\1"),
    (r"attention\.(?:self|relative_position_bias)\.relative_position_bias_table", r"attn.relative_position_bias_table"),
    (r"layernorm_before\." + _P, r"norm1.\1"),
    (r"layernorm_after\." + _P, r"norm2.\1"),
    (r"(?:intermediate\.dense|mlp\.fc1)\." + _P, r"mlp.fc1.\1"),
    (r"(?:output\.dense|mlp\.fc2)\." + _P, r"mlp.fc2.\1"),
]
_VIT = r"(?:(?:vit|deit|ijepa)\.)?"
HF_VIT_BLOCK = re.compile(_VIT + r"(?:encoder\.layer|layers)\.(\d+)\.(.+)")
HF_VIT = [
    (_VIT + r"embeddings\.cls_token", r"cls_token"),
    (_VIT + r"embeddings\.distillation_token", r"dist_token"),
    (_VIT + r"embeddings\.position_embeddings", r"pos_embed"),
    (_VIT + r"embeddings\.patch_embeddings\.projection\." + _P, r"patch_embed.proj.\1"),
    (_VIT + r"layernorm\." + _P, r"norm.\1"),
    (r"(?:cls_)?classifier\." + _P, r"head.\1"),
    (r"distillation_classifier\." + _P, r"head_dist.\1"),
]
_SWIN = r"(?:swin\.)?"
HF_SWIN_BLOCK = re.compile(_SWIN + r"encoder\.layers\.(\d+)\.blocks\.(\d+)\.(.+)")
HF_SWIN_DOWNSAMPLE = re.compile(_SWIN + r"encoder\.layers\.(\d+)\.downsample\.(.+)")
HF_SWIN = [
    (_SWIN + r"embeddings\.patch_embeddings\.projection\." + _P, r"patch_embed.proj.\1"),
    (_SWIN + r"embeddings\.norm\." + _P, r"patch_embed.norm.\1"),
    (_SWIN + r"embeddings\.position_embeddings", r"absolute_pos_embed"),
    (_SWIN + r"layernorm\." + _P, r"norm.\1"),
    (r"classifier\." + _P, r"head.fc.\1"),
]


def check_block_numbers(names: Iterable[str], label: str) -> None:
    """Raise FqvitError for block or stage numbers above 99. The largest number determines how many blocks are expected."""
    absurd = next((key for key in names if ABSURD.search(key)), None)
    if absurd is not None:
        raise FqvitError(f"{label}: '{absurd[:80]}' has a block or stage number above 99. The checkpoint is damaged.")


def to_timm(tensors: dict[str, Tensor], label: str) -> Canonical:
    """Rename the weights to timm's names. Unknown names are kept, so that later errors can name them."""
    kept = {key: value for key, value in tensors.items() if not IGNORED.search(key)}
    check_block_numbers(kept, label)
    layout = _layout(kept, label)
    if layout in LAYOUTS:
        found = LAYOUTS[layout](kept, label)
        return Canonical(layout, found.tensors, found.origin)
    rename = RENAMES[layout]
    if layout == "timm" and _has_scaled_blocks(kept):
        rename = str  # keep gamma_1 and gamma_2: in timm's BEiT and EVA, LayerScale is a parameter of the block
    origin = {rename(key): key for key in kept}
    if len(origin) < len(kept):
        lost = next(key for key in kept if key not in origin.values())
        raise FqvitError(f"{label}: '{lost}' and '{origin[rename(lost)]}' are the same tensor. Remove one of them.")
    renamed = {new: kept[old] for new, old in origin.items()}
    heads = None
    if layout == "google npz":
        query = renamed.get("blocks.0.attn.q.kernel")
        heads = query.shape[1] if query is not None and query.ndim == 3 else None
        renamed = {_torch_name(key): _torch_order(key, value) for key, value in renamed.items()}
        origin = {_torch_name(new): old for new, old in origin.items()}
    mask = tensors.get("layers.0.blocks.1.attn_mask")
    windows = mask.shape[0] if mask is not None and mask.ndim == 3 else None
    joined = Renamed(renamed, origin)
    join_qkv(joined, label)
    return Canonical(layout, joined.tensors, joined.origin, heads, windows)


LAYOUTS: dict[Layout, Callable[[dict[str, Tensor], str], Renamed]] = {
    "openai clip": clip.from_openai,
    "openclip": clip.from_openclip_timm,
    "hugging face clip": clip.from_hugging_face,
    "original dinov2": dino.from_dinov2,
    "original dinov3": dino.from_dinov3,
    "hugging face dinov2": dino.from_hugging_face_v2,
    "hugging face dinov3": dino.from_hugging_face_v3,
    "hugging face beit": beit.from_beit,
    "hugging face swinv2": beit.from_swinv2,
}


def _layout(tensors: dict[str, Tensor], label: str) -> Layout:
    def has(pattern: str) -> bool:
        return any(re.search(pattern, key) for key in tensors)

    if any(GOOGLE_ROOT.sub("", key) == "embedding/kernel" for key in tensors):
        return "google npz"
    if has(r"^(visual\.)?conv1\.weight$") and has(r"^(visual\.)?transformer\.resblocks\.0\."):
        return "openai clip"
    if has(r"^visual\.trunk\.patch_embed\.proj\.weight$"):
        return "openclip"
    if has(r"^(vision_model\.)?embeddings\.patch_embedding\.weight$"):
        return "hugging face clip"
    if has(r"^embeddings\.patch_embeddings\.weight$"):
        return "hugging face dinov3"
    if has(r"embeddings\.patch_embeddings\.projection\.weight$"):
        if has(r"layer_scale1\.lambda1$"):
            return "hugging face dinov2"
        if has(r"^swinv2\.|continuous_position_bias_mlp"):
            return "hugging face swinv2"
        if any(HF_SWIN_BLOCK.fullmatch(key) for key in tensors):
            return "hugging face swin"
        only_qv = has(r"\.(query|q_proj)\.bias$") and not has(r"\.(key|k_proj)\.bias$")
        return "hugging face beit" if only_qv or has(r"^(beit|data2vec_vision)\.|\.lambda_1$") else "hugging face vit"
    if "patch_embed.proj.weight" in tensors:
        if has(r"^storage_tokens$|^rope_embed\.periods$"):
            return "original dinov3"
        if has(r"^register_tokens$|\.mlp\.w12\.|^blocks\.\d+\.\d+\."):
            return "original dinov2"
        # timm merges patches at the start of stage i + 1; all other layouts (and timm before 0.9) do so at the end of stage i.
        return "original swin" if has(r"^layers\.0\.downsample\.") else "timm"
    if has(r"^roi_head\."):
        raise FqvitError(
            f"{label}: weights of a detector, expected a classifier. Use `fqvit detect quantize --weights {label}`,"
            " or fqvit.quantize_detector in Python."
        )
    if has(r"^visual\.layer1\."):
        raise FqvitError(f"{label}: CLIP with a ResNet, expected a vision transformer. Use a ViT variant.")
    few = ", ".join(list(tensors)[:3])
    raise FqvitError(
        f"{label}: not a known layout of a vision transformer (found {few}, ...), expected a patch embedding. "
        "Build the model with its library and pass the module."
    )


def _has_scaled_blocks(tensors: dict[str, Tensor]) -> bool:
    """Return whether gamma_1 and gamma_2 belong to BEiT or DINOv3, which have no qkv bias or no learned position embeddings."""
    biased = any(key.endswith(".attn.qkv.bias") for key in tensors)
    return not biased or "pos_embed" not in tensors


def _timm(key: str) -> str:
    return re.sub(r"\.gamma_([12])$", r".ls\1.gamma", key)  # the name of LayerScale in DeiT III


def _original_swin(key: str) -> str:
    key = re.sub(r"^layers\.(\d+)\.downsample\.", lambda m: f"layers.{int(m[1]) + 1}.downsample.", key)
    return re.sub(r"^head\.(weight|bias)$", r"head.fc.\1", key)


def _hugging_face_vit(key: str) -> str:
    if match := HF_VIT_BLOCK.fullmatch(key):
        return f"blocks.{match[1]}.{_first(_HF_BLOCK, match[2])}"
    return _first(HF_VIT, key)


def _hugging_face_swin(key: str) -> str:
    if match := HF_SWIN_BLOCK.fullmatch(key):
        return f"layers.{match[1]}.blocks.{match[2]}.{_first(_HF_BLOCK, match[3])}"
    if match := HF_SWIN_DOWNSAMPLE.fullmatch(key):
        return f"layers.{int(match[1]) + 1}.downsample.{match[2]}"
    return _first(HF_SWIN, key)


def _google(key: str) -> str:
    return _first(GOOGLE, GOOGLE_ROOT.sub("", key))


RENAMES: dict[Layout, Callable[[str], str]] = {
    "timm": _timm,
    "original swin": _original_swin,
    "hugging face vit": _hugging_face_vit,
    "hugging face swin": _hugging_face_swin,
    "google npz": _google,
}


def _first(table: list[tuple[str, str]], key: str) -> str:
    for pattern, name in table:
        if match := re.fullmatch(pattern, key):
            return match.expand(name)
    return key


def _torch_name(key: str) -> str:
    return re.sub(r"\.(kernel|scale)$", ".weight", key)


def _torch_order(key: str, value: Tensor) -> Tensor:
    """Transpose Flax's layouts: kernels [in, out], convolutions [h, w, in, out], attention [in, H, D] and [H, D, out]."""
    if key.endswith("attn.proj.kernel"):
        value = value.flatten(0, -2) if value.ndim > 2 else value
    elif re.search(r"attn\.[qkv]\.(kernel|bias)$", key):
        value = value.flatten(-2) if value.ndim > 1 else value
    if value.ndim == 4 and key.endswith("kernel"):
        return value.permute(3, 2, 0, 1)
    return value.T if value.ndim == 2 and key.endswith("kernel") else value
