"""The result of calibration as a frozen value and as a JSON file.

See also: calibrate.py (creates it), lowering/lower.py and simulate.py (use it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError
from fqvit.ir.packing import MAX_CODEBOOKS
from fqvit.models.graph import Features, Graph
from fqvit.models.load import FloatModel
from fqvit.models.outputs import output_graph
from fqvit.quant.centering import center
from fqvit.quant.codebooks import Groups
from fqvit.quant.doubling import choose_doubled, double, double_sites
from fqvit.quant.qparams import QParams
from fqvit.quant.recipe import Recipe
from fqvit.quant.rotating import rotate
from fqvit.quant.splitting import split
from fqvit.quant.weights import QuantizedLinear


class Measure(msgspec.Struct, frozen=True):
    """Difference between the quantized model and the float model. No labels are needed.

    kl: mean Kullback-Leibler divergence in nats; agreement: percentage of images with the same top-1 class.
    loss: expected top-1 loss in percentage points, 100 * mean(p[float top-1 class] - p[quantized top-1 class]), where p are the
    class probabilities of the float model: the true loss if these are well calibrated.
    """

    kl: float
    agreement: float
    loss: float


class Raised(msgspec.Struct, frozen=True):
    """One unit whose sites got more bits: number of sites, bits before and after, and the KL divergence that this saves."""

    unit: str
    role: str
    sites: int
    before: int
    after: int
    gain: float


class Narrowed(msgspec.Struct, frozen=True):
    """One step that narrows the weights of a layer: bits before and after, the KL divergence it adds, the bytes it saves."""

    layer: str
    before: int
    after: int
    cost: float
    saved: int


class Choice(msgspec.Struct, frozen=True):
    """The choice of recipe `auto`.

    start: measured before any change   end: measured after raising the chosen units and narrowing the chosen layers
    units, layers: numbers of candidates
    reached: whether end.loss <= max_loss or, with max_size, whether the file is at most that large   bytes: file size, if known
    """

    max_loss: float
    images: int
    start: Measure
    end: Measure
    reached: bool
    units: int
    raised: list[Raised]
    narrowed: list[Narrowed] = []
    layers: int = 0
    max_size: int | None = None
    bytes: int | None = None


class SavedSite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON form of a QParams."""

    bits: Annotated[int, msgspec.Meta(ge=1, le=16)]
    scale: list[Annotated[float, msgspec.Meta(gt=0)]]
    zero: list[Annotated[int, msgspec.Meta(ge=0, le=65535)]]
    alpha: list[Annotated[int, msgspec.Meta(ge=0, le=15)]] | None
    log2: bool
    zero_code: bool
    levels: list[Annotated[int, msgspec.Meta(ge=0, le=2**15)]] = []
    grid: list[Annotated[int, msgspec.Meta(ge=0, le=65535)]] = []
    octave: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1

    def __post_init__(self) -> None:
        if not self.scale or len(self.scale) != len(self.zero):
            raise ValueError("scale and zero must have one value per group of channels")
        if self.levels and max(self.levels) == 0:
            raise ValueError("at least one of levels must be above 0")
        if self.grid and (self.grid[-1] >= 2**self.bits or self.grid != sorted(set(self.grid))):
            raise ValueError("grid must be ascending codes of at most `bits` bits")

    def qparams(self) -> QParams:
        alpha = None if self.alpha is None else np.array(self.alpha, np.uint8)
        scale, zero = np.array(self.scale), np.array(self.zero, np.int64)
        levels, grid = tuple(self.levels), tuple(self.grid)
        return QParams(self.bits, scale, zero, alpha, self.log2, self.zero_code, levels, grid, self.octave)

    @staticmethod
    def of(q: QParams) -> SavedSite:
        alpha = None if q.alpha is None else q.alpha.tolist()
        scale, zero, levels, grid = q.scale.tolist(), q.zero.tolist(), list(q.levels), list(q.grid)
        return SavedSite(q.bits, scale, zero, alpha, q.log2, q.zero_code, levels, grid, q.octave)


class SavedGroups(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON form of Groups: choice u8 [O, G] and codebooks i8 [B, levels] as base64 bytes."""

    choice: bytes
    codebooks: bytes
    levels: Annotated[int, msgspec.Meta(ge=4, le=128)]
    size: Annotated[int, msgspec.Meta(ge=2, le=256)]

    def __post_init__(self) -> None:
        if not self.choice or len(self.codebooks) not in range(self.levels, MAX_CODEBOOKS * self.levels + 1, self.levels):
            raise ValueError(f"groups must have choices and 1 to {MAX_CODEBOOKS} codebooks of `levels` levels")

    def groups(self, rows: int) -> Groups:
        choice = np.frombuffer(self.choice, np.uint8).reshape(rows, -1)
        return Groups(choice, np.frombuffer(self.codebooks, np.int8).reshape(-1, self.levels), self.size)

    @staticmethod
    def of(groups: Groups) -> SavedGroups:
        return SavedGroups(groups.choice.tobytes(), groups.codebooks.tobytes(), groups.codebooks.shape[1], groups.size)


class SavedWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The JSON form of a QuantizedLinear: w int8 [O, K] as base64 bytes.

    exponent: null in older calibrations of weights without groups. Those of weights with groups must be made again.
    """

    w: bytes
    scale: list[Annotated[float, msgspec.Meta(gt=0)]]
    bias: list[Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]]
    groups: SavedGroups | None = None
    exponent: None = None

    def __post_init__(self) -> None:
        rows = len(self.scale)
        if not rows or not self.w or len(self.bias) != rows or len(self.w) % rows:
            raise ValueError("w, scale and bias must have one row per output")
        if self.groups is not None and len(self.groups.choice) % rows:
            raise ValueError("groups.choice must have one row per output")

    def weights(self) -> QuantizedLinear:
        rows = len(self.scale)
        w = np.frombuffer(self.w, np.int8).reshape(rows, -1)
        groups = None if self.groups is None else self.groups.groups(rows)
        return QuantizedLinear(w, np.array(self.scale), np.array(self.bias, np.int64), groups)

    @staticmethod
    def of(found: QuantizedLinear) -> SavedWeights:
        groups = None if found.groups is None else SavedGroups.of(found.groups)
        return SavedWeights(found.w.tobytes(), found.scale.tolist(), found.bias.tolist(), groups)


class SavedCalibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The JSON form of a Calibration."""

    recipe: Recipe
    features: Features  # deprecated: differs from "logits" only after `quantize --features`
    images: Annotated[int, msgspec.Meta(ge=1)]
    sites: dict[str, SavedSite]
    weights: dict[str, SavedWeights] = {}
    square: SavedSite | None = None
    outputs: list[str] = []
    centers: dict[str, list[float]] = {}


@dataclass(frozen=True)
class Calibration:
    """The quantization parameters of every site, with the recipe and the number of images that they come from."""

    recipe: Recipe
    features: Features
    images: int
    sites: Mapping[str, QParams]
    # Weights that a method chose (methods/), by linear layer. All other weights are rounded to the nearest code.
    weights: Mapping[str, QuantizedLinear] = field(default_factory=dict)
    choice: Choice | None = None  # recipe `auto` only
    square: QParams | None = None  # detector heads only: parameters of their input, RoI features
    outputs: tuple[str, ...] = ()  # names of the outputs (models/requests.py); empty: those of the model itself
    # Constants subtracted from keys, float64 [C] per layer (centering.py). Empty unless the recipe centers keys.
    centers: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def graph(self, model: FloatModel) -> Graph:
        """Trace a model up to the outputs that it was calibrated for, with its rotated heads, centered keys and split MLPs."""
        p = model.preprocess
        graph = output_graph(model.module, (p.channels, p.height, p.width), self.features, self.outputs)
        graph = center(rotate(graph, self.recipe), self.centers)
        return double(split(graph, self.recipe.outliers), self.recipe.doubled)

    def to_json(self) -> str:
        """Encode all fields except `choice` as JSON text. Floats survive the round trip exactly."""
        sites = {name: SavedSite.of(q) for name, q in self.sites.items()}
        weights = {name: SavedWeights.of(found) for name, found in self.weights.items()}
        square = None if self.square is None else SavedSite.of(self.square)
        outputs, centers = list(self.outputs), {name: constant.tolist() for name, constant in self.centers.items()}
        saved = SavedCalibration(self.recipe, self.features, self.images, sites, weights, square, outputs, centers)
        return msgspec.json.format(msgspec.json.encode(saved), indent=1).decode()

    @staticmethod
    def from_json(text: str) -> Calibration:
        """Decode the text of to_json; raises FqvitError for any other text."""
        try:
            saved = msgspec.json.decode(text, type=SavedCalibration)
        except (msgspec.DecodeError, RecursionError) as error:
            raise FqvitError(f"calibration: not a valid calibration ({error}). Calibrate again.") from None
        sites = {name: site.qparams() for name, site in saved.sites.items()}
        weights = {name: found.weights() for name, found in saved.weights.items()}
        square = None if saved.square is None else saved.square.qparams()
        outputs, centers = tuple(saved.outputs), {name: np.array(constant) for name, constant in saved.centers.items()}
        return Calibration(
            saved.recipe, saved.features, saved.images, sites, weights, square=square, outputs=outputs, centers=centers
        )


def double_neurons(calibration: Calibration, graph: Graph) -> Calibration:
    """Give neurons a second copy: those of the recipe, or chosen ones. graph: without copies; see doubling.py"""
    recipe = calibration.recipe
    doubled = recipe.doubled or choose_doubled(graph, calibration.sites)
    sites = double_sites(graph, doubled, calibration.sites)
    return replace(calibration, recipe=msgspec.structs.replace(recipe, doubled=doubled), sites=sites)
