"""The known models, one row each: timm name, sizes and image preprocessing. Imports no torch.

A checkpoint may change settings of a row, such as patch, image size and class count (fold.py), but never width, depth or heads.
See also: config.py (the sizes), load.py (builds the model of a row).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.embedded import FMNIST_PREPROCESS, FMNIST_SWIN_CONFIG, FMNIST_VIT_CONFIG

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Row:
    """One known model. `name` is that of timm; `aliases` are shorter names."""

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


# Names of a listed family and size with another patch or image size. DeiT III is DeiT with LayerScale, which fold.py folds.
OTHER_SIZES = re.compile(r"(vit|deit3?)_([a-z]+)(_distilled)?_patch([1-9]\d?)_([1-9]\d{1,3})")


def lookup(name: str) -> Row | None:
    """Return the row of a timm name or alias, or None. A tag after a dot is ignored (vit_tiny_patch16_224.augreg_in21k)."""
    stem = name.split(".")[0]
    match = OTHER_SIZES.fullmatch(stem)
    if stem in BY_NAME or match is None:
        return BY_NAME.get(stem)
    family, size, distilled, patch, side = match[1], match[2], match[3] or "", int(match[4]), int(match[5])
    known = BY_NAME.get(f"{family.rstrip('3')}_{size}{distilled}_patch16_224")
    if known is None or isinstance(known.config, SwinConfig) or (family == "deit3" and distilled):
        return None
    config = replace(known.config, image=(side, side), patch=patch)
    # As in timm: no crop for DeiT III and for sides of at least 384; otherwise the same fraction as for the known row.
    resize = side if family == "deit3" or side >= 384 else side * known.preprocess.resize // known.preprocess.height
    return Row(stem, config, _preprocess(side, resize, known.preprocess.mean, known.preprocess.std))


def find(name: str) -> Row:
    """As `lookup`, but raise FqvitError with similar names if there is no such row."""
    row = lookup(name)
    if row is None:
        near = difflib.get_close_matches(name, BY_NAME, 3, 0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else "`fqvit models` lists the names."
        raise FqvitError(f"{name}: no such model. {hint}")
    return row


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
