"""Compare a quantized detector with its float detector: the sites of every network, and the detections.

The signal-to-noise ratios of a head include the noise of the pyramid: float and integer heads read the features of the same
boxes, those of the float detector, each from its own feature maps. Detections are compared as the two detectors give them.
Needs torch. See also: compare.py (the sites of one program), detections.py (matching).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fqvit.detect.boxes import Floats
from fqvit.detect.cache import SizeCache
from fqvit.detect.fixed.constants import BOX_FRACTION, Ratio
from fqvit.detect.fixed.reference import MOST_BYTES, align_params
from fqvit.detect.fixed.roialign import multiscale_roi_align as integer_roi_align
from fqvit.detect.fixed.roialign import native_roi_align
from fqvit.detect.float.networks import FloatNetworks
from fqvit.detect.float.pipeline import detect
from fqvit.detect.float.proposals import propose, refine
from fqvit.detect.float.roialign import Floats32, multiscale_roi_align
from fqvit.detect.images import Input, pad_with
from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.model.float_models import box_model, mask_model, pyramid_model
from fqvit.detect.model.pyramid import split_outputs
from fqvit.detect.program import DetectorProgram
from fqvit.detect.resize import resized
from fqvit.detect.results import NamedResult, coco_results, named
from fqvit.errors import FqvitError
from fqvit.evaluate.compare import Comparer, Comparison, Outputs, Power, SiteNoise, energy
from fqvit.evaluate.detections import Agreement, Match, agreements, match
from fqvit.ir.program import Program
from fqvit.models.graph import IMAGES, Features
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise

BOXES = 64  # boxes per image on which the sites of a head are compared
ROI_FEATURES = "roi features"  # the name of the input of a head among its sites
KEPT_SIZES = 2  # image sizes whose pyramids are in memory


@dataclass(frozen=True)
class ComparedImage:
    """The detections of one image, best first, and how they match."""

    name: str
    floats: list[NamedResult]
    integers: list[NamedResult]
    match: Match


@dataclass(frozen=True)
class DetectorComparison:
    """parts: the sites of each network, by the name of its program   detections: one summary per minimum score"""

    images: int
    parts: dict[str, Comparison]
    detections: list[Agreement]


class PartComparer(Comparer):
    """Compares one network of a detector. power: sums to continue, from the pyramid of another image size"""

    compared_kinds = ()

    def __init__(self, program: Program, model: FloatModel, power: dict[str, Power] | None = None) -> None:
        super().__init__(program, model, most_bytes=MOST_BYTES)
        self.logits = None  # the classes of single boxes are not counted
        if power is not None:
            self.power = power

    def _outputs(self, model: FloatModel) -> tuple[Features, tuple[str, ...]]:
        return "logits", ()  # all outputs of the network

    @torch.no_grad()
    def add_pixels(self, pixels: NDArray[np.uint8]) -> Outputs:
        """Add one padded image u8 [h, w, 3] to a pyramid."""
        values = normalise(pixels[None], self.model.preprocess)
        return self._add(values, pixels[None], values, (), None)

    @torch.no_grad()
    def add_rois(self, exact: Floats32, codes: NDArray[np.uint8], simulated: Floats32) -> Outputs:
        """Add the features of boxes [n, side, side, C] to a head. They count as a site."""
        power, q, x = self.power[IMAGES], self.qparams[IMAGES], torch.from_numpy(exact)
        rounded = self.simulation.encode_input(torch.from_numpy(simulated))
        power.signal += energy(x)
        power.alone += energy(x - q.decode(q.encode(x)))
        power.integer += energy(x - q.decode(torch.from_numpy(codes).float()))
        power.simulated += energy(x - rounded)
        return self._add(x, codes, rounded, (), None)

    def _row(self, name: str, power: Power) -> SiteNoise:
        roi = self.program.header.input
        if name == IMAGES and roi is not None:
            return SiteNoise(ROI_FEATURES, "roi", roi.bits, *power.decibels())
        return super()._row(name, power)


@dataclass(frozen=True)
class _Levels:
    """The feature maps of one image: of the float pyramid, of the integer one (codes), and of the simulation."""

    exact: list[Floats32]
    integers: list[NDArray[np.uint8]]
    simulated: list[Floats32]


class DetectorComparer:
    """Accumulates images; result() can be called at any time after the first one."""

    def __init__(self, program: DetectorProgram, detector: FloatDetector) -> None:
        """Raises FqvitError if the float detector does not match the program."""
        self.program, self.detector, self.settings = program, detector, program.settings
        self.networks = FloatNetworks(detector)
        self.ready = program.ready(1)
        self.boxes, self.masks = (
            [PartComparer(part, model(detector, stage)) for stage, part in enumerate(parts)]
            for parts, model in ((program.boxes, box_model), (program.masks, mask_model))
        )
        self.pyramids: SizeCache[PartComparer] = SizeCache(KEPT_SIZES)
        self.pyramid_power: dict[str, Power] | None = None
        self.pyramid: PartComparer | None = None  # the latest one; its sums include all sizes
        self.images = 0  # whose sites were compared
        self.matches: list[Match] = []

    def add(self, image: Image.Image, name: str) -> ComparedImage:
        """Compare the detections and all sites of an image."""
        found = self.add_detections(image, name)
        given = self.program.prepare(image)
        height, width = given.size
        boxes = np.array([result["bbox"] for result in found.floats]).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        self._add_sites(given, boxes * np.tile([width / given.width, height / given.height], 2))
        return found

    def add_detections(self, image: Image.Image, name: str) -> ComparedImage:
        """Compare the detections of an image only. It is prepared for both detectors as the program's file says."""
        given, s = self.program.prepare(image), self.settings
        number = len(self.matches) + 1
        both = (detect(self.networks, given, s), self.ready.detect(given))
        floats, integers = (named(coco_results(found, number, s), name, s) for found in both)
        self.matches.append(match(floats, integers))
        return ComparedImage(name, floats, integers, self.matches[-1])

    def _add_sites(self, given: Input, detected: Floats) -> None:
        """detected: the float detector's boxes in pixels of the network's input, for the mask heads"""
        pixels = pad_with(given.pixels, self.program.between.padding)
        self.images += 1
        self.pyramid = self.pyramids.get((pixels.shape[0], pixels.shape[1]), self._make_pyramid)
        out = self.pyramid.add_pixels(pixels)
        exact, simulated = (split_outputs(outputs) for outputs in (out.exact, out.simulated))
        count = len(exact.levels)
        levels = _Levels(_arrays(exact.levels), [codes[0] for codes in out.integers[:count]], _arrays(simulated.levels))
        objectness, deltas = ([x.astype(np.float64) for x in _arrays(part)] for part in (exact.objectness, exact.deltas))
        proposals = propose(objectness, deltas, given.size, self.settings)[:BOXES]
        boxes = proposals
        for stage, head in enumerate(self.boxes if len(boxes) else ()):
            ratios = self.program.between.box_squares[stage]
            found = head.add_rois(*self._features(levels, boxes, self.program.boxes[stage], ratios))
            logits, moves = (x.double().numpy() for x in found.exact)
            boxes = refine(boxes, logits, moves, self.settings.stds[stage], given.size)
        boxes = detected[:BOXES] if len(detected) else proposals  # as in calibration
        for stage, head in enumerate(self.masks if len(boxes) else ()):
            ratios = self.program.between.mask_squares[stage]
            head.add_rois(*self._features(levels, boxes, self.program.masks[stage], ratios))

    def _make_pyramid(self, height: int, width: int) -> PartComparer:
        program, model = resized(self.program.pyramid, height, width), pyramid_model(self.detector, height, width)
        made = PartComparer(program, model, self.pyramid_power)
        self.pyramid_power = made.power
        return made

    def _features(
        self, levels: _Levels, boxes: Floats, head: Program, ratios: Sequence[Ratio]
    ) -> tuple[Floats32, NDArray[np.uint8], Floats32]:
        """Return the features of the boxes for a head, from the maps of each pyramid."""
        s, c, side = self.settings, self.program.between, head.input_shape[0]
        exact, simulated = (
            multiscale_roi_align(maps, boxes, side, s.finest, s.strides) for maps in (levels.exact, levels.simulated)
        )
        edges = np.round(boxes * 2**BOX_FRACTION).astype(np.int64)
        params = align_params(self.program.pyramid, head, ratios, c)
        codes = integer_roi_align(levels.integers, edges, side, c.areas, params, native_roi_align(1))
        return exact, codes, simulated

    def result(self) -> DetectorComparison:
        if self.pyramid is None:
            raise FqvitError("compare: no images were read. Pass a folder with at least one readable image.")
        self.pyramid.images = self.images
        comparers = {"pyramid": self.pyramid}
        for kind, parts in (("boxes", self.boxes), ("masks", self.masks)):
            comparers |= {f"{kind}.{stage}": part for stage, part in enumerate(parts)}
        # Heads have no sums if no image has proposals.
        found = {name: part.result() for name, part in comparers.items() if part.images}
        return DetectorComparison(len(self.matches), found, agreements(self.matches, self.settings.score))


def _arrays(maps: Sequence[Tensor]) -> list[Floats32]:
    return [x[0].contiguous().numpy() for x in maps]
