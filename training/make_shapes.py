"""Writes a small detection data set in COCO's form: `make_shapes.py -o FOLDER`. Shapes of eight classes, of many sizes and
textures, over each other, on noisy grounds among scribbles that are none of them.

A seed gives the same bytes every time. train_detector.py draws its training images here as it goes, from other seeds than
those of the written splits. Masks are what is seen of a shape, not what is behind others.
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
SMALLEST, LARGEST = 16.0, 72.0  # sizes of shapes in pixels, logarithms evenly spread
MOST_SHAPES = 7
LEAST_SEEN = 0.5  # of a shape; a new one that would hide more of another is not drawn
FEWEST_PIXELS = 24
# First number of a seed: what the random numbers are for.
TRAIN_SPLIT, VAL_SPLIT, ON_THE_FLY = 1, 2, 3

Mask = NDArray[np.bool_]
Colour = NDArray[np.float32]


@dataclass(frozen=True)
class Scene:
    """pixels: u8 [SIDE, SIDE, 3]   labels: [n]   masks: [n, SIDE, SIDE], no two of them True at a pixel"""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    masks: Mask

    @cached_property
    def boxes(self) -> NDArray[np.float64]:
        """x1, y1, x2, y2 around each mask."""
        found = np.zeros((len(self.masks), 4))
        for box, mask in zip(found, self.masks, strict=True):
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            box[:] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        return found

    def flipped(self) -> Scene:
        return Scene(self.pixels[:, ::-1], self.labels, self.masks[:, :, ::-1])


def polygon(u: Colour, v: Colour, corners: list[tuple[float, float]]) -> Mask:
    """Inside by the even-odd rule."""
    inside = np.zeros(u.shape, bool)
    for (x1, y1), (x2, y2) in zip(corners, corners[1:] + corners[:1], strict=True):
        if y1 != y2:
            inside ^= ((v < y1) != (v < y2)) & (u < (x2 - x1) * (v - y1) / (y2 - y1) + x1)
    return inside


def around(count: int, *radii: float) -> list[tuple[float, float]]:
    """Corners on circles of the radii in turn."""
    return [
        (float(r * np.sin(a)), float(-r * np.cos(a)))
        for i in range(count)
        for r, a in [(radii[i % len(radii)], 2 * np.pi * i / count)]
    ]


def inside(label: int, u: Colour, v: Colour) -> Mask:
    """Where a shape of size 2 is, in its own upright coordinates."""
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


def texture(rng: np.random.Generator, u: Colour, v: Colour, colour: Colour) -> Colour:
    """[h, w, 3], around a colour: plain, shaded, striped, chequered or rough."""
    other = np.clip(colour + rng.uniform(-60, 60, 3), 0, 255)
    kind = rng.integers(5)
    if kind == 0:
        share = np.zeros_like(u)
    elif kind == 1:
        share = np.clip((u + 1) / 2, 0, 1)
    elif kind == 2:
        share = (np.sin(rng.uniform(6, 12) * u + rng.uniform(0, 6)) > 0).astype(np.float32)
    elif kind == 3:
        pace = rng.uniform(3, 7)
        share = ((np.floor(u * pace) + np.floor(v * pace)) % 2).astype(np.float32)
    else:
        share = rng.random(u.shape, np.float32)
    return (colour + share[..., None] * (other - colour)).astype(np.float32)


def ground(rng: np.random.Generator) -> Colour:
    """[SIDE, SIDE, 3]: two colours that change into each other, soft blotches, and scribbles."""
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
        # Thin strokes, too thin for a bar: something to tell from shapes.
        (x1, y1), (x2, y2) = rng.uniform(0, 1, (2, 2))
        length = max(float(np.hypot(x2 - x1, y2 - y1)), 1e-3)
        away = abs((x - x1) * (y2 - y1) - (y - y1) * (x2 - x1)) / length
        along = ((x - x1) * (x2 - x1) + (y - y1) * (y2 - y1)) / length**2
        stroke = (away < rng.uniform(0.5, 1.5) / SIDE) & (along > 0) & (along < 1)
        canvas[stroke] = rng.uniform(0, 255, 3)
    return canvas.astype(np.float32)


def scene(seed: tuple[int, ...]) -> Scene:
    """A picture with 1 to MOST_SHAPES shapes, all of it decided by the seed."""
    rng = np.random.default_rng(seed)
    canvas = ground(rng)
    labels: list[int] = []
    masks: list[Mask] = []
    whole: list[int] = []
    wanted = int(rng.integers(2, MOST_SHAPES + 1))
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
        if area < max(FEWEST_PIXELS, 0.1 * size * size):  # too much of it is beyond the edge
            continue
        here = (slice(top, bottom), slice(left, right))
        if any((mask[here] & shape).sum() > mask.sum() - LEAST_SEEN * n for mask, n in zip(masks, whole, strict=True)):
            continue
        behind = canvas[here][shape].mean(0)
        colour = rng.uniform(0, 255, 3)
        if np.abs(colour - behind).max() < 55:  # nobody could see it
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
    """FOLDER/NAME/000001.jpg, ... and FOLDER/instances_NAME.json."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for number in range(1, count + 1):
        picture = scene((*seed, number))
        file = f"{number:06}.jpg"
        Image.fromarray(picture.pixels).save(folder / name / file, quality=92)
        images.append({"id": number, "file_name": file, "height": SIDE, "width": SIDE})
        for label, box, mask in zip(picture.labels, picture.boxes, picture.masks, strict=True):
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
    parser = argparse.ArgumentParser(description="Writes a small detection data set in COCO's form.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--train", type=int, default=1000, help="images to calibrate with")
    parser.add_argument("--val", type=int, default=500, help="images to report on")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_split(arguments.output, "train", arguments.train, (TRAIN_SPLIT, arguments.seed))
    write_split(arguments.output, "val", arguments.val, (VAL_SPLIT, arguments.seed))
    print(f"{arguments.output}: {arguments.train} + {arguments.val} images of {SIDE} x {SIDE}, {len(CLASSES)} classes")


if __name__ == "__main__":
    main()
