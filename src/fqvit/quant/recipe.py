"""Recipes: which sites are quantized, with which method and how many bits.

A recipe is a frozen value, or a TOML file with the same fields. A file may start from a named recipe (`base = "fq-vit"`) and
change fields; `[sites."blocks.*.mlp.act"]` tables override single sites by name or role.
See also: plan.py (turns a recipe into one plan per site of a graph).
"""

from __future__ import annotations

import math
import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fqvit.errors import FqvitError

Bits = Annotated[int, msgspec.Meta(ge=2, le=8)]
SiteBits = Annotated[int, msgspec.Meta(ge=2, le=16)]  # more than 8 only for residual, hidden, scores and output
RangeObserver = Literal["minmax", "ema", "percentile", "omse"]
DOUBLING = ("compensated", "weighted", "reconstructed")  # roundings that can round two copies of a neuron differently


class SiteRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Overrides for the sites whose name or role matches. Fields left out keep the recipe's value."""

    bits: SiteBits | None = None
    observer: RangeObserver | Literal["ptf"] | None = None
    k: Annotated[int, msgspec.Meta(ge=0, le=8)] | None = None
    range: tuple[float, float] | None = None  # fixed range, nothing is observed; must include 0

    def __post_init__(self) -> None:
        if self.range is not None:
            low, high = self.range
            if not -math.inf < low <= 0 <= high < math.inf or low == high:
                # A ValueError, because msgspec adds the path of the field to it when reading a file.
                raise ValueError(f"range {low:g}..{high:g} must be finite, not empty and include 0")


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to quantize and how. The defaults are the paper's method with 8-bit weights and activations and 4-bit attention."""

    name: str
    weight_bits: Bits = 8
    weight_group: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0  # weights per shared codebook, at 4 bits or less; 0: no groups
    layer_bits: dict[str, Bits] = {}  # bits of the weights of single layers, by name or pattern such as "blocks.*.mlp.fc1"
    weight_ends: Literal["codes", "halves"] = "codes"  # at 8 bits, map max|w| to 127, or to 127.5 and saturate
    # How weights are rounded. nearest: to the nearest code; compensated: column by column, so that later columns and biases
    # compensate earlier errors; weighted: likewise, with tokens weighted by their influence on the outputs (compensate.py);
    # reconstructed: compensated, then learned segment by segment, together with scales and biases (reconstruct.py);
    # bit-split: bit by bit, to minimize the output error (bitsplit.py).
    rounding: Literal["nearest", "compensated", "weighted", "reconstructed", "bit-split"] = "nearest"
    activation_bits: Bits = 8
    attention_bits: Bits = 4
    observer: RangeObserver = "minmax"
    # observed: ranges from `observer`; least-error: with compensated rounding, ranges that minimize the squared error of the
    # inputs of matrix products (ranges.py).
    ranges: Literal["observed", "least-error"] = "observed"
    residual: Literal["ptf", "tensor"] = "ptf"  # LayerNorm inputs: Power-of-Two Factor, or one scale per tensor
    k: Annotated[int, msgspec.Meta(ge=0, le=8)] = 3
    # log2: Log-Int-Softmax (uniform with more than 4 bits); log2-wide: log2 codes of any width, simulated only; uniform:
    # uniform codes; relative: codes relative to the largest value of each row.
    attention: Literal["log2", "log2-wide", "uniform", "relative"] = "log2"
    # Weights of relative codes: powers of two and some midpoints (evenly spaced above 4 bits), or spaced along a smooth curve.
    # "curve-below-8": along the curve with up to 7 bits; evenly spaced with 8, which is faster and fits QDQ runtimes.
    levels: Literal["powers", "curve", "curve-below-8"] = "powers"
    # plain: keys as the model computes them; otherwise minus one constant per channel, which does not change attention.
    # centered: the mean key of one image (centering.py); leveled: constants for which the largest scores of all rows are
    # nearly equal (leveling.py).
    keys: Literal["plain", "centered", "leveled"] = "plain"
    # Q and K of every head as the model computes them, or rotated: all channels have similar ranges (rotating.py).
    heads: Literal["plain", "rotated"] = "plain"
    # Scores: the range from `observer`, or only the part of it that attention depends on.
    scores: Literal["observed", "attended"] = "observed"
    # With `channels`: V has the observed ranges, or wider ones where these allow finer codes for attention times V (values.py).
    values: Literal["observed", "widened"] = "observed"
    zero_code: bool = True  # the last log2 code means 0 rather than 2^-15
    exp: Literal["table", "polynomial", "coarse"] = "table"  # exact; the paper's I-Exp; I-Exp as the paper's code evaluates it
    branches: Literal["accumulator", "codes"] = "accumulator"  # outputs of proj, fc2 and the patch embedding before the sum
    qkv: Literal["separate", "joint"] = "separate"  # one scale each for Q, K and V, or one for all
    channels: bool = False  # one scale per channel of norms, V, attention times V and GELU, folded into the next weights
    # With `channels`: no channel of GELU outputs has a smaller range than this quantile of all channels. A neuron that fires
    # rarely may be silent in all calibration images.
    gelu_floor: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    # With `channels`: ranges end at the observed extremes; or those of GELU outputs end earlier, which allows finer codes, and
    # those of sites with few observed rows later, because values beyond the extremes are likely there (channels.py).
    extremes: Literal["observed", "balanced"] = "observed"
    # With `channels`: the hidden neurons of an MLP stay together, or those with outlying ranges form an MLP of their own, which
    # computes the same function with finer codes for the others (splitting.py).
    # doubled: neurons with coarse codes and large weights have two copies with slightly different inputs, if `rounding` can
    # round them differently: compensated, weighted or reconstructed (doubling.py).
    mlps: Literal["whole", "split", "doubled"] = "whole"
    outliers: dict[
        str, tuple[int, ...]
    ] = {}  # neurons of split MLPs, by the name of the first layer; empty: calibration chooses
    doubled: dict[str, tuple[int, ...]] = {}  # likewise, the neurons with two copies
    # With `ranges` least-error and fewer than 8 bits: codes of GELU outputs are evenly spaced, with one shift per channel; or
    # 2^bits of the 256 codes of 8 bits, dense near 0.
    gelu: Literal["even", "spaced"] = "even"
    # Zero points are the middle code, as in int8 with zero point 0, except for pixels and for sites that are never negative.
    symmetric: bool = False
    mult: Literal["full", "short"] = "full"  # constant multipliers have up to 31 bits, or up to 16
    position_bits: Literal[8, 16] = 16
    logits: Literal["accumulator", "codes"] = "accumulator"  # full precision, or an 8-bit site
    momentum: Annotated[float, msgspec.Meta(ge=0.001, le=1)] = 0.01  # for observers ema and percentile
    quantile: Annotated[float, msgspec.Meta(gt=0.5, le=1)] = 0.99999  # for observer percentile
    last_batch: bool = False  # ptf and omse use the last batch only, as the paper's code does
    images: Annotated[int, msgspec.Meta(ge=1)] = 1000
    # Size of the random sample of images that methods read again once ranges are known: for weights, V, keys and searches.
    refine_images: Annotated[int, msgspec.Meta(ge=1)] = 128
    shuffle: Annotated[int, msgspec.Meta(ge=0)] | None = None  # seed for the order of calibration images; None: given order
    batch: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    sites: dict[str, SiteRule] = {}
    # LayerNorm and Softmax in integers, or in float: then only the inputs of matrix products are quantized, and the recipe can
    # only be simulated.
    nonlinear: Literal["integer", "float"] = "integer"
    # How scales are chosen. observed: from observed ranges; similarity: searched for the best correlation with the float
    # outputs (similarity.py); reparameterized: by percentiles, with reparameterized norms and log-sqrt2 attention
    # (reparameterize.py); hessian: searched by the Hessian, with twin codes of attention and GELU outputs (hessian.py).
    intervals: Literal["observed", "similarity", "reparameterized", "hessian"] = "observed"
    # `auto`: raise the bits of sites until the top-1 loss, estimated without labels, is at most this many percentage points.
    max_loss: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    # `auto`: bits that weights of single layers may be narrowed to, until the loss reaches max_loss, or until the file has at
    # most max_size bytes.
    widths: tuple[Bits, ...] = ()
    max_size: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        if 0 < self.weight_group < 8:
            raise ValueError(f"weight_group {self.weight_group} must be 0 or 8 to 256")
        if self.nonlinear == "float" and self.max_loss is not None:
            raise ValueError("max_loss requires nonlinear integer")
        if self.max_loss is None and (self.widths or self.max_size is not None):
            raise ValueError("widths and max_size require max_loss")
        if self.ranges == "least-error" and self.rounding not in ("compensated", "reconstructed"):
            raise ValueError("ranges least-error requires rounding compensated or reconstructed")
        if self.rounding == "reconstructed" and self.ranges != "least-error":
            raise ValueError("rounding reconstructed requires ranges least-error")
        if self.mlps != "split" and self.outliers:
            raise ValueError("outliers require mlps split")
        if self.mlps != "doubled" and self.doubled:
            raise ValueError("doubled requires mlps doubled")
        if self.doubled and self.rounding not in DOUBLING:
            raise ValueError(f"doubled requires rounding {', '.join(DOUBLING)}")
        if self.gelu == "spaced" and self.ranges != "least-error":
            raise ValueError("gelu spaced requires ranges least-error")
        if self.rounding == "bit-split" and (self.nonlinear == "integer" or self.weight_group or self.intervals != "observed"):
            raise ValueError("rounding bit-split requires nonlinear float, weight_group 0 and intervals observed")
        symmetric = self.intervals == "similarity"
        if self.intervals != "observed" and not (
            self.nonlinear == "float"
            and self.symmetric == symmetric
            and self.attention == "uniform"
            and self.qkv == "separate"
            and self.rounding == "nearest"
            and not self.channels
            and not self.weight_group
        ):
            raise ValueError(
                f"intervals {self.intervals} requires nonlinear float, symmetric {str(symmetric).lower()}, attention uniform,"
                " qkv separate, rounding nearest, channels false and weight_group 0"
            )

    @property
    def integer(self) -> bool:
        """Whether the recipe can be lowered to an integer program."""
        return self.nonlinear == "integer" and self.attention != "log2-wide"

    @property
    def log2_attention(self) -> bool:
        """Whether attention has log2 codes, which have at most 4 bits."""
        return self.attention == "log2" and self.attention_bits <= 4


# The baselines use neither PTF nor log2 codes.
_PLAIN: dict[str, Any] = {"residual": "tensor", "attention": "uniform", "attention_bits": 8}

# Only inputs of matrix products are limited to 8 bits: the residual stream and the inputs of GELU are wider.
_OURS: dict[str, Any] = {
    "residual": "tensor",
    "attention": "relative",
    "channels": True,
    "k": 4,
    "sites": {"residual": SiteRule(bits=16), "hidden": SiteRule(bits=10)},
}
# Smaller errors at no cost at run time. Few images are read again, to keep quantizing short.
_BETTER: dict[str, Any] = {
    "heads": "rotated",
    "scores": "attended",
    "values": "widened",
    "extremes": "balanced",
    "rounding": "weighted",
    "refine_images": 24,
}
_DEFAULT: dict[str, Any] = {
    **_OURS,
    **_BETTER,
    "levels": "curve-below-8",
    "gelu_floor": 0.9,
    "mlps": "split",
}
# `auto` narrows weights to 4 bits, so their rounding needs the statistics of more images.
_SEARCH: dict[str, Any] = {"rounding": "compensated", "refine_images": 128}

# Without the neurons that a saved recipe lists.
_WHOLE: dict[str, Any] = {"mlps": "whole", "outliers": {}, "doubled": {}}

# For `embedding`: features are compared with each other directly, so every part of them counts, not just the best class.
_FINE: dict[str, Any] = {"levels": "curve", "keys": "leveled", "scores": "attended", "values": "widened", "gelu_floor": 0.9}

# With fewer than 8 bits: every method that reduces the error. Scores are read by the softmax only and keep 8 bits.
_LOW: dict[str, Any] = {
    "rounding": "reconstructed",
    "ranges": "least-error",
    "gelu": "spaced",
    "levels": "curve",
    "heads": "rotated",
    "keys": "leveled",
    "scores": "attended",
    "gelu_floor": 0.0,  # scales of GELU outputs are searched
    "extremes": "observed",
    "mlps": "split",
    "doubled": {},
    "refine_images": 512,
}
_LOW_SITES = {**_OURS["sites"], "scores": SiteRule(bits=8)}
# With 4-bit weights and 8-bit activations: learned weights, and the finer activations of `embedding`.
_W4: dict[str, Any] = {
    "rounding": "reconstructed",
    "ranges": "least-error",
    "heads": "plain",
    "extremes": "observed",
    **_WHOLE,
    "refine_images": 256,
    **_FINE,
}
# Weights per shared codebook, in recipes with 4-bit weights. With 8-bit activations, most of the error comes from the weights.
WEIGHT_GROUP = 16
WEIGHT_GROUP_A8 = 8

# Hardware with symmetric int8 and 16-bit multipliers. No codes are wider than 8 bits, so the residual stream needs PTF.
# Codes of attention and GELU outputs are those that such hardware represents exactly.
_NPU: dict[str, Any] = {"symmetric": True, "mult": "short", "levels": "powers", "gelu_floor": 0.0, **_WHOLE}

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="fqvit", **_DEFAULT),
        Recipe(name="w6a6", weight_bits=6, activation_bits=6, **{**_OURS, **_LOW, "sites": _LOW_SITES}),
        Recipe(name="w4", weight_bits=4, weight_group=WEIGHT_GROUP_A8, **_OURS, **_W4),
        Recipe(
            name="w4a4",
            weight_bits=4,
            activation_bits=4,
            weight_group=WEIGHT_GROUP,
            **{**_OURS, **_LOW, "sites": _LOW_SITES},
        ),
        Recipe(name="fast", weight_bits=7, **_DEFAULT),
        Recipe(name="embedding", rounding="weighted", mlps="doubled", refine_images=384, **_OURS, **_FINE),
        Recipe(name="npu", attention="relative", channels=True, k=4, **_BETTER, **_NPU),
        Recipe(name="auto", weight_group=WEIGHT_GROUP, widths=(4, 6), max_loss=0.5, **{**_DEFAULT, **_SEARCH}),
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
        Recipe(name="bit-split", nonlinear="float", rounding="bit-split", refine_images=256, **_PLAIN),
        Recipe(name="ptq-vit", nonlinear="float", intervals="similarity", symmetric=True, **_PLAIN),
        Recipe(name="ptq4vit", nonlinear="float", intervals="hessian", images=32, **_PLAIN),
        Recipe(name="repq-vit", nonlinear="float", intervals="reparameterized", images=32, **_PLAIN),
    )
}
DEFAULT_RECIPE = "fqvit"
# Recipes that get the methods of w6a6, w4 and w4a4 if their bits are changed to fewer than 8.
ADAPTED = ("fqvit", "embedding", "w6a6", "w4", "w4a4")


def load_recipe(name: str | Path | Recipe = DEFAULT_RECIPE) -> Recipe:
    """Return a recipe by name, or read it from a TOML file. A Recipe is returned as it is."""
    if isinstance(name, Recipe):
        return name
    if str(name) in RECIPES:
        return RECIPES[str(name)]
    path = Path(str(name))
    if path.suffix != ".toml":
        raise FqvitError(f"recipe {str(name)!r}: no such recipe. Use one of {', '.join(RECIPES)}, or a .toml file.")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FqvitError(
            f"{path}: cannot be read ({error.strerror}). Use one of {', '.join(RECIPES)}, or a .toml file."
        ) from None
    except (ValueError, RecursionError) as error:  # also raised for integers with too many digits and for deep nesting
        raise FqvitError(f"{path}: not a TOML file ({error}).") from None
    base = table.pop("base", None)
    if base is not None and str(base) not in RECIPES:
        raise FqvitError(f"{path}: base {base!r} is not a recipe. Use one of {', '.join(RECIPES)}.")
    fields = msgspec.to_builtins(RECIPES[str(base)]) if base else {}
    if isinstance(table.get("sites"), dict):
        table["sites"] = _merged_rules(fields.get("sites", {}), table["sites"])
    try:
        return msgspec.convert({**fields, "name": path.stem, **table}, Recipe)
    except msgspec.ValidationError as error:
        raise FqvitError(f"{path}: {str(error).replace('`', '')}. docs/reference/recipes.md lists the fields.") from None


def _merged_rules(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the site rules of the base, then those of the file. Rules with the same pattern are merged field by field."""
    merged = dict(base)
    for pattern, rule in own.items():
        before = merged.pop(pattern, {})
        merged[pattern] = {**before, **rule} if isinstance(rule, dict) else rule
    return merged


def weight_bits(recipe: Recipe, layer: str, at_end: bool) -> tuple[int, int]:
    """Return the number of bits of a layer's weights, and how many weights share a codebook (0: no groups).

    Groups are for at most 4 bits. With groups, and with weights that are compensated or learned, the patch embedding and the
    output layers (at_end) keep 8 bits: they are small and sensitive. If patterns in recipe.layer_bits match
    the name of the layer, the last of them sets the bits instead.
    """
    own = [bits for pattern, bits in recipe.layer_bits.items() if fnmatchcase(layer, pattern)]
    if own:
        return own[-1], recipe.weight_group if own[-1] <= 4 else 0
    group = recipe.weight_group if recipe.weight_bits <= 4 else 0
    keeps_ends = group > 0 or recipe.rounding in ("compensated", "reconstructed")
    return (8, 0) if keeps_ends and at_end else (recipe.weight_bits, group)


def check_integer(recipe: Recipe) -> None:
    """Raise FqvitError if the recipe has no integer program."""
    if not recipe.integer:
        why = "LayerNorm and Softmax stay float" if recipe.nonlinear == "float" else "its attention codes are only simulated"
        raise FqvitError(f"recipe {recipe.name}: {why}, so there is no integer program. `fqvit table` measures it.")


def detector_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe for a detector: `weighted` becomes `nearest`, because tokens are weighted by one output vector only."""
    check_integer(recipe)
    return msgspec.structs.replace(recipe, rounding="nearest", doubled={}) if recipe.rounding == "weighted" else recipe


def with_profile(recipe: Recipe, profile: str) -> Recipe:
    """Adapt `recipe` to a hardware profile.

    npu: symmetric int8 and 16-bit multipliers. Sites have at most 8 bits; a residual stream that had more gets PTF instead.
    """
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
    """Set the weight, activation and attention bits of `recipe`, given as W/A/ATTN, such as "8/8/4"."""
    match = re.fullmatch(r"([2-8])/([2-8])/([2-8])", str(bits))
    if match is None:
        raise FqvitError(f"bits {bits!r}: expected W/A/ATTN, each from 2 to 8, such as 8/8/4.")
    weight, activation, attention = map(int, match.groups())
    return msgspec.structs.replace(recipe, weight_bits=weight, activation_bits=activation, attention_bits=attention)


def with_methods(recipe: Recipe) -> Recipe:
    """Add the methods that reduce the error of fewer than 8 bits to a recipe whose bits were changed.

    Only recipes that are built for accuracy get them; other recipes compare single methods.
    """
    if recipe.name not in ADAPTED or min(recipe.weight_bits, recipe.activation_bits) == 8:
        return recipe
    group = 0 if recipe.weight_bits > 4 else WEIGHT_GROUP if recipe.activation_bits < 8 else WEIGHT_GROUP_A8
    if recipe.name == "fqvit":
        recipe = msgspec.structs.replace(recipe, values="observed")
    if recipe.activation_bits == 8:
        methods = _W4 if recipe.name == "fqvit" else {}
        return msgspec.structs.replace(recipe, weight_group=group, **methods)
    return msgspec.structs.replace(recipe, weight_group=group, sites={**_LOW_SITES, **recipe.sites}, **_LOW)
