"""Decide the settings that tensors do not show: arguments and config files first, then the name of an architecture.

The name is used only if the tensors have the structure of that architecture. Otherwise the weights belong to another
architecture, whose number of heads, pooling and activation are unknown.
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from fqvit.errors import FqvitError
from fqvit.models import architectures, zoo
from fqvit.models.architectures import TimmConfig
from fqvit.models.checkpoints.hints import Hints
from fqvit.models.checkpoints.keymaps import Canonical
from fqvit.models.checkpoints.recognise import Family, family_of, is_packed_swiglu, listed, remedy
from fqvit.models.checkpoints.timm_config import hints_of
from fqvit.models.config import BeitConfig, DinoV3Config, Pool, SwinConfig, SwinV2Config, VisionConfig, ViTConfig

FAMILIES: dict[type, Family] = {
    VisionConfig: "vision",
    SwinConfig: "swin",
    SwinV2Config: "swinv2",
    BeitConfig: "beit",
    DinoV3Config: "dinov3",
}
# Settings that the tensors of a ViT do not show, by their names in Hints and in load_model.
UNDECIDED = ("heads", "pool", "activation")


def structure_of(found: Canonical) -> dict[str, bool | int]:
    """Return which parts a ViT has, judged by the names of its tensors."""
    t = found.tensors
    registers = t.get("reg_token")
    return {
        "class_token": "cls_token" in t,
        "distillation token": "dist_token" in t,
        "registers": registers.shape[1] if registers is not None and registers.ndim == 3 else 0,
        "norm before the blocks": "norm_pre.weight" in t,
        "qkv_bias": any(name.endswith(".attn.qkv.bias") for name in t),
        "LayerScale": any(name.endswith(".ls1.gamma") for name in t),
        "norm": "norm.weight" in t,
        "fc_norm": "fc_norm.weight" in t,
        "attention pooling": "attn_pool.latent" in t,
    }


def structure(config: VisionConfig, distilled: bool) -> dict[str, bool | int]:
    """Return which of the parts in `structure_of` a config has."""
    return {
        "class_token": config.class_token,
        "distillation token": distilled,
        "registers": config.registers,
        "norm before the blocks": config.norm_pre,
        "qkv_bias": config.qkv_bias,
        "LayerScale": config.layer_scale,
        "norm": config.norm,
        "fc_norm": config.fc_norm,
        "attention pooling": config.pool == "map",
    }


def as_vision(c: ViTConfig) -> VisionConfig:
    """Convert the config of a ViT classifier to that of the generic vision transformer."""
    sizes = (c.image, c.patch, c.channels, c.classes, c.width, c.depth, c.heads, c.hidden)
    pool: Pool = "token" if c.pool == "token" else "avg"
    return VisionConfig(*sizes, class_token=c.prefix > 0, norm=c.norm_first, fc_norm=c.norm_last, pool=pool, eps=c.eps)


def settle(found: Canonical, hints: Hints, name: str | None, label: str) -> tuple[Hints, tuple[str, ...]]:
    """Return the hints, completed with settings of the named architecture, and one sentence per setting taken from it.

    Raises FqvitError if the settings of a ViT stay undecided. Those of other families are checked by recognise.infer.
    """
    if found.heads is not None and hints.heads is None:
        hints = replace(hints, heads=(found.heads,))
    family, given = family_of(found), hints
    named = _named(name)
    if named is not None and FAMILIES[type(named[0])] != family:
        if {FAMILIES[type(named[0])], family} == {"swin", "vision"}:
            return hints, ()  # reported by fold.py, which names a model of the right family
        raise FqvitError(
            f"{name}: {label} has the tensors of family '{family}', expected '{FAMILIES[type(named[0])]}'. "
            "Pass the name of its architecture."
        )
    if named is not None:
        config, distilled = named
        difference = _difference(found, config, distilled) if isinstance(config, VisionConfig) else None
        if difference is None:
            hints = _completed(hints, config, name or "", found)
        elif hints.exact or any(getattr(hints, setting) is None for setting in UNDECIDED):
            raise FqvitError(
                f"{name}: {difference} in {label}. The weights belong to another architecture, whose heads, pooling and "
                "activation they do not show. Pass its name, or heads, pool and activation, or the module itself."
            )
    if family == "vision":
        _check_layer_scale(found, name, label)
        _check_decided(found, hints, name, label)
    taken = [setting for setting in UNDECIDED if getattr(given, setting) is None and getattr(hints, setting) is not None]
    return hints, tuple(f"{setting}: {_shown(getattr(hints, setting))}, from the name {name}" for setting in taken)


def _named(name: str | None) -> tuple[TimmConfig, bool] | None:
    """Return the config of the named architecture, and whether that architecture is distilled."""
    if name is None:
        return None
    known, row = architectures.lookup(name), zoo.lookup(name)
    if known is not None:
        return known.config, known.distilled
    if row is None:
        return None
    if isinstance(row.config, SwinConfig):
        return row.config, False
    return as_vision(row.config), row.config.prefix == 2


def _difference(found: Canonical, config: VisionConfig, distilled: bool) -> str | None:
    """Describe the first part in which the tensors differ from the named architecture; None if they do not differ."""
    want, got = structure(config, distilled), structure_of(found)
    if got["distillation token"] != want["distillation token"]:
        return None  # reported by fold.py, which names the model with or without distillation
    for part, value in want.items():
        if got[part] != value and not (part == "norm" and not got[part]):  # a missing norm is reported later, as missing keys
            return f"{part} is {got[part]}, expected {value},"
    return None


def _completed(hints: Hints, config: TimmConfig, name: str, found: Canonical) -> Hints:
    """Return the hints, with unknown settings taken from the named architecture."""
    named = hints_of(config, f"the name {name}", name)
    if isinstance(config, SwinConfig):
        named = replace(named, heads=None, windows=None, image=None)  # shown by the tensors, or chosen by fold.py
    if found.layout.startswith("hugging face"):
        # Activation and eps of such a checkpoint are in its config.json. Without that file, both are unknown.
        named = replace(named, activation=None, eps=None)
    keys = ("heads", "pool", "activation", "qkv_bias", "eps", "image", "theta", "windows", "pretrained_windows")
    filled = {key: getattr(named, key) for key in keys if getattr(hints, key) is None}
    return replace(hints, **filled, source=hints.source or named.source)


def _check_layer_scale(found: Canonical, name: str | None, label: str) -> None:
    """Raise FqvitError for gamma_1 together with a qkv bias, unless the name is that of a DeiT III."""
    key = next(
        (new for new, old in found.origin.items() if old.endswith((".gamma_1", "ls_1.gamma")) and new.endswith(".ls1.gamma")),
        None,
    )
    if key is None or found.layout == "openai clip" or (name or "").startswith("deit3"):
        return
    raise FqvitError(
        f"{label}: '{found.origin[key]}' is the LayerScale of DeiT III or of a model with rotary positions, and the weights "
        "do not show which. Pass the name of the architecture, or the module itself."
    )


def _check_decided(found: Canonical, hints: Hints, name: str | None, label: str) -> None:
    """Raise FqvitError if settings of a ViT are undecided; the message lists all of them."""
    shown = {"pool"} if "attn_pool.latent" in found.tensors else set()
    if found.heads is not None:
        shown.add("heads")
    if is_packed_swiglu(found.tensors):
        shown.add("activation")
    missing = [setting for setting in UNDECIDED if getattr(hints, setting) is None and setting not in shown]
    parts = structure_of(found)
    if not parts["qkv_bias"] and not parts["LayerScale"] and hints.qkv_bias is None:
        missing.append("qkv_bias")  # timm's vit_base_patch16_rpn_224 has the same keys but another order of norms
    if not missing:
        return
    problem = f"{label}: the weights do not show {listed(missing)}"
    if name is not None and _named(name) is None:
        near = difflib.get_close_matches(name, (*zoo.BY_NAME, *architectures.names()), 2, 0.6)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        problem += f", and {name} is not a name that fqvit knows{hint}"
    raise FqvitError(f"{problem}. {remedy(missing)}")


def _shown(value: object) -> str:
    return str(value[0]) if isinstance(value, tuple) and len(value) == 1 else str(value)
