"""Check a hardware model against golden vectors, op by op: python examples/golden.py FOLDER

FOLDER is written by `fqvit export FILE.fqvit --to vectors -o FOLDER`. Here the "hardware" is a few lines of Python that only
implement `linear` without packed weights; replace them with your simulator. All values must be equal: there is no tolerance.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "")
if not (folder / "manifest.json").is_file():
    sys.exit("usage: python examples/golden.py FOLDER, a folder written by `fqvit export FILE.fqvit --to vectors -o FOLDER`")
manifest = json.loads((folder / "manifest.json").read_text())


def array(name: str) -> np.ndarray[Any, Any]:
    """Load a buffer or a constant."""
    entry = manifest["buffers"].get(name) or manifest["constants"][name]
    return np.load(folder / entry["file"])


def hardware_linear(op: dict[str, Any]) -> np.ndarray[Any, Any]:
    """acc = x @ w.T + bias;  y = clamp(floor(acc * mult / 2^shift + 1/2) + zero, 0, 2^bits - 1)

    See docs/reference/format.md#linear.
    """
    y, fields = op["output"], op["fields"]
    w = array(f"{fields.get('weights_of') or y}.w").astype(np.int64)
    acc = array(op["inputs"][0]).astype(np.int64) @ w.T + array(f"{y}.bias")
    if fields["out"] == "acc":
        return acc
    shift = array(f"{y}.shift").astype(np.int64)
    scaled = (acc * array(f"{y}.mult") + (1 << (shift - 1))) >> shift
    if fields["out"] == "i32":
        return scaled
    zero = fields["y_zero"]
    zeros = array(zero) if isinstance(zero, str) else np.repeat(np.atleast_1d(zero), scaled.shape[-1] // np.size(zero))
    return np.clip(scaled + zeros.astype(np.int64), 0, 2 ** fields["bits"] - 1)


checked = 0
for op in manifest["ops"]:
    if op["op"] == "linear" and op["fields"]["group"] == 0 and op["fields"].get("width", 0) == 0:
        if not np.array_equal(hardware_linear(op), array(op["output"])):
            sys.exit(f"op {op['number']}, {op['output']}: differs")
        checked += 1
print(f"checked {checked} of {len(manifest['ops'])} ops: all their values are equal")
