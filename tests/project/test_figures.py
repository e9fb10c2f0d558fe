"""Committed figures are up to date with the measurements they show, and the script for Figure 2 runs a ResNet correctly."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
if not SCRIPTS.is_dir():
    pytest.skip("needs benchmarks/, which source distributions leave out", allow_module_level=True)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPTS / f"{name}.py", *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["figure1", "readme_figure", "pareto"])
def test_a_committed_figure_is_up_to_date_with_its_csv(name: str) -> None:
    done = run(name, "--check")
    assert done.returncode == 0, done.stderr


class Bottleneck(nn.Module):
    """A block of ResNet-50, built from torch's own layers: the reference for the functional code of the script."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + (self.downsample(x) if hasattr(self, "downsample") else x))


class ResNet(nn.Module):
    """ResNet with small widths and random weights; two blocks per stage."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        inputs = 8
        for stage, width in ((1, 4), (2, 6), (3, 8), (4, 10)):
            blocks = [Bottleneck(inputs, width, 4 * width, 1 if stage == 1 else 2), Bottleneck(4 * width, width, 4 * width, 1)]
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            inputs = 4 * width

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return x


@pytest.fixture(scope="module")
def resnet() -> ResNet:
    torch.manual_seed(0)
    module = ResNet().eval()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
    return module


@torch.no_grad()
def test_the_script_of_figure_2_computes_the_input_of_a_resnets_last_batchnorm(resnet: ResNet) -> None:
    seen: list[Tensor] = []
    handle = resnet.get_submodule("layer4.1.bn3").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randn(2, 3, 64, 64)
    resnet(images)
    handle.remove()
    found = script("figure2").resnet_last_norm_input(resnet.state_dict(), images)
    assert found.shape == (2, 40, 2, 2)
    torch.testing.assert_close(found, seen[0])


def test_figure_2_draws_transformers_and_a_resnet(resnet: ResNet, tmp_path: Path) -> None:
    from PIL import Image

    import fqvit

    (tmp_path / "images").mkdir()
    for i in range(3):
        Image.effect_noise((40, 40), 60).convert("RGB").save(tmp_path / "images" / f"{i}.png")
    save_file(resnet.state_dict(), tmp_path / "resnet.safetensors")
    model = fqvit.load_model("fmnist_vit")
    save_file(model.module.state_dict(), tmp_path / "vit.safetensors")
    words = ["--calib", tmp_path / "images", "--resnet", tmp_path / "resnet.safetensors", "-o", tmp_path / "out.svg"]
    words += ["--model", f"Tiny=fmnist_vit={tmp_path / 'vit.safetensors'}"]
    done = run("figure2", *words)
    assert done.returncode == 0, done.stderr
    svg = (tmp_path / "out.svg").read_text()
    assert "ResNet" in svg and "layer4.1.bn3, 40 channels" in svg and "Tiny" in svg and "norm, 96 channels" in svg


def test_figure_2_rejects_other_networks(tmp_path: Path) -> None:
    save_file({"conv1.weight": torch.zeros(8, 3, 7, 7)}, tmp_path / "other.safetensors")
    words = ["--calib", tmp_path, "--resnet", tmp_path / "other.safetensors"]
    done = run("figure2", *words)
    assert done.returncode == 1 and "layer1.0.conv3.weight" in done.stderr and "Traceback" not in done.stderr
