"""Writes small valid files for every reader of foreign bytes: what fuzzing starts from. They are committed, packed.

python tests/fuzz/make_seeds.py tests/fuzz/seeds
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from fqvit.detect.program import DetectorProgram  # noqa: E402
from fqvit.ir.lower_detector import LoweredDetector  # noqa: E402
from fqvit.ir.program import Program  # noqa: E402
from fqvit.models.config import DetectorConfig, SwinConfig  # noqa: E402
from fqvit.models.detector_load import load_detector, random_release  # noqa: E402
from fqvit.quant.calibrate_detector import calibrate_detector  # noqa: E402
from fqvit.quant.recipe import load_recipe  # noqa: E402
from tests.detect.detectors import SETTINGS  # noqa: E402
from tests.detect.test_programs import pictures  # noqa: E402
from tests.ir.draw import STYLES, Draw  # noqa: E402
from tests.ir.test_ops import CASES  # noqa: E402
from tests.runtime.programs import program_with  # noqa: E402
from tests.runtime.wide import accepted  # noqa: E402
from tests.runtime.wide_moves import EVERY_WIDE  # noqa: E402

SWIN = SwinConfig((64, 64), 4, 3, 0, 4, (1, 1, 1, 1), (1, 1, 2, 2), 3, fixed_window=True)
TINY = DetectorConfig(SWIN, 2, channels=4, box_channels=4, box_width=6, mask_convs=1, mask_channels=4)


def written(program: Program | DetectorProgram) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.fqvit"
        program.save(path)
        return path.read_bytes()


def programs() -> dict[str, bytes]:
    """Every op and every group of ops that the engine joins: of many draws the smallest file. Whole networks are in golden/."""
    kinds = {case.__name__.lower(): lambda draw, case=case: (CASES[case](draw),) for case in CASES} | EVERY_WIDE
    found = {}
    for kind, case in kinds.items():
        files = []
        for seed in range(60):
            draw = Draw(np.random.default_rng(seed), STYLES[seed % 4])
            ops = case(draw)
            if accepted(draw, ops) and sum(x.nbytes for x in draw.buffers.values()) < 4000:
                files.append(written(program_with(draw, *ops)[0]))
        name = kind.replace(" ", "_").replace(",", "").replace("+", "and")
        found |= {f"{name}_{i}.fqvit": raw for i, raw in enumerate(sorted(files, key=len)[:2])}
    return found


def detectors() -> dict[str, bytes]:
    settings = msgspec.structs.replace(SETTINGS, short=32, long=64, proposals_a_level=20, proposals=10)
    detector = load_detector(random_release(TINY, "mmdetection"), settings)
    calibration = calibrate_detector(detector, pictures()[:1], load_recipe("fqvit"))
    return {"tiny.fqvit": written(DetectorProgram.of(detector, LoweredDetector(detector, calibration)))}


TARGETS = {"program": programs, "detector": detectors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("targets", nargs="*", default=[])
    arguments = parser.parse_args()
    for target in arguments.targets or TARGETS:
        folder = arguments.folder / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, raw in TARGETS[target]().items():
            small = gzip.compress(raw, 9, mtime=0)
            packs = len(small) < 0.7 * len(raw)
            (folder / (f"{name}.gz" if packs else name)).write_bytes(small if packs else raw)
            print(f"{target}/{name}: {len(raw)} bytes, {min(len(small), len(raw))} kept")


if __name__ == "__main__":
    main()
