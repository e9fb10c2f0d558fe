"""Draw docs/assets/figure2.svg: channel ranges before the last normalization of several models.

    .venv/bin/python benchmarks/figure2.py --calib DIR --model DeiT-Tiny=deit_tiny=FILE --model ViT-Tiny=vit_tiny=FILE \\
        [--resnet FILE.safetensors] [--limit 100] [-o FILE.svg]

This is the paper's Figure 2. A channel's range is its max - min over all tokens (or pixels) of all images in the float model,
at the input of the last LayerNorm. A ResNet with bottleneck blocks (50, 101 or 152 layers; key names of torchvision and timm)
is run by the functions below and shown at the input of its last BatchNorm. A checkpoint without a classifier gets a head of
zeros: the head comes after the last LayerNorm and does not affect the ranges.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

import fqvit
from fqvit.data.preprocess import Preprocess
from fqvit.models.graph import Node, trace
from fqvit.models.pixels import normalise
from fqvit.models.zoo import IMAGENET_MEAN, IMAGENET_STD
from fqvit.report.collect import NormRanges
from fqvit.report.data import ChannelRanges
from fqvit.report.plots import model_boxes
from fqvit.report.svg import standalone
from fqvit.system.progress import track

BATCH = 4
RESNET_PREPROCESS = Preprocess(224, 224, 3, 256, "bilinear", IMAGENET_MEAN, IMAGENET_STD)
FIGURE = Path(__file__).resolve().parents[1] / "docs" / "assets" / "figure2.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], metavar="[LABEL=]NAME=FILE")
    parser.add_argument("--resnet", type=Path, metavar="FILE.safetensors")
    parser.add_argument("--calib", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("-o", "--out", type=Path, default=FIGURE)
    given = parser.parse_args()
    found: list[tuple[str, ChannelRanges]] = []
    if given.resnet is not None:
        found.append(resnet_ranges(load_file(given.resnet), given.calib, given.limit))
    for text in given.model:
        found.append(transformer_ranges(text, given.calib, given.limit))
    if not found:
        sys.exit("figure2: no model given. Pass --model NAME=FILE at least once.")
    for name, ranges in found:
        print(f"{name}: {ranges.norm}, widest / median = {ranges.ratio:.1f}")
    images = len(fqvit.ImageFolder.unlabelled(given.calib, RESNET_PREPROCESS).limit(given.limit))
    given.out.write_text(standalone(model_boxes(found, images)), encoding="utf-8")


@torch.no_grad()
def transformer_ranges(text: str, calib: Path, limit: int) -> tuple[str, ChannelRanges]:
    """Run the model given as [LABEL=]NAME=FILE and return its label and the channel ranges before its last LayerNorm."""
    *labels, name, file = text.split("=")
    weights = load_file(file)
    if "head.weight" not in weights:
        width = weights["norm.weight"].shape[0]
        weights |= {"head.weight": torch.zeros(1, width), "head.bias": torch.zeros(1)}
    model = fqvit.load_model(name, weights)
    graph = trace(model.module)
    norms = NormRanges(graph)

    def visit(node: Node, y: Tensor) -> Tensor:
        norms.see(node, y)
        return y

    label = labels[0] if labels else name
    for pixels in batches(calib, model.preprocess, limit, label):
        graph.run(normalise(pixels, model.preprocess), visit)
    return label, norms.result()[-1]


@torch.no_grad()
def resnet_ranges(weights: Mapping[str, Tensor], calib: Path, limit: int) -> tuple[str, ChannelRanges]:
    """Run a ResNet and return its name and the channel ranges before its last BatchNorm."""
    lows, highs = [], []
    depth = {16: 50, 33: 101, 50: 152}.get(sum(len(blocks(weights, stage)) for stage in STAGES))
    label = f"ResNet-{depth}" if depth else "ResNet"
    for pixels in batches(calib, RESNET_PREPROCESS, limit, label):
        y = resnet_last_norm_input(weights, normalise(pixels, RESNET_PREPROCESS))
        lo, hi = torch.aminmax(y.transpose(0, 1).flatten(1), dim=1)
        lows.append(lo)
        highs.append(hi)
    lo, hi = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    return label, ChannelRanges(f"{blocks(weights, 4)[-1]}.bn3", lo.double().numpy(), hi.double().numpy())


def batches(calib: Path, preprocess: Preprocess, limit: int, label: str) -> Iterator[NDArray]:
    """Yield the images in batches, u8 [N, H, W, C], and show progress."""
    folder = fqvit.ImageFolder.unlabelled(calib, preprocess).limit(limit)
    for batch in track(folder.batches(BATCH), -(-len(folder) // BATCH), label):
        yield batch.images


STAGES = (1, 2, 3, 4)


def blocks(weights: Mapping[str, Tensor], stage: int) -> list[str]:
    """Name the blocks of a stage in order: layer1.0, layer1.1, ..."""
    count = 0
    while f"layer{stage}.{count}.conv3.weight" in weights:
        count += 1
    if not count:
        sys.exit(f"--resnet: no layer{stage}.0.conv3.weight. Pass a ResNet-50, -101 or -152 with torchvision's or timm's keys.")
    return [f"layer{stage}.{i}" for i in range(count)]


def resnet_last_norm_input(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Run a float ResNet (He 2016; stride 2 in the 3 x 3 convolution) up to its last BatchNorm.

    x: normalized images, float32 [N, 3, H, W]. Returns the output of the last convolution, float32 [N, C, H / 32, W / 32].
    """

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        w = weights[f"{name}.weight"]
        return F.conv2d(x, w, stride=stride, padding=w.shape[-1] // 2)

    def norm(name: str, x: Tensor) -> Tensor:
        mean, variance, gain, bias = (weights[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, mean, variance, gain, bias, eps=1e-5)

    x = F.max_pool2d(F.relu(norm("bn1", conv("conv1", x, 2))), 3, stride=2, padding=1)
    names = [(name, stage) for stage in STAGES for name in blocks(weights, stage)]
    for name, stage in names:
        stride = 2 if stage > 1 and name.endswith(".0") else 1
        y = F.relu(norm(f"{name}.bn1", conv(f"{name}.conv1", x)))
        y = F.relu(norm(f"{name}.bn2", conv(f"{name}.conv2", y, stride)))
        y = conv(f"{name}.conv3", y)
        if name == names[-1][0]:
            return y
        if f"{name}.downsample.0.weight" in weights:
            x = norm(f"{name}.downsample.1", conv(f"{name}.downsample.0", x, stride))
        x = F.relu(norm(f"{name}.bn3", y) + x)
    raise AssertionError("a ResNet has at least one block")


if __name__ == "__main__":
    main()
