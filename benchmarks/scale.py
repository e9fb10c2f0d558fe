"""Measure the throughput of one core: decoding, reading headers, calibration, evaluation.

    .venv/bin/python benchmarks/scale.py --data-root DIR [--cores 64] [--images 128]

DIR has weights/deit_tiny_patch16_224.safetensors and imagenet/{calib,val}/WNID/*.jpg. Times are CPU times of the
process (torch and the engine use one thread), which vary less than wall time when the machine is busy.
docs/measurements/distributed.md has the results.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

import fqvit
from fqvit.models.device import keep_freed_memory

TRAIN, VAL, CALIBRATION = 1_281_167, 50_000, 1_000  # images of ImageNet-1k; calibration images of recipe fqvit


def cpu(work: Callable[[], object], count: int) -> float:
    """Run `work` and return its CPU milliseconds per image."""
    start = time.process_time()
    work()
    return 1000 * (time.process_time() - start) / count


def packed(source: fqvit.ImageFolder, path: Path) -> None:
    """Write the images as a tar shard in WebDataset's layout: NAME.cls, NAME.jpg, NAME.json."""
    with tarfile.open(path, "w") as tar:
        for number, file in enumerate(source.paths):
            for kind, data in (("cls", b"7"), ("jpg", file.read_bytes()), ("json", b'{"label": 7, "filename": "x.JPEG"}')):
                member = tarfile.TarInfo(f"{number:08}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--cores", type=int, default=64)
    parser.add_argument("--images", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `fqvit quantize` does
    model = fqvit.load_model("deit_tiny", arguments.data_root / "weights" / "deit_tiny_patch16_224.safetensors")
    recipe = msgspec.structs.replace(fqvit.load_recipe("fqvit"), images=arguments.images)
    calib = fqvit.ImageFolder.unlabelled(arguments.data_root / "imagenet" / "calib", model.preprocess).limit(arguments.images)
    val = fqvit.ImageFolder.unlabelled(arguments.data_root / "imagenet" / "val", model.preprocess).limit(arguments.images)

    def read(source: fqvit.ImageFolder | fqvit.TarShards) -> float:
        return cpu(lambda: [source.read(i) for i in range(len(source))], len(source))

    fqvit.calibrate(model, calib.limit(16), recipe)  # the first pass of a process is slower
    found = {}
    calibrate = cpu(lambda: found.update(c=fqvit.calibrate(model, calib, recipe)), len(calib))
    engine = fqvit.Engine(fqvit.lower(model, found["c"]), threads=1)
    batches = [batch.images for batch in val.batches(8)]
    evaluate = cpu(lambda: [engine.run(batch) for batch in batches], sum(map(len, batches)))
    with tempfile.TemporaryDirectory() as folder:
        packed(val, Path(folder, "x.tar"))
        headers = cpu(lambda: fqvit.TarShards.labelled(Path(folder, "x.tar"), model.preprocess, 1000), len(val))
        tar = read(fqvit.TarShards.unlabelled(Path(folder, "x.tar"), model.preprocess))
    decode = read(val)
    for name, value in (
        ("read, decode and resize a file", decode),
        ("the same from a tar shard", tar),
        ("read the headers of a sample", headers),
        ("calibrate, reading included", calibrate),
        ("evaluate, in the engine", evaluate),
    ):
        print(f"{name:34} {value:8.3f} ms CPU per image, {1000 / value:8.1f} images per second per core")
    for label, seconds in (
        (f"calibrate {CALIBRATION:,} images", CALIBRATION * calibrate / 1000),
        (f"evaluate {VAL:,} images", VAL * (evaluate + decode) / 1000),
        (f"read {TRAIN:,} headers", TRAIN * headers / 1000),
    ):
        print(f"{label:34} {seconds:8.0f} s on one core, {seconds / arguments.cores:8.1f} s on {arguments.cores}")


if __name__ == "__main__":
    main()
