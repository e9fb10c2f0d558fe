"""Train the embedded models on Fashion-MNIST: `train_fmnist.py fmnist_vit -o FILE`, and the same for `fmnist_swin`.

5,000 training images are held out for model selection; the test images are used once, at the end. A run saves its state after
every epoch and resumes from it when started again. README.md has the commands, times and results.
"""

from __future__ import annotations

import argparse
import gzip
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.models.embedded import FMNIST_PREPROCESS, FMNIST_SWIN_CONFIG, FMNIST_VIT_CONFIG
from fqvit.models.layers import Linear, Patches, Softmax
from fqvit.models.swin import Swin, WindowAttention
from fqvit.models.vit import Attention, ViT

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
HELD_OUT = 5000
MAX_SHIFT = 1  # pixels


@dataclass(frozen=True)
class Plan:
    """Hyperparameters of a training run."""

    epochs: int
    cooldown: int  # epochs at the end in which the learning rates fall to 0
    matrix_rate: float = 0.004  # learning rate of Muon; 0.02 is too noisy with small batches
    other_rate: float = 1e-3  # learning rate of Adam
    batch: int = 64
    images: int | None = None  # training images per epoch, drawn anew for each epoch; None: all
    smoothing: float = 0.1  # label smoothing
    attention_dropout: float = 0.0  # also makes the model robust against coarsely quantized attention


PLANS = {"fmnist_vit": Plan(epochs=13, cooldown=10, attention_dropout=0.2), "fmnist_swin": Plan(epochs=14, cooldown=10)}


def build(name: str) -> nn.Module:
    """Build the untrained model, initialized for a short training run.

    The default std of 0.02 suits wide models; narrow ones learn faster with a std of 1 / sqrt(inputs) and with meaningful
    initial positions: position embeddings of sines and cosines in the ViT, a bias towards close positions in the Swin.
    """
    model = ViT(FMNIST_VIT_CONFIG) if name == "fmnist_vit" else Swin(FMNIST_SWIN_CONFIG)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Linear | Patches):
                # The last layers of residual branches start smaller, so that the residual stream keeps its magnitude.
                gain = 1 / 3 if module.role == "branch" else 1.0
                nn.init.trunc_normal_(module.weight, std=gain * module.weight[0].numel() ** -0.5)
        for module in model.modules():
            if isinstance(module, Attention):
                q, k, _ = module.qkv.weight.chunk(3)
                k.copy_(q)  # a token attends to similar tokens at similar positions
            elif isinstance(module, WindowAttention):
                module.relative_position_bias_table.copy_(distance_bias(FMNIST_SWIN_CONFIG.window, module.q.heads))
        if isinstance(model, ViT):
            config = FMNIST_VIT_CONFIG
            model.pos_embed[0, 1:] = position_waves(config.image[0] // config.patch, config.width)
    return model


def position_waves(side: int, width: int) -> Tensor:
    """Return position embeddings [side^2, width]: sines and cosines of row and column, wavelengths 28 to 2.8 patches."""
    frequency = torch.logspace(0, 1, width // 4) * math.pi / 14
    position = torch.arange(side * side)
    row, column = (position // side)[:, None] * frequency, (position % side)[:, None] * frequency
    return 0.5 * torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], 1)


def distance_bias(window: int, heads: int) -> Tensor:
    """Return the relative position bias [(2 * window - 1)^2, heads]: minus the distance, halved from one head to the next."""
    offset = torch.arange(1.0 - window, window)
    distance = torch.hypot(offset[:, None], offset[None, :]).flatten()
    return -distance[:, None] * 0.5 ** torch.arange(heads)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan, 2024): momentum, then an update with the same singular vectors and all singular values close to 1.

    Convolutions are flattened to matrices [outputs, inputs].
    """

    def __init__(self, matrices: list[Tensor], rate: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(matrices, {"lr": rate, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(mean, group["momentum"]).flatten(1))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(update.view_as(p), alpha=-group["lr"] * max(1, update.shape[0] / update.shape[1]) ** 0.5)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Run five Newton-Schulz iterations towards U V^T of the singular value decomposition U S V^T."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
    return x if wide else x.T


def read_split(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Read images u8 [N, 28, 28] and labels i64 [N] of the split "train" or "t10k"."""
    images, labels = folder / f"{split}-images-idx3-ubyte.gz", folder / f"{split}-labels-idx1-ubyte.gz"
    for path in (images, labels):
        if not path.is_file():
            raise SystemExit(f"{path}: not found. Run apt-get install dataset-fashion-mnist, or pass its folder as --data.")
    pixels = np.frombuffer(gzip.decompress(images.read_bytes()), np.uint8, offset=16).reshape(-1, 28, 28)
    classes = np.frombuffer(gzip.decompress(labels.read_bytes()), np.uint8, offset=8)
    return torch.from_numpy(pixels.copy()), torch.from_numpy(classes.astype(np.int64))


def normalise(images: Tensor) -> Tensor:
    """(pixel / 255 - mean) / std: u8 [N, 28, 28] -> float [N, 1, 28, 28]"""
    return ((images.float() / 255 - FMNIST_PREPROCESS.mean[0]) / FMNIST_PREPROCESS.std[0]).unsqueeze(1)


def augment(images: Tensor, random: torch.Generator) -> Tensor:
    """Shift half of the images by up to MAX_SHIFT pixels (filling with black) and flip half of them left-right, at random."""
    n, side = images.shape[0], images.shape[-1]
    move, flip = torch.rand(2, n, 1, generator=random) < 0.5
    shift = MAX_SHIFT + move * torch.randint(-MAX_SHIFT, MAX_SHIFT + 1, (2, n, 1), generator=random)
    index = torch.arange(side).expand(n, side)
    rows, columns = index + shift[0], torch.where(flip, index.flip(1), index) + shift[1]
    padded = F.pad(images, (MAX_SHIFT,) * 4)
    return padded[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def optimisers(model: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Use Muon for inner matrices, Adam for the rest: first and last layer, biases, norms, position embeddings and biases."""
    matrices = [m.weight for m in model.modules() if isinstance(m, Linear) and m.role != "logits"]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [Muon(matrices, plan.matrix_rate), torch.optim.Adam(others, lr=plan.other_rate)]


def rate_factor(progress: float, plan: Plan) -> float:
    """Return the factor of the learning rates after `progress` epochs: warm-up, constant, linear decay."""
    return min(10 * progress, 1.0, (plan.epochs - progress) / plan.cooldown)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the top-1 accuracy in percent."""
    model.eval()
    right = sum(
        int((model(normalise(x)).argmax(1) == y).sum()) for x, y in zip(images.split(250), labels.split(250), strict=True)
    )
    return 100 * right / len(labels)


def split_held_out(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the held-out images and of those to train on, in random order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:HELD_OUT], order[HELD_OUT:]


def train(
    name: str, model: nn.Module, parts: list[torch.optim.Optimizer], data: Path, output: Path, plan: Plan, seed: int
) -> None:
    """Train a model with Muon and Adam (`parts`, in this order) and write its weights. Resume if a state file exists."""
    images, labels = read_split(data, "train")
    held_out, order = split_held_out(len(labels), seed)
    rates = [plan.matrix_rate, plan.other_rate]
    random = torch.Generator().manual_seed(seed + 1)
    state_file = output.with_suffix(".state")
    first, seconds = 0, 0.0
    if state_file.is_file():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        for part, saved in zip(parts, state["optimisers"], strict=True):
            part.load_state_dict(saved)
        random.set_state(state["random"])
        first, seconds = state["epoch"], state["seconds"]

    for epoch in range(first, plan.epochs):
        start, total = time.monotonic(), 0.0
        model.train()
        batches = order[torch.randperm(len(order), generator=random)[: plan.images]].split(plan.batch)
        for step, chosen in enumerate(batches):
            for part, rate in zip(parts, rates, strict=True):
                part.param_groups[0]["lr"] = rate * rate_factor(epoch + (step + 1) / len(batches), plan)
            inputs = normalise(augment(images[chosen], random))
            loss = F.cross_entropy(model(inputs), labels[chosen], label_smoothing=plan.smoothing)
            model.zero_grad()
            loss.backward()
            for part in parts:
                part.step()
            total += loss.item()
        seconds += time.monotonic() - start
        held_out_accuracy = accuracy(model, images[held_out], labels[held_out])
        print(
            f"{name} epoch {epoch + 1}/{plan.epochs}: loss {total / len(batches):.4f}, "
            f"held-out top-1 {held_out_accuracy:.2f} %, {seconds / 60:.1f} min",
            flush=True,
        )
        save_state(state_file, model, parts, random, epoch + 1, seconds)

    finish(name, model, data, output)


def save_state(
    path: Path, model: nn.Module, parts: list[torch.optim.Optimizer], random: torch.Generator, epoch: int, seconds: float
) -> None:
    state = {"model": model.state_dict(), "optimisers": [part.state_dict() for part in parts], "random": random.get_state()}
    new = path.with_suffix(".new")  # a run that is stopped while writing keeps the previous state
    torch.save({**state, "epoch": epoch, "seconds": seconds}, new)
    new.replace(path)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and float buffers, without the step counters of batch norms."""
    return {key: value for key, value in model.state_dict().items() if value.is_floating_point()}


def finish(name: str, model: nn.Module, data: Path, output: Path) -> None:
    """Write the weights as float16 and print the accuracy on the test images."""
    images, labels = read_split(data, "t10k")
    full = accuracy(model, images, labels)
    save_file({key: value.half().contiguous() for key, value in weights_of(model).items()}, output)
    model.load_state_dict({key: value.float() for key, value in load_file(output).items()}, strict=False)
    half = accuracy(model, images, labels)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{name}: {parameters} parameters, test top-1 {full:.2f} % (float32), {half:.2f} % (float16 weights)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded models on Fashion-MNIST.")
    parser.add_argument("name", choices=list(PLANS))
    parser.add_argument("--data", type=Path, default=DEBIAN_FOLDER, help="folder with the four idx .gz files")
    parser.add_argument("-o", "--output", type=Path, required=True, help=".safetensors file to write")
    parser.add_argument(
        "--epochs",
        type=int,
        help="number of epochs instead of the default; a resumed run may change it until the learning rates start to fall",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plan = PLANS[arguments.name]
    if arguments.epochs:
        plan = replace(plan, epochs=arguments.epochs)
    torch.manual_seed(arguments.seed)
    model = build(arguments.name)
    for module in model.modules():
        if isinstance(module, Softmax) and plan.attention_dropout:
            module.register_forward_hook(lambda layer, _, p: F.dropout(p, plan.attention_dropout, layer.training))
    train(arguments.name, model, optimisers(model, plan), arguments.data, arguments.output, plan, arguments.seed)


if __name__ == "__main__":
    main()
