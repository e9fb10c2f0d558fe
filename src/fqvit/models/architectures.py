"""Look up timm's architectures by name: their configs, and the preprocessing of their pretrained tags.

Imports neither torch nor timm. The tables are written by scripts/timm_tables.py. A name determines the settings that tensors do
not show: heads, activation, pooling, eps.
See also: zoo.py (rows with short names), config.py (the configs), transform.py (preprocessing).
"""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fqvit.models.config import BeitConfig, DinoV3Config, SwinConfig, SwinV2Config, VisionConfig
from fqvit.models.transform import Transform

FamilyConfig = VisionConfig | DinoV3Config | BeitConfig | SwinV2Config
TimmConfig = FamilyConfig | SwinConfig

FAMILIES: dict[str, type[TimmConfig]] = {
    "vision": VisionConfig,
    "distilled": VisionConfig,
    "dinov3": DinoV3Config,
    "beit": BeitConfig,
    "swin": SwinConfig,
    "swinv2": SwinV2Config,
}

# Names of the original releases.
ALIASES = {
    **{f"dinov2_vit{s[0]}14": f"vit_{s}_patch14_dinov2" for s in ("small", "base", "large", "giant")},
    **{f"dinov2_vit{s[0]}14_reg": f"vit_{s}_patch14_reg4_dinov2" for s in ("small", "base", "large", "giant")},
    **{f"dinov3_vit{s[0]}16": f"vit_{s}_patch16_dinov3_qkvb" for s in ("small", "base", "large")},
    **{f"dino_vit{s[0]}{p}": f"vit_{s}_patch{p}_224.dino" for s in ("small", "base") for p in (8, 16)},
    **{f"mae_vit_{s}_patch{p}": f"vit_{s}_patch{p}_224.mae" for s, p in (("base", 16), ("large", 16), ("huge", 14))},
}


@dataclass(frozen=True)
class Architecture:
    """An architecture of timm. distilled: two heads, on the class token and the distillation token"""

    name: str
    config: TimmConfig
    distilled: bool = False


def resolve(name: str) -> tuple[str, str]:
    """Return timm's name and the tag, "" if there is none; names of original releases are translated."""
    stem, _, tag = ALIASES.get(name, name).partition(".")
    return stem, tag


def lookup(name: str) -> Architecture | None:
    """Return the architecture of a name, with or without a tag; None if fqvit does not define it."""
    stem, _ = resolve(name)
    row = _models().get(stem)
    if row is None or row["family"] == "-":
        return None
    return Architecture(stem, _config(row), row["family"] == "distilled")


def why_not(name: str) -> str | None:
    """Return the unsupported feature of a timm architecture that fqvit does not define; None for all other names."""
    row = _models().get(resolve(name)[0])
    return row["options"] if row is not None and row["family"] == "-" else None


def transform(name: str) -> Transform | None:
    """Return the preprocessing of a name's tag, or of timm's default tag if the name has none; None if either is unknown."""
    stem, tag = resolve(name)
    tags = _tags().get(stem, {})
    row = tags.get(tag) if tag else next(iter(tags.values()), None)
    if row is None:
        return None
    height, width = map(int, row["image"].split("x"))
    mean, std = (tuple(map(float, row[key].split())) for key in ("mean", "std"))
    source = f"timm's {stem}.{row['tag']}" if row["tag"] else f"timm's {stem}"
    return Transform(
        image=(height, width),
        crop=float(row["crop"]),
        squash=row["mode"] == "squash",
        interpolation="bilinear" if row["interpolation"] == "bilinear" else "bicubic",
        mean=mean,
        std=std,
        source=source,
    )


def names() -> tuple[str, ...]:
    """Return the names of all supported architectures."""
    return tuple(name for name, row in _models().items() if row["family"] != "-")


@cache
def _models() -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in _read("timm_models.csv")}


@cache
def _tags() -> dict[str, dict[str, dict[str, str]]]:
    out: dict[str, dict[str, dict[str, str]]] = {}
    for row in _read("timm_tags.csv"):
        out.setdefault(row["name"], {})[row["tag"]] = row
    return out


def _read(name: str) -> list[dict[str, str]]:
    text = (files("fqvit") / "assets" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _config(row: dict[str, str]) -> TimmConfig:
    kind = FAMILIES[row["family"]]
    cells = {key: row[key] for key in ("image", "patch", "width", "depth", "heads", "hidden") if row[key]}
    cells |= dict(option.split("=", 1) for option in row["options"].split())
    cells.setdefault("channels", "3")
    fields = {f.name for f in dataclasses.fields(kind)}
    cells.setdefault("outputs" if "outputs" in fields else "classes", "1000")
    if "depths" in fields:
        cells["depths"] = cells.pop("depth")
    return kind(**{key: _value(key, text) for key, text in cells.items()})  # type: ignore[arg-type]


TUPLES = ("image", "depths", "windows", "pretrained_windows")
TEXTS = ("activation", "pool")


def _value(key: str, text: str) -> object:
    """Parse a cell according to its field. Numbers joined by x (2x2x6x2: depths or heads of a Swin) become a tuple."""
    if key in TEXTS:
        return text
    if key in TUPLES or "x" in text:
        return tuple(map(int, text.split("x")))
    if text in ("true", "false"):
        return text == "true"
    return float(text) if "." in text or "e-" in text else int(text)
