"""Write golden vectors of a detector: every buffer of every network, and inputs and outputs of every integer part.

networks/NAME has the vectors of one network (export/vectors.py): the pyramid at its stored size, the heads on one RoI. The
arrays in parts/ are those of one run of the detector on the reference. docs/reference/detector-exports.md describes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fqvit.data.preprocess import Preprocess
from fqvit.detect.export.facts import facts
from fqvit.detect.fixed.boxes import rescaled, scaled
from fqvit.detect.fixed.masks import paste
from fqvit.detect.fixed.proposals import propose, refine, select_detections
from fqvit.detect.fixed.reference import ReferenceDetector
from fqvit.detect.image_files import read_rgb
from fqvit.detect.images import Input, pad_with, upright_pixels
from fqvit.detect.program import DetectorProgram
from fqvit.export.folder import check_free, replacing_folder, write_manifest
from fqvit.export.vectors import ArrayWriter, test_picture, write_run
from fqvit.system.progress import busy

FORMAT = "detector vectors 1"
Arrays = dict[str, np.ndarray[Any, Any]]


def export(program: DetectorProgram, path: str | Path, image: str | Path | None = None) -> None:
    """Write the folder `path` atomically. image: a file, or None for a test picture of the size of the stored pyramid"""
    check_free(Path(path))
    program.verify()
    small = program.pyramid.header.preprocess
    picture = Image.fromarray(test_picture(small)) if image is None else read_rgb(image)
    with busy("running the reference"):
        steps = dict(detection_steps(program, picture))
    with replacing_folder(path) as folder:
        writer = ArrayWriter(folder)
        parts = {
            name: {key: writer.write(f"parts/{name}", key, array) for key, array in arrays.items()}
            for name, arrays in steps.items()
        }
        for name, part in program.parts():
            own = folder / "networks" / name
            own.mkdir(parents=True)
            pixels = test_picture(small) if part.header.input is None else _codes(part.header.input.shape)
            with busy(f"running {name}"):
                write_run(part, own, pixels, "test picture")
        padded = steps["pad"]["padded"].shape
        content = {"image": "test picture" if image is None else Path(image).name, "parts": parts}
        write_manifest(folder, FORMAT, {**facts(program, (padded[0], padded[1])), **content})


def _codes(shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return fixed codes as the input of a head: the test picture with as many channels as the head needs."""
    height, width, channels = shape
    template = Preprocess(height, width, 3, height, "bilinear", (0.5,) * 3, (0.5,) * 3)
    picture = test_picture(template)
    return np.concatenate([picture + np.uint8(5 * i) for i in range(-(-channels // 3))], -1)[..., :channels].copy()


def detection_steps(program: DetectorProgram, image: Image.Image) -> Iterator[tuple[str, Arrays]]:
    """Run the reference on an image; yield the inputs and outputs of every part, in the order in which they run."""
    c, runner = program.between, ReferenceDetector(program)
    prepared: Input = program.prepare(image)
    size, original = prepared.size, (prepared.height, prepared.width)
    yield "resize", {"image": upright_pixels(image), "pixels": prepared.pixels}
    yield "pad", {"padded": pad_with(prepared.pixels, c.padding)}
    maps = runner.maps(prepared.pixels)
    named = {f"map_{i}": x for i, x in enumerate(maps.levels)}
    levels = {f"objectness_{i}": x for i, x in enumerate(maps.objectness)}
    levels |= {f"deltas_{i}": x for i, x in enumerate(maps.deltas)}
    yield "pyramid", named | levels
    boxes = propose(maps.objectness, maps.deltas, size, c)
    yield "propose", {"boxes": boxes}
    total = np.zeros((1, 1), np.int64)
    for stage, head in enumerate(runner.box_heads if len(boxes) else ()):
        features = runner.roi_features(maps.levels, boxes, head)
        yield f"roi_align_boxes_{stage}", {"boxes": boxes, "features": features}
        logits, deltas = head.run(features)
        yield f"boxes_{stage}", {"logits": logits, "deltas": deltas}
        total = total + scaled(logits, c.classes[stage])
        if stage < c.stages - 1:
            boxes = refine(boxes, logits, deltas, stage, size, c)
            yield f"refine_{stage}", {"boxes": boxes}
    chosen = select_detections(boxes, total, deltas, size, c) if len(boxes) else runner.classify(maps.levels, boxes, size)
    yield "select", {"logits": total, "boxes": chosen.boxes, "scores": chosen.scores, "labels": chosen.labels}
    for stage, head in enumerate(runner.mask_heads if len(chosen.boxes) else ()):
        features = runner.roi_features(maps.levels, chosen.boxes, head)
        (logits,) = head.run(features)
        yield f"roi_align_masks_{stage}", {"features": features}
        yield f"masks_{stage}", {"logits": logits[np.arange(len(chosen.boxes)), :, :, chosen.labels]}
    probabilities = runner.mask_probabilities(maps.levels, chosen)
    yield "probabilities", {"probabilities": probabilities}
    found = rescaled(chosen.boxes, size, original)
    yield "rescale", {"boxes": found}
    masks = [paste(p, box, *original, c.mask) for p, box in zip(probabilities, found, strict=True)]
    packed = np.packbits(np.array(masks, bool).reshape(len(masks), *original), axis=-1)
    yield "paste", {"masks": packed}
