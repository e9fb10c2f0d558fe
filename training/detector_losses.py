"""Compute the training losses of a detector: match anchors and boxes with the ground truth and sample them.

The values follow mmdetection's configurations for Swin. Anchors are positive from an intersection over union (IoU) of 0.7 and
negative below 0.3, boxes are positive from IoU 0.5 (0.6 and 0.7 in the later stages of a cascade). The losses are cross
entropy for classes and L1 for deltas. Matching and encoding run in numpy, with fqvit.detect.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from make_shapes import Scene
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fqvit.detect.boxes import Floats
from fqvit.detect.float.anchors import anchors
from fqvit.detect.float.boxes import encode, pairwise_iou
from fqvit.detect.float.proposals import UNIT_STDS, propose, refine
from fqvit.detect.float.roialign import axis_weights, level_of
from fqvit.detect.model.detector import Detector
from fqvit.detect.model.pyramid import PyramidOutputs, split_outputs
from fqvit.detect.settings import DetectSettings

STAGE_IOUS = (0.5, 0.6, 0.7)
STAGE_WEIGHTS = (1.0, 0.5, 0.25)
ANCHOR_SAMPLES, ANCHOR_POSITIVES = 256, 0.5


@dataclass(frozen=True)
class Samples:
    """Sampled boxes of a stage, of all images.

    boxes: [n, 4]   image: [n]   label: [n]; for background, the number of classes
    truth: [n], index of the matched shape in its image; -1 for background
    """

    boxes: Floats
    image: NDArray[np.int64]
    label: NDArray[np.int64]
    truth: NDArray[np.int64]


def sample_at_most(rng: np.random.Generator, candidates: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return a random sample of at most `most` candidates."""
    return candidates if len(candidates) <= most else rng.choice(candidates, most, replace=False)


def match_anchors(start: Floats, truth: Floats, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sample anchors; return their indices and the index of the shape that each one matches, -1 for background.

    Every shape matches at least its best anchor, if their IoU is 0.3 or more.
    """
    if len(truth) == 0:
        chosen = sample_at_most(rng, np.arange(len(start)), ANCHOR_SAMPLES)
        return chosen, np.full(len(chosen), -1)
    common = pairwise_iou(start, truth)
    best, matched = common.max(1), common.argmax(1)
    positive = best >= 0.7
    tops = common.max(0)
    for shape in np.flatnonzero(tops >= 0.3):
        low_quality = common[:, shape] >= tops[shape] - 1e-9
        positive |= low_quality
        matched[low_quality] = shape
    positives = sample_at_most(rng, np.flatnonzero(positive), int(ANCHOR_SAMPLES * ANCHOR_POSITIVES))
    negatives = sample_at_most(rng, np.flatnonzero(~positive & (best < 0.3)), ANCHOR_SAMPLES - len(positives))
    return np.concatenate([positives, negatives]), np.concatenate([matched[positives], np.full(len(negatives), -1)])


def proposal_losses(
    outputs: PyramidOutputs, scenes: list[Scene], s: DetectSettings, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of objectness and the L1 loss of deltas, both divided by the number of sampled anchors."""
    start = np.concatenate(
        [
            anchors((x.shape[1], x.shape[2]), stride, s.anchor_scale, s.anchor_ratios)
            for x, stride in zip(outputs.objectness, s.strides, strict=True)
        ]
    )
    logits = torch.cat([x.flatten(1) for x in outputs.objectness], 1)
    deltas = torch.cat([x.reshape(len(x), -1, 4) for x in outputs.deltas], 1)
    image, anchor, target, move = [], [], [], []
    for n, scene in enumerate(scenes):
        chosen, matched = match_anchors(start, scene.boxes, rng)
        image.append(np.full(len(chosen), n))
        anchor.append(chosen)
        target.append(matched >= 0)
        positives = matched >= 0
        moves = np.zeros((len(chosen), 4))
        moves[positives] = encode(start[chosen[positives]], scene.boxes[matched[positives]], UNIT_STDS)
        move.append(moves)
    rows, columns = torch.from_numpy(np.concatenate(image)), torch.from_numpy(np.concatenate(anchor))
    positive = torch.from_numpy(np.concatenate(target))
    wanted = torch.from_numpy(np.concatenate(move)).float()
    objectness = F.binary_cross_entropy_with_logits(logits[rows, columns], positive.float())
    distance = F.l1_loss(deltas[rows[positive], columns[positive]], wanted[positive], reduction="sum")
    return objectness, distance / len(positive)


def sample_boxes(
    proposals: list[Floats], scenes: list[Scene], iou: float, count: int, classes: int, rng: np.random.Generator
) -> Samples:
    """Sample `count` boxes per image, at most a quarter of them positive. Ground truth boxes are added to the proposals."""
    parts = []
    for n, (boxes, scene) in enumerate(zip(proposals, scenes, strict=True)):
        boxes = np.concatenate([scene.boxes, boxes])
        common = pairwise_iou(boxes, scene.boxes) if len(scene.labels) else np.zeros((len(boxes), 1))
        positive = common.max(1) >= iou
        positives = sample_at_most(rng, np.flatnonzero(positive), count // 4)
        chosen = np.concatenate([positives, sample_at_most(rng, np.flatnonzero(~positive), count - len(positives))])
        truth = np.where(positive, common.argmax(1), -1)[chosen]
        label = np.full(len(chosen), classes)
        label[truth >= 0] = scene.labels[truth[truth >= 0]]
        parts.append((boxes[chosen], np.full(len(chosen), n), label, truth))
    return Samples(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def roi_features(levels: tuple[Tensor, ...], samples: Samples, side: int, s: DetectSettings) -> Tensor:
    """Compute differentiable RoI features [n, side, side, C] with the weights of fqvit.detect.float.roialign."""
    level = level_of(samples.boxes, s.finest, len(levels))
    parts, order = [], []
    for number, map_ in enumerate(levels):
        _, height, width, channels = map_.shape
        for image in range(len(map_)):
            members = np.flatnonzero((level == number) & (samples.image == image))
            if len(members) == 0:
                continue
            boxes = samples.boxes[members] / s.strides[number]
            rows = torch.from_numpy(axis_weights(boxes[:, 1], boxes[:, 3], side, height))
            columns = torch.from_numpy(axis_weights(boxes[:, 0], boxes[:, 2], side, width))
            strips = (rows.flatten(0, 1) @ map_[image].reshape(height, -1)).view(len(members), side, width, channels)
            parts.append(columns[:, None] @ strips)
            order.append(members)
    back = np.argsort(np.concatenate(order))
    return torch.cat(parts)[torch.from_numpy(back)]


def mask_targets(samples: Samples, scenes: list[Scene], side: int) -> Tensor:
    """Return target masks [n, side, side]: 1 in the cells of a sampled box that the matched shape covers by at least half."""
    targets = np.zeros((len(samples.boxes), side, side), np.float32)
    height, width = scenes[0].pixels.shape[:2]
    rows = axis_weights(samples.boxes[:, 1], samples.boxes[:, 3], side, height)
    columns = axis_weights(samples.boxes[:, 0], samples.boxes[:, 2], side, width)
    for n, (image, truth) in enumerate(zip(samples.image, samples.truth, strict=True)):
        targets[n] = rows[n] @ scenes[image].masks[truth].astype(np.float32) @ columns[n].T >= 0.5
    return torch.from_numpy(targets)


def positives_of(samples: Samples, most: int) -> Samples:
    """Return the first positive samples, at most `most`."""
    chosen = np.flatnonzero(samples.truth >= 0)[:most]
    return Samples(samples.boxes[chosen], samples.image[chosen], samples.label[chosen], samples.truth[chosen])


def detector_losses(
    detector: Detector,
    images: Tensor,
    scenes: list[Scene],
    s: DetectSettings,
    rng: np.random.Generator,
    boxes_per_image: int,
    masks_per_image: int,
) -> dict[str, Tensor]:
    """Return all losses of a batch by name. images: normalized [N, 3, h, w]   scenes: their ground truth"""
    outputs = split_outputs(detector.pyramid(images))
    objectness, deltas = proposal_losses(outputs, scenes, s, rng)
    losses = {"objectness": objectness, "proposals": deltas}
    size = (images.shape[2], images.shape[3])
    first = [[x.detach().double().numpy() for x in part] for part in (outputs.objectness, outputs.deltas)]
    proposals = [propose([x[n] for x in first[0]], [x[n] for x in first[1]], size, s) for n in range(len(scenes))]
    for stage, (box_head, mask_head) in enumerate(zip(detector.box_heads, detector.mask_heads, strict=True)):
        weight = STAGE_WEIGHTS[stage]
        classes = detector.config.classes
        samples = sample_boxes(proposals, scenes, STAGE_IOUS[stage], boxes_per_image, classes, rng)
        logits, moves = box_head(roi_features(outputs.levels, samples, detector.config.box_side, s))
        label = torch.from_numpy(samples.label)
        name = f" {stage + 1}" if detector.config.stages > 1 else ""
        losses[f"classes{name}"] = weight * F.cross_entropy(logits, label)
        positive = np.flatnonzero(samples.truth >= 0)
        true_boxes = np.array([scenes[samples.image[i]].boxes[samples.truth[i]] for i in positive]).reshape(-1, 4)
        wanted = torch.from_numpy(encode(samples.boxes[positive], true_boxes, s.stds[stage])).float()
        of_class = moves.view(len(label), -1, 4)
        column = label[positive] if of_class.shape[1] > 1 else torch.zeros(len(positive), dtype=torch.long)
        distance = F.l1_loss(of_class[torch.from_numpy(positive), column], wanted, reduction="sum")
        losses[f"boxes{name}"] = weight * distance / len(label)
        mask_samples = positives_of(samples, masks_per_image * len(scenes))
        if len(mask_samples.boxes):
            masks = mask_head(roi_features(outputs.levels, mask_samples, detector.config.mask_side, s))
            chosen = masks[torch.arange(len(mask_samples.boxes)), :, :, torch.from_numpy(mask_samples.label)]
            target = mask_targets(mask_samples, scenes, chosen.shape[1])
            losses[f"masks{name}"] = weight * F.binary_cross_entropy_with_logits(chosen, target)
        if stage + 1 < detector.config.stages:
            moved = refine(
                samples.boxes, logits.detach().double().numpy(), moves.detach().double().numpy(), s.stds[stage], size
            )
            solid = (moved[:, 2:] > moved[:, :2] + 1e-3).all(1)
            proposals = [moved[solid & (samples.image == n)] for n in range(len(scenes))]
    return losses
