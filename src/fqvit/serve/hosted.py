"""A model that is being served: from the bytes of image files to its results, batched across requests."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fqvit.data.images import UnreadableImage, decode_as
from fqvit.errors import FqvitError
from fqvit.inference.embeddings import Info
from fqvit.inference.model import DetectorModel, Model, ProgramModel, load
from fqvit.inference.search import searchable
from fqvit.serve.batcher import Batcher
from fqvit.serve.limits import Budget, Limits, Rejected

T = TypeVar("T")
Outputs: TypeAlias = "dict[str, np.ndarray[Any, Any]]"  # of one image: output name -> codes
FULL = "the server is busy: too many images are waiting. Try again in a second."


class Shared:
    """What all models of a server share: its limits, the queue, the cores, and the threads that decode images.

    ran: called with the name of a model and the number of images of each batch
    """

    def __init__(self, limits: Limits, threads: int, ran: Callable[[str, int], None]) -> None:
        self.limits, self.threads, self.ran = limits, threads, ran
        self.queue = Budget(limits.queue, 429, FULL)
        self.turn = threading.Lock()
        self.decoders = ThreadPoolExecutor(threads, thread_name_prefix="fqvit-decode")

    async def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in one of the threads that decode images."""
        return await asyncio.get_running_loop().run_in_executor(self.decoders, function, *arguments)


class Hosted:
    """A loaded file under a name.

    name: file name without its suffix, by which clients choose a model   tasks: endpoints that can use the model
    """

    def __init__(self, name: str, model: Model, tasks: tuple[str, ...], shared: Shared) -> None:
        self.name, self.model, self.tasks, self.shared = name, model, tasks, shared

    def close(self) -> None:
        raise NotImplementedError


class HostedProgram(Hosted):
    """A program: classifies or embeds images. Decoding runs in threads; the engine runs the pixels in batches."""

    def __init__(self, name: str, model: ProgramModel, shared: Shared) -> None:
        kinds = [info.kind for info in model.outputs.values()]
        tasks = ("classify",) * ("logits" in kinds[:1]) + ("embeddings",) * any(
            kind in ("embedding", "signs") for kind in kinds
        )
        super().__init__(name, model, tasks, shared)
        self.program = model
        self._batcher = Batcher(self._run, shared.limits.batch, shared.turn, lambda images: shared.ran(name, images), name)

    async def outputs(self, files: Sequence[bytes]) -> list[Outputs]:
        """Return all outputs of the program for each image file."""
        with self.shared.queue.holding(len(files)):
            decoded = [self.shared.in_thread(self._decode, file, number) for number, file in enumerate(files)]
            return await self._batcher.submit(await asyncio.gather(*decoded))

    def embedding(self, output: str | None) -> Info:
        """Return the output that is an embedding: the one of this name, or the first."""
        return searchable(self.program.outputs, self.name, output)

    def close(self) -> None:
        self._batcher.close()

    def _decode(self, file: bytes, number: int) -> NDArray[np.uint8]:
        return decoded(self.program.preprocess.apply, file, number, self.shared.limits.pixels)

    def _run(self, pixels: Sequence[NDArray[np.uint8]]) -> list[Outputs]:
        results = self.program.run(np.stack(pixels), self.program.outputs)
        return [{name: codes[number] for name, codes in results.items()} for number in range(len(pixels))]


class HostedDetector(Hosted):
    """A detector. Images have different sizes and run one by one; to save memory, they stay compressed until their turn."""

    def __init__(self, name: str, model: DetectorModel, shared: Shared) -> None:
        super().__init__(name, model, ("detect",), shared)
        self.detector = model
        self._batcher = Batcher(self._run, 1, shared.turn, lambda images: shared.ran(name, images), name)

    async def detections(self, files: Sequence[bytes]) -> list[Any]:
        """Return the detections of each image file, as IntegerFound."""
        with self.shared.queue.holding(len(files)):
            return await self._batcher.submit(list(enumerate(files)))

    def close(self) -> None:
        self._batcher.close()

    def _run(self, items: Sequence[tuple[int, bytes]]) -> list[Any]:
        (number, file), pixels = items[0], self.shared.limits.pixels
        return [decoded(self.detector.detector.detect_image, file, number, pixels)]


def decoded(make: Callable[[Image.Image], T], file: bytes, number: int, most_pixels: int) -> T:
    """Return make(image) for an encoded image. Raises Rejected if it cannot be decoded. number: index in the request"""

    def checked(image: Image.Image) -> T:
        if image.width * image.height > most_pixels:
            size = f"{image.width} x {image.height} pixels"
            raise UnreadableImage(name, f"{size}, at most {most_pixels} are allowed")
        return make(image)

    name = f"image {number}"
    try:
        return decode_as(checked, io.BytesIO(file), name)
    except FqvitError as error:
        raise Rejected(400, str(error)) from None


def host(paths: Sequence[Path], shared: Shared) -> dict[str, Hosted]:
    """Load files, and return them by name. Raises FqvitError if a file does not verify or two have the same name."""
    hosted: dict[str, Hosted] = {}
    for path in paths:
        name = path.stem
        if name in hosted:
            raise FqvitError(f"{path}: a second file named {name}. Clients choose a model by this name; rename one file.")
        model = load(path, shared.threads)
        if isinstance(model, DetectorModel):
            hosted[name] = HostedDetector(name, model, shared)
        elif isinstance(model, ProgramModel):
            hosted[name] = HostedProgram(name, model, shared)
    return hosted
