"""Train a small detector on synthetic shapes: `python training/train_detector.py mask_rcnn -o FILE`, or `cascade`.

Training images are generated on the fly; the validation split of make_shapes.py is used for reporting only. All random numbers
are derived from (seed, step), so a run that was stopped resumes from its state file and ends with the same weights.
README.md has the commands, times and results.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from detector_losses import detector_losses
from make_shapes import CLASSES, ON_THE_FLY, SIDE, VAL_SPLIT, Scene, scene, write_split
from PIL import Image
from torch import nn
from train_fmnist import Muon, distance_bias

from fqvit.detect.annotations import read_annotations
from fqvit.detect.float.networks import detect_float
from fqvit.detect.images import normalise_and_pad
from fqvit.detect.model.detector import Detector, FloatDetector, build_detector
from fqvit.detect.model.load import load_detector, save_detector
from fqvit.detect.results import coco_results
from fqvit.detect.settings import DetectSettings
from fqvit.evaluate.coco import average_precision
from fqvit.models.config import DetectorConfig, SwinConfig
from fqvit.models.device import keep_freed_memory
from fqvit.models.layers import Linear, Patches
from fqvit.models.maps import Conv2d, Deconv
from fqvit.models.swin import WindowAttention
from fqvit.system.files import replacing

# Shapes are 16 to 72 pixels large. Square anchors have sides of 16, 32, 64, ... pixels; RoIs of at least 28 pixels use the
# second level, RoIs of at least 56 pixels the third.
SETTINGS = DetectSettings(
    short=SIDE, long=SIDE, anchor_scale=4.0, finest=14.0, proposals_a_level=200, proposals=200, classes=CLASSES
)
SAVE_EVERY = 200  # steps
AHEAD = 3  # batches drawn in advance
BRANCH_GAIN = 1 / 3  # initial scale of residual branches, so that the residual stream keeps its magnitude


@dataclass(frozen=True)
class Plan:
    """The model and the hyperparameters of a training run."""

    config: DetectorConfig
    steps: int
    batch: int = 8
    matrix_rate: float = 0.01  # learning rate of Muon
    other_rate: float = 1.5e-3  # learning rate of AdamW
    warm_up: int = 100  # steps
    average: float = 0.998  # decay per step of the moving average of the weights
    boxes_per_image: int = 64
    masks_per_image: int = 8
    evaluate_every: int = 1500


SWIN = SwinConfig((SIDE, SIDE), 4, 3, 0, 32, (2, 2, 2, 2), (2, 4, 8, 8), 4, fixed_window=True)
SMALL = DetectorConfig(SWIN, len(CLASSES), channels=64, box_width=192, mask_channels=32)
PLANS = {
    "mask_rcnn": Plan(SMALL, steps=6000),
    "cascade": Plan(replace(SMALL, stages=3, box_width=128, agnostic=True), steps=4200),
}


def build(config: DetectorConfig, seed: int) -> Detector:
    """Return an untrained detector, initialized for a short training run.

    Weights have standard deviations of gain / sqrt(inputs), attention prefers close positions, and outputs are small.
    """
    torch.manual_seed(seed)
    detector = build_detector(config)
    with torch.no_grad():
        for name, module in detector.named_modules():
            if isinstance(module, Linear | Patches | Conv2d):
                relu = 2**0.5 if module.role == "inner" else 1.0
                gain = BRANCH_GAIN if module.role == "branch" else 0.1 if module.role in ("logits", "deltas") else relu
                nn.init.trunc_normal_(module.weight, std=gain * module.weight[0].numel() ** -0.5)
            elif isinstance(module, Deconv):
                nn.init.trunc_normal_(module.weight, std=(2 / len(module.weight)) ** 0.5)
            elif isinstance(module, WindowAttention):
                module.relative_position_bias_table.copy_(distance_bias(config.backbone.window, module.q.heads))
            if name.endswith("objectness"):
                nn.init.constant_(module.bias, -2.0)  # few anchors match a shape
    return detector


def draw_batch(seed: int, step: int, count: int) -> list[Scene]:
    """Return the training images of a step, half of them flipped."""
    scenes = [scene((ON_THE_FLY, seed, step, i)) for i in range(count)]
    return [one.flipped() if i % 2 else one for i, one in enumerate(scenes)]


def batches(seed: int, steps: range, count: int) -> Iterator[tuple[int, list[Scene]]]:
    """Yield each step and its training images, which another process draws in advance."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        ahead = deque(pool.submit(draw_batch, seed, step, count) for step in steps[:AHEAD])
        for step in steps:
            scenes = ahead.popleft().result()
            if step + AHEAD in steps:
                ahead.append(pool.submit(draw_batch, seed, step + AHEAD, count))
            yield step, scenes


def optimisers(detector: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Return Muon for inner linear layers and convolutions, and AdamW without weight decay for all other parameters.

    The others are the patch embedding, the output layers, the deconvolutions, biases, norms and position bias tables.
    """
    inside = [m for m in detector.modules() if isinstance(m, Linear | Conv2d) and m.role not in ("logits", "deltas")]
    matrices = [m.weight for m in inside]
    chosen = {id(p) for p in matrices}
    others = [p for p in detector.parameters() if id(p) not in chosen]
    return [
        Muon(matrices, plan.matrix_rate),
        torch.optim.AdamW(others, lr=plan.other_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_factor(step: int, plan: Plan) -> float:
    """Return the factor of the learning rates at a step: a linear warm-up, then cosine decay to 0."""
    done = max(step - plan.warm_up, 0) / max(plan.steps - plan.warm_up, 1)
    return min((step + 1) / plan.warm_up, 0.5 + 0.5 * math.cos(math.pi * done))


def train(name: str, data: Path, output: Path, plan: Plan, seed: int) -> None:
    """Train from scratch or from the state file, write the averaged weights to `output` and print their average precision."""
    detector = build(plan.config, seed)
    averaged = build(plan.config, seed).eval()
    parts = optimisers(detector, plan)
    settings = msgspec.structs.replace(SETTINGS, proposals_a_level=100, proposals=120)
    state_file = output.with_suffix(".state")
    first, seconds = 0, 0.0
    if state_file.is_file():
        state = torch.load(state_file, weights_only=True)
        detector.load_state_dict(state["model"])
        averaged.load_state_dict(state["average"])
        for part, saved in zip(parts, state["optimisers"], strict=True):
            part.load_state_dict(saved)
        first, seconds = state["step"], state["seconds"]
        print(f"{name}: resumes at step {first}, {seconds / 60:.1f} min", flush=True)

    totals: dict[str, float] = {}
    start, since = time.monotonic() - seconds, first
    for step, scenes in batches(seed, range(first, plan.steps), plan.batch):
        losses = train_step(detector, averaged, parts, scenes, settings, plan, step, seed)
        for key, value in losses.items():
            totals[key] = totals.get(key, 0.0) + value
        done = step + 1
        if done % SAVE_EVERY == 0 or done == plan.steps:
            seconds = time.monotonic() - start
            left = seconds / done * (plan.steps - done)
            shown = ", ".join(f"{key} {value / (done - since):.3f}" for key, value in totals.items())
            print(f"{name} {done}/{plan.steps}: {shown}; {seconds / 60:.1f} min, {left / 60:.0f} left", flush=True)
            totals, since = {}, done
            state = {
                "model": detector.state_dict(),
                "average": averaged.state_dict(),
                "optimisers": [part.state_dict() for part in parts],
            }
            with replacing(state_file) as temporary:
                torch.save({**state, "step": done, "seconds": seconds}, temporary)
        if done % plan.evaluate_every == 0 and done < plan.steps:
            began = time.monotonic()
            print(f"{name} {done}/{plan.steps}: {shown_ap(evaluate(averaged, data, 100))} (100 images)", flush=True)
            start += time.monotonic() - began
    save_detector(output, averaged, SETTINGS, half=True)
    ap = shown_ap(evaluate(load_detector(output).module, data))
    parameters = sum(p.numel() for p in averaged.parameters())
    print(f"{name}: {parameters} parameters, {output.stat().st_size} bytes, {seconds / 60:.1f} min, {ap}, float16 weights")


def train_step(
    detector: Detector,
    averaged: Detector,
    parts: list[torch.optim.Optimizer],
    scenes: list[Scene],
    settings: DetectSettings,
    plan: Plan,
    step: int,
    seed: int,
) -> dict[str, float]:
    """Take one optimizer step and update the moving average of the weights. Return the losses by name."""
    images = torch.from_numpy(np.stack([normalise_and_pad(one.pixels, settings) for one in scenes]))
    rng = np.random.default_rng((seed, step))
    losses = detector_losses(detector, images, scenes, settings, rng, plan.boxes_per_image, plan.masks_per_image)
    total = sum(losses.values(), torch.zeros(()))
    detector.zero_grad()
    total.backward()
    nn.utils.clip_grad_norm_(detector.parameters(), 5.0)
    for part, rate in zip(parts, (plan.matrix_rate, plan.other_rate), strict=True):
        part.param_groups[0]["lr"] = rate * rate_factor(step, plan)
        part.step()
    # At the start, the average forgets the initial weights faster.
    keep = min(plan.average, (step + 1) / (step + 10))
    with torch.no_grad():
        torch._foreach_lerp_(list(averaged.parameters()), list(detector.parameters()), 1 - keep)
    return {key: value.item() for key, value in losses.items()}


def evaluate(detector: Detector, data: Path, count: int | None = None) -> dict[str, float]:
    """Return COCO's average precisions of boxes and masks on the first `count` images (None: all) of the validation split."""
    truth = read_annotations(data / "instances_val.json")
    numbers = sorted(truth.images)[:count]
    files = [data / "val" / truth.images[number].file_name for number in numbers]
    whole = FloatDetector("", detector.eval(), SETTINGS, "")
    found = detect_float(whole, (Image.open(file) for file in files))
    results = [r for number, one in zip(numbers, found, strict=True) for r in coco_results(one, number, SETTINGS)]
    return {key: value or 0.0 for key, value in average_precision(truth, results, numbers).items()}


def shown_ap(precision: dict[str, float]) -> str:
    p = precision
    return f"box AP {p['box_ap']:.1f} ({p['box_ap50']:.1f} at 0.5), mask AP {p['mask_ap']:.1f} ({p['mask_ap50']:.1f} at 0.5)"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the small detectors on synthetic shapes.")
    parser.add_argument("name", choices=list(PLANS))
    parser.add_argument(
        "--data", type=Path, default=Path("shapes"), help="folder written by make_shapes.py; a missing val split is written"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help=".safetensors file to write")
    parser.add_argument("--steps", type=int, help="number of training steps; the learning rates fall to 0 at the last one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # sys.exit raises an exception, so that the process that draws images is stopped, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped. Run the same command again to resume."))
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    plan = PLANS[arguments.name]
    if arguments.steps:
        plan = replace(plan, steps=arguments.steps)
    if not (arguments.data / "instances_val.json").is_file():
        write_split(arguments.data, "val", 500, (VAL_SPLIT, 0))
    train(arguments.name, arguments.data, arguments.output, plan, arguments.seed)


if __name__ == "__main__":
    main()
