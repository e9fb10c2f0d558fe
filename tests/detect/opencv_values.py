"""Pixels that OpenCV computed, and the synthetic images that they come from.

    python tests/detect/opencv_values.py     writes opencv_values.json with the installed cv2; tests do not run this

opencv_values.json has the version of OpenCV and, for each case, the old size, the new size and the resized pixels, row by row.
For larger images, the pixels are replaced by the SHA-256 of their bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VALUES = Path(__file__).with_suffix(".json")
# (old height, old width, new height, new width): enlarged and reduced, 2 : 1 and 1 : 2, one row, one column, one pixel, one
# axis unchanged, equal weights.
SMALL = (
    *((3, 4, 5, 7), (7, 5, 3, 4), (6, 8, 3, 4), (3, 2, 6, 4), (1, 7, 1, 12), (7, 1, 4, 1), (1, 1, 3, 3), (1, 5, 4, 3)),
    *((5, 1, 3, 4), (4, 6, 4, 5), (4, 6, 7, 6), (9, 3, 1, 1), (2, 2, 5, 5), (8, 12, 2, 4)),
)
LARGE = (
    *((480, 640, 800, 1067), (375, 500, 800, 1067), (1000, 1500, 800, 1200), (50, 1302, 51, 1333), (1600, 2132, 800, 1066)),
    # For these new side lengths, the two weights of some pixels sum to 2047 or 2049 instead of 2048.
    *((2, 1, 3, 5463), (1, 2, 5463, 3), (2, 5, 3, 5487), (5, 2, 5487, 3)),
)


def image(height: int, width: int) -> NDArray[np.uint8]:
    """Return noise, u8 [height, width, 3], from a multiplicative hash of the position."""
    y, x, colour = np.ogrid[:height, :width, :3]
    made: NDArray[np.uint8] = ((y * 7919 + x * 104729 + colour * 1299709 + 12345) * 2654435761 % 2**32 >> 24).astype(np.uint8)
    return made


def digest(pixels: NDArray[np.uint8]) -> str:
    return hashlib.sha256(pixels.tobytes()).hexdigest()


def make() -> None:
    import cv2

    def resized(height: int, width: int, new_height: int, new_width: int) -> Any:
        return cv2.resize(image(height, width), (new_width, new_height), interpolation=cv2.INTER_LINEAR)

    cases = [{"old": size[:2], "new": size[2:], "pixels": resized(*size).ravel().tolist()} for size in SMALL]
    cases += [{"old": size[:2], "new": size[2:], "sha256": digest(resized(*size))} for size in LARGE]
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    VALUES.write_text(f'{{"opencv": "{cv2.__version__}", "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    make()
