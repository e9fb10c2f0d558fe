"""Calibrate a detector: one float pass over unlabelled images observes every activation to be quantized.

Each such activation, called a site, has one observer. Images are processed one at a time, each at its own size; sites have the
same names at every size. Heads are observed on the RoI features that the float detector extracts. Recipes that search
for bit widths or ranges, or compensate for rounding errors, are rejected: these methods are not implemented for detectors.
See also: quant/calibrate.py, float/pipeline.py (from feature maps to boxes).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fqvit.detect.float.networks import BOXES_AT_ONCE, FloatNetworks
from fqvit.detect.float.pipeline import Maps, classify
from fqvit.detect.float.proposals import propose
from fqvit.detect.float.roialign import Floats32, multiscale_roi_align
from fqvit.detect.images import FLOAT_RULE, Input, Pixels, normalise_and_pad, prepare
from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.model.pyramid import split_outputs
from fqvit.errors import FqvitError
from fqvit.models.graph import Graph, trace
from fqvit.quant.batches import mark_last
from fqvit.quant.calibrate import Call, SiteObserver, coded_attention, observe_batch, site_parameters
from fqvit.quant.calibration import Calibration
from fqvit.quant.plan import plan, plan_roi_features, recipes_of_parts
from fqvit.quant.recipe import Recipe, check_detector


@dataclass(frozen=True)
class DetectorCalibration:
    """Calibrations of a detector's networks. pyramid: valid for every image size   boxes, masks: one per stage"""

    pyramid: Calibration
    boxes: tuple[Calibration, ...]
    masks: tuple[Calibration, ...]

    def to_json(self) -> str:
        """Encode the calibrations as JSON text: {"pyramid": [one text], "boxes": [one text per stage], "masks": ...}."""
        parts = {"pyramid": (self.pyramid,), "boxes": self.boxes, "masks": self.masks}
        return json.dumps({name: [one.to_json() for one in part] for name, part in parts.items()})

    @staticmethod
    def from_json(text: str) -> DetectorCalibration:
        """Decode the text of to_json; raises FqvitError for any other text."""
        try:
            texts = msgspec.json.decode(text, type=dict[str, list[str]])
            (pyramid,), boxes, masks = (texts[name] for name in ("pyramid", "boxes", "masks"))
        except (msgspec.DecodeError, KeyError, ValueError) as error:
            raise FqvitError(f"calibration: not that of a detector ({error}). Calibrate again.") from None
        read = Calibration.from_json
        return DetectorCalibration(read(pyramid), tuple(map(read, boxes)), tuple(map(read, masks)))


class PartObservers:
    """The observers of one network: the pyramid or a head. roi: the observer of a head's input; None for the pyramid"""

    def __init__(self, graph: Graph, recipe: Recipe, whole: Recipe, head: bool) -> None:
        """recipe: the rules for this network   whole: the detector's recipe   head: whether the network takes RoI features"""
        self.graph, self.recipe = graph, recipe
        self.sites = {name: SiteObserver(site, recipe) for name, site in plan(graph, recipe).items()}
        self.roi = SiteObserver(plan_roi_features(whole), whole) if head else None

    def observe(self, graph: Graph, x: Tensor, call: Call | None = None) -> tuple[Tensor, ...]:
        """Run `graph`, which may be for another image size, on x and observe every site; returns the outputs."""
        if self.roi is not None:
            self.roi.observe(x)
        return observe_batch(graph, x, self.sites, call=call)

    def calibration(self, images: int) -> Calibration:
        found = site_parameters(self.graph, self.recipe, self.sites)
        roi = None if self.roi is None else self.roi.qparams()
        return Calibration(self.recipe, "logits", images, found, square=roi)


class ObservedNetworks(FloatNetworks):
    """The float networks, with every site observed while they run."""

    def __init__(self, detector: FloatDetector, recipe: Recipe) -> None:
        super().__init__(detector)
        module = self.module
        graphs = [trace(part) for part in (module.pyramid, *module.box_heads, *module.mask_heads)]
        recipes = recipes_of_parts(graphs, recipe)
        parts = [PartObservers(graph, each, recipe, i > 0) for i, (graph, each) in enumerate(zip(graphs, recipes, strict=True))]
        self.pyramid_observers, self.box_heads, self.mask_heads = parts[0], parts[1 : 1 + self.stages], parts[1 + self.stages :]
        self.last = False  # whether the current image is the last one

    def maps(self, pixels: Pixels) -> Maps:
        images = torch.from_numpy(normalise_and_pad(pixels, self.settings))[None]
        graph = trace(self.pyramid((images.shape[2], images.shape[3])))
        part = self.pyramid_observers
        call = coded_attention(part.recipe, part.sites) if self.last and part.recipe.last_batch else None
        outputs = split_outputs(part.observe(graph, images, call))
        return Maps(*([x[0].contiguous().numpy() for x in level] for level in outputs))

    def boxes(self, stage: int, rois: Floats32) -> tuple[Floats32, Floats32]:
        classes, deltas = _observe(self.box_heads[stage], rois)
        return classes, deltas

    def masks(self, stage: int, rois: Floats32, labels: NDArray[np.int64]) -> Floats32:
        (logits,) = _observe(self.mask_heads[stage], rois)
        chosen: Floats32 = logits[np.arange(len(labels)), :, :, labels]
        return chosen


def _observe(part: PartObservers, rois: Floats32) -> Sequence[Floats32]:
    outputs = [part.observe(part.graph, some) for some in torch.split(torch.from_numpy(rois), BOXES_AT_ONCE)]
    return [torch.cat(some).numpy() for some in zip(*outputs, strict=True)]


@torch.no_grad()
def calibrate_detector(
    detector: FloatDetector,
    images: Iterable[Image.Image],
    recipe: Recipe,
    *,
    seen: Callable[[int], None] | None = None,
) -> DetectorCalibration:
    """Observe every site of every network on the first recipe.images of `images`. seen(n) is called after image n."""
    check_detector(recipe)
    networks, count = ObservedNetworks(detector, recipe), 0
    taken: Iterable[Image.Image] = islice(images, recipe.images)
    if recipe.shuffle is not None:
        given = list(taken)
        taken = [given[i] for i in np.random.default_rng(recipe.shuffle).permutation(len(given))]
    for image, last in mark_last(taken):
        networks.last = last
        _observe_image(networks, prepare(image, detector.settings, FLOAT_RULE))
        count += 1
        if seen is not None:
            seen(count)
    if count == 0:
        raise FqvitError(f"{detector.name}: no calibration images. Pass at least one.")
    boxes, masks = (tuple(part.calibration(count) for part in parts) for parts in (networks.box_heads, networks.mask_heads))
    return DetectorCalibration(networks.pyramid_observers.calibration(count), boxes, masks)


def _observe_image(networks: ObservedNetworks, image: Input) -> None:
    s = networks.settings
    maps = networks.maps(image.pixels)
    proposals = propose(
        [x.astype(np.float64) for x in maps.objectness], [x.astype(np.float64) for x in maps.deltas], image.size, s
    )
    found = classify(networks, maps.levels, proposals, image.size, s)
    # If nothing is detected, the mask heads are observed on proposals instead.
    boxes = found.boxes if len(found.boxes) else proposals[: s.detections]
    labels = np.zeros(len(boxes), np.int64)
    rois = multiscale_roi_align(maps.levels, boxes, networks.mask_side, s.finest, s.strides)
    for stage in range(networks.stages if len(rois) else 0):
        networks.masks(stage, rois, labels)
