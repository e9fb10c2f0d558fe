"""Write golden vectors: every buffer of one run as .npy with a manifest, to test other implementations.

The reference interpreter computes them. docs/reference/vectors.md describes the files.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.export.folder import check_free, replacing_folder, write_manifest
from fqvit.ir.program import INPUT, Program
from fqvit.ir.value import NAMES
from fqvit.runtime.outputs import describe_outputs
from fqvit.runtime.reference import Reference
from fqvit.system.files import npy_bytes

FORMAT = "vectors 1"
Integers = np.ndarray[Any, Any]


def export(program: Program, path: str | Path, image: str | Path | NDArray[np.uint8] | None = None) -> None:
    """Write the folder `path` atomically: buffers/, constants/ and manifest.json of one run on one image.

    image: a file (resized and cropped by the program's preprocessing), uint8 pixels [H, W, C], or None for test_picture()
    An earlier export at `path` is replaced; other files there raise FqvitError.
    """
    check_free(Path(path))
    program.check_pixels("export of golden vectors")
    pixels = _pixels(program.header.preprocess, image)
    name = Path(image).name if isinstance(image, str | Path) else "test picture" if image is None else "pixels"
    with replacing_folder(path) as folder:
        write_run(program, folder, pixels, name)


def write_run(program: Program, folder: Path, pixels: NDArray[np.uint8], image: str) -> None:
    """Write the vectors of one run into a folder. pixels: u8 [H, W, C], or codes of RoI features for a detector's head

    image: what the input is, for the manifest
    """
    runner, writer = Reference(program), ArrayWriter(folder)
    buffers = {INPUT: writer.write("buffers", INPUT, pixels)}
    runner.run(pixels[None], lambda name, codes: buffers.update({name: writer.write("buffers", name, codes[0])}))
    constants = {name: writer.write("constants", name, array) for name, array in sorted(program.constants.items())}
    output, infos = program.header.output, describe_outputs(program, program.verify())
    content: dict[str, object] = {
        "model": program.header.model,
        "fingerprint": program.fingerprint(),
        "image": image,
        "output": output.buffer,
        "output_scale": output.scale,
        "outputs": [
            {"buffer": one.buffer, **msgspec.to_builtins(info)} for one, info in zip(program.header.outputs, infos, strict=True)
        ],
        "ops": [_op(program, i, buffers, constants) for i in range(len(program.ops))],
        "buffers": buffers,
        "constants": constants,
        "sites": {name: _site(program, name) for name in program.header.sites},
    }
    write_manifest(folder, FORMAT, content)


def test_picture(preprocess: Preprocess) -> NDArray[np.uint8]:
    """Return a fixed uint8 image [H, W, C]: a gradient with a checkerboard in the middle, computed with integers only.

    pixel[y, x, c] = ((255 * y // H + 255 * x // W) // 2 + 31 * c) mod 256, or 255 minus this value if y and x are both in the
    middle half and y // 3 + x // 3 is odd
    """
    height, width, channels = preprocess.height, preprocess.width, preprocess.channels
    y, x, c = np.ogrid[0:height, 0:width, 0:channels]
    slope = ((255 * y // height + 255 * x // width) // 2 + 31 * c) % 256
    middle = (height <= 4 * y) & (4 * y < 3 * height) & (width <= 4 * x) & (4 * x < 3 * width)
    pixels: NDArray[np.uint8] = np.where(middle & ((y // 3 + x // 3) % 2 == 1), 255 - slope, slope).astype(np.uint8)
    return pixels


def _pixels(preprocess: Preprocess, image: str | Path | NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    if image is None:
        return test_picture(preprocess)
    if isinstance(image, str | Path):
        from fqvit.data.images import read_image  # late: only image files need Pillow

        return read_image(image, preprocess)
    shape = preprocess.height, preprocess.width, preprocess.channels
    if image.dtype != np.uint8 or image.shape != shape:
        raise FqvitError(
            f"image: {image.dtype} {list(image.shape)}, expected uint8 {list(shape)}. Resize and crop the image first."
        )
    return image


class ArrayWriter:
    """Writes arrays as .npy files and returns their manifest entries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used: set[str] = set()

    def write(self, kind: str, name: str, array: Integers) -> dict[str, object]:
        (self.folder / kind).mkdir(parents=True, exist_ok=True)
        base = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII).lstrip(".")[:100] or "_"
        file, count = f"{kind}/{base}.npy", 1
        while file.lower() in self.used:
            count += 1
            file = f"{kind}/{base}.{count}.npy"
        self.used.add(file.lower())
        little = np.ascontiguousarray(array).reshape(array.shape)
        little = little.astype(little.dtype.newbyteorder("<"), copy=False)
        data = npy_bytes(little)
        (self.folder / file).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        return {"file": file, "dtype": NAMES.get(array.dtype, "i64"), "shape": list(array.shape), "sha256": digest}


def _op(program: Program, number: int, buffers: dict[str, Any], constants: dict[str, Any]) -> dict[str, object]:
    """Return the manifest entry of an op: its fields as in the .fqvit file, its inputs, and the constants that it uses."""
    op = program.ops[number]
    fields = _fields(op)
    named = [op.part(part) for part in op.parts if op.part(part) in constants]
    named += [text for text in _texts(fields) if text in constants]
    return {
        "number": number,
        "op": op.__struct_config__.tag,
        "inputs": list(op.inputs()),
        "output": op.y,
        "constants": list(dict.fromkeys(named)),
        "fields": fields,
    }


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Return all fields except `y`, including defaults, so that readers of the manifest need no table of defaults."""
    fields = {name: getattr(struct, name) for name in struct.__struct_fields__ if name != "y"}
    return {
        name: [_fields(item) for item in value] if name == "terms" else msgspec.to_builtins(value)
        for name, value in fields.items()
    }


def _texts(value: object) -> list[str]:
    """Return every string in a field, in order."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    return [text for item in value for text in _texts(item)] if isinstance(value, list | tuple) else []


def _site(program: Program, name: str) -> dict[str, object]:
    """Return the fields of a site that describe its codes, without empty ones."""
    site = program.header.sites[name]
    fields = {field: getattr(site, field) for field in site.__struct_fields__}
    return {field: value for field, value in fields.items() if value not in ((), None, False)}
