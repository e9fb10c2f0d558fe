"""Convert a checkpoint with timm's names to a config and a state dict of our modules.

For ViT, DeiT and Swin classifiers, which are built from leaf modules. Equivalent forms are folded (LayerScale, the distilled
head, position embeddings without a class token, a missing qkv bias). See also: keymaps.py and settle.py (the steps before),
recognise.py (the other families), ../load.py (the step after).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import torch
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.models.checkpoints.hints import Hints as Hints
from fqvit.models.checkpoints.keymaps import Canonical
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.zoo import Row, likely

MAX_SIDE = 8192  # largest height and width of images, as in Preprocess


def fit(found: Canonical, row: Row, hints: Hints, label: str) -> tuple[ViTConfig | SwinConfig, dict[str, Tensor]]:
    """Return the row's config, adapted to the checkpoint, and the state dict for its module."""
    swin = is_swin(found)
    if swin != isinstance(row.config, SwinConfig):
        series, sizes = sizes_of(found)
        raise FqvitError(f"{row.name}: {label} is a {'Swin' if swin else 'ViT'}. {_advice(likely(series, *sizes))}")
    state = weights_of(found, label)
    config: ViTConfig | SwinConfig
    if isinstance(row.config, SwinConfig):
        config = _swin(found, state, row, row.config, hints, label)
    else:
        config = _vit(found, state, row, row.config, hints, label)
    if not all(1 <= side <= MAX_SIDE for side in config.image):
        shown = " x ".join(map(str, config.image))
        raise FqvitError(f"{label}: images of {shown} pixels, expected sides of 1 to {MAX_SIDE}. The checkpoint is damaged.")
    return config, state


def weights_of(found: Canonical, label: str) -> dict[str, Tensor]:
    """Return the tensors as float32 on the CPU; raises FqvitError for empty ones, NaN and infinity."""
    for name, tensor in found.tensors.items():
        # Empty tensors are rejected: a shape such as [10^12, 0] takes no memory, but a model of that size would.
        if tensor.numel() == 0:
            key = found.origin.get(name, name)
            raise FqvitError(f"{label}: '{key}' is empty: {list(tensor.shape)}. The checkpoint is damaged.")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            key = found.origin.get(name, name)
            raise FqvitError(f"{label}: '{key}' contains NaN or infinity, expected finite weights. Use another checkpoint.")
    return {name: tensor.detach().to("cpu", torch.float32) for name, tensor in found.tensors.items()}


def is_swin(found: Canonical) -> bool:
    return any(name.startswith("layers.0.blocks.") for name in found.tensors)


def sizes_of(found: Canonical) -> tuple[str, tuple[int, tuple[int, ...], int]]:
    """Return the series and (width, depths, number of prefix tokens), from the names and shapes of tensors."""
    patch = found.tensors.get("patch_embed.proj.weight")
    width = patch.shape[0] if patch is not None and patch.ndim > 0 else 0
    if is_swin(found):
        depths = [0] * _count(found.tensors, r"layers\.(\d+)\.")
        for name in found.tensors:
            if match := re.match(r"layers\.(\d+)\.blocks\.(\d+)\.", name):
                stage, block = int(match[1]), int(match[2])
                depths[stage] = max(depths[stage], block + 1)
        return "swin", (width, tuple(depths), 1)
    prefix = 2 if "dist_token" in found.tensors else 1
    return "deit" if prefix == 2 else "vit", (width, (_count(found.tensors, r"blocks\.(\d+)\."),), prefix)


def heads_of(found: Canonical, hints: Hints, stages: int) -> tuple[int, ...]:
    """Return the numbers of heads: for a Swin, one per stage, from its bias tables; for a ViT, from the hints or the layout."""
    if is_swin(found):
        tables = [found.tensors.get(f"layers.{i}.blocks.0.attn.relative_position_bias_table") for i in range(stages)]
        return tuple(table.shape[1] if table is not None and table.ndim == 2 else 1 for table in tables)
    return hints.heads or (found.heads or 1,)


def _vit(found: Canonical, state: dict[str, Tensor], row: Row, c: ViTConfig, hints: Hints, label: str) -> ViTConfig:
    _, (width, depths, prefix) = sizes_of(found)
    distilled = prefix == 2
    # Check names before sizes: apart from its extra keys, a distilled model has the same shapes as the plain one of its size.
    if distilled != (c.prefix == 2):
        key = "dist_token" if distilled else "head_dist.weight"
        problem = f"unexpected key '{found.origin.get(key, key)}'" if distilled else f"missing key '{key}'"
        raise FqvitError(f"{row.name}: {problem} in {label}. {_advice(likely('deit', width, depths, prefix))}")
    _same_sizes(row, (c.width, (c.depth,)), (width, depths), prefix, label)
    _same_heads(row, (c.heads,), hints.heads or ((found.heads,) if found.heads else None), label)

    if "cls_token" not in state:
        prefix = 0
        state["cls_token"] = torch.zeros(1, 0, width)
    patch, channels = _patch_shape(state, label)
    mean = "fc_norm.weight" in state or prefix == 0
    if hints.pool is not None:
        if hints.pool not in ("token", "avg") or (hints.pool == "token" and prefix == 0) or (hints.pool == "avg" and distilled):
            raise FqvitError(f"{label}: pool '{hints.pool}', expected '{'avg' if mean else 'token'}' for these weights.")
        mean = hints.pool == "avg"
    _fill_qkv_bias(state)
    _fold_layer_scale(state, label)
    head = _head(state, "head", label)
    if distilled:
        _fold_distilled(found, state, width, label)
    return replace(
        c,
        image=_vit_image(state, patch, prefix, width, hints, label),
        patch=patch,
        channels=channels,
        classes=head.shape[0],
        hidden=_rows(state, "blocks.0.mlp.fc1.weight", c.hidden),
        prefix=prefix,
        pool="mean" if mean else "token",
        norm_first="norm.weight" in state or "fc_norm.weight" not in state,
        norm_last="fc_norm.weight" in state,
        eps=hints.eps if hints.eps is not None else _default_eps(found, c),
    )


def _default_eps(found: Canonical, c: ViTConfig) -> float:
    """Return the eps to use without a config.json: 1e-12 for ViT and DeiT in Hugging Face's layout, otherwise the row's."""
    return 1e-12 if found.layout == "hugging face vit" else c.eps


def _swin(found: Canonical, state: dict[str, Tensor], row: Row, c: SwinConfig, hints: Hints, label: str) -> SwinConfig:
    _, (width, depths, _) = sizes_of(found)
    _same_sizes(row, (c.width, c.depths), (width, depths), 1, label)
    tables = [state.get(f"layers.{i}.blocks.0.attn.relative_position_bias_table") for i in range(len(c.depths))]
    if all(table is not None and table.ndim == 2 for table in tables):
        _same_heads(row, c.heads, tuple(table.shape[1] for table in tables if table is not None), label)
    if hints.eps is not None and hints.eps != c.eps:
        raise FqvitError(f"{label}: layer_norm_eps {hints.eps}, expected {c.eps} for a Swin. Choose another model.")
    if hints.pool not in (None, "avg"):
        raise FqvitError(f"{label}: global_pool '{hints.pool}', expected 'avg' for a Swin. Choose another model.")
    patch, channels = _patch_shape(state, label)
    window = c.window
    if tables[0] is not None and tables[0].ndim == 2:
        side = math.isqrt(tables[0].shape[0])
        if side * side != tables[0].shape[0] or side % 2 == 0:
            rows = tables[0].shape[0]
            raise FqvitError(f"{label}: bias tables have {rows} rows, expected (2 * window - 1)^2 for a square window.")
        window = (side + 1) // 2
    _fill_qkv_bias(state)
    return replace(
        c,
        image=_swin_image(found, c, patch, window, hints),
        patch=patch,
        channels=channels,
        classes=_head(state, "head.fc", label).shape[0] if "head.fc.weight" in state or "head.fc.bias" in state else 0,
        window=window,
        hidden_ratio=max(_rows(state, "layers.0.blocks.0.mlp.fc1.weight", c.hidden_ratio * width) // width, 1),
    )


def _vit_image(state: dict[str, Tensor], patch: int, prefix: int, width: int, hints: Hints, label: str) -> tuple[int, int]:
    """Compute the image size from the number of position embeddings: a square grid unless config.json says otherwise.

    If only patches have position embeddings, add zeros for the prefix tokens to state["pos_embed"].
    """
    positions = state.get("pos_embed")
    if positions is None or positions.ndim != 3:
        problem = "missing key 'pos_embed'" if positions is None else f"'pos_embed' has shape {list(positions.shape)}"
        raise FqvitError(f"{label}: {problem}, expected [1, tokens, {width}]. Only learned position embeddings are supported.")
    tokens = positions.shape[1]
    if hints.image is not None and (hints.image[0] // patch) * (hints.image[1] // patch) == tokens - prefix:
        return hints.image
    for rows_before in (prefix, 0):
        side = math.isqrt(max(tokens - rows_before, 0))
        if side > 0 and side * side == tokens - rows_before:
            if rows_before < prefix:  # positions exist for patches only: the prefix tokens get zeros
                zeros = positions.new_zeros(positions.shape[0], prefix, positions.shape[2])
                state["pos_embed"] = torch.cat([zeros, positions], 1)
            return side * patch, side * patch
    raise FqvitError(f"{label}: {tokens} positions with {prefix} prefix tokens, expected a square grid of patches.")


def _swin_image(found: Canonical, c: SwinConfig, patch: int, window: int, hints: Hints) -> tuple[int, int]:
    """Return the image size from config.json, the number of windows, or the row. No parameter's shape depends on it."""
    if hints.image is not None:
        return hints.image
    if found.windows is not None and math.isqrt(found.windows) ** 2 == found.windows:
        side = math.isqrt(found.windows) * window * patch
        return side, side
    # For another window or patch size, keep the number of windows per side, as timm does (224 pixels: window 7; 384: 12).
    height, width = (side * window * patch // (c.window * c.patch) for side in c.image)
    return height, width


def _same_sizes(row: Row, want: tuple[int, tuple[int, ...]], got: tuple[int, tuple[int, ...]], prefix: int, label: str) -> None:
    if want == got:
        return
    other = likely(row.series, *got, prefix)
    # A checkpoint of the same width with fewer blocks is incomplete; a later check names its missing keys.
    if other is None and want[0] == got[0] and all(g <= w for g, w in zip(got[1], want[1], strict=False)):
        return
    problem = f"width {got[0]} and depth {_shown(got[1])} in {label}, expected {want[0]} and {_shown(want[1])}"
    raise FqvitError(f"{row.name}: {problem}. {_advice(other)}")


def _same_heads(row: Row, want: tuple[int, ...], got: tuple[int, ...] | None, label: str) -> None:
    if got is not None and want != got:
        raise FqvitError(f"{row.name}: {_shown(got)} heads in {label}, expected {_shown(want)}. Use another checkpoint.")


def _patch_shape(state: dict[str, Tensor], label: str) -> tuple[int, int]:
    """Return the patch side and the number of channels, from the weight [width, channels, patch, patch]."""
    weight = state["patch_embed.proj.weight"]
    if weight.ndim != 4 or weight.shape[2] != weight.shape[3]:
        raise FqvitError(f"{label}: patch embedding of shape {list(weight.shape)}, expected [width, channels, patch, patch].")
    if weight.shape[1] not in (1, 3):
        raise FqvitError(f"{label}: takes images of {weight.shape[1]} channels, expected 1 (grey) or 3 (RGB).")
    return weight.shape[2], weight.shape[1]


def _head(state: dict[str, Tensor], name: str, label: str) -> Tensor:
    weight = state.get(f"{name}.weight")
    if weight is None or weight.ndim != 2 or weight.shape[0] == 0:
        raise FqvitError(
            f"{label}: missing key '{name}.weight' (a feature extractor without a classifier). "
            "Use a checkpoint fine-tuned for classification."
        )
    return weight


def _fill_qkv_bias(state: dict[str, Tensor]) -> None:
    """Add zero biases if no block has a qkv bias. If only some blocks lack it, the file is damaged, and nothing is added."""
    if any(name.endswith("attn.qkv.bias") for name in state):
        return
    for name in [name for name, value in state.items() if name.endswith("attn.qkv.weight") and value.ndim == 2]:
        state[name.removesuffix("weight") + "bias"] = torch.zeros(state[name].shape[0])


def _fold_layer_scale(state: dict[str, Tensor], label: str) -> None:
    """Fold LayerScale into the layer before it: x + gamma * (W @ y + b) = x + (gamma * W) @ y + gamma * b"""
    for name in [name for name in state if re.search(r"\.ls[12]\.gamma$", name)]:
        gamma, block = state.pop(name), name.rsplit(".", 2)[0]
        target = f"{block}.attn.proj" if ".ls1." in name else f"{block}.mlp.fc2"
        for part in ("weight", "bias"):
            value = state.get(f"{target}.{part}")
            if value is not None and value.ndim > 0:  # a 0-d tensor is reported by mismatch()
                if value.shape[0] != gamma.numel():
                    raise FqvitError(f"{label}: '{name}' has {gamma.numel()} values, expected {value.shape[0]}.")
                state[f"{target}.{part}"] = value * gamma.flatten().view(-1, *[1] * (value.ndim - 1))


def _fold_distilled(found: Canonical, state: dict[str, Tensor], width: int, label: str) -> None:
    """Fold the two heads into one: (W @ c + b + W' @ d + b') / 2 = [W / 2, W' / 2] @ [c, d] + (b + b') / 2

    c and d are the class token and the distillation token after the last norm.
    Hugging Face's DeiTForImageClassification has only one head: its logits are W @ c + b, and d is used only in attention.
    """
    parts = ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")
    one_head = found.origin["head.weight"] == "classifier.weight"
    absent = [key for key in (*parts[: 2 if one_head else 4], "cls_token") if key not in state]
    if absent:
        raise FqvitError(f"{label}: lacks {_named(absent)}. The checkpoint is incomplete or of another model.")
    tokens = (state["cls_token"], state.pop("dist_token"))
    if any(token.numel() != width for token in tokens):
        shapes = " and ".join(str(list(token.shape)) for token in tokens)
        raise FqvitError(f"{label}: class and distillation tokens of shapes {shapes}, expected [1, 1, {width}].")
    state["cls_token"] = torch.cat([token.reshape(1, 1, width) for token in tokens], 1)
    weight, bias = state["head.weight"], state["head.bias"]
    if one_head:
        state["head.weight"] = torch.cat([weight, torch.zeros_like(weight)], 1)
        return
    other, other_bias = state.pop("head_dist.weight"), state.pop("head_dist.bias")
    if (other.shape, other_bias.shape) != (weight.shape, bias.shape):
        raise FqvitError(f"{label}: 'head_dist.weight' is {list(other.shape)}, expected {list(weight.shape)} like the head.")
    state["head.weight"] = torch.cat([weight, other], 1) / 2
    state["head.bias"] = (bias + other_bias) / 2


def mismatch(
    name: str, label: str, want: dict[str, Tensor], state: dict[str, Tensor], origin: dict[str, str]
) -> FqvitError | None:
    """Return an error that names missing keys, unexpected keys or wrong shapes of a state dict; None if it matches."""
    missing = [key for key in want if key not in state]
    unexpected = [origin.get(key, key) for key in state if key not in want]
    shapes = [key for key in want if key in state and want[key].shape != state[key].shape]
    if missing:
        return FqvitError(f"{name}: {label} lacks {_named(missing)}. The checkpoint is incomplete or of another model.")
    if unexpected:
        return FqvitError(f"{name}: {label} has {_named(unexpected, 'unexpected ')}. The checkpoint belongs to another model.")
    if shapes:
        key = shapes[0]
        more = f" ({len(shapes)} tensors differ)" if len(shapes) > 1 else ""
        problem = f"'{origin.get(key, key)}' is {list(state[key].shape)}, expected {list(want[key].shape)}{more}"
        return FqvitError(f"{name}: in {label} {problem}. The checkpoint belongs to another model.")
    return None


def _named(keys: list[str], adjective: str = "") -> str:
    few = ", ".join(f"'{key}'" for key in keys[:3])
    return f"{len(keys)} {adjective}key{'s' if len(keys) > 1 else ''}: {few}{', ...' if len(keys) > 3 else ''}"


def _advice(row: Row | None) -> str:
    if row is None:
        return "No known model has these sizes; `fqvit models` lists the known ones."
    short = row.aliases[0] if row.aliases else row.name
    return f"This looks like {short} or another model of width {row.config.width}. Pass the name of the model it belongs to."


def _rows(state: dict[str, Tensor], key: str, otherwise: int) -> int:
    value = state.get(key)
    return value.shape[0] if value is not None and value.ndim == 2 else otherwise


def _count(tensors: dict[str, Tensor], pattern: str) -> int:
    return max((int(match[1]) + 1 for name in tensors if (match := re.match(pattern, name))), default=0)


def _shown(numbers: tuple[int, ...]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else "-".join(map(str, numbers))
