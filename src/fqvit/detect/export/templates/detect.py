"""Detect objects with integers only: ONNX networks, and the arithmetic between them in numpy. Written by fqvit.

    python detect.py IMAGE...                     prints COCO results as JSON: boxes, scores, classes and masks
    python detect.py IMAGE... -o results.json     writes them to a file

Needs numpy, onnxruntime and Pillow, and the files of this folder. The results are those of `fqvit detect predict`, bit for bit.

The flow: resize and pad the image -> pyramid.onnx -> propose -> for each stage: roi_align, boxes_N.onnx, refine -> select
-> roi_align, masks_N.onnx, sigmoid -> scale boxes to the image, paste masks.

Units: boxes are in 1/256 pixel, scores in 2^-24, logarithms in 2^-27, box offsets in 2^-24 of the box's size, interpolation
weights and mask probabilities in 2^-15. A ratio is a pair (mult, shift) that stands for mult / 2^shift. All integers are int64
and cannot overflow: fqvit proved that from the constants in detector.json.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

Array = Any  # a numpy array of integers
Facts = dict[str, Any]  # from detector.json
Size = tuple[int, int]  # height and width


def round_shift(x: Any, shift: Any) -> Any:
    """floor(x / 2^shift + 1/2), shift >= 1"""
    return (x + (shift * 0 + 1 << (shift - 1))) >> shift


def round_divide(a: Any, b: Any) -> Any:
    """floor(a / b + 1/2), b > 0"""
    return (a + b // 2) // b


def scaled(x: Array, ratio: list[int]) -> Array:
    """x * mult / 2^shift, rounded"""
    return round_shift(x.astype(np.int64) * ratio[0], ratio[1])


def _power_table(bits: int) -> Array:
    """2^(i / 2^bits) for i < 512, in 2^-30, from integer square roots with 120 fraction bits"""
    step = 2 << 120
    for _ in range(bits):
        step = math.isqrt(step << 120)
    power, values = 1 << 120, []
    for _ in range(512):
        values.append(int(round_shift(power, 90)))
        power = power * step >> 120
    return np.array(values, np.int64)


HIGH, MIDDLE, LOW = _power_table(9), _power_table(18), _power_table(27)


def power_of_two(x: Array) -> tuple[Array, Array]:
    """2^x as (mantissa in 2^-30, exponent), x in 2^-27"""
    mantissa = round_shift(HIGH[x >> 18 & 511] * MIDDLE[x >> 9 & 511], 30)
    mantissa = round_shift(mantissa * LOW[x & 511], 30)
    return np.minimum(mantissa, (2 << 30) - 1), x >> 27


def power_below_one(x: Array) -> Array:
    """2^x in 2^-30, for x <= 0 in 2^-27"""
    mantissa, exponent = power_of_two(np.maximum(x, -64 << 27))
    return round_shift(mantissa * 2, np.minimum(1 - exponent, 62))


def softmax(logits: Array) -> Array:
    """Scores in 2^-24 of base-2 logits in 2^-27, over the last axis"""
    power = power_below_one(logits - logits.max(-1, keepdims=True))
    return round_divide(power << 24, power.sum(-1, keepdims=True))


def sigmoid(logits: Array) -> Array:
    """Probabilities in 2^-15 of base-2 logits in 2^-27"""
    power = power_below_one(-np.abs(logits))
    return round_divide(np.where(logits < 0, power, 1 << 30) << 15, power + (1 << 30))


def anchors(rows: int, columns: int, stride: int, halves: list[list[int]]) -> Array:
    """All anchors of a level, [rows columns A, 4]. halves: half the width and half the height of each anchor of a cell"""
    half, step = np.array(halves, np.int64), stride << 8
    y, x = np.meshgrid(np.arange(rows, dtype=np.int64) * step, np.arange(columns, dtype=np.int64) * step, indexing="ij")
    centres = np.stack([x, y], -1)[:, :, None]
    return np.concatenate([centres - half, centres + half], -1).reshape(-1, 4)


def decode(boxes: Array, deltas: Array, ratios: list[list[int]], limit: int, size: Size) -> Array:
    """Apply deltas [..., 4] to boxes [..., 4] and clip them to an image of size (height, width) in pixels."""
    sides = boxes[..., 2:] - boxes[..., :2]
    offsets = np.stack([scaled(deltas[..., i], ratios[i]) for i in (0, 1)], -1)
    logs = np.stack([scaled(deltas[..., i], ratios[i]) for i in (2, 3)], -1)
    farthest = (1 << 61) // np.maximum(sides, 1)
    distance = round_shift(np.clip(offsets, -farthest, farthest) * sides, 16)  # in 2^-16 pixel
    mantissa, exponent = power_of_two(np.clip(logs, -limit, limit))
    half = round_shift(sides * mantissa, 23 - exponent)  # in 2^-16 pixel
    centre = (boxes[..., :2] + boxes[..., 2:]) * 128 + distance
    edges = round_shift(np.concatenate([centre - half, centre + half], -1), 8)
    height, width = size[0] << 8, size[1] << 8
    return np.clip(edges, 0, np.array([width, height, width, height], np.int64))


def by_score(scores: Array) -> Array:
    """Indices by descending score; equal scores keep their order."""
    return np.argsort(-scores, kind="stable")


def areas(boxes: Array) -> Array:
    sides = np.maximum(boxes[..., 2:] - boxes[..., :2], 0)
    return sides[..., 0] * sides[..., 1]


def suppress(boxes: Array, scores: Array, groups: Array, iou: int) -> Array:
    """Non-maximum suppression within groups: indices of the boxes to keep, best first. iou: threshold in 2^-16"""
    kept: list[int] = []
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        members = members[by_score(scores[members])]
        alive = np.ones(len(members), bool)
        for i, box in enumerate(members):
            if not alive[i]:
                continue
            kept.append(int(box))
            rest = boxes[members[i + 1 :]]
            low, high = np.maximum(boxes[box, :2], rest[:, :2]), np.minimum(boxes[box, 2:], rest[:, 2:])
            sides = np.maximum(high - low, 0)
            common = sides[:, 0] * sides[:, 1]
            union = areas(boxes[box]) + areas(rest) - common
            alive[i + 1 :] &= ~(common << 16 > iou * union)
    together = np.sort(np.array(kept, np.int64))
    return together[by_score(scores[together])]


def propose(objectness: list[Array], deltas: list[Array], size: Size, c: Facts) -> Array:
    """Proposals of an image, best first: [n, 4]. objectness, deltas: one array [h, w, A] and [h, w, 4 A] per level"""
    found = []
    for level, (logits, moves) in enumerate(zip(objectness, deltas)):
        start = anchors(logits.shape[0], logits.shape[1], c["strides"][level], c["anchors"][level])
        scores = scaled(logits.ravel(), c["objectness"][level])
        best = by_score(scores)[: c["proposals_a_level"]]
        boxes = decode(start[best], moves.reshape(-1, 4)[best], c["deltas"][level], c["log_limit"], size)
        found.append((boxes, scores[best], np.full(len(best), level)))
    boxes, scores, levels = (np.concatenate(part) for part in zip(*found))
    solid = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(1))
    boxes, scores, levels = boxes[solid], scores[solid], levels[solid]
    return boxes[suppress(boxes, scores, levels, c["proposal_iou"])[: c["proposals"]]]


def refine(boxes: Array, logits: Array, deltas: Array, stage: int, size: Size, c: Facts) -> Array:
    """Boxes for the next stage: apply the deltas of the most probable class, not counting background (the last class)."""
    moves = deltas.reshape(len(boxes), -1, 4)
    label = logits[:, :-1].argmax(1) if moves.shape[1] > 1 else 0
    return decode(boxes, moves[np.arange(len(boxes)), label], c["box_deltas"][stage], c["log_limit"], size)


def select(boxes: Array, logits: Array, deltas: Array, size: Size, c: Facts) -> tuple[Array, Array, Array]:
    """Boxes, scores and labels of the detections, best first. logits: base-2, the mean over the stages"""
    scores = softmax(logits)[:, :-1]
    moves = deltas.reshape(len(boxes), -1, 4)
    box, label = np.nonzero(scores > c["score"])
    chosen = decode(boxes[box], moves[box, label if moves.shape[1] > 1 else 0], c["box_deltas"][-1], c["log_limit"], size)
    kept = suppress(chosen, scores[box, label], label, c["iou"])[: c["detections"]]
    return chosen[kept], scores[box, label][kept], label[kept]


def axis_weights(low: int, high: int, cell: int, bins: int, size: int) -> Array:
    """The weight of each of `size` cells in each bin of low..high, [bins, size] in 2^-15. cell: the length of a cell"""
    samples = -((low - high) // (bins * cell))
    sums = np.zeros((bins, size), np.int64)
    if samples <= 0:
        return sums
    parts = 2 * samples * bins
    whole = cell * parts
    k = np.arange(samples * bins, dtype=np.int64)
    position = (low - cell // 2) * parts + (2 * k + 1) * (high - low)
    inside = (position >= -whole) & (position <= size * whole)
    position = np.clip(position[inside], 0, (size - 1) * whole)
    bin_, first = k[inside] // samples, position // whole
    toward = position - first * whole
    np.add.at(sums, (bin_, first), whole - toward)
    np.add.at(sums, (bin_, np.minimum(first + 1, size - 1)), toward)
    return round_divide(sums << 15, whole * samples)


def roi_align(maps: list[Array], boxes: Array, head: Facts, c: Facts) -> Array:
    """Codes of the RoI features of each box, u8 [n, side, side, C], from the map for its area."""
    found: Array = np.searchsorted(np.array(c["areas"], np.int64), areas(boxes), side="right")
    side, levels = head["side"], found.tolist()
    rois = np.zeros((len(boxes), side, side, maps[0].shape[-1]), np.uint8)
    for n, ((x1, y1, x2, y2), level) in enumerate(zip(boxes.tolist(), levels)):
        codes, cell = maps[level], c["strides"][level] << 8
        rows = axis_weights(y1, y2, cell, side, codes.shape[0])
        columns = axis_weights(x1, x2, cell, side, codes.shape[1])
        used_rows, used_columns = np.flatnonzero(rows.any(0)), np.flatnonzero(columns.any(0))
        values = codes[np.ix_(used_rows, used_columns)].astype(np.int64) - head["map_zeros"][level]
        strips = round_shift(np.tensordot(rows[:, used_rows], values, 1), 8)
        sums = np.einsum("bx,axc->abc", columns[:, used_columns], strips)
        rois[n] = np.clip(scaled(sums, head["ratios"][level]) + head["zero"], 0, head["last"])
    return rois


def mask_axis(low: int, high: int, first: int, last: int, side: int) -> tuple[Array, Array]:
    """The cell before each pixel first..last - 1, in a mask with a border of zeros, and the weight of the next cell."""
    one = 1 << 15
    if high > low:
        pixels = (np.arange(first, last, dtype=np.int64) << 8) + 128 - low
        position = round_divide(pixels * (side << 15), high - low) - one // 2
    else:
        position = np.full(last - first, (side - 1) << 14, np.int64)
    position = np.clip(position, -one, side << 15) + one
    before = np.minimum(position >> 15, side)
    return before, position - (before << 15)


def paste(probabilities: Array, box: list[int], height: int, width: int, threshold: int) -> Array:
    """The mask of a box, bool [height, width]: pixels whose interpolated probability is at least `threshold`, in 2^-30."""
    mask = np.zeros((height, width), bool)
    x1, y1, x2, y2 = box
    left, right = max((x1 >> 8) - 1, 0), min(-(-x2 >> 8) + 1, width)
    top, bottom = max((y1 >> 8) - 1, 0), min(-(-y2 >> 8) + 1, height)
    if left < right and top < bottom:
        side, bordered = len(probabilities), np.pad(probabilities, 1)
        row, down = mask_axis(y1, y2, top, bottom, side)
        column, across = mask_axis(x1, x2, left, right, side)
        strips = round_shift(bordered[row] * ((1 << 15) - down)[:, None] + bordered[row + 1] * down[:, None], 15)
        values = strips[:, column] * ((1 << 15) - across) + strips[:, column + 1] * across
        mask[top:bottom, left:right] = values >= threshold
    return mask


def resize_opencv(pixels: Array, height: int, width: int) -> Array:
    """cv2.resize(..., interpolation=cv2.INTER_LINEAR) on u8. Only the interpolation weights are computed in float."""

    def weights(old: int, new: int) -> tuple[Array, Array, Array]:
        at = ((np.arange(new) + 0.5) * (1 / (new / old)) - 0.5).astype(np.float32)
        first = np.floor(at)
        share = at - first
        before, after = np.rint((np.float32(1) - share) * np.float32(2048)), np.rint(share * np.float32(2048))
        return first.astype(np.int64), before.astype(np.int32), after.astype(np.int32)

    y, above, below = weights(pixels.shape[0], height)
    x, left, right = weights(pixels.shape[1], width)
    last_row, last_column = pixels.shape[0] - 1, pixels.shape[1] - 1
    border = (x < 0) | (x >= last_column)
    left[border], right[border] = 2048, 0
    x, x_next = np.clip(x, 0, last_column), np.clip(x + 1, 0, last_column)

    def sums(rows: Array) -> Array:
        line = pixels[np.clip(rows, 0, last_row)].astype(np.int32)
        return line[:, x] * left[:, None] + line[:, x_next] * right[:, None]

    quarters = (above[:, None, None] * (sums(y) >> 4) >> 16) + (below[:, None, None] * (sums(y + 1) >> 4) >> 16)
    return ((quarters + 2) >> 2).astype(np.uint8)


def resize_rounded(pixels: Array, height: int, width: int) -> Array:
    """Bilinear interpolation with one rounding, without floats."""

    def weights(old: int, new: int) -> tuple[Array, Array, Array]:
        position = np.clip((2 * np.arange(new, dtype=np.int64) + 1) * old - new, 0, (old - 1) * 2 * new)
        first = position // (2 * new)
        return first, np.minimum(first + 1, old - 1), round_divide((position - first * 2 * new) << 11, 2 * new)

    y, y_next, down = weights(pixels.shape[0], height)
    x, x_next, across = weights(pixels.shape[1], width)
    wide, down, across = pixels.astype(np.int64), down[:, None, None], across[:, None]
    rows = wide[y] * (2048 - down) + wide[y_next] * down
    sums = rows[:, x] * (2048 - across) + rows[:, x_next] * across
    return round_shift(sums, 22).astype(np.uint8)


class Detector:
    """The detector in a folder that `fqvit export --to onnx` wrote."""

    def __init__(self, folder: Path) -> None:
        self.facts = json.loads((folder / "detector.json").read_text(encoding="utf-8"))
        self.c = self.facts["constants"]

        stages, run = range(len(self.facts["boxes"])), onnxruntime.InferenceSession
        self.pyramid = run(str(folder / "pyramid.onnx"))
        self.boxes, self.masks = ([run(str(folder / f"{kind}_{i}.onnx")) for i in stages] for kind in ("boxes", "masks"))

    def prepare(self, pixels: Array) -> Array:
        """Resize pixels u8 [h, w, 3] to the largest size within both limits of the settings, with the same aspect ratio."""
        height, width = pixels.shape[:2]
        short, long = self.facts["short"], self.facts["long"]
        low, high = min(height, width), max(height, width)
        new, old = (long, high) if long * low < short * high else (short, low)
        rows, columns = (max(round_divide(side * new, old), 1) for side in (height, width))
        if (rows, columns) == (height, width):
            return pixels
        return (resize_opencv if self.facts["resize"] == "opencv" else resize_rounded)(pixels, rows, columns)

    def detect(self, pixels: Array) -> tuple[Array, Array, Array, Array]:
        """Boxes [n, 4], scores [n], labels [n] and mask probabilities [n, side, side] of an image u8 [h, w, 3], best first."""
        c, resized = self.c, self.prepare(pixels)
        size = resized.shape[0], resized.shape[1]
        padded = np.empty((-(-size[0] // 32) * 32, -(-size[1] // 32) * 32, 3), np.uint8)
        padded[:] = c["padding"]
        padded[: size[0], : size[1]] = resized
        height, width = self.facts["size"]
        if padded.shape[:2] != (height, width):
            found = f"the image becomes {padded.shape[0]} x {padded.shape[1]} pixels, this export takes {height} x {width}"
            raise SystemExit(f"{found}. Export again with --size {pixels.shape[0]}x{pixels.shape[1]}.")
        outputs = self.pyramid.run(None, {"pixels": padded[None]})
        maps, objectness, deltas = (
            [x[0] for x, kind in zip(outputs, self.facts["outputs"]) if kind == one] for one in ("map", "scores", "deltas")
        )
        boxes = propose(objectness, deltas, size, c)
        side = 2 * self.facts["masks"][0]["side"]
        if len(boxes) == 0:
            return boxes, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, side, side), np.int64)
        total: Array = 0
        for stage, (session, head) in enumerate(zip(self.boxes, self.facts["boxes"])):
            logits, moves = session.run(None, {"pixels": roi_align(maps, boxes, head, c)})
            total = total + scaled(logits, c["classes"][stage])
            if stage < len(self.boxes) - 1:
                boxes = refine(boxes, logits, moves, stage, size, c)
        boxes, scores, labels = select(boxes, total, moves, size, c)
        sums = np.zeros((len(boxes), side, side), np.int64)
        for stage, (session, head) in enumerate(zip(self.masks, self.facts["masks"])):
            if len(boxes):
                (logits,) = session.run(None, {"pixels": roi_align(maps, boxes, head, c)})
                sums += sigmoid(scaled(logits[np.arange(len(boxes)), :, :, labels], c["mask_logits"][stage]))
        probabilities = round_divide(sums, len(self.masks))
        numerator, denominator = np.array([*pixels.shape[1::-1]] * 2), np.array([size[1], size[0]] * 2)
        return round_divide(boxes * numerator, denominator), scores, labels, probabilities

    def results(self, pixels: Array, image_id: int, file_name: str) -> list[dict[str, Any]]:
        """The detections of an image as COCO results."""
        found = []
        for box, score, label, mask in zip(*self.detect(pixels)):
            x1, y1, x2, y2 = (float(edge) / 256 for edge in box)
            pasted = paste(mask, box.tolist(), pixels.shape[0], pixels.shape[1], self.c["mask"])
            category = self.facts["categories"][label] if self.facts["categories"] else int(label) + 1
            found.append(
                {
                    "image_id": image_id,
                    "category_id": category,
                    "bbox": [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)],
                    "score": round(float(score) / 2**24, 6),
                    "segmentation": {"size": list(pasted.shape), "counts": run_lengths(pasted)},
                    "file_name": file_name,
                    "category": self.facts["classes"][label] if self.facts["classes"] else f"class {category}",
                }
            )
        return found


def run_lengths(mask: Array) -> str:
    """A mask in COCO's compressed run-length encoding."""
    flat = mask.T.ravel()
    ends = np.flatnonzero(np.diff(flat, prepend=False, append=False)) if flat.any() else np.zeros(0, np.int64)
    lengths = np.diff(np.concatenate([[0], ends, [flat.size]])).tolist()
    if lengths[-1] == 0:
        lengths.pop()
    letters = []
    for i, length in enumerate(lengths):
        value, more = length - lengths[i - 2] if i > 2 else length, True
        while more:
            group = value & 31
            value >>= 5
            more = value != (-1 if group & 16 else 0)
            letters.append(chr((group | 32 if more else group) + 48))
    return "".join(letters)


def main() -> None:
    words = sys.argv[1:]
    out = words[words.index("-o") + 1] if "-o" in words[:-1] else None
    paths = [Path(word) for word in (words[: words.index("-o")] if "-o" in words else words)]
    if not paths or words[0] in ("-h", "--help"):
        raise SystemExit("usage: python detect.py IMAGE... [-o results.json]")
    numbers = [int(path.stem) for path in paths if path.stem.isdigit()]
    ids = numbers if len(set(numbers)) == len(paths) else list(range(1, len(paths) + 1))
    detector, results = Detector(Path(__file__).parent), []
    for path, number in zip(paths, ids):
        try:
            with Image.open(path) as image:
                pixels = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            sys.stderr.write(f"{path}: cannot be read as an image: {error}\n")
            raise SystemExit(2) from None
        results += detector.results(pixels, number, str(path))
    text = "[" + ",\n".join(json.dumps(result, ensure_ascii=False) for result in results) + "]\n"
    sys.stdout.write(text) if out is None else Path(out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
