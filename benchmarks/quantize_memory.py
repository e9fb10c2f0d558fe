"""Measure time and peak memory of `fqvit quantize` for large models with random weights.

Each model is quantized by its own process, whose peak memory is the largest resident set, including Python, torch and the
checkpoint. Calibration images are photographs from --data-root, or random images without it. Time depends on the number of
images; memory does not, because calibration keeps one batch and statistics of fixed size.

    .venv/bin/python benchmarks/quantize_memory.py --data-root DIR
    .venv/bin/python benchmarks/quantize_memory.py --models vit_large --recipes embedding --images 128

Generated checkpoints are kept in build/speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from fqvit.bench.measure import smooth_images
from fqvit.models import zoo

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "speed"
MAKE_CHECKPOINT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from speed_models import clipped_weights;"
    "from safetensors.torch import save_file; from fqvit.models import zoo; from fqvit.models.load import build;"
    "save_file(clipped_weights(build(zoo.find(sys.argv[2]).config).state_dict()), sys.argv[3])"
)


def checkpoint(name: str) -> Path:
    """Return a checkpoint of random weights, made by another process, whose memory is not measured."""
    path = FOLDER / f"{name}.safetensors"
    if not path.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-c", MAKE_CHECKPOINT, str(ROOT / "benchmarks"), name, str(path)], check=True)
    return path


def photographs(data: Path, folder: Path, count: int) -> Path:
    found = data / "imagenet" / "calib"
    if found.is_dir():
        return found
    for i, pixels in enumerate(smooth_images((count, 256, 256, 3), 0)):
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


def peak_and_output(command: list[str]) -> tuple[float, str, float]:
    """Run a command. Return its peak memory in GB, its output and its time in seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"quantize_memory.py: {' '.join(command)} ended with exit code {process.returncode}.")
        output.seek(0)
        unit = 1 if sys.platform == "darwin" else 1024
        return usage.ru_maxrss * unit / 1e9, output.read().decode(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="vit_large,swin_base", help="comma-separated model names")
    parser.add_argument("--recipes", default="fqvit", help="comma-separated")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--data-root", type=Path, default=ROOT.parent / "shared" / "data")
    arguments = parser.parse_args()
    print(f"{'model':28} {'recipe':10} {'images':>6} {'peak GB':>8} {'seconds':>8} {'calibration':>12} {'file MB':>8}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = photographs(arguments.data_root, folder, arguments.images)
        for model in arguments.models.split(","):
            weights = checkpoint(model)
            for recipe in arguments.recipes.split(","):
                command = [sys.executable, "-m", "fqvit", "quantize", zoo.find(model).name, "--weights", str(weights)]
                command += ["--calib", str(images), "--images", str(arguments.images), "--recipe", recipe]
                peak, said, seconds = peak_and_output([*command, "-o", str(folder / "model.fqvit"), "--json"])
                found = json.loads(said.splitlines()[-1])
                row = f"{found['model']:28} {recipe:10} {found['calibration_images']:6} {peak:8.2f} {seconds:8.1f}"
                print(f"{row} {found['calibration_seconds']:12.1f} {found['bytes'] / 1e6:8.1f}", flush=True)


if __name__ == "__main__":
    main()
