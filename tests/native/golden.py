"""Write the golden files in the form that native/test/capi_test.c reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
# The first one must be a classifier with pixels as input.
NAMES = ["tiny_v1", *sorted({path.stem for path in GOLDEN.glob("*_v?.npz")} - {"tiny_v1"})]


def write_golden(folder: Path) -> None:
    for name in NAMES:
        stored = np.load(GOLDEN / f"{name}.npz")
        output = stored["output"]
        shutil.copy(GOLDEN / f"{name}.fqvit", folder)
        (folder / f"{name}.images").write_bytes(stored["images"].tobytes())
        (folder / f"{name}.output").write_bytes(output.astype(output.dtype.newbyteorder("<")).tobytes())
