"""The known models, one row each: timm name, sizes and image preprocessing. Imports no torch.

A checkpoint may change settings of a row, such as patch size, image size and class count (checkpoints/fold.py), but never
width, depth or heads.
See also: config.py (the sizes), load.py (builds the model of a row).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Literal

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models import architectures
from fqvit.models.architectures import Architecture
from fqvit.models.config import SwinConfig, VisionConfig, ViTConfig
from fqvit.models.embedded import FMNIST_PREPROCESS, FMNIST_SWIN_CONFIG, FMNIST_VIT_CONFIG
from fqvit.models.transform import IMAGENET_MEAN, IMAGENET_STD, Transform, to_preprocess

HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Row:
    """One known model. `name` is its name in timm; `aliases` are shorter names."""

    name: str
    config: ViTConfig | SwinConfig
    preprocess: Preprocess
    aliases: tuple[str, ...] = ()
    embedded: bool = False

    @property
    def series(self) -> str:
        """vit, deit (including DeiT III), swin or fmnist: the first word of the name."""
        return self.name.split("_")[0].rstrip("3")


def _preprocess(side: int, resize: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Preprocess:
    return Preprocess(height=side, width=side, channels=3, resize=resize, interpolation="bicubic", mean=mean, std=std)


def _vit(width: int, side: int, prefix: int = 1) -> ViTConfig:
    depth = 24 if width == 1024 else 12
    return ViTConfig((side, side), 16, 3, 1000, width, depth, width // 64, 4 * width, prefix)


def _vit_row(size: str, width: int, side: int) -> Row:
    aliases = (f"vit_{size}",) if side == 224 else (f"vit_{size}_{side}",)
    resize = 248 if side == 224 else side
    return Row(f"vit_{size}_patch16_{side}", _vit(width, side), _preprocess(side, resize, HALF, HALF), aliases)


def _deit_row(size: str, width: int, side: int, distilled: bool = False) -> Row:
    stem = f"deit_{size}_distilled" if distilled else f"deit_{size}"
    aliases = (stem,) if side == 224 else (f"{stem}_{side}",)
    # Resize to 256 before the crop, as the FQ-ViT paper does for DeiT (timm: 248).
    preprocess = _preprocess(side, 256 if side == 224 else side, IMAGENET_MEAN, IMAGENET_STD)
    return Row(f"{stem}_patch16_{side}", _vit(width, side, 2 if distilled else 1), preprocess, aliases)


def _swin_row(size: str, width: int, depth: int, heads: int, side: int = 224, window: int = 7) -> Row:
    aliases = (f"swin_{size}",) if side == 224 else (f"swin_{size}_{side}",)
    config = SwinConfig((side, side), 4, 3, 1000, width, (2, 2, depth, 2), tuple(heads * 2**i for i in range(4)), window)
    preprocess = _preprocess(side, 248 if side == 224 else side, IMAGENET_MEAN, IMAGENET_STD)
    return Row(f"swin_{size}_patch4_window{window}_{side}", config, preprocess, aliases)


WIDTHS = {"tiny": 192, "small": 384, "base": 768, "large": 1024}

ROWS: tuple[Row, ...] = (
    Row("fmnist_vit", FMNIST_VIT_CONFIG, FMNIST_PREPROCESS, embedded=True),
    Row("fmnist_swin", FMNIST_SWIN_CONFIG, FMNIST_PREPROCESS, embedded=True),
    *(_vit_row(size, WIDTHS[size], side) for side in (224, 384) for size in WIDTHS),
    *(_deit_row(size, WIDTHS[size], 224) for size in ("tiny", "small", "base")),
    _deit_row("base", 768, 384),
    *(_deit_row(size, WIDTHS[size], 224, distilled=True) for size in ("tiny", "small", "base")),
    _deit_row("base", 768, 384, distilled=True),
    _swin_row("tiny", 96, 6, 3),
    _swin_row("small", 96, 18, 3),
    _swin_row("base", 128, 18, 4),
    _swin_row("base", 128, 18, 4, side=384, window=12),
)

BY_NAME: dict[str, Row] = {name: row for row in ROWS for name in (row.name, *row.aliases)}


# Names of a listed family and size, but with a patch or image size for which timm has no model.
OTHER_SIZES = re.compile(r"(vit|deit)_([a-z]+)(_distilled)?_patch([1-9]\d?)_([1-9]\d{1,3})")


def lookup(name: str) -> Row | None:
    """Return the row of a classifier that is built from leaf modules, or None if there is no such row.

    The name is that of a listed model, of a model of timm, or of a listed model with another patch or image size.

    A tag after a dot selects the preprocessing (vit_tiny_patch16_224.augreg_in21k). Without a tag, models of timm have
    the preprocessing of timm's default tag.
    """
    stem, tag = architectures.resolve(name)
    transform = architectures.transform(f"{stem}.{tag}" if tag else stem)
    row = BY_NAME.get(stem)
    if row is not None:
        return row if transform is None or not tag else replace(row, preprocess=_tagged(transform, row.config))
    known = architectures.lookup(stem)
    if known is not None:
        config = leaf_config(known)
        return None if config is None or transform is None else Row(known.name, config, _tagged(transform, config))
    match = OTHER_SIZES.fullmatch(stem)
    if match is None or architectures.why_not(stem) is not None:
        return None
    family, size, distilled, patch, side = match[1], match[2], match[3] or "", int(match[4]), int(match[5])
    known_row = BY_NAME.get(f"{family}_{size}{distilled}_patch16_224")
    if known_row is None or isinstance(known_row.config, SwinConfig):
        return None
    other = replace(known_row.config, image=(side, side), patch=patch)
    # As in timm: no crop for sides of at least 384; otherwise the same fraction as for the known row.
    resize = side if side >= 384 else side * known_row.preprocess.resize // known_row.preprocess.height
    return Row(stem, other, _preprocess(side, resize, known_row.preprocess.mean, known_row.preprocess.std))


def _tagged(transform: Transform, config: ViTConfig | SwinConfig) -> Preprocess:
    return to_preprocess(transform, config.image, config.channels, transform.source)[0]


def leaf_config(known: Architecture) -> ViTConfig | SwinConfig | None:
    """Return the config of a classifier that is built from leaf modules; None for other families."""
    c = known.config
    if isinstance(c, SwinConfig):
        return c
    if not isinstance(c, VisionConfig) or c.registers or c.norm_pre or c.swiglu or c.activation != "gelu":
        return None
    if c.pool not in ("token", "avg") or not c.patch_bias:
        return None
    prefix = 2 if known.distilled else int(c.class_token)
    pool: Literal["token", "mean"] = "token" if c.pool == "token" else "mean"
    sizes = (c.image, c.patch, c.channels, c.outputs or 1000, c.width, c.depth, c.heads, c.hidden)
    return ViTConfig(*sizes, prefix, pool, c.norm, c.fc_norm, c.eps)


def transform_of(row: Row) -> Transform:
    """Return the preprocessing of a row as a Transform, which fits other image sizes too."""
    p = row.preprocess
    image = (p.height, p.width)
    return Transform(image, None, p.resize, p.squash, p.interpolation, p.mean, p.std, f"the name {row.name}")


def new_row(
    name: str,
    width: int,
    depths: tuple[int, ...],
    heads: tuple[int, ...],
    prefix: int,
    image: tuple[int, int] | None,
    swin: bool,
) -> Row:
    """Return a row for sizes that no known model has. Its preprocessing is that of ImageNet models without a crop."""
    side = image or (224, 224)
    config: ViTConfig | SwinConfig
    if swin:
        config = SwinConfig(side, 4, 3, 1000, width, depths, heads, 7)
    else:
        config = ViTConfig(side, 16, 3, 1000, width, depths[0], heads[0], 4 * width, prefix)
    preprocess, _ = to_preprocess(Transform(), side, 3, name)
    return Row(name, config, preprocess)


def check(name: str) -> str:
    """Return the name if it is known; raises FqvitError with the reason or with similar names if it is not."""
    if lookup(name) is None and architectures.lookup(name) is None:
        find(name)
    return name


def refuse_undefined(name: str) -> None:
    """Raise FqvitError if the name is that of a timm model that fqvit does not define."""
    if (why := architectures.why_not(name)) is not None:
        problem = f"{name}: has {why}, for which fqvit has no definition of its own"
        raise FqvitError(f"{problem}. Build it with timm and pass the module.")


def find(name: str) -> Row:
    """Like `lookup`, but raise FqvitError with the reason or with similar names if there is no such row."""
    row = lookup(name)
    if row is not None:
        return row
    refuse_undefined(name)
    if architectures.lookup(name) is not None:
        raise FqvitError(f"{name}: not a ViT, DeiT or Swin classifier, which this command needs. `fqvit models` lists them.")
    near = difflib.get_close_matches(name, (*BY_NAME, *architectures.names()), 3, 0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else "`fqvit models` lists the names."
    raise FqvitError(f"{name}: not a name that fqvit knows. {hint} Models with other names load from a folder or as a module.")


def likely(
    series: str,
    width: int,
    depths: tuple[int, ...],
    prefix: int = 1,
    image: tuple[int, int] | None = None,
) -> Row | None:
    """Return the row with these sizes, or None. If several match, prefer the given series, then the given image size."""

    def fits(row: Row) -> bool:
        c = row.config
        if isinstance(c, SwinConfig):
            return (c.width, c.depths) == (width, depths)
        return (c.width, (c.depth,)) == (width, depths) and (c.prefix == 2) == (prefix == 2)

    found = [row for row in ROWS if fits(row)]
    return min(found, key=lambda row: (row.series != series, image is not None and row.config.image != image), default=None)
