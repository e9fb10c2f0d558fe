"""Vision towers of CLIP and SigLIP: OpenAI's and OpenCLIP's layout (visual.*), OpenCLIP with timm inside, Hugging Face."""

from __future__ import annotations

from torch import Tensor

from fqvit.models.checkpoints.layouts.rename import P, Renamed, join_qkv, rename

TEXT = (
    r"^(text_model|text|transformer|token_embedding|ln_final)\.|^(text_projection|logit_scale|logit_bias|positional_embedding)"
)
BUFFERS = r"position_ids$|(^|\.)attn_mask$"

_RESBLOCK = r"(?:visual\.)?transformer\.resblocks\.(\d+)\."
OPENAI = (
    (r"(?:visual\.)?conv1\." + P, r"patch_embed.proj.\1"),
    (r"(?:visual\.)?class_embedding", "cls_token"),
    (r"(?:visual\.)?positional_embedding", "pos_embed"),
    (r"(?:visual\.)?ln_pre\." + P, r"norm_pre.\1"),
    (r"(?:visual\.)?ln_post\." + P, r"norm.\1"),
    (r"(?:visual\.)?proj", "head.weight"),
    (_RESBLOCK + r"ln_([12])\." + P, r"blocks.\1.norm\2.\3"),
    (_RESBLOCK + r"attn\.in_proj_" + P, r"blocks.\1.attn.qkv.\2"),
    (_RESBLOCK + r"attn\.out_proj\." + P, r"blocks.\1.attn.proj.\2"),
    (_RESBLOCK + r"mlp\.c_fc\." + P, r"blocks.\1.mlp.fc1.\2"),
    (_RESBLOCK + r"mlp\.c_proj\." + P, r"blocks.\1.mlp.fc2.\2"),
    (_RESBLOCK + r"ls_([12])\.gamma", r"blocks.\1.ls\2.gamma"),
)

_V = r"(?:vision_model\.)?"
_LAYER = _V + r"encoder\.layers\.(\d+)\."
HUGGING_FACE = (
    (_V + r"embeddings\.class_embedding", "cls_token"),
    (_V + r"embeddings\.patch_embedding\." + P, r"patch_embed.proj.\1"),
    (_V + r"embeddings\.position_embedding\.weight", "pos_embed"),
    (_V + r"pre_layrnorm\." + P, r"norm_pre.\1"),
    (_V + r"post_layernorm\." + P, r"norm.\1"),
    (_LAYER + r"layer_norm([12])\." + P, r"blocks.\1.norm\2.\3"),
    (_LAYER + r"self_attn\.([qkv])_proj\." + P, r"blocks.\1.attn.\2.\3"),
    (_LAYER + r"self_attn\.out_proj\." + P, r"blocks.\1.attn.proj.\2"),
    (_LAYER + r"mlp\.(fc[12])\." + P, r"blocks.\1.mlp.\2.\3"),
    (_V + r"head\.probe", "attn_pool.latent"),
    (_V + r"head\.attention\.in_proj_" + P, r"attn_pool.qkv.\1"),
    (_V + r"head\.attention\.out_proj\." + P, r"attn_pool.proj.\1"),
    (_V + r"head\.layernorm\." + P, r"attn_pool.norm.\1"),
    (_V + r"head\.mlp\.(fc[12])\." + P, r"attn_pool.mlp.\1.\2"),
    (r"visual_projection\.weight", "head.weight"),
    (r"classifier\." + P, r"head.\1"),
)


def from_openai(tensors: dict[str, Tensor], label: str) -> Renamed:
    """Rename the keys visual.* of OpenAI's CLIP and of OpenCLIP, or those of the vision tower itself (conv1, ...)."""
    dropped = TEXT if any(key.startswith("visual.") for key in tensors) else r"^$"
    found = rename(tensors, OPENAI, f"{dropped}|{BUFFERS}", label)
    found.change("head.weight", lambda w: w.T)  # OpenAI computes features @ proj, a Linear computes features @ weight.T
    _with_batch_axis(found)
    return found


def from_openclip_timm(tensors: dict[str, Tensor], label: str) -> Renamed:
    """Rename the keys of OpenCLIP with a timm model (visual.trunk.*) and a projection (visual.head.proj)."""
    table = ((r"visual\.trunk\.(.+)", r"\1"), (r"visual\.head\.proj\.weight", "head.weight"))
    return rename(tensors, table, f"{TEXT}|{BUFFERS}", label)


def from_hugging_face(tensors: dict[str, Tensor], label: str) -> Renamed:
    """Rename the keys of CLIPVisionModel, CLIPModel, SiglipVisionModel, SiglipModel and their classifiers."""
    found = rename(tensors, HUGGING_FACE, f"{TEXT}|{BUFFERS}", label)
    _with_batch_axis(found)
    for part in ("weight", "bias"):
        if (joined := found.tensors.pop(f"attn_pool.qkv.{part}", None)) is not None:
            old, width = found.origin.pop(f"attn_pool.qkv.{part}"), joined.shape[0] // 3 if joined.ndim else 0
            found.add(f"attn_pool.q.{part}", joined[:width] if joined.ndim else joined, old)
            found.add(f"attn_pool.kv.{part}", joined[width:] if joined.ndim else joined, old)
    join_qkv(found, label)
    return found


def _with_batch_axis(found: Renamed) -> None:
    """Add the axes that timm's parameters have: class token [C] -> [1, 1, C], positions [T, C] -> [1, T, C]"""
    found.change("cls_token", lambda token: token.reshape(1, 1, -1))
    found.change("pos_embed", lambda positions: positions.unsqueeze(0))
