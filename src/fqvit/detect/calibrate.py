"""Calibrate a detector: one float pass over unlabelled images observes every activation to be quantized.

Each such activation, called a site, has one observer. Images are processed one at a time, each at its own size; sites have the
same names at every size. Heads are observed on the RoI features that the float detector extracts. Methods that run the networks
again, such as learning weights, do so on a sample of crops and RoI features (sample.py).
See also: quant/calibrate.py, refine.py (these methods), float/pipeline.py (from feature maps to boxes).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from fqvit.detect.float.networks import BOXES_AT_ONCE, FloatNetworks
from fqvit.detect.float.pipeline import Maps, classify
from fqvit.detect.float.proposals import propose
from fqvit.detect.float.roialign import Floats32, multiscale_roi_align
from fqvit.detect.images import FLOAT_RULE, Input, Pixels, normalise_and_pad, prepare
from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.model.float_models import pyramid_model
from fqvit.detect.model.load import SMALLEST
from fqvit.detect.model.pyramid import split_outputs
from fqvit.detect.refine import choose_bits, round_weights
from fqvit.detect.sample import DetectorSample
from fqvit.errors import FqvitError
from fqvit.models.graph import Graph, trace
from fqvit.quant.adjust import Centers, adjust_ranges
from fqvit.quant.batches import mark_last, sample_size
from fqvit.quant.calibrate import (
    Call,
    SiteObserver,
    coded_attention,
    observe_batch,
    site_parameters,
)
from fqvit.quant.calibration import Calibration, Choice
from fqvit.quant.centering import center, key_centers
from fqvit.quant.methods import auto
from fqvit.quant.plan import plan, plan_roi_features, recipes_of_parts
from fqvit.quant.recipe import Recipe, detector_recipe
from fqvit.quant.rotating import rotate
from fqvit.quant.weights import check_layers
from fqvit.system.progress import Progress

CROPS = 128  # crops that methods read again, if the recipe has more images: each is larger than an image of a classifier


@dataclass(frozen=True)
class DetectorCalibration:
    """Calibrations of a detector's networks. pyramid: valid for every image size   boxes, masks: one per stage

    choice: what recipe auto chose for all networks; None for other recipes
    """

    pyramid: Calibration
    boxes: tuple[Calibration, ...]
    masks: tuple[Calibration, ...]
    choice: Choice | None = None

    def parts(self) -> dict[str, Calibration]:
        """Return the calibrations by network, named as in the detector's file."""
        kinds = (("boxes", self.boxes), ("masks", self.masks))
        return {"pyramid": self.pyramid} | {f"{kind}.{i}": one for kind, each in kinds for i, one in enumerate(each)}

    @staticmethod
    def of(parts: Mapping[str, Calibration], choice: Choice | None = None) -> DetectorCalibration:
        """Combine calibrations by network."""
        boxes, masks = (tuple(x for name, x in parts.items() if name.startswith(kind)) for kind in ("boxes", "masks"))
        return DetectorCalibration(parts["pyramid"], boxes, masks, choice)

    def to_json(self) -> str:
        """Encode the calibrations as JSON text: {network: text}. `choice` is left out, as in Calibration.to_json."""
        return json.dumps({name: each.to_json() for name, each in self.parts().items()})

    @staticmethod
    def from_json(text: str) -> DetectorCalibration:
        """Decode the text of to_json; raises FqvitError for any other text."""
        try:
            texts = msgspec.json.decode(text, type=dict[str, str])
            return DetectorCalibration.of({name: Calibration.from_json(each) for name, each in texts.items()})
        except (msgspec.DecodeError, KeyError) as error:
            raise FqvitError(f"calibration: not that of a detector ({error}). Calibrate again.") from None


class PartObservers:
    """The observers of one network: the pyramid or a head.

    sites: one mapping {site: observer} per recipe   roi: the observers of a head's input, one per recipe; none for the pyramid
    """

    def __init__(self, graph: Graph, recipes: Sequence[Recipe], wholes: Sequence[Recipe], head: bool) -> None:
        """recipes: with the rules for this network   wholes: the recipes of the detector   head: whether x is RoI features"""
        self.graph, self.recipes = graph, recipes
        self.sites = [{name: SiteObserver(site, recipe) for name, site in plan(graph, recipe).items()} for recipe in recipes]
        self.roi = [SiteObserver(plan_roi_features(whole), whole) for whole in wholes] if head else []

    def observe(self, graph: Graph, x: Tensor, call: Call | None = None) -> tuple[Tensor, ...]:
        """Run `graph`, which may be for another image size, on x and observe every site; returns the outputs."""
        for roi in self.roi:
            roi.observe(x)
        return observe_batch(graph, x, *self.sites, call=call)

    def calibrations(self, images: int, centers: Centers) -> list[Calibration]:
        """Return one calibration per recipe."""
        found = []
        for i, recipe in enumerate(self.recipes):
            sites = site_parameters(self.graph, recipe, self.sites[i])
            roi = self.roi[i].qparams() if self.roi else None
            found.append(Calibration(recipe, "logits", images, sites, square=roi, centers=centers))
        return found


class ObservedNetworks(FloatNetworks):
    """The float networks, with every site observed while they run. sample: None if no method runs the networks again"""

    def __init__(self, detector: FloatDetector, recipes: Sequence[Recipe], sample: DetectorSample | None) -> None:
        super().__init__(detector)
        self.sample, self.last = sample, False  # last: whether the current image is the last one
        template = pyramid_model(detector, *SMALLEST)
        plain = rotate(trace(template.module), recipes[0])
        self.centers: Centers = key_centers(plain, template.preprocess) if recipes[0].keys != "plain" else {}
        modules = {"pyramid": None, **self.module_heads()}
        graphs = [center(plain, self.centers) if head is None else rotate(trace(head), recipes[0]) for head in modules.values()]
        check_layers(graphs, recipes[0])
        every = [recipes_of_parts(graphs, recipe) for recipe in recipes]
        self.parts = {
            part: PartObservers(graph, [each[i] for each in every], recipes, part != "pyramid")
            for i, (part, graph) in enumerate(zip(modules, graphs, strict=True))
        }

    def module_heads(self) -> dict[str, nn.Module]:
        """Return the heads by name, in the order of the detector's file."""
        boxes = {f"boxes.{i}": head for i, head in enumerate(self.module.box_heads)}
        return boxes | {f"masks.{i}": head for i, head in enumerate(self.module.mask_heads)}

    def maps(self, pixels: Pixels) -> Maps:
        if self.sample is not None:
            self.sample.add_image(pixels)
        images = torch.from_numpy(normalise_and_pad(pixels, self.settings))[None]
        part = self.parts["pyramid"]
        graph = center(rotate(trace(self.pyramid((images.shape[2], images.shape[3]))), part.recipes[0]), self.centers)
        coded = self.last and part.recipes[0].last_batch
        call = coded_attention(part.recipes[0], part.sites[0]) if coded else None
        outputs = split_outputs(part.observe(graph, images, call))
        return Maps(*([x[0].contiguous().numpy() for x in level] for level in outputs))

    def boxes(self, stage: int, rois: Floats32) -> tuple[Floats32, Floats32]:
        classes, deltas = self._observe(f"boxes.{stage}", rois)
        return classes, deltas

    def masks(self, stage: int, rois: Floats32, labels: NDArray[np.int64]) -> Floats32:
        (logits,) = self._observe(f"masks.{stage}", rois)
        chosen: Floats32 = logits[np.arange(len(labels)), :, :, labels]
        return chosen

    def _observe(self, name: str, rois: Floats32) -> Sequence[Floats32]:
        if self.sample is not None:
            self.sample.add_features(name, rois)
        part = self.parts[name]
        outputs = [part.observe(part.graph, some) for some in torch.split(torch.from_numpy(rois), BOXES_AT_ONCE)]
        return [torch.cat(some).numpy() for some in zip(*outputs, strict=True)]


@torch.no_grad()
def calibrate_detector(
    detector: FloatDetector,
    images: Iterable[Image.Image],
    recipe: Recipe,
    *,
    seen: Callable[[int], None] | None = None,
    progress: Progress | None = None,
    size_of: Callable[[DetectorCalibration], int] | None = None,
) -> DetectorCalibration:
    """Observe every site of every network on the first recipe.images of `images`, then run the methods of the recipe.

    seen(n) is called after image n   progress: shows the progress of the methods   size_of: returns the size of the file, for
    recipe.max_size
    """
    recipe = detector_recipe(recipe)
    if recipe.max_size is not None and size_of is None:
        raise FqvitError(f"recipe {recipe.name}: max_size needs the argument size_of, which measures the file.")
    recipes = [recipe] if recipe.max_loss is None else [recipe, auto.wide(recipe)]
    crops = min(sample_size(recipe), CROPS)
    sample = DetectorSample(detector.settings, crops) if crops else None
    networks, count = ObservedNetworks(detector, recipes, sample), 0
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
    return _finish(detector, networks, recipe, count, progress, size_of)


def _finish(
    detector: FloatDetector,
    networks: ObservedNetworks,
    recipe: Recipe,
    images: int,
    progress: Progress | None,
    size_of: Callable[[DetectorCalibration], int] | None,
) -> DetectorCalibration:
    """Compute the parameters of all sites, then run the methods that the recipe enables on the sample."""
    inputs = None if networks.sample is None else networks.sample.inputs()
    centers = networks.centers
    if inputs is not None:
        model = pyramid_model(detector, *inputs["pyramid"].shape[1:3])
        graph, observers = center(rotate(trace(model.module), recipe), centers), networks.parts["pyramid"].sites
        where = torch.device("cpu")
        centers = adjust_ranges(graph, model.preprocess, recipe, observers, centers, inputs["pyramid"], where)
    every = {part: each.calibrations(images, centers if part == "pyramid" else {}) for part, each in networks.parts.items()}
    found = {part: each[0] for part, each in every.items()}
    if inputs is None:
        return DetectorCalibration.of(found)
    choice = None
    if recipe.max_loss is not None:
        measure_size = None if size_of is None else lambda parts: size_of(DetectorCalibration.of(parts))
        wider = {part: each[1] for part, each in every.items()}
        found, choice = choose_bits(detector, found, wider, inputs, recipe, measure_size, progress)
    return DetectorCalibration.of(round_weights(detector, found, inputs, progress), choice)


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
