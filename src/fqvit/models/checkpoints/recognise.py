"""Find the family and the config of a checkpoint with timm's names, from its tensors and the settings that they do not show.

Tensors show widths, depth, patch size, registers, norms, and the heads of a Swin. They show neither the heads of a ViT
nor the activation, the pooling or the order of norms: those come from Hints. A setting that remains undecided is an error.
See also: hints.py, keymaps.py (the step before), resample.py (position embeddings for other image sizes).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.models.architectures import FamilyConfig
from fqvit.models.checkpoints.hints import DECIDED, Hints
from fqvit.models.checkpoints.keymaps import Canonical
from fqvit.models.config import BeitConfig, DinoV3Config, Pool, SwinV2Config, VisionConfig

Family = Literal["vision", "swin", "swinv2", "beit", "dinov3"]

# (key pattern, feature that fqvit does not define). The error names the first match, so more specific patterns come first.
UNSUPPORTED = [
    (r"^blocks_token_only\.", "class attention (CaiT)"),
    (r"\.(q_norm|k_norm|norm_q|norm_k)\.", "norms of q and k"),
    (r"^rope\.|freqs_cis|\.freqs$", "learned rotary positions"),
    (r"(^|\.)rel_pos\.|rel_pos_[hw]$", "relative positions of another kind"),
    (r"^pre_logits\.", "a pre-logits layer (ImageNet-21k head)"),
    (r"\.attn\.norm\.|\.mlp\.norm\.|ffn_ln|inner_attn_ln", "norms inside attention or MLP"),
    (r"^patch_embed\.backbone\.|^embeddings\.patch_embeddings\.backbone", "a convolutional stem"),
    (r"^patch_embed\.norm\.", "a norm after the patch embedding"),
    (r"^absolute_pos_embed$", "absolute positions in a Swin"),
    (r"\.attn\.(q_proj|k_proj|v_proj)\.", "separate projections of q, k and v (EVA-02)"),
    (r"\.attn\.gate\.", "gated attention"),
]


# LayerNorm's eps per layout, where it is not 1e-6.
EPS = {
    "hugging face vit": 1e-12,
    "hugging face beit": 1e-12,
    "hugging face dinov3": 1e-5,
    "original dinov3": 1e-5,
    "hugging face swinv2": 1e-5,
    "original swin": 1e-5,
}


def family_of(found: Canonical) -> Family:
    names = found.tensors
    if any(name.startswith("layers.0.blocks.") for name in names):
        return "swinv2" if any(".attn.logit_scale" in name or ".cpb_mlp." in name for name in names) else "swin"
    if any(re.search(r"\.gamma_[12]$", name) for name in names) and "reg_token" in names and "pos_embed" not in names:
        return "dinov3"
    if any(re.search(r"\.attn\.q_bias$|relative_position_bias_table$|\.gamma_[12]$", name) for name in names):
        return "beit"
    return "vision"


def check_supported(found: Canonical, label: str) -> None:
    """Raise FqvitError if a key belongs to a feature that fqvit does not define."""
    swin = any(name.startswith("layers.0.") for name in found.tensors)
    for pattern, feature in UNSUPPORTED:
        for name in found.tensors:
            if re.search(pattern, name) and not (swin and name.startswith("patch_embed.norm.")):
                raise FqvitError(
                    f"{label}: '{found.origin.get(name, name)}' means {feature}, for which fqvit has no definition of its own. "
                    "Build the model with its library and pass the module."
                )


class Reader:
    """Read sizes from tensors and all other settings from hints. undecided: names of the settings that neither contains"""

    def __init__(self, found: Canonical, hints: Hints, label: str) -> None:
        self.found, self.hints, self.label = found, hints, label
        self.tensors = found.tensors
        self.undecided: list[str] = []

    def has(self, name: str) -> bool:
        return name in self.tensors

    def any(self, pattern: str) -> bool:
        return any(re.search(pattern, name) for name in self.tensors)

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        value = self.tensors.get(name)
        if value is None:
            raise FqvitError(f"{self.label}: lacks '{name}'. The checkpoint is incomplete or of another model.")
        if value.ndim != axes or 0 in value.shape:
            old = self.found.origin.get(name, name)
            raise FqvitError(f"{self.label}: '{old}' has shape {list(value.shape)}, expected {axes} axes. The file is damaged.")
        return tuple(value.shape)

    def patch(self) -> tuple[int, int, int]:
        """Return width, channels and patch side."""
        width, channels, height, side = self.shape("patch_embed.proj.weight", 4)
        if height != side:
            raise FqvitError(f"{self.label}: patches of {height} x {side} pixels, expected a square.")
        if channels not in (1, 3):
            raise FqvitError(f"{self.label}: takes images of {channels} channels, expected 1 (grey) or 3 (RGB).")
        return width, channels, side

    def count(self, pattern: str) -> int:
        return max((int(match[1]) + 1 for name in self.tensors if (match := re.match(pattern, name))), default=0)

    def setting(self, name: str, value: object, placeholder: object) -> object:
        """Return the value of a setting. If it is None, record that it is undecided and return the placeholder."""
        if value is None:
            self.undecided.append(name)
            return placeholder
        return value

    def heads(self, width: int) -> int:
        heads = self.setting("heads", self.hints.heads, (1,))
        assert isinstance(heads, tuple)
        if len(heads) != 1 or heads[0] < 1 or width % heads[0]:
            shown = ", ".join(map(str, heads))
            raise FqvitError(f"{self.label}: {shown} heads for width {width}, expected one number that divides the width.")
        return int(heads[0])

    def outputs(self, name: str = "head") -> int:
        if not self.has(f"{name}.weight") and not self.has(f"{name}.bias"):
            return 0
        return self.shape(f"{name}.weight", 2)[0]

    def eps(self) -> float:
        """Return the eps from the hints, or else the default of the library that wrote the checkpoint."""
        if self.hints.eps is not None:
            return self.hints.eps
        if self.has("norm_pre.weight"):
            return 1e-5  # CLIP
        return EPS.get(self.found.layout, 1e-6)

    def finish(self, config: FamilyConfig) -> None:
        """Raise FqvitError if settings are undecided, or if sizes in the config file differ from those of the tensors."""
        if self.undecided:
            raise FqvitError(f"{self.label}: the weights do not show {listed(self.undecided)}. {remedy(self.undecided)}")
        for name, expected in self.hints.sizes.items():
            shown = getattr(config, name, None)
            if shown is not None and shown != expected:
                raise FqvitError(
                    f"{self.label}: {name} {shown} in the weights, expected {expected} as in {self.hints.source}. "
                    "The files belong to different models."
                )


def listed(names: Sequence[str]) -> str:
    """Return names as text: a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def remedy(undecided: Sequence[str]) -> str:
    """Return a sentence that says how to decide these settings. Only those of DECIDED are arguments of load_model."""
    arguments = f"{listed(undecided)} to load_model (commands have --heads, --pool and --activation), or "
    first = arguments if set(undecided) <= set(DECIDED) else ""
    return f"Pass {first}the architecture's name, a folder with config.json, or the module."


def infer(found: Canonical, hints: Hints, label: str) -> FamilyConfig:
    """Return the config of a checkpoint; its image size is that of the weights."""
    reader = Reader(found, hints, label)
    family = family_of(found)
    config: FamilyConfig
    if family == "swinv2":
        config = _swinv2(reader)
    elif family == "dinov3":
        config = _dinov3(reader)
    elif family == "beit":
        config = _beit(reader)
    else:
        config = _vision(reader)
    reader.finish(config)
    return config


def _vision(r: Reader) -> VisionConfig:
    width, channels, patch = r.patch()
    class_token = r.has("cls_token")
    registers = r.shape("reg_token", 3)[1] if r.has("reg_token") else 0
    hidden = r.shape("blocks.0.mlp.fc2.weight", 2)[1]
    qkv_bias, layer_scale = r.any(r"\.attn\.qkv\.bias$"), r.any(r"\.ls1\.gamma$")
    swiglu = is_packed_swiglu(r.tensors)
    if not qkv_bias and not layer_scale:  # timm's vit_base_patch16_rpn_224 has the same keys but another order of norms
        r.setting("qkv_bias", r.hints.qkv_bias, False)
    pool = _pool(r)
    outputs = r.outputs()
    prefix = int(class_token) + registers
    image, prefix_positions = _grid(r, patch, prefix)
    return VisionConfig(
        image=image,
        patch=patch,
        channels=channels,
        outputs=outputs,
        width=width,
        depth=r.count(r"blocks\.(\d+)\."),
        heads=r.heads(width),
        hidden=hidden,
        class_token=class_token,
        registers=registers,
        prefix_positions=prefix_positions,
        patch_bias=r.has("patch_embed.proj.bias"),
        norm_pre=r.has("norm_pre.weight"),
        qkv_bias=qkv_bias,
        layer_scale=layer_scale,
        swiglu=swiglu,
        activation="gelu" if swiglu else r.setting("activation", r.hints.activation, "gelu"),  # type: ignore[arg-type]
        norm=r.has("norm.weight"),
        fc_norm=r.has("fc_norm.weight"),
        pool=pool,
        head_bias=r.has("head.bias") or not outputs,
        eps=r.eps(),
    )


def is_packed_swiglu(tensors: dict[str, Tensor]) -> bool:
    """Return whether fc1 has twice as many rows as fc2 has columns: two halves, of which one is the gate."""
    first, second = tensors.get("blocks.0.mlp.fc1.weight"), tensors.get("blocks.0.mlp.fc2.weight")
    if first is None or second is None or first.ndim != 2 or second.ndim != 2:
        return False
    return first.shape[0] == 2 * second.shape[1]


def check_sizes(found: Canonical, hints: Hints, label: str) -> None:
    """Raise FqvitError if the sizes of a ViT or Swin in the config file differ from those of the tensors."""
    patch, hidden = found.tensors.get("patch_embed.proj.weight"), found.tensors.get("blocks.0.mlp.fc1.weight")
    shown: dict[str, int] = {}
    if patch is not None and patch.ndim == 4:
        shown |= {"width": patch.shape[0], "channels": patch.shape[1], "patch": patch.shape[2]}
    if hidden is not None and hidden.ndim == 2:
        shown["hidden"] = hidden.shape[0]
    for name, size in shown.items():
        if hints.sizes.get(name, size) != size:
            problem = f"{label}: {name} {size} in the weights, expected {hints.sizes[name]} as in {hints.source}"
            raise FqvitError(f"{problem}. The files belong to different models.")


def _pool(r: Reader) -> Pool:
    """Return the pooling. The tensors show only whether it is attention pooling."""
    shown: Pool | None = "map" if r.has("attn_pool.latent") else r.hints.pool
    if shown == "map" and r.hints.pool not in (None, "map"):
        raise FqvitError(f"{r.label}: has attention pooling, expected '{r.hints.pool}' as in {r.hints.source}.")
    pool: Pool = r.setting("pool", shown, "token")  # type: ignore[assignment]
    if pool in ("token", "token_avg") and not r.has("cls_token") and "pool" not in r.undecided:
        raise FqvitError(f"{r.label}: pool '{pool}' needs a class token, and there is none. Pass pool='avg'.")
    return pool


def _grid(r: Reader, patch: int, prefix: int) -> tuple[tuple[int, int], bool]:
    """Return the image size that the position embeddings fit, and whether they include the class token and the registers."""
    rows = r.shape("pos_embed", 3)[1]
    image = r.hints.image
    for before in (prefix, 0):
        if image is not None and (image[0] // patch) * (image[1] // patch) == rows - before:
            return image, before == prefix
    for before in (prefix, 0):
        side = math.isqrt(max(rows - before, 0))
        if side > 0 and side * side == rows - before:
            return (side * patch, side * patch), before == prefix
    raise FqvitError(f"{r.label}: {rows} positions with {prefix} prefix tokens, expected a square grid of patches.")


def _dinov3(r: Reader) -> DinoV3Config:
    width, channels, patch = r.patch()
    swiglu = r.any(r"\.mlp\.fc1_g\.")
    pool = r.setting("pool", r.hints.pool, "token")
    if pool not in ("token", "avg", "none"):
        raise FqvitError(f"{r.label}: pool '{pool}', expected 'token', 'avg' or 'none' for DINOv3.")
    if r.hints.activation not in (None, "gelu"):
        raise FqvitError(f"{r.label}: activation '{r.hints.activation}', expected 'gelu' for DINOv3. Pass the module itself.")
    if r.any(r"\.attn\.qkv\.bias$"):
        raise FqvitError(f"{r.label}: DINOv3 with a bias of k, expected biases of q and v only. Pass the module itself.")
    return DinoV3Config(
        image=r.hints.image or (224, 224),
        patch=patch,
        channels=channels,
        outputs=r.outputs(),
        width=width,
        depth=r.count(r"blocks\.(\d+)\."),
        heads=r.heads(width),
        hidden=r.shape("blocks.0.mlp.fc2.weight", 2)[1],
        registers=r.shape("reg_token", 3)[1],
        qv_bias=r.any(r"\.attn\.q_bias$"),
        swiglu=swiglu,
        pool=pool,
        theta=r.hints.theta if r.hints.theta is not None else 100.0,
        eps=r.eps(),
    )


def _beit(r: Reader) -> BeitConfig:
    width, channels, patch = r.patch()
    block_bias, shared_bias = r.has("blocks.0.attn.relative_position_bias_table"), r.any(r"^rel_pos_bias\.")
    if not r.any(r"\.attn\.q_bias$") and r.any(r"\.attn\.qkv\.bias$"):
        raise FqvitError(
            f"{r.label}: LayerScale and a qkv bias in timm's layout mean DeiT III or a model with rotary positions, and the "
            "weights do not show which. Pass the name of the architecture."
        )
    pool = r.setting("pool", r.hints.pool, "avg")
    if pool not in ("token", "avg", "none"):
        raise FqvitError(f"{r.label}: pool '{pool}', expected 'token', 'avg' or 'none' for BEiT.")
    if r.hints.activation not in (None, "gelu"):
        raise FqvitError(f"{r.label}: activation '{r.hints.activation}', expected 'gelu' for BEiT. Pass the module itself.")
    if block_bias:
        heads = r.shape("blocks.0.attn.relative_position_bias_table", 2)[1]
    else:
        heads = r.shape("rel_pos_bias.relative_position_bias_table", 2)[1] if shared_bias else r.heads(width)
    if r.hints.heads not in (None, (heads,)):
        expected = ", ".join(map(str, r.hints.heads or ()))
        raise FqvitError(f"{r.label}: {heads} heads in the bias tables, expected {expected} as in {r.hints.source}.")
    return BeitConfig(
        image=_beit_image(r, patch, block_bias, shared_bias),
        patch=patch,
        channels=channels,
        outputs=r.outputs(),
        width=width,
        depth=r.count(r"blocks\.(\d+)\."),
        heads=heads,
        hidden=r.shape("blocks.0.mlp.fc1.weight", 2)[0],
        qv_bias=r.any(r"\.attn\.q_bias$"),
        positions=r.has("pos_embed"),
        block_bias=block_bias,
        shared_bias=shared_bias,
        layer_scale=r.any(r"\.gamma_1$"),
        norm=r.has("norm.weight"),
        fc_norm=r.has("fc_norm.weight"),
        pool=pool,
        eps=r.eps(),
    )


def _beit_image(r: Reader, patch: int, block_bias: bool, shared_bias: bool) -> tuple[int, int]:
    """Return the image size, from the config, the bias tables or the position embeddings."""
    if r.hints.image is not None:
        return r.hints.image
    if not block_bias and not shared_bias:
        return _grid(r, patch, 1)[0]
    name = "blocks.0.attn.relative_position_bias_table" if block_bias else "rel_pos_bias.relative_position_bias_table"
    side = math.isqrt(max(r.shape(name, 2)[0] - 3, 0))
    if side % 2 == 0 or side * side != r.shape(name, 2)[0] - 3:
        raise FqvitError(f"{r.label}: bias tables of {r.shape(name, 2)[0]} rows, expected (2 * side - 1)^2 + 3. Pass size=.")
    return (side + 1) // 2 * patch, (side + 1) // 2 * patch


def _swinv2(r: Reader) -> SwinV2Config:
    width, channels, patch = r.patch()
    stages = r.count(r"layers\.(\d+)\.blocks\.")
    depths = tuple(r.count(rf"layers\.{i}\.blocks\.(\d+)\.") for i in range(stages))
    heads = tuple(r.shape(f"layers.{i}.blocks.0.attn.logit_scale", 3)[0] for i in range(stages))
    if r.hints.heads not in (None, heads):
        raise FqvitError(f"{r.label}: heads {heads} in the weights, expected {r.hints.heads} as in {r.hints.source}.")
    if r.hints.pool not in (None, "avg"):
        raise FqvitError(f"{r.label}: pool '{r.hints.pool}', expected 'avg' for a SwinV2. Pass the module itself.")
    if r.hints.activation not in (None, "gelu"):
        raise FqvitError(f"{r.label}: activation '{r.hints.activation}', expected 'gelu' for a SwinV2. Pass the module itself.")
    windows = r.setting("windows", r.hints.windows, (1,) * stages)
    assert isinstance(windows, tuple)
    pretrained = r.hints.pretrained_windows or (0,) * stages
    image = r.setting("the image size", r.hints.image, (patch, patch))
    config = SwinV2Config(
        image=image,  # type: ignore[arg-type]
        patch=patch,
        channels=channels,
        outputs=r.outputs("head.fc"),
        width=width,
        depths=depths,
        heads=heads,
        windows=windows * stages if len(windows) == 1 else windows,
        pretrained_windows=tuple(pretrained[i] if i < len(pretrained) else 0 for i in range(stages)),
        hidden_ratio=r.shape("layers.0.blocks.0.mlp.fc1.weight", 2)[0] / width,
        qv_bias=r.any(r"\.attn\.q_bias$"),
        eps=r.eps(),
    )
    if not r.undecided:
        _check_windows(config, r.label)
    return config


def _check_windows(c: SwinV2Config, label: str) -> None:
    """Raise FqvitError if windows do not tile the grid: libraries then differ in where they pad."""
    for stage, window in enumerate(c.windows):
        grid = c.grid(stage)
        side = min(window, *grid)
        if any(length % side for length in grid) or (side < window and grid[0] != grid[1]):
            shown = f"{grid[0]} x {grid[1]} tokens in windows of {window}"
            raise FqvitError(
                f"{label}: stage {stage} has {shown}, expected a multiple of the window. "
                "Choose another image size, or pass the module."
            )
