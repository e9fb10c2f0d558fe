"""Recipes: what is quantized, how and to how many bits. Frozen values; also TOML files with the same field names.

A file may start from a named recipe (`base = "fq-vit"`) and change fields; `[sites."blocks.*.mlp.act"]` tables override
single sites by name or role. Recipes hold no state and no code: plan.py turns one into a plan for each site of a graph.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fqvit.errors import FqvitError

Bits = Annotated[int, msgspec.Meta(ge=2, le=8)]
SiteBits = Annotated[int, msgspec.Meta(ge=2, le=16)]  # above 8: residual, hidden and scores only
RangeObserver = Literal["minmax", "ema", "percentile", "omse"]


class SiteRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to do differently at the sites whose name or role matches. Fields left out stay as the recipe has them."""

    bits: SiteBits | None = None
    observer: RangeObserver | Literal["ptf"] | None = None
    k: Annotated[int, msgspec.Meta(ge=0, le=8)] | None = None
    range: tuple[float, float] | None = None  # used as it is, nothing is observed; 0 must lie inside

    def __post_init__(self) -> None:
        if self.range is not None:
            low, high = self.range
            if not -math.inf < low <= 0 <= high < math.inf or low == high:
                # ValueError, because msgspec then adds the path of the fault while it reads a file.
                raise ValueError(f"range {low:g}..{high:g} must be finite, not empty, and hold 0")


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The defaults are the paper's method, 8/8/4."""

    name: str
    weight_bits: Bits = 8
    weight_group: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0  # weights that share an exponent, at 4 bits or less; 0: none
    weight_ends: Literal["codes", "halves"] = "codes"  # max|w| is 127 codes, or 127.5 of which the half is clipped
    # The nearest code; codes and biases that make up for the errors of what is quantized before (compensate.py); or codes
    # chosen bit by bit for the least error of the outputs (bitsplit.py).
    rounding: Literal["nearest", "compensated", "bit-split"] = "nearest"
    activation_bits: Bits = 8
    attention_bits: Bits = 4
    observer: RangeObserver = "minmax"
    residual: Literal["ptf", "tensor"] = "ptf"  # LayerNorm inputs: Power-of-Two Factor, or one step for all channels
    k: Annotated[int, msgspec.Meta(ge=0, le=8)] = 3
    # Log-Int-Softmax (more than 4 bits are always uniform; "log2-wide": log2 with any bits, simulated only); uniform; or beside
    # the largest of the row, each row rescaled.
    attention: Literal["log2", "log2-wide", "uniform", "relative"] = "log2"
    zero_code: bool = True  # the last log2 code means 0 rather than 2^-15
    exp: Literal["table", "polynomial", "coarse"] = "table"  # the paper's I-Exp: as printed, or as its code evaluates it
    branches: Literal["accumulator", "codes"] = "accumulator"  # proj, fc2 and the patch embedding before they are added
    qkv: Literal["separate", "joint"] = "separate"
    channels: bool = False  # a step for each channel of norms, V, attention times V and GELU, folded into the next weights
    symmetric: bool = False  # every zero point is the middle code: what int8 with zero point 0 is (pixels apart)
    mult: Literal["full", "short"] = "full"  # constant multipliers between scales: up to 31 bits, or 16
    position_bits: Literal[8, 16] = 16
    logits: Literal["accumulator", "codes"] = "accumulator"  # class scores in fine steps, or in those of an 8-bit site
    momentum: Annotated[float, msgspec.Meta(ge=0.001, le=1)] = 0.01  # ema and percentile
    quantile: Annotated[float, msgspec.Meta(gt=0.5, le=1)] = 0.99999  # percentile
    last_batch: bool = False  # ptf and omse look at the last batch only, as the original code does
    images: Annotated[int, msgspec.Meta(ge=1)] = 1000
    shuffle: Annotated[int, msgspec.Meta(ge=0)] | None = None  # seed of the order of calibration images; None: as they come
    batch: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    sites: dict[str, SiteRule] = {}
    # LayerNorm and Softmax in integers; or in float: only what a matrix product reads has codes then, and nothing is lowered.
    nonlinear: Literal["integer", "float"] = "integer"
    # Steps of weights and sites from their extremes, or searched so that outputs stay alike (similarity.py).
    intervals: Literal["observed", "similarity"] = "observed"
    # `auto`: sites are raised to more bits until the expected loss of top-1, judged without labels, is at most this.
    max_loss: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None

    def __post_init__(self) -> None:
        if 0 < self.weight_group < 8:
            raise ValueError(f"weight_group {self.weight_group} must be 0 or 8 to 256")
        if self.nonlinear == "float" and self.max_loss is not None:
            raise ValueError("max_loss needs sites that can be raised, which nonlinear float does not have")
        if self.rounding == "bit-split" and (self.nonlinear == "integer" or self.weight_group or self.intervals != "observed"):
            raise ValueError("rounding bit-split is for nonlinear float without weight_group and searched intervals")
        if self.intervals == "similarity" and not (
            self.nonlinear == "float"
            and self.symmetric
            and self.attention == "uniform"
            and self.qkv == "separate"
            and self.rounding == "nearest"
            and not self.channels
            and not self.weight_group
        ):
            raise ValueError(
                "intervals similarity is for nonlinear float, symmetric, uniform attention, separate qkv and nearest rounding,"
                " without channels and weight_group"
            )

    @property
    def integer(self) -> bool:
        """Whether there is an integer program of it."""
        return self.nonlinear == "integer" and self.attention != "log2-wide"

    @property
    def log2_attention(self) -> bool:
        """Whether attention is stored as powers of two, which 4 bits are enough for."""
        return self.attention == "log2" and self.attention_bits <= 4


_PLAIN: dict[str, Any] = {"residual": "tensor", "attention": "uniform", "attention_bits": 8}

# Only what a matrix product reads needs 8 bits: the residual stream and GELU's inputs are wider.
_OURS: dict[str, Any] = {
    "residual": "tensor",
    "attention": "relative",
    "channels": True,
    "k": 4,
    "sites": {"residual": SiteRule(bits=16), "hidden": SiteRule(bits=10)},
}

# Chips with int8 of zero point 0 and 16-bit multipliers: no codes are wider, and so the residual stream needs its PTF.
_NPU: dict[str, Any] = {"symmetric": True, "mult": "short"}

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="fqvit", **_OURS),
        Recipe(name="w4", weight_bits=4, weight_group=16, rounding="compensated", **_OURS),
        Recipe(name="fast", weight_bits=7, **_OURS),
        Recipe(name="npu", attention="relative", channels=True, k=4, **_NPU),
        Recipe(name="auto", attention="relative", channels=True, k=4, max_loss=0.5),
        Recipe(name="fq-vit"),
        Recipe(name="fq-vit-8", attention="uniform", attention_bits=8),
        Recipe(
            name="fq-vit-original",
            exp="coarse",
            branches="codes",
            qkv="joint",
            position_bits=8,
            logits="codes",
            weight_ends="halves",
            last_batch=True,
            batch=100,
            shuffle=0,
        ),
        Recipe(name="minmax", **_PLAIN),
        Recipe(name="ema", observer="ema", **_PLAIN),
        Recipe(name="percentile", observer="percentile", **_PLAIN),
        Recipe(name="omse", observer="omse", **_PLAIN),
        Recipe(name="partial", nonlinear="float", **_PLAIN),
        Recipe(name="bit-split", nonlinear="float", rounding="bit-split", **_PLAIN),
        Recipe(name="ptq-vit", nonlinear="float", intervals="similarity", symmetric=True, **_PLAIN),
    )
}
DEFAULT_RECIPE = "fqvit"


def load_recipe(name: str | Path) -> Recipe:
    """A recipe by name, or from a TOML file."""
    if str(name) in RECIPES:
        return RECIPES[str(name)]
    path = Path(name)
    if path.suffix != ".toml":
        raise FqvitError(f"recipe {str(name)!r}: no such recipe. Use one of {', '.join(RECIPES)}, or a .toml file.")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FqvitError(
            f"{path}: cannot be read ({error.strerror}). Use one of {', '.join(RECIPES)}, or a .toml file."
        ) from None
    except (ValueError, RecursionError) as error:  # numbers of many digits and deep nesting, too
        raise FqvitError(f"{path}: not a TOML file ({error}).") from None
    base = table.pop("base", None)
    if base is not None and str(base) not in RECIPES:
        raise FqvitError(f"{path}: base {base!r} is not a recipe. Use one of {', '.join(RECIPES)}.")
    fields = msgspec.to_builtins(RECIPES[str(base)]) if base else {}
    if isinstance(table.get("sites"), dict):
        table["sites"] = _joined(fields.get("sites", {}), table["sites"])
    try:
        return msgspec.convert({**fields, "name": path.stem, **table}, Recipe)
    except msgspec.ValidationError as error:
        raise FqvitError(f"{path}: {str(error).replace('`', '')}. docs/reference/recipes.md lists the fields.") from None


def _joined(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The base's rules of sites, then the file's; fields of the same site or role are joined."""
    joined = dict(base)
    for pattern, rule in own.items():
        before = joined.pop(pattern, {})
        joined[pattern] = {**before, **rule} if isinstance(rule, dict) else rule
    return joined


def check_integer(recipe: Recipe) -> None:
    """Refuses recipes that there is no integer program of."""
    if not recipe.integer:
        why = "LayerNorm and Softmax stay float in it" if recipe.nonlinear == "float" else "its attention codes are simulated"
        raise FqvitError(f"recipe {recipe.name}: {why}, so there is no integer program. `fqvit table` measures it.")


def check_detector(recipe: Recipe) -> None:
    """Refuses recipes that know classifiers only."""
    check_integer(recipe)
    for field, value, only in (
        ("max_loss", recipe.max_loss, None),
        ("rounding", recipe.rounding, "nearest"),
        ("intervals", recipe.intervals, "observed"),
    ):
        if value != only:
            said = f"recipe {recipe.name}: {field} is {value}, which is for classifiers only"
            raise FqvitError(f"{said}. Use fqvit, fast or fq-vit for a detector, or change it in a .toml file.")


def with_profile(recipe: Recipe, profile: str) -> Recipe:
    """`recipe` for a kind of hardware. npu: symmetric int8 and 16-bit multipliers; sites lose what they have beyond 8 bits, and
    a residual stream that had it takes the Power-of-Two Factor instead."""
    if profile != "npu":
        raise FqvitError(f"profile {profile!r}: expected npu.")
    wide = {pattern for pattern, rule in recipe.sites.items() if (rule.bits or 0) > 8}
    sites = {
        pattern: msgspec.structs.replace(rule, bits=None) if pattern in wide else rule for pattern, rule in recipe.sites.items()
    }
    sites = {pattern: rule for pattern, rule in sites.items() if rule != SiteRule()}
    residual = "ptf" if "residual" in wide else recipe.residual
    return msgspec.structs.replace(recipe, sites=sites, residual=residual, **_NPU)


def with_bits(recipe: Recipe, bits: str) -> Recipe:
    """`recipe` at W/A/ATTN bits, such as "8/8/4"."""
    match = re.fullmatch(r"([2-8])/([2-8])/([2-8])", bits)
    if match is None:
        raise FqvitError(f"bits {bits!r}: expected W/A/ATTN, each from 2 to 8, such as 8/8/4.")
    weight, activation, attention = map(int, match.groups())
    return msgspec.structs.replace(recipe, weight_bits=weight, activation_bits=activation, attention_bits=attention)
