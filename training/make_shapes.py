"""Write a small synthetic detection data set in COCO's format: `python training/make_shapes.py -o FOLDER`.

Images show overlapping shapes of eight classes in many sizes and textures, on noisy backgrounds with strokes as distractors.
Masks are the visible parts of shapes. A seed always gives the same bytes. train_detector.py generates its training images with
`scene`, from seeds that differ from those of the written splits.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fqvit.detect.masks import to_runs

CLASSES = ("disc", "square", "triangle", "star", "ring", "cross", "crescent", "bar")
SIDE = 128
SMALLEST, LARGEST = 16.0, 72.0  # sizes of shapes in pixels, drawn log-uniformly
MAX_SHAPES = 7
MIN_VISIBLE = 0.5  # visible fraction of a shape; a new shape that would leave less of another one visible is not drawn
MIN_PIXELS = 24  # minimum area of a new shape inside the image
# The first number of a seed says what the images are for.
TRAIN_SPLIT, VAL_SPLIT, ON_THE_FLY = 1, 2, 3

Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Scene:
    """An image and its shapes. pixels: u8 [SIDE, SIDE, 3]   labels: [n]   masks: [n, SIDE, SIDE], disjoint"""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    masks: Mask

    @cached_property
    def boxes(self) -> NDArray[np.float64]:
        """Bounding box of each mask, [n, 4]: x1, y1, x2, y2."""
        found = np.zeros((len(self.masks), 4))
        for box, mask in zip(found, self.masks, strict=True):
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            box[:] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        return found

    def flipped(self) -> Scene:
        """Return the scene mirrored left-right."""
        return Scene(self.pixels[:, ::-1], self.labels, self.masks[:, :, ::-1])


def polygon(u: Floats, v: Floats, corners: list[tuple[float, float]]) -> Mask:
    """Return which points (u, v) are inside a polygon, by the even-odd rule."""
    inside = np.zeros(u.shape, bool)
    for (x1, y1), (x2, y2) in zip(corners, corners[1:] + corners[:1], strict=True):
        if y1 != y2:
            inside ^= ((v < y1) != (v < y2)) & (u < (x2 - x1) * (v - y1) / (y2 - y1) + x1)
    return inside


def around(count: int, *radii: float) -> list[tuple[float, float]]:
    """Return `count` corners at equal angles, on circles of the given radii in turn."""
    return [
        (float(r * np.sin(a)), float(-r * np.cos(a)))
        for i in range(count)
        for r, a in [(radii[i % len(radii)], 2 * np.pi * i / count)]
    ]


def inside(label: int, u: Floats, v: Floats) -> Mask:
    """Return which points (u, v) are inside a shape of size 2 that is upright and centred at the origin."""
    distance = u * u + v * v
    match CLASSES[label]:
        case "disc":
            return distance <= 1
        case "square":
            return np.maximum(abs(u), abs(v)) <= 0.84
        case "triangle":
            return polygon(u, v, around(3, 1.12))
        case "star":
            return polygon(u, v, around(10, 1.12, 0.48))
        case "ring":
            return (distance <= 1) & (distance >= 0.3)
        case "cross":
            return (np.minimum(abs(u), abs(v)) <= 0.3) & (np.maximum(abs(u), abs(v)) <= 0.98)
        case "crescent":
            return (distance <= 1) & ((u - 0.5) ** 2 + v * v >= 0.62)
        case _:
            return (abs(u) <= 1.05) & (abs(v) <= 0.36)


def texture(rng: np.random.Generator, u: Floats, v: Floats, colour: Floats) -> Floats:
    """Draw a texture [h, w, 3] of two similar colours: plain (only `colour`), gradient, stripes, checkerboard or noise."""
    other = np.clip(colour + rng.uniform(-60, 60, 3), 0, 255)
    kind = rng.integers(5)
    if kind == 0:
        share = np.zeros_like(u)
    elif kind == 1:
        share = np.clip((u + 1) / 2, 0, 1)
    elif kind == 2:
        share = (np.sin(rng.uniform(6, 12) * u + rng.uniform(0, 6)) > 0).astype(np.float32)
    elif kind == 3:
        cells = rng.uniform(3, 7)  # per unit of u and v
        share = ((np.floor(u * cells) + np.floor(v * cells)) % 2).astype(np.float32)
    else:
        share = rng.random(u.shape, np.float32)
    return (colour + share[..., None] * (other - colour)).astype(np.float32)


def background(rng: np.random.Generator) -> Floats:
    """Draw a background [SIDE, SIDE, 3]: a gradient of two colours, soft blotches and thin strokes."""
    y, x = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32) / SIDE
    angle = rng.uniform(0, 2 * np.pi)
    share = np.clip(0.5 + (x - 0.5) * np.cos(angle) + (y - 0.5) * np.sin(angle), 0, 1)[..., None]
    first, second = rng.uniform(20, 235, (2, 3))
    second = first + (second - first) * rng.uniform(0.1, 0.6)
    canvas = first + share * (second - first)
    cells = int(rng.integers(3, 17))
    coarse = rng.uniform(0, 1, (cells, cells, 3)).astype(np.float32)
    grown = np.stack(
        [np.asarray(Image.fromarray(coarse[..., c]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for c in range(3)], -1
    )
    canvas = canvas + (grown - 0.5) * rng.uniform(10, 80)
    for _ in range(rng.integers(0, 6)):
        # Strokes thinner than a bar, as distractors.
        (x1, y1), (x2, y2) = rng.uniform(0, 1, (2, 2))
        length = max(float(np.hypot(x2 - x1, y2 - y1)), 1e-3)
        away = abs((x - x1) * (y2 - y1) - (y - y1) * (x2 - x1)) / length
        along = ((x - x1) * (x2 - x1) + (y - y1) * (y2 - y1)) / length**2
        stroke = (away < rng.uniform(0.5, 1.5) / SIDE) & (along > 0) & (along < 1)
        canvas[stroke] = rng.uniform(0, 255, 3)
    return canvas.astype(np.float32)


def scene(seed: tuple[int, ...]) -> Scene:
    """Draw an image with up to MAX_SHAPES shapes, determined by the seed."""
    rng = np.random.default_rng(seed)
    canvas = background(rng)
    labels: list[int] = []
    masks: list[Mask] = []
    whole: list[int] = []
    wanted = int(rng.integers(2, MAX_SHAPES + 1))
    for _ in range(3 * wanted):
        if len(labels) == wanted:
            break
        label = int(rng.integers(len(CLASSES)))
        size = float(np.exp(rng.uniform(np.log(SMALLEST), np.log(LARGEST))))
        angle, stretch = rng.uniform(0, 2 * np.pi), np.exp(rng.uniform(-0.18, 0.18))
        centre = rng.uniform(0, SIDE, 2)
        reach = int(size * 0.8) + 2
        left, top = np.maximum(centre.astype(int) - reach, 0)
        right, bottom = np.minimum(centre.astype(int) + reach, SIDE)
        y, x = np.mgrid[top:bottom, left:right].astype(np.float32) + 0.5
        dx, dy = (x - centre[0]) * 2 / size, (y - centre[1]) * 2 / size
        u, v = (dx * np.cos(angle) + dy * np.sin(angle)) / stretch, (dy * np.cos(angle) - dx * np.sin(angle)) * stretch
        shape = inside(label, u, v)
        area = int(shape.sum())
        if area < max(MIN_PIXELS, 0.1 * size * size):  # too much of it is outside the image
            continue
        here = (slice(top, bottom), slice(left, right))
        if any((mask[here] & shape).sum() > mask.sum() - MIN_VISIBLE * n for mask, n in zip(masks, whole, strict=True)):
            continue
        behind = canvas[here][shape].mean(0)
        colour = rng.uniform(0, 255, 3)
        if np.abs(colour - behind).max() < 55:  # too little contrast
            colour = np.where(behind > 127, behind - 75, behind + 75)
        canvas[here] = np.where(shape[..., None], texture(rng, u, v, colour.astype(np.float32)), canvas[here])
        for mask in masks:
            mask[here] &= ~shape
        masks.append(np.zeros((SIDE, SIDE), bool))
        masks[-1][here] = shape
        labels.append(label)
        whole.append(area)
    canvas += rng.normal(0, rng.uniform(1, 7), canvas.shape)
    pixels = np.clip(canvas + 0.5, 0, 255).astype(np.uint8)
    stacked = np.stack(masks) if masks else np.zeros((0, SIDE, SIDE), bool)
    return Scene(pixels, np.array(labels, np.int64), stacked)


def write_split(folder: Path, name: str, count: int, seed: tuple[int, ...]) -> None:
    """Write FOLDER/NAME/000001.jpg, ... and FOLDER/instances_NAME.json."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for number in range(1, count + 1):
        drawn = scene((*seed, number))
        file = f"{number:06}.jpg"
        Image.fromarray(drawn.pixels).save(folder / name / file, quality=92)
        images.append({"id": number, "file_name": file, "height": SIDE, "width": SIDE})
        for label, box, mask in zip(drawn.labels, drawn.boxes, drawn.masks, strict=True):
            x1, y1, x2, y2 = (float(edge) for edge in box)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": int(label) + 1,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": int(mask.sum()),
                    "iscrowd": 0,
                    "segmentation": to_runs(mask),
                }
            )
    categories = [{"id": i, "name": title} for i, title in enumerate(CLASSES, 1)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / f"instances_{name}.json").write_text(json.dumps(content))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small synthetic detection data set in COCO's format.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--train", type=int, default=1000, help="number of images in the train split, for calibration")
    parser.add_argument("--val", type=int, default=500, help="number of images in the val split, for validation")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_split(arguments.output, "train", arguments.train, (TRAIN_SPLIT, arguments.seed))
    write_split(arguments.output, "val", arguments.val, (VAL_SPLIT, arguments.seed))
    print(f"{arguments.output}: {arguments.train} + {arguments.val} images of {SIDE} x {SIDE}, {len(CLASSES)} classes")


if __name__ == "__main__":
    main()
