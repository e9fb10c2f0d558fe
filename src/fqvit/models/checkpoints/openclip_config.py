"""Read open_clip_config.json: the vision tower of an OpenCLIP model. Every field is used, irrelevant, or rejected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fqvit.errors import FqvitError
from fqvit.models import architectures
from fqvit.models.checkpoints.hints import Hints, words
from fqvit.models.checkpoints.preprocessing import read_openclip
from fqvit.models.checkpoints.timm_config import hints_of
from fqvit.models.checkpoints.transformers_config import pair
from fqvit.models.config import Pool

SOURCE = "open_clip_config.json"
MODEL = words(
    """
    embed_dim vision_cfg text_cfg quick_gelu custom_text init_logit_bias init_logit_scale
    """
)
VISION = words(
    """
    image_size layers width patch_size head_width mlp_ratio ls_init_value patch_dropout no_ln_pre pool_type
    timm_model_name timm_model_pretrained timm_pool timm_proj timm_proj_bias timm_drop timm_drop_path act_kwargs
    output_tokens
    """
)
POOLS: dict[str, Pool] = {"tok": "token", "avg": "avg", "": "token", "map": "map"}


def is_openclip(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("model_cfg"), Mapping)


def read_config(config: Mapping[str, Any], label: str) -> Hints:
    model, preprocess = config["model_cfg"], config.get("preprocess_cfg") or {}
    vision = model.get("vision_cfg") or {}
    for fields, known, where in ((model, MODEL, "model_cfg"), (vision, VISION, "vision_cfg")):
        for name, value in fields.items():
            if name not in known and value not in (None, False, {}):
                raise FqvitError(f"{label}: {SOURCE}: {where} has {name} {str(value)[:40]!r}, which is not understood.")
    transform = read_openclip(preprocess, label)
    inner = vision.get("timm_model_name")
    if inner is not None:
        known_inner = architectures.lookup(inner)
        if known_inner is None:
            why = architectures.why_not(inner) or "an architecture that fqvit does not know"
            raise FqvitError(f"{label}: vision tower '{inner}' has {why}. Build it with open_clip and pass the module.")
        hints = replace(hints_of(known_inner.config, SOURCE, inner), transform=transform)
        image, pool = pair(vision.get("image_size"), "image_size", label, SOURCE), vision.get("timm_pool")
        return replace(hints, image=image or hints.image, pool=_pool(pool, label) if pool else hints.pool)
    width, tanh = vision.get("width"), (vision.get("act_kwargs") or {}).get("approximate") == "tanh"
    head_width = vision.get("head_width", 64)
    if not isinstance(width, int) or not isinstance(head_width, int) or width % head_width:
        raise FqvitError(
            f"{label}: {SOURCE}: width {width} and head_width {head_width}, expected integers, the"
            " first a multiple of the second. The file is damaged."
        )
    return Hints(
        heads=(width // head_width,),
        eps=1e-5,
        image=pair(vision.get("image_size"), "image_size", label, SOURCE),
        pool=_pool(vision.get("pool_type", "tok"), label),
        activation="quick_gelu" if model.get("quick_gelu") else "gelu_tanh" if tanh else "gelu",
        sizes={"width": width},
        transform=transform,
        source=SOURCE,
    )


def _pool(name: object, label: str) -> Pool:
    if name not in POOLS:
        raise FqvitError(f"{label}: {SOURCE}: pooling '{name}', expected tok, avg or map. Pass the module itself.")
    return POOLS[str(name)]
