"""The README's commands for classifiers run unchanged and in order.

Commands with a checkpoint and commands without one run in separate folders. Integer programs of the embedded models keep the
accuracy of the float models.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import fqvit
from fqvit.models import embedded
from fqvit.models.graph import run_float, trace
from fqvit.models.pixels import normalise
from fqvit.quant.recipe import DEFAULT_RECIPE
from fqvit.quant.simulate import Simulation
from fqvit.runtime.reference import Reference
from tests.cli.command_line import fqvit as command

README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = re.findall(r"^    (fqvit .+?)(?: +#.*)?$", README, re.MULTILINE)


def test_the_commands_without_a_checkpoint_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for line in COMMANDS if "deit" not in line]
    assert lines[0] == "fqvit quantize"
    for line in lines:
        done = command(*shlex.split(line)[1:])
        assert done.code == 0, f"{line}: {done.err}"
    assert (tmp_path / "fmnist_vit.fqvit").is_file()


def test_the_commands_with_deit_tiny_run(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(shared_data / "weights" / "deit_tiny_patch16_224.safetensors", tmp_path)
    images = sorted((shared_data / "imagenet" / "calib").glob("*/*.jpg"))[:4]
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(images):
        (tmp_path / "val" / str(number)).mkdir(parents=True)
        shutil.copy(image, tmp_path / "val" / str(number) / "0.jpg")
        shutil.copy(image, tmp_path / "photos" / f"{number}.jpg")
    shutil.copy(images[0], tmp_path / "cat.jpg")
    shutil.copy(images[1], tmp_path / "dog.jpg")
    monkeypatch.chdir(tmp_path)
    lines = [line for line in COMMANDS if "deit" in line]
    assert len(lines) >= 5
    for line in lines:
        done = command(*shlex.split(line)[1:])
        assert done.code == 0, f"{line}: {done.err}"


@pytest.mark.parametrize("recipe", ["fq-vit", DEFAULT_RECIPE])
@pytest.mark.parametrize("name", embedded.MODELS)
def test_program_and_simulation_keep_the_accuracy_of_the_embedded_models(name: str, recipe: str) -> None:
    """On 1,000 test images, the program is within 0.5 percentage points of the float model.

    The simulation is within 0.3 percentage points of the program.
    """
    model = fqvit.load_model(name)
    calibration = fqvit.calibrate(model, [embedded.calibration_images()], fqvit.load_recipe(recipe))
    program = fqvit.lower(model, calibration)
    images, labels = embedded.test_images()

    def top1(logits: list[np.ndarray]) -> float:
        return 100 * float((np.concatenate(logits).argmax(1) == labels).mean())

    batches = np.split(images, 20)
    reference, simulation = Reference(program), Simulation(model, calibration)
    integer = top1([reference.run(batch) for batch in batches])
    simulated = top1([simulation.run(batch).numpy() for batch in batches])
    exact = top1([model_logits(model, batch) for batch in batches])
    assert abs(integer - exact) <= 0.5
    assert abs(simulated - integer) <= 0.3


def model_logits(model: fqvit.FloatModel, images: np.ndarray) -> np.ndarray:
    return run_float(trace(model.module), normalise(images, model.preprocess)).numpy()
