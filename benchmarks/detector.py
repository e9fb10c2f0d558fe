"""Measure a Mask R-CNN on Swin-T at full size: agreement with the simulation, memory, and time.

    .venv/bin/python benchmarks/detector.py --images DIR [--quick] [--out benchmarks/results/detector.json]

The detector has random weights in mmdetection's checkpoint layout. Images are photographs, for example from COCO, resized to at
most 800 x 1333. The JSON file contains

- for every part of the detector, compared with the float simulation of quantization on the same inputs: the share of equal
  codes and the largest difference;
- the peak memory of a process that only loads and runs the integer detector;
- the median CPU time on one thread, per part and from pixels to masks, with integer and float runs interleaved.

The score threshold is set so that there are many detections. --quick: small images, one calibration image, one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fqvit.detect.calibrate import DetectorCalibration, calibrate_detector  # noqa: E402
from fqvit.detect.fixed.head_runner import HeadRunner  # noqa: E402
from fqvit.detect.float.networks import FloatNetworks  # noqa: E402
from fqvit.detect.float.pipeline import Maps, detect  # noqa: E402
from fqvit.detect.float.proposals import propose, softmax  # noqa: E402
from fqvit.detect.float.roialign import multiscale_roi_align  # noqa: E402
from fqvit.detect.images import FLOAT_RULE, Input, pad_pixels, prepare  # noqa: E402
from fqvit.detect.lower import LoweredDetector  # noqa: E402
from fqvit.detect.model.detector import FloatDetector  # noqa: E402
from fqvit.detect.model.float_models import box_model, mask_model, pyramid_model  # noqa: E402
from fqvit.detect.model.load import load_detector, random_release  # noqa: E402
from fqvit.detect.program import DetectorProgram  # noqa: E402
from fqvit.detect.settings import DetectSettings  # noqa: E402
from fqvit.ir.program import Program  # noqa: E402
from fqvit.lowering.lower import lower_with_values  # noqa: E402
from fqvit.models.config import DetectorConfig, SwinConfig  # noqa: E402
from fqvit.models.load import FloatModel  # noqa: E402
from fqvit.quant.calibration import Calibration  # noqa: E402
from fqvit.quant.recipe import load_recipe  # noqa: E402
from fqvit.runtime.native import Engine  # noqa: E402
from tests.detect.sites import compared_sites  # noqa: E402

SWIN_T = SwinConfig((64, 64), 4, 3, 0, 96, (2, 2, 6, 2), (3, 6, 12, 24), 7, fixed_window=True)
CONFIG = DetectorConfig(SWIN_T, 80)
COMPARED_ROIS = 50  # RoIs compared per head; a small number, because the engine keeps all buffers of every RoI
# The score threshold is lowered until this many candidates reach it before NMS. With random weights, none reaches the default.
BUSY = 300
Codes = NDArray[np.uint8]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="a folder of photographs, *.jpg")
    parser.add_argument("--recipe", default="fqvit")
    parser.add_argument("--calib", type=int, default=4, help="number of calibration images; the next image is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "detector.json")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = DetectSettings(short=256, long=427) if arguments.quick else DetectSettings()
    calib, rounds = (1, 1) if arguments.quick else (arguments.calib, arguments.rounds)
    paths = sorted(arguments.images.glob("*.jpg"))
    detector = load_detector(random_release(CONFIG, "mmdetection"), settings)
    photographs = [Image.open(path).convert("RGB") for path in paths[: calib + 1]]
    calibration = calibrate_detector(detector, photographs[:calib], load_recipe(arguments.recipe))
    lowered = LoweredDetector(detector, calibration)
    image = prepare(photographs[calib], settings, FLOAT_RULE)
    networks = FloatNetworks(detector)
    rois = float_rois(networks, image, settings)
    busy = replace(detector, settings=msgspec.structs.replace(settings, score=busy_score(networks, rois["box"])))
    program = DetectorProgram.of(busy, lowered)
    found: dict[str, Any] = {"recipe": arguments.recipe, "calibration images": calib, "input": list(image.padded)}
    found["exact"] = exactness(detector, calibration, lowered, image, rois)
    found["file bytes"], found["peak MiB"] = memory(program, paths[calib])
    found["CPU seconds"] = times(networks, lowered, image, rois, rounds) | whole(networks, program, image, rounds)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def float_rois(networks: FloatNetworks, image: Input, s: DetectSettings) -> dict[str, NDArray[np.float32]]:
    """Return RoI features of the float detector: all proposals (box head) and the first s.detections of them (mask head)."""
    maps: Maps = networks.maps(image.pixels)
    scores, deltas = ([x.astype(np.float64) for x in part] for part in (maps.objectness, maps.deltas))
    boxes = propose(scores, deltas, image.size, s)
    sides = {"box": (networks.box_side, boxes), "mask": (networks.mask_side, boxes[: s.detections])}
    return {name: multiscale_roi_align(maps.levels, some, side, s.finest, s.strides) for name, (side, some) in sides.items()}


def as_codes(rois: NDArray[np.float32], program: Program) -> Codes:
    q = program.header.input
    assert q is not None
    return (np.floor(rois / q.scale + 0.5) + q.zero).clip(0, 2**q.bits - 1).astype(np.uint8)


def exactness(
    detector: FloatDetector,
    calibration: DetectorCalibration,
    lowered: LoweredDetector,
    image: Input,
    rois: dict[str, NDArray[np.float32]],
) -> dict[str, Any]:
    """Return the number of codes, the share of equal codes and the largest difference for each group of quantized tensors."""
    pixels = pad_pixels(image.pixels, detector.settings)[None]
    pyramid = pyramid_model(detector, *pixels.shape[1:3])
    first = {name: as_codes(x[:COMPARED_ROIS], p) for (name, x), p in zip(rois.items(), heads(lowered), strict=True)}
    found = compare(pyramid, calibration.pyramid, pixels)
    found |= compare(box_model(detector, 0), calibration.boxes[0], first["box"], "box head")
    found |= compare(mask_model(detector, 0), calibration.masks[0], first["mask"], "mask head")
    return found


def heads(lowered: LoweredDetector) -> tuple[Program, Program]:
    return lowered.boxes[0], lowered.masks[0]


def compare(model: FloatModel, calibration: Calibration, x: Codes, group: str | None = None) -> dict[str, Any]:
    """Compare the codes of a program with the simulation, site by site. A site is a quantized tensor of the float model.

    group: name of a single group for all sites; None: one group per first part of the site names
    """
    program, values = lower_with_values(model, calibration)
    engine = Engine(program, 1, keep=True)
    all_buffers = [engine.buffers(one) for one in x]
    buffers = {name: np.stack([buffers[name] for buffers in all_buffers]) for name in all_buffers[0]}
    groups: dict[str, dict[str, Any]] = {}
    for site in compared_sites(model, calibration, values, buffers, x):
        name = (group or site.node.name.split(".")[0]) + (", outputs" if site.q is None else "")
        one = groups.setdefault(name, {"codes": 0, "other": 0, "largest difference": 0, "least equal site": 1.0})
        other = int(np.count_nonzero(site.codes != site.found))
        one["codes"] += site.codes.size
        one["other"] += other
        largest = int(np.abs(site.codes.astype(np.int64) - site.found.astype(np.int64)).max())
        one["largest difference"] = max(one["largest difference"], largest)
        one["least equal site"] = min(one["least equal site"], round(1 - other / site.codes.size, 6))
    for one in groups.values():
        one["equal"] = round(1 - one.pop("other") / one["codes"], 6)
    return groups


def memory(program: DetectorProgram, photograph: Path) -> tuple[int, dict[str, float]]:
    """Return the size of the file in bytes, and the peak memory in MiB of a process that runs it on a photograph."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "detector.fqvit")
        program.save(file)
        size = file.stat().st_size
        command = [sys.executable, str(ROOT / "benchmarks" / "detector_memory.py"), str(file), str(photograph)]
        peaks = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return size, peaks


def busy_score(networks: FloatNetworks, rois: NDArray[np.float32]) -> float:
    """Return the score threshold that BUSY (box, class) pairs reach."""
    scores = softmax(networks.boxes(0, rois)[0].astype(np.float64))[:, :-1]
    return float(np.sort(scores.ravel())[-BUSY])


def whole(networks: FloatNetworks, program: DetectorProgram, image: Input, rounds: int) -> dict[str, Any]:
    """Time the whole detector, from pixels to boxes, scores and masks."""
    ready, counts = program.ready(threads=1), {}

    def integer() -> None:
        counts["integer"] = len(list(ready.detect(image).masks()))

    def float_() -> None:
        counts["float"] = len(list(detect(networks, image, program.settings).masks()))

    return {"from pixels to masks": in_turns(integer, float_, rounds) | {"detections": counts}}


def times(
    networks: FloatNetworks, lowered: LoweredDetector, image: Input, rois: dict[str, NDArray[np.float32]], rounds: int
) -> dict[str, Any]:
    """Time every part of the detector, integer and float interleaved."""
    pixels = pad_pixels(image.pixels, networks.settings)[None]
    engine = Engine(lowered.pyramid(*image.padded), 1)
    box, mask = (HeadRunner(program, 1) for program in heads(lowered))
    codes = {name: as_codes(x, p) for (name, x), p in zip(rois.items(), heads(lowered), strict=True)}
    labels = np.zeros(len(rois["mask"]), np.int64)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "pyramid": (lambda: engine.run_all(pixels), lambda: networks.maps(image.pixels)),
        f"box head, {len(rois['box'])} RoIs": (
            lambda: box.run_all(codes["box"]),
            lambda: networks.boxes(0, rois["box"]),
        ),
        f"mask head, {len(labels)} RoIs": (
            lambda: mask.run_all(codes["mask"]),
            lambda: networks.masks(0, rois["mask"], labels),
        ),
    }
    found: dict[str, Any] = {}
    for name, works in pairs.items():
        found[name] = in_turns(*works, rounds)
    total = [sum(part[kind] for part in found.values()) for kind in ("integer", "float")]
    found["networks"] = {"integer": round(total[0], 4), "float": round(total[1], 4), "ratio": round(total[1] / total[0], 2)}
    return found


def in_turns(integer: Callable[[], object], float_: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Run the two functions alternately. Return their median CPU seconds and the ratio float / integer.

    The first round is a warm-up.
    """
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for work, seconds in zip((integer, float_), taken, strict=True):
            seconds.append(cpu(work))
    ours, theirs = (statistics.median(seconds[1:]) for seconds in taken)
    return {"integer": round(ours, 4), "float": round(theirs, 4), "ratio": round(theirs / ours, 2)}


def cpu(work: Callable[[], object]) -> float:
    """Return the CPU time of `work` in seconds, which other processes disturb less than wall time."""
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
