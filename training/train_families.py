"""Train the small models of families.py on Fashion-MNIST: `train_families.py rotary -o FILE`, or `all` and a folder.

Four short epochs, which draw 14,000 images each, give a sensible classifier, not the best one. As in train_fmnist.py, runs are
seeded, 5,000 training images are held out, the test images are used once at the end, and a run that was stopped resumes from
its last epoch.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from families import FAMILIES
from torch import nn
from train_fmnist import DEBIAN_FOLDER, Muon, Plan, train

PLAN = Plan(epochs=4, cooldown=3, matrix_rate=0.008, other_rate=2e-3, images=14_000)
FIRST = ("patch_embed", "stem", "cpb_mlp")  # Adam trains these layers and the last one


def initialise(model: nn.Module) -> None:
    """Draw weights with std 1 / sqrt(inputs), smaller at the end of a branch. Key weights start equal to query weights."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "cpb_mlp" not in name:
            gain = 1 / 3 if name.endswith(("proj", "fc2", "w3")) else 1.0
            nn.init.trunc_normal_(module.weight, std=gain * module.in_features**-0.5)
        if name.endswith("qkv"):
            q, k, _ = module.weight.data.chunk(3)
            k.copy_(q)  # a token attends to similar tokens at similar positions


def optimisers(model: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Use Muon for the inner linear layers and dense convolutions, and Adam for the rest."""
    matrices = [
        module.weight
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1))
        and name != "head"
        and not any(first in name for first in FIRST)
    ]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [Muon(matrices, plan.matrix_rate), torch.optim.Adam(others, lr=plan.other_rate)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train small models of several families on Fashion-MNIST.")
    parser.add_argument("name", choices=[*FAMILIES, "all"])
    parser.add_argument("--data", type=Path, default=DEBIAN_FOLDER, help="folder with the four idx .gz files")
    parser.add_argument("-o", "--output", type=Path, required=True, help=".safetensors file to write; a folder for `all`")
    parser.add_argument("--epochs", type=int, default=PLAN.epochs)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plan = replace(PLAN, epochs=arguments.epochs, cooldown=max(1, arguments.epochs - 1))
    for name in FAMILIES if arguments.name == "all" else [arguments.name]:
        output = arguments.output / f"{name}.safetensors" if arguments.name == "all" else arguments.output
        output.parent.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(arguments.seed)
        model = FAMILIES[name]()
        initialise(model)
        train(name, model, optimisers(model, plan), arguments.data, output, plan, arguments.seed)


if __name__ == "__main__":
    main()
