"""DINOv2 and DINOv3: the layouts of the original releases and of Hugging Face.

In models with registers, the position embedding of the class token is added to the class token, because timm's models have
position embeddings for patches only.
"""

from __future__ import annotations

import re

from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.models.checkpoints.layouts.rename import P, Renamed, join_qkv, rename

UNUSED = r"mask_token$|(^|\.)rope_embed\.periods$|bias_mask$|^local_cls_norm\.|^(dino|ibot)_head\."

DINOV2 = (
    (r"register_tokens", "reg_token"),
    (r"blocks\.\d+\.(\d+)\.(.+)", r"blocks.\1.\2"),  # blocks in chunks, as trained with FSDP
)

_D2 = r"(?:dinov2(?:_with_registers)?\.)?"
_D2_LAYER = _D2 + r"encoder\.layer\.(\d+)\."
HUGGING_FACE_V2 = (
    (_D2 + r"embeddings\.cls_token", "cls_token"),
    (_D2 + r"embeddings\.register_tokens", "reg_token"),
    (_D2 + r"embeddings\.position_embeddings", "pos_embed"),
    (_D2 + r"embeddings\.patch_embeddings\.projection\." + P, r"patch_embed.proj.\1"),
    (_D2_LAYER + r"(norm[12])\." + P, r"blocks.\1.\2.\3"),
    (_D2_LAYER + r"attention\.(?:attention\.)?(?:query|q_proj)\." + P, r"blocks.\1.attn.q.\2"),
    (_D2_LAYER + r"attention\.(?:attention\.)?(?:key|k_proj)\." + P, r"blocks.\1.attn.k.\2"),
    (_D2_LAYER + r"attention\.(?:attention\.)?(?:value|v_proj)\." + P, r"blocks.\1.attn.v.\2"),
    (_D2_LAYER + r"attention\.(?:output\.dense|o_proj)\." + P, r"blocks.\1.attn.proj.\2"),
    (_D2_LAYER + r"layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
    (_D2_LAYER + r"mlp\.(?:weights_in|fc1)\." + P, r"blocks.\1.mlp.fc1.\2"),
    (_D2_LAYER + r"mlp\.(?:weights_out|fc2)\." + P, r"blocks.\1.mlp.fc2.\2"),
    (_D2 + r"layernorm\." + P, r"norm.\1"),
    (r"classifier\." + P, r"head.\1"),
)

DINOV3 = (
    (r"storage_tokens", "reg_token"),
    (r"blocks\.(\d+)\.ls([12])\.gamma", r"blocks.\1.gamma_\2"),
    (r"blocks\.(\d+)\.mlp\.w1\." + P, r"blocks.\1.mlp.fc1_g.\2"),
    (r"blocks\.(\d+)\.mlp\.w2\." + P, r"blocks.\1.mlp.fc1_x.\2"),
    (r"blocks\.(\d+)\.mlp\.w3\." + P, r"blocks.\1.mlp.fc2.\2"),
)

_D3_LAYER = r"(?:model\.)?layer\.(\d+)\."
HUGGING_FACE_V3 = (
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.register_tokens", "reg_token"),
    (r"embeddings\.patch_embeddings\." + P, r"patch_embed.proj.\1"),
    (_D3_LAYER + r"(norm[12])\." + P, r"blocks.\1.\2.\3"),
    (_D3_LAYER + r"attention\.([qkv])_proj\." + P, r"blocks.\1.attn.\2.\3"),
    (_D3_LAYER + r"attention\.o_proj\." + P, r"blocks.\1.attn.proj.\2"),
    (_D3_LAYER + r"layer_scale([12])\.lambda1", r"blocks.\1.gamma_\2"),
    (_D3_LAYER + r"mlp\.gate_proj\." + P, r"blocks.\1.mlp.fc1_g.\2"),
    (_D3_LAYER + r"mlp\.up_proj\." + P, r"blocks.\1.mlp.fc1_x.\2"),
    (_D3_LAYER + r"mlp\.down_proj\." + P, r"blocks.\1.mlp.fc2.\2"),
)


def from_dinov2(tensors: dict[str, Tensor], label: str) -> Renamed:
    """Rename the keys of the original DINOv2, which has register_tokens and a packed SwiGLU named w12 and w3."""
    table = (
        *DINOV2,
        (r"blocks\.(\d+)\.mlp\.w12\." + P, r"blocks.\1.mlp.fc1.\2"),
        (r"blocks\.(\d+)\.mlp\.w3\." + P, r"blocks.\1.mlp.fc2.\2"),
    )
    found = rename(tensors, table, UNUSED, label)
    _fold_class_position(found)
    return found


def from_hugging_face_v2(tensors: dict[str, Tensor], label: str) -> Renamed:
    """Rename the keys of Dinov2Model, Dinov2WithRegistersModel and their classifiers."""
    found = rename(tensors, HUGGING_FACE_V2, UNUSED, label)
    _fold_class_position(found)
    join_qkv(found, label)
    return found


def from_dinov3(tensors: dict[str, Tensor], label: str) -> Renamed:
    """Rename the keys of the original DINOv3, which has storage_tokens and a qkv bias whose middle third (k) is masked."""
    found = rename(tensors, DINOV3, UNUSED, label)
    for key in [key for key in found.tensors if re.fullmatch(r"blocks\.\d+\.attn\.qkv\.bias", key)]:
        bias, old, block = found.tensors.pop(key), found.origin.pop(key), key.removesuffix("qkv.bias")
        if bias.ndim != 1 or bias.shape[0] % 3:
            raise FqvitError(f"{label}: '{old}' has shape {list(bias.shape)}, expected [3 * width]. The file is damaged.")
        q, _, v = bias.chunk(3)
        found.add(block + "q_bias", q, old)
        found.add(block + "v_bias", v, old)
    return found


def from_hugging_face_v3(tensors: dict[str, Tensor], label: str) -> Renamed:
    """Rename the keys of DINOv3ViTModel, whose MLP is gated if there is a gate_proj."""
    found = rename(tensors, HUGGING_FACE_V3, UNUSED, label)
    if not any(".mlp.fc1_g." in key for key in found.tensors):
        for key in [key for key in found.tensors if ".mlp.fc1_x." in key]:
            found.add(key.replace("fc1_x", "fc1"), found.tensors.pop(key), found.origin[key])
    join_qkv(found, label)
    return found


def _fold_class_position(found: Renamed) -> None:
    """With registers: add the first position embedding to the class token, and keep only those of the patches."""
    token, positions = found.tensors.get("cls_token"), found.tensors.get("pos_embed")
    if "reg_token" not in found.tensors or token is None or positions is None:
        return
    if token.ndim == 3 and positions.ndim == 3 and positions.shape[1] > 1 and token.shape[2] == positions.shape[2]:
        found.tensors["cls_token"] = token + positions[:, :1]
        found.tensors["pos_embed"] = positions[:, 1:]
