"""Trains the embedded models on Fashion-MNIST: `train_fmnist.py fmnist_vit -o FILE`, and the same for `fmnist_swin`.

5,000 training images are held out for choices; the test images are looked at once, at the end. A run writes its state
after every epoch and goes on from there when started again. README.md has the commands, times and results.
"""

from __future__ import annotations

import argparse
import gzip
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.models.embedded import FMNIST_PREPROCESS, FMNIST_SWIN_CONFIG, FMNIST_VIT_CONFIG
from fqvit.models.layers import Linear, Patches
from fqvit.models.swin import Swin
from fqvit.models.vit import ViT

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
HELD_OUT = 5000
MAX_SHIFT = 2  # pixels


@dataclass(frozen=True)
class Plan:
    epochs: int
    cooldown: int = 5  # epochs at the end in which the learning rate falls to 0
    rate: float = 1e-3  # reached after one epoch of warm-up
    decay: float = 0.05
    batch: int = 64
    smoothing: float = 0.1  # of the labels


PLANS = {"fmnist_vit": Plan(epochs=14), "fmnist_swin": Plan(epochs=16)}


def build(name: str) -> nn.Module:
    """The untrained model. Its modules start for wide models (std 0.02); narrow ones learn sooner from 1 / sqrt(inputs)."""
    model = ViT(FMNIST_VIT_CONFIG) if name == "fmnist_vit" else Swin(FMNIST_SWIN_CONFIG)
    for module in model.modules():
        if isinstance(module, Linear | Patches):
            # Branches start at a third, so that the residual stream keeps its size through the blocks.
            gain = 1 / 3 if module.role == "branch" else 1.0
            nn.init.trunc_normal_(module.weight, std=gain * module.weight[0].numel() ** -0.5)
    return model


def read_split(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images u8 [N, 28, 28] and labels i64 [N] of "train" or "t10k"."""
    images, labels = folder / f"{split}-images-idx3-ubyte.gz", folder / f"{split}-labels-idx1-ubyte.gz"
    for path in (images, labels):
        if not path.is_file():
            raise SystemExit(f"{path}: not found. Run apt-get install dataset-fashion-mnist, or pass its folder as --data.")
    pixels = np.frombuffer(gzip.decompress(images.read_bytes()), np.uint8, offset=16).reshape(-1, 28, 28)
    classes = np.frombuffer(gzip.decompress(labels.read_bytes()), np.uint8, offset=8)
    return torch.from_numpy(pixels.copy()), torch.from_numpy(classes.astype(np.int64))


def normalise(images: Tensor) -> Tensor:
    """u8 [N, 28, 28] -> float [N, 1, 28, 28]"""
    return ((images.float() / 255 - FMNIST_PREPROCESS.mean[0]) / FMNIST_PREPROCESS.std[0]).unsqueeze(1)


def augment(images: Tensor, random: torch.Generator) -> Tensor:
    """Each image moved by up to MAX_SHIFT pixels (black comes in) and flipped left-right half of the time."""
    n, side = images.shape[0], images.shape[-1]
    shift = torch.randint(2 * MAX_SHIFT + 1, (2, n, 1), generator=random)
    flip = torch.rand(n, 1, generator=random) < 0.5
    place = torch.arange(side).expand(n, side)
    rows, columns = place + shift[0], torch.where(flip, place.flip(1), place) + shift[1]
    padded = F.pad(images, (MAX_SHIFT,) * 4)
    return padded[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def optimiser(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """AdamW; only the matrices decay, not biases, norms, positions and tables."""
    matrices = [m.weight for m in model.modules() if isinstance(m, Linear | Patches)]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [{"params": matrices, "weight_decay": plan.decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.rate)


def rate_at(progress: float, plan: Plan) -> float:
    """progress in epochs: up in the first, then level, then down in a line."""
    return plan.rate * min(progress, 1.0, (plan.epochs - progress) / plan.cooldown)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = sum(
        int((model(normalise(x)).argmax(1) == y).sum()) for x, y in zip(images.split(250), labels.split(250), strict=True)
    )
    return 100 * right / len(labels)


def train(name: str, data: Path, output: Path, plan: Plan, seed: int) -> None:
    torch.manual_seed(seed)
    images, labels = read_split(data, "train")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, order = order[:HELD_OUT], order[HELD_OUT:]

    model = build(name)
    optimizer = optimiser(model, plan)
    random = torch.Generator().manual_seed(seed + 1)
    state_file = output.with_suffix(".state")
    first, seconds = 0, 0.0
    if state_file.is_file():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        random.set_state(state["random"])
        first, seconds = state["epoch"], state["seconds"]

    for epoch in range(first, plan.epochs):
        start, total = time.monotonic(), 0.0
        model.train()
        batches = order[torch.randperm(len(order), generator=random)].split(plan.batch)
        for step, chosen in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(epoch + (step + 1) / len(batches), plan)
            inputs = normalise(augment(images[chosen], random))
            loss = F.cross_entropy(model(inputs), labels[chosen], label_smoothing=plan.smoothing)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        seconds += time.monotonic() - start
        held_out_accuracy = accuracy(model, images[held_out], labels[held_out])
        print(
            f"{name} epoch {epoch + 1}/{plan.epochs}: loss {total / len(batches):.4f}, "
            f"held-out top-1 {held_out_accuracy:.2f} %, {seconds / 60:.1f} min",
            flush=True,
        )
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": random.get_state()}
        part = state_file.with_suffix(".part")
        torch.save({**state, "epoch": epoch + 1, "seconds": seconds}, part)
        part.replace(state_file)

    finish(name, model, data, output)


def finish(name: str, model: nn.Module, data: Path, output: Path) -> None:
    """Writes the float16 file and reports what it reaches on the test images."""
    images, labels = read_split(data, "t10k")
    full = accuracy(model, images, labels)
    save_file({key: value.half().contiguous() for key, value in model.state_dict().items()}, output)
    model.load_state_dict({key: value.float() for key, value in load_file(output).items()})
    half = accuracy(model, images, labels)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{name}: {parameters} parameters, test top-1 {full:.2f} % (float32), {half:.2f} % (float16 weights)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the embedded models on Fashion-MNIST.")
    parser.add_argument("name", choices=list(PLANS))
    parser.add_argument("--data", type=Path, default=DEBIAN_FOLDER, help="folder of the four idx .gz files")
    parser.add_argument("-o", "--output", type=Path, required=True, help=".safetensors file to write")
    parser.add_argument("--epochs", type=int, help="in place of the plan's; a run may be lengthened or cut until it cools down")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plan = PLANS[arguments.name]
    if arguments.epochs:
        plan = replace(plan, epochs=arguments.epochs)
    train(arguments.name, arguments.data, arguments.output, plan, arguments.seed)


if __name__ == "__main__":
    main()
