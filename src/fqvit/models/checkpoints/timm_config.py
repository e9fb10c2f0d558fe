"""Read the config.json of timm: architecture, model_args and pretrained_cfg. Every field is used, irrelevant, or rejected.

The architecture determines the settings that the tensors do not show; arguments in model_args override them.
See also: architectures.py (timm's names), transformers_config.py, live.py (pretrained_cfg of modules in memory).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fqvit.errors import FqvitError
from fqvit.models import architectures
from fqvit.models.architectures import TimmConfig
from fqvit.models.checkpoints.hints import Hints, words
from fqvit.models.checkpoints.preprocessing import finite, interpolation_of
from fqvit.models.checkpoints.transformers_config import pair
from fqvit.models.config import Activation, BeitConfig, DinoV3Config, Pool, SwinConfig, SwinV2Config, VisionConfig
from fqvit.models.transform import Transform

TOP = words(
    """
    architecture num_classes num_features global_pool model_args pretrained_cfg label_names label_descriptions
    """
)
PRETRAINED = words(
    """
    architecture classifier crop_mode crop_pct custom_load description file first_conv fixed_input_size hf_hub_filename
    hf_hub_id input_size interpolation label_descriptions label_names label_offset license mean min_input_size module
    notes num_classes origin_url paper_ids paper_name pool_size source state_dict std tag test_crop_pct test_input_size
    test_pool_size url
    """
)
POOLS: dict[str, Pool] = {"token": "token", "avg": "avg", "map": "map", "": "none"}
ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}

# Arguments whose values can be seen from the tensors, or that matter only during training.
SHOWN = words(
    """
    class_token reg_tokens init_values no_embed_class fc_norm qkv_bias embed_dim depth depths mlp_ratio patch_size
    in_chans num_classes pre_norm final_norm num_reg_tokens use_fc_norm use_abs_pos_emb use_rel_pos_bias
    use_shared_rel_pos_bias drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate drop_path_rate
    weight_init fix_init dynamic_img_size strict_img_size head_init_scale swiglu_mlp
    """
)
# Arguments that change the structure of the architecture.
CHANGES = words(
    "class_token reg_tokens init_values no_embed_class fc_norm qkv_bias pre_norm final_norm "
    "embed_dim depth depths num_heads mlp_ratio"
)
# Arguments that are accepted with these values only.
FIXED: dict[str, tuple[object, ...]] = {
    "norm_layer": ("layernorm",),
    "dynamic_img_pad": (False,),
    "qk_norm": (False,),
    "scale_attn_norm": (False,),
    "scale_mlp_norm": (False,),
    "pool_include_prefix": (False,),
    "pos_embed": ("learn",),
    "always_partition": (False,),
    "proj_bias": (True,),
}


def is_timm(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("architecture"), str)


def read_config(config: Mapping[str, Any], label: str) -> Hints:
    """Return the settings of a config; raises FqvitError for fields and values that are not understood."""
    for name, value in config.items():
        if name not in TOP and value is not None:
            raise FqvitError(f"{label}: config.json: {name} {str(value)[:40]!r} is not understood. Pass the module itself.")
    name, arguments = config["architecture"], config.get("model_args") or {}
    why = architectures.why_not(name)
    if why is not None:
        raise FqvitError(
            f"{label}: architecture '{name}' has {why}, for which fqvit has no definition of its own. "
            "Build it with timm and pass the module."
        )
    if not isinstance(arguments, Mapping):
        raise FqvitError(
            f"{label}: config.json: model_args is a {type(arguments).__name__}, expected an object. The file is damaged."
        )
    known = architectures.lookup(name)
    hints = Hints(architecture=name, source=f"config.json (architecture {name})")
    if known is not None:
        hints = hints_of(known.config, hints.source, name)
    hints = _override(hints, arguments, label)
    if isinstance(config.get("global_pool"), str) and (
        known is None or not isinstance(known.config, SwinConfig | SwinV2Config)
    ):
        hints = replace(hints, pool=_choice(POOLS, config["global_pool"], "global_pool", label))
    elif config.get("global_pool") not in (None, "avg"):
        raise FqvitError(f"{label}: global_pool '{config['global_pool']}', expected 'avg' for a Swin. Pass the module itself.")
    names = config.get("label_names")
    usual = known is not None and hints.pool == getattr(known.config, "pool", hints.pool)
    return replace(
        hints,
        exact=usual and not CHANGES & set(arguments),
        labels=tuple(map(str, names)) if isinstance(names, list) else None,
        transform=read_pretrained(config.get("pretrained_cfg") or {}, label, "config.json"),
        sizes={},
    )


def hints_of(config: TimmConfig, source: str, name: str) -> Hints:
    """Return the settings of an architecture that its tensors do not show."""
    hints = Hints(eps=config.eps, image=config.image, architecture=name, source=source)
    if isinstance(config, SwinConfig):
        return replace(hints, heads=config.heads, windows=(config.window,), pool="avg", activation="gelu")
    if isinstance(config, SwinV2Config):
        windows, pretrained = config.windows, config.pretrained_windows
        return replace(hints, heads=config.heads, windows=windows, pretrained_windows=pretrained, pool="avg", activation="gelu")
    hints = replace(hints, heads=(config.heads,), pool=config.pool)
    if isinstance(config, VisionConfig):
        return replace(hints, activation=config.activation, qkv_bias=config.qkv_bias)
    if isinstance(config, DinoV3Config):
        return replace(hints, theta=config.theta)
    assert isinstance(config, BeitConfig)
    return replace(hints, activation="gelu")


def read_pretrained(cfg: Mapping[str, Any], label: str, source: str) -> Transform:
    """Return the preprocessing of a pretrained_cfg."""
    if not isinstance(cfg, Mapping):
        raise FqvitError(
            f"{label}: {source}: pretrained_cfg is a {type(cfg).__name__}, expected an object. The file is damaged."
        )
    for name, value in cfg.items():
        if name not in PRETRAINED and value is not None:
            raise FqvitError(f"{label}: {source}: pretrained_cfg has {name} {str(value)[:40]!r}, which is not understood.")
    crop, mode, size = cfg.get("crop_pct"), cfg.get("crop_mode") or "center", cfg.get("input_size")
    if crop is not None and not (isinstance(crop, int | float) and 0.1 <= crop <= 1):
        raise FqvitError(f"{label}: {source}: crop_pct {crop!r}, expected a number from 0.1 to 1.")
    if mode not in ("center", "squash"):
        raise FqvitError(f"{label}: {source}: crop_mode '{mode}', expected 'center' or 'squash'.")
    if size is not None and (not isinstance(size, list | tuple) or len(size) != 3):
        raise FqvitError(f"{label}: {source}: input_size {size!r}, expected channels, height and width. The file is damaged.")
    interpolation = cfg.get("interpolation")
    return Transform(
        image=None if size is None else pair(list(size[1:]), "input_size", label, source),
        crop=None if crop is None else float(crop),
        squash=None if crop is None else mode == "squash",
        interpolation=None if interpolation is None else interpolation_of(interpolation, label),
        mean=finite(cfg.get("mean"), "mean", label, source),
        std=finite(cfg.get("std"), "std", label, source),
        source=f"{source} (pretrained_cfg)",
    )


def _override(hints: Hints, arguments: Mapping[str, Any], label: str) -> Hints:
    for name, value in arguments.items():
        if name == "act_layer":
            hints = replace(hints, activation=_choice(ACTIVATIONS, value, name, label))
        elif name == "global_pool":
            hints = replace(hints, pool=_choice(POOLS, value, name, label))
        elif name == "img_size":
            hints = replace(hints, image=pair(value, name, label, "config.json: model_args"))
        elif name == "num_heads":
            hints = replace(hints, heads=tuple(value) if isinstance(value, list) else (int(value),))
        elif name == "window_size" and isinstance(value, int):
            hints = replace(hints, windows=(value,))
        elif name == "qkv_bias" and isinstance(value, bool):
            hints = replace(hints, qkv_bias=value)
        elif name in FIXED and value in FIXED[name]:
            pass
        elif name in FIXED or name not in SHOWN:
            problem = f"{label}: model_args has {name} {str(value)[:40]!r}, which is not supported"
            raise FqvitError(f"{problem}. Build the model with timm and pass the module.")
    return hints


def _choice(table: Mapping[str, Any], value: object, name: str, label: str) -> Any:
    if value not in table:
        known = ", ".join(repr(key) for key in table)
        raise FqvitError(f"{label}: config.json: {name} {str(value)!r}, expected one of {known}. Pass the module itself.")
    return table[value]  # type: ignore[index]
