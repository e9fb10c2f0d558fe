"""BEiT, Data2Vec and SwinV2 in Hugging Face's layout. The original releases have timm's names."""

from __future__ import annotations

from torch import Tensor

from fqvit.models.checkpoints.layouts.rename import P, Renamed, join_qkv, rename

UNUSED = r"mask_token$|relative_position_index$|relative_coords_table$|attn_mask$"

_B = r"(?:(?:beit|data2vec_vision)\.)?"
_LAYER = _B + r"(?:encoder\.layer|layers)\.(\d+)\."
_TABLE = r"relative_position_bias\.relative_position_bias_table"
_INNER = (
    (r"attention\.(?:attention\.|self\.)?(?:query|q_proj)\." + P, r"attn.q.{}"),
    (r"attention\.(?:attention\.|self\.)?(?:key|k_proj)\." + P, r"attn.k.{}"),
    (r"attention\.(?:attention\.|self\.)?(?:value|v_proj)\." + P, r"attn.v.{}"),
    (r"attention\.(?:output\.dense|o_proj)\." + P, r"attn.proj.{}"),
    (r"layernorm_before\." + P, r"norm1.{}"),
    (r"layernorm_after\." + P, r"norm2.{}"),
    (r"(?:intermediate\.dense|mlp\.fc1)\." + P, r"mlp.fc1.{}"),
    (r"(?:output\.dense|mlp\.fc2)\." + P, r"mlp.fc2.{}"),
)
BEIT = (
    (_B + r"embeddings\.cls_token", "cls_token"),
    (_B + r"embeddings\.position_embeddings", "pos_embed"),
    (_B + r"embeddings\.patch_embeddings\.projection\." + P, r"patch_embed.proj.\1"),
    *((_LAYER + pattern, rf"blocks.\1.{name.format(chr(92) + '2')}") for pattern, name in _INNER),
    (_LAYER + r"lambda_([12])", r"blocks.\1.gamma_\2"),
    (_LAYER + r"(?:attention\.(?:attention\.)?)?" + _TABLE, r"blocks.\1.attn.relative_position_bias_table"),
    (
        _B + r"(?:encoder\.relative_position_bias|shared_position_bias)\.relative_position_bias_table",
        r"rel_pos_bias.relative_position_bias_table",
    ),
    (_B + r"pooler\.layernorm\." + P, r"fc_norm.\1"),
    (_B + r"layernorm\." + P, r"norm.\1"),
    (r"classifier\." + P, r"head.\1"),
)

_S = r"(?:swinv2\.)?"
_BLOCK = _S + r"encoder\.layers\.(\d+)\.blocks\.(\d+)\."
SWINV2 = (
    (_S + r"embeddings\.patch_embeddings\.projection\." + P, r"patch_embed.proj.\1"),
    (_S + r"embeddings\.norm\." + P, r"patch_embed.norm.\1"),
    (_S + r"embeddings\.position_embeddings", "absolute_pos_embed"),
    *((_BLOCK + pattern, rf"layers.\1.blocks.\2.{name.format(chr(92) + '3')}") for pattern, name in _INNER),
    (_BLOCK + r"attention\.self\.logit_scale", r"layers.\1.blocks.\2.attn.logit_scale"),
    (_BLOCK + r"attention\.self\.continuous_position_bias_mlp\.(\d)\." + P, r"layers.\1.blocks.\2.attn.cpb_mlp.\3.\4"),
    (_S + r"layernorm\." + P, r"norm.\1"),
    (r"classifier\." + P, r"head.fc.\1"),
)


def from_beit(tensors: dict[str, Tensor], label: str) -> Renamed:
    """Rename the keys of BeitModel, BeitForImageClassification and their Data2VecVision counterparts."""
    found = rename(tensors, BEIT, UNUSED, label)
    join_qkv(found, label)
    return found


def from_swinv2(tensors: dict[str, Tensor], label: str) -> Renamed:
    """Rename the keys of Swinv2Model and Swinv2ForImageClassification.

    Patch merging is at the end of stage i here, and at the start of stage i + 1 in timm.
    """
    stages = ((_S + rf"encoder\.layers\.{i}\.downsample\.(.+)", rf"layers.{i + 1}.downsample.\1") for i in range(10))
    found = rename(tensors, (*SWINV2, *stages), UNUSED, label)
    join_qkv(found, label)
    return found
