"""Write src/fqvit/assets/timm_*.csv: what timm builds and how it preprocesses images, per model name.

Needs timm; the package itself does not. Run it again after an update of timm:

    python scripts/timm_tables.py

timm_models.csv has one row per model name: the family and the config (fields that differ from the defaults); for an unsupported
model, the feature that fqvit's own modules do not support; for a model of a timm module that is not in MODULES, the name of
that module. timm_tags.csv has the preprocessing per name and tag; the first tag of a name is timm's default.
See also: src/fqvit/models/architectures.py (reads both), tests/models/test_architectures.py (compares them with timm).
"""

from __future__ import annotations

import csv
import dataclasses
import warnings
from pathlib import Path
from typing import Any

from fqvit.models.config import BeitConfig, DinoV3Config, SwinConfig, SwinV2Config, VisionConfig

MODULES = ["vision_transformer", "deit", "eva", "beit", "swin_transformer", "swin_transformer_v2"]
ASSETS = Path(__file__).resolve().parent.parent / "src" / "fqvit" / "assets"
SIZES = ("image", "patch", "width", "depth", "depths", "heads", "hidden")


class Unsupported(Exception):
    """A feature that fqvit's own modules do not support, worded to follow "the model has"."""


def need(condition: bool, feature: str) -> None:
    if not condition:
        raise Unsupported(feature)


def is_identity(module: Any) -> bool:
    return module is None or type(module).__name__ == "Identity"


def norm_eps(module: Any) -> float:
    need(type(module).__name__ == "LayerNorm" and module.bias is not None, f"{type(module).__name__} instead of LayerNorm")
    return float(module.eps)


def activation(module: Any) -> str:
    kind = type(module).__name__
    if kind == "GELU" and getattr(module, "approximate", "none") == "none":
        return "gelu"
    names = {"GELUTanh": "gelu_tanh", "GELU": "gelu_tanh", "QuickGELU": "quick_gelu"}
    need(kind in names, f"the activation {kind}")
    return names[kind]


def image_of(model: Any) -> tuple[int, int]:
    embed = model.patch_embed
    need(type(embed).__name__ == "PatchEmbed", f"a convolutional stem ({type(embed).__name__})")
    need(embed.patch_size[0] == embed.patch_size[1], "patches that are not square")
    return tuple(embed.img_size)


def vision(model: Any) -> VisionConfig:
    image, block, c = image_of(model), model.blocks[0], model.embed_dim
    need(is_identity(getattr(model.patch_embed, "norm", None)), "a norm in the patch embedding")
    need(type(block).__name__ == "Block", f"blocks with another structure ({type(block).__name__})")
    need(type(block.attn).__name__ == "Attention", f"another attention ({type(block.attn).__name__})")
    need(is_identity(block.attn.q_norm), "norms of q and k")
    need(is_identity(block.attn.norm) and is_identity(block.mlp.norm), "norms inside attention or MLP")
    need(block.attn.gate is None, "gated attention")
    need(block.attn.attn_dim == c, "heads that are wider than width / heads")
    need(block.attn.proj.bias is not None, "no bias in the projections")
    need(model.pos_embed is not None, "no learned positions")
    need(not model.pool_include_prefix, "pooling over all tokens")
    need(model.global_pool in ("token", "avg", "map"), f"the pooling {model.global_pool!r}")
    mlp = type(block.mlp).__name__
    need(mlp in ("Mlp", "GluMlp"), f"another MLP ({mlp})")
    if mlp == "GluMlp":
        need(type(block.mlp.act).__name__ == "SiLU" and not block.mlp.gate_last, "another gated MLP")
    if model.attn_pool is not None:
        pool = model.attn_pool
        need(type(pool).__name__ == "AttentionPoolLatent", f"another pooling ({type(pool).__name__})")
        need(pool.latent_len == 1 and is_identity(pool.q_norm) and pool.pos_embed is None, "another attention pooling")
        need(pool.num_heads == block.attn.num_heads, "other heads in the attention pooling")
    return VisionConfig(
        image=image,
        patch=model.patch_embed.patch_size[0],
        channels=model.in_chans,
        outputs=model.num_classes,
        width=c,
        depth=len(model.blocks),
        heads=block.attn.num_heads,
        hidden=block.mlp.fc2.in_features,
        class_token=model.has_class_token,
        registers=model.num_reg_tokens,
        prefix_positions=not model.no_embed_class,
        patch_bias=model.patch_embed.proj.bias is not None,
        norm_pre=not is_identity(model.norm_pre),
        qkv_bias=block.attn.qkv.bias is not None,
        layer_scale=not is_identity(block.ls1),
        swiglu=mlp == "GluMlp",
        activation="gelu" if mlp == "GluMlp" else activation(block.mlp.act),  # type: ignore[arg-type]
        norm=not is_identity(model.norm),
        fc_norm=not is_identity(model.fc_norm),
        pool=model.global_pool,
        eps=norm_eps(block.norm1),
    )


def dinov3(model: Any) -> DinoV3Config:
    image, block = image_of(model), model.blocks[0]
    kind = type(model.rope).__name__
    need(kind == "RotaryEmbeddingDinoV3", "the blocks of EVA" if model.rope is None else f"rotary positions ({kind})")
    need(model.pos_embed is None, "learned and rotary positions")
    need(type(block).__name__ == "EvaBlock" and type(block.attn).__name__ == "EvaAttention", "another attention")
    need(is_identity(block.attn.q_norm) and is_identity(block.attn.norm) and block.attn.rotate_half, "another attention")
    need(block.gamma_1 is not None and block.gamma_2 is not None, "no LayerScale")
    need(is_identity(block.mlp.norm) and is_identity(model.norm_pre) and is_identity(model.fc_norm), "other norms")
    need(model.attn_pool is None and model.global_pool in ("token", "avg"), f"the pooling {model.global_pool!r}")
    need(type(block.mlp).__name__ in ("Mlp", "SwiGLU"), f"another MLP ({type(block.mlp).__name__})")
    return DinoV3Config(
        image=image,
        patch=model.patch_embed.patch_size[0],
        channels=model.in_chans,
        outputs=model.num_classes,
        width=model.embed_dim,
        depth=len(model.blocks),
        heads=block.attn.num_heads,
        hidden=block.mlp.fc2.in_features,
        registers=0 if model.reg_token is None else model.reg_token.shape[1],
        qv_bias=block.attn.q_bias is not None,
        swiglu=type(block.mlp).__name__ == "SwiGLU",
        pool=model.global_pool,
        theta=model.rope.temperature,
        eps=norm_eps(block.norm1),
    )


def beit(model: Any) -> BeitConfig:
    image, block = image_of(model), model.blocks[0]
    need(type(block.mlp).__name__ == "Mlp" and is_identity(block.mlp.norm), "another MLP")
    return BeitConfig(
        image=image,
        patch=model.patch_embed.patch_size[0],
        channels=model.in_chans,
        outputs=model.num_classes,
        width=model.embed_dim,
        depth=len(model.blocks),
        heads=block.attn.num_heads,
        hidden=block.mlp.fc1.out_features,
        qv_bias=block.attn.q_bias is not None,
        positions=model.pos_embed is not None,
        block_bias=block.attn.relative_position_bias_table is not None,
        shared_bias=model.rel_pos_bias is not None,
        layer_scale=block.gamma_1 is not None,
        norm=not is_identity(model.norm),
        fc_norm=not is_identity(model.fc_norm),
        pool=model.global_pool,
        eps=norm_eps(block.norm1),
    )


def stages(model: Any) -> dict[str, Any]:
    return {
        "patch": model.patch_embed.patch_size[0],
        "channels": model.in_chans,
        "width": model.embed_dim,
        "depths": tuple(len(stage.blocks) for stage in model.layers),
        "heads": tuple(stage.blocks[0].attn.num_heads for stage in model.layers),
        "eps": norm_eps(model.norm),
    }


def swin(model: Any) -> SwinConfig:
    image = image_of(model)
    window = model.layers[0].blocks[0].window_size[0]
    sides = [min(window, *stage.blocks[0].input_resolution) for stage in model.layers]
    need(
        all(stage.blocks[0].window_size[0] == side for stage, side in zip(model.layers, sides)),
        "window sizes that differ between stages",
    )
    return SwinConfig(image=image, classes=model.num_classes, window=window, **stages(model))


def swinv2(model: Any) -> SwinV2Config:
    image = image_of(model)
    sizes = [
        (stage.blocks[0].attn.pretrained_window_size[0], model._ref_window_sizes[i]) for i, stage in enumerate(model.layers)
    ]
    return SwinV2Config(
        image=image,
        outputs=model.num_classes,
        windows=tuple(window if isinstance(window, int) else window[0] for _, window in sizes),
        pretrained_windows=tuple(pretrained for pretrained, _ in sizes),
        **stages(model),
    )


READERS = {
    "VisionTransformer": ("vision", vision),
    "VisionTransformerDistilled": ("distilled", vision),
    "Eva": ("dinov3", dinov3),
    "Beit": ("beit", beit),
    "SwinTransformer": ("swin", swin),
    "SwinTransformerV2": ("swinv2", swinv2),
}


def text(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()


def row(name: str, model: Any) -> dict[str, str]:
    kind = type(model).__name__
    if kind not in READERS:
        return {"name": name, "family": "-", "options": f"another architecture ({kind})"}
    family, reader = READERS[kind]
    try:
        config = reader(model)
    except Unsupported as error:
        return {"name": name, "family": "-", "options": str(error)}
    cells, options = {"name": name, "family": family}, []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name in SIZES:
            cells[f.name] = text(value)
        elif value != f.default and not (f.name in ("channels", "outputs", "classes") and value in (3, 1000)):
            options.append(f"{f.name}={text(value)}")
    cells["depth"] = cells.pop("depths", cells.get("depth", ""))
    return {**cells, "options": " ".join(options)}


def main() -> None:
    import timm
    from timm.models import _registry as registry

    names = sorted(timm.list_models(module=MODULES))
    others = {name: registry._model_to_module[name] for name in timm.list_models() if name not in names}
    with (ASSETS / "timm_models.csv").open("w", newline="") as file:
        columns = ["name", "family", "image", "patch", "width", "depth", "heads", "hidden", "options"]
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        for name in names:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                writer.writerow(row(name, timm.create_model(name, device="meta")))
        for name, module in others.items():
            writer.writerow({"name": name, "family": "-", "options": f"another architecture ({module})"})
    with (ASSETS / "timm_tags.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["name", "tag", "image", "crop", "mode", "interpolation", "mean", "std"])
        for name in names:
            for tag, cfg in registry._model_default_cfgs[name].cfgs.items():
                mean, std = (" ".join(map(str, values)) for values in (cfg.mean, cfg.std))
                size = text(tuple(cfg.input_size[1:]))
                writer.writerow([name, tag, size, cfg.crop_pct, cfg.crop_mode, cfg.interpolation, mean, std])


if __name__ == "__main__":
    main()
