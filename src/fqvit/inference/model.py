"""Use a .fqvit file on images: embed, classify or detect, including the preprocessing.

Images are paths, PIL images or uint8 arrays of any size. fqvit.Engine is the layer below: it takes arrays of the program's
input size. Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fqvit.data.images import decode_ahead, image_names, read_image
from fqvit.errors import FqvitError
from fqvit.inference.embeddings import Embeddings, Info, storable
from fqvit.inference.results import Classification, Classifications, best_scores
from fqvit.ir.file import DETECTOR, kind_of
from fqvit.runtime.native import Engine
from fqvit.system.hub import local_program

if TYPE_CHECKING:
    from fqvit.detect.fixed.found import IntegerFound
    from fqvit.ir.program import Program

OneImage: TypeAlias = "str | Path | Image.Image | NDArray[np.uint8]"
Images: TypeAlias = "OneImage | Sequence[OneImage]"
BATCH = 16


def load(path: str | Path | Program, threads: int | None = None) -> Model:
    """Load a .fqvit file: a program or a detector. Raises FqvitError if it is neither or does not verify.

    path: the path of the file; hf:ORG/NAME or hf:ORG/NAME/FILE.fqvit@REVISION on the Hugging Face Hub; or a program in memory
    threads: None uses every core available to this process. The results are the same for every number of threads.
    """
    if not isinstance(path, str | os.PathLike):
        if type(path).__name__ != "Program":
            raise FqvitError(f"load: {type(path).__name__}, expected a .fqvit file, hf:ORG/NAME or a Program.")
        return ProgramModel(path, threads)
    path = local_program(path)
    return DetectorModel(path, threads) if kind_of(path) == DETECTOR else ProgramModel(path, threads)


class Model:
    """A loaded .fqvit file. Which of embed, classify and detect it has depends on the file; the others raise FqvitError.

    name: the name of the model. fingerprint: the fingerprint of the file; equal files give equal results on every machine.
    """

    def __init__(self, path: Path, name: str, fingerprint: str, does: str) -> None:
        self.path, self.name, self.fingerprint = path, name, fingerprint
        self._does = does

    def __repr__(self) -> str:
        return f"{self.name}: {self._does} ({self.path}, fingerprint {self.fingerprint[:12]})"

    @property
    def outputs(self) -> dict[str, Info]:
        """What the program returns, by name, in the order of the file; empty for a detector."""
        return {}

    def embed(self, images: Images, output: str | Sequence[str] | None = None) -> Embeddings:
        """Return the program's outputs for one or more images, with one name per image. output: names; None: all outputs."""
        raise self._cannot("embed")

    @overload
    def classify(self, images: str | Path | Image.Image, top: int = 5) -> Classification: ...  # type: ignore[overload-overlap]
    @overload
    def classify(self, images: NDArray[np.uint8], top: int = 5) -> Classification | Classifications: ...
    @overload
    def classify(self, images: Sequence[OneImage], top: int = 5) -> Classifications: ...
    def classify(self, images: Images, top: int = 5) -> Classification | Classifications:
        """Return the `top` classes of an image, best first; for several images or a folder, one such list per image."""
        raise self._cannot("classify")

    @overload
    def detect(self, images: str | Path | Image.Image) -> IntegerFound: ...  # type: ignore[overload-overlap]
    @overload
    def detect(self, images: NDArray[np.uint8]) -> IntegerFound | list[IntegerFound]: ...
    @overload
    def detect(self, images: Sequence[OneImage]) -> list[IntegerFound]: ...
    def detect(self, images: Images) -> IntegerFound | list[IntegerFound]:
        """Return the detections of an image, best first; for several images, one result per image."""
        raise self._cannot("detect")

    def run(self, pixels: NDArray[np.uint8], wanted: Iterable[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Return outputs, by name, for images of the program's input size, u8 [N, H, W, C]. wanted: names; None: all outputs"""
        raise self._cannot("run")

    def _cannot(self, method: str) -> FqvitError:
        return FqvitError(f"{self.path}: {self.name} {self._does}, so it has no {method}().")


class ProgramModel(Model):
    """A program: a classifier, or a model that returns embeddings. engine: runs it on arrays of its input size."""

    def __init__(self, program: Path | Program, threads: int | None = None) -> None:
        self.engine = Engine(program, threads)
        path = program if isinstance(program, Path) else Path(program.header.model)
        header = self.engine.header
        does = f"gives {', '.join(output.kind for output in header.outputs)}"
        super().__init__(path, header.model, self.engine.fingerprint, does)
        self.preprocess = header.preprocess
        self.classes = self.engine.classes
        self._outputs = {info.name: info for info in described(self.engine)}

    @property
    def outputs(self) -> dict[str, Info]:
        return dict(self._outputs)

    def embed(self, images: Images, output: str | Sequence[str] | None = None) -> Embeddings:
        wanted, listed = self.chosen(output), _listed(images)
        found = [self.run(pixels, wanted) for pixels in self._batches(listed)]
        empty = self.run(np.zeros((0, *self.engine.input_shape), np.uint8), wanted)
        vectors = {name: np.concatenate([empty[name], *(part[name] for part in found)]) for name in wanted}
        names = [storable(_name(image, number)) for number, image in enumerate(listed)]
        return Embeddings(names, vectors, wanted, self.name, self.fingerprint)

    def classify(self, images: Any, top: int = 5) -> Any:
        if self.engine.header.output.kind != "logits":
            raise self._cannot("classify")
        scale = self.engine.header.output.scale
        listed = _listed(images)
        codes = [row for pixels in self._batches(listed) for row in self.engine.run(pixels)]
        results = Classifications(
            Classification(best_scores(row, scale, self.classes, top), _name(image, number))
            for number, (row, image) in enumerate(zip(codes, listed, strict=True))
        )
        return results[0] if _is_single(images) else results

    def chosen(self, output: str | Sequence[str] | None) -> dict[str, Info]:
        """Return the named outputs in the order given; None: all of them. A string may be comma-separated."""
        if output is None:
            return dict(self._outputs)
        names = [name.strip() for name in output.split(",")] if isinstance(output, str) else list(output)
        missing = next((name for name in names if name not in self._outputs), None)
        if missing is not None or not names:
            has = ", ".join(self._outputs)
            raise FqvitError(f"{self.path}: no output {missing or ''!r}, it has {has}. Choose among these, or quantize again.")
        return {name: self._outputs[name] for name in names}

    def run(self, pixels: NDArray[np.uint8], wanted: Iterable[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        results = dict(zip(self._outputs, self.engine.run_all(pixels), strict=True))
        return results if wanted is None else {name: results[name] for name in wanted}

    def _batches(self, images: Sequence[OneImage]) -> Iterator[NDArray[np.uint8]]:
        def read(index: int) -> NDArray[np.uint8]:
            image = images[index]
            if isinstance(image, str | Path):
                return read_image(image, self.preprocess)
            return self.preprocess.apply(_as_image(image, index))

        starts = range(0, len(images), BATCH)
        for _, decoded in decode_ahead(read, (range(start, min(start + BATCH, len(images))) for start in starts)):
            yield np.stack([future.result() for future in decoded])


class DetectorModel(Model):
    """A detector. detector: runs it on prepared images."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        from fqvit.detect.fixed.detector import IntegerDetector

        self.detector = IntegerDetector(path, threads)
        header = self.detector.header
        super().__init__(path, header.model, self.detector.fingerprint, "detects objects")
        self.classes = header.settings.classes or None

    def detect(self, images: Any) -> Any:
        from fqvit.detect.image_files import read_rgb

        found = []
        for number, image in enumerate(_listed(images)):
            if isinstance(image, str | Path):
                image = read_rgb(image)
            one = self.detector.detect_image(_as_image(image, number))
            found.append(replace(one, classes=self.classes))
        return found[0] if _is_single(images) else found


def described(engine: Engine) -> list[Info]:
    """Return what the outputs of a program mean, in their order."""
    return [msgspec.convert(asdict(output), Info) for output in engine.outputs]


def _is_single(images: Images) -> bool:
    if isinstance(images, np.ndarray):
        return images.ndim < 4
    if isinstance(images, str | Path):
        return not os.path.isdir(images)
    return isinstance(images, Image.Image)


def _listed(images: Any) -> Sequence[OneImage]:
    """Return the images as a sequence. An array with four axes is several images, and so is a folder."""
    if _is_single(images):
        return [images]
    if isinstance(images, str | Path):
        return [Path(images) / name for name in image_names(Path(images))]
    if not isinstance(images, Iterable):
        kind = type(images).__name__
        raise FqvitError(f"images: {kind}, expected paths, a folder, PIL images or uint8 arrays.")
    return images if isinstance(images, Sequence | np.ndarray) else list(images)  # type: ignore[return-value]


def _name(image: OneImage, number: int) -> str:
    if isinstance(image, Image.Image):
        image = getattr(image, "filename", "")
    return str(image) if isinstance(image, str | Path) and str(image) else f"image {number}"


def _as_image(image: object, number: int) -> Image.Image:
    """Return an array u8 [H, W], [H, W, 1] or [H, W, 3] as a PIL image."""
    if isinstance(image, Image.Image):
        return image
    if not isinstance(image, np.ndarray):
        kind = type(image).__name__
        raise FqvitError(f"image {number}: {kind}, expected a path, a PIL image or a uint8 array [H, W, 3].")
    if image.dtype != np.uint8 or not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (1, 3))):
        said = f"{image.dtype} {list(image.shape)}"
        raise FqvitError(f"image {number}: {said}, expected uint8 [H, W, 3], [H, W, 1] or [H, W]. Values are 0 to 255.")
    return Image.fromarray(np.ascontiguousarray(image[:, :, 0] if image.shape[2:] == (1,) else image))
