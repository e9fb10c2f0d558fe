"""Load the inputs of commands: images with or without labels, class names and float models; check output paths.

Wrong inputs are reported before any slow work. torch is not imported here unless a float model is loaded.
See also: data/places.py (folders, tar and Parquet files), models/embedded.py (images in the package).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fqvit.cli.output import warn, warn_of_skipped
from fqvit.data.images import Batch, ImageArray, ImageFolder, Source
from fqvit.data.places import open_labelled, open_unlabelled
from fqvit.data.preprocess import Preprocess
from fqvit.data.shards import TarShards
from fqvit.distributed.workers import SINGLE_PROCESS, Workers
from fqvit.errors import FqvitError
from fqvit.models import embedded
from fqvit.models.locate import located, named
from fqvit.system.hub import check_reachable, is_address
from fqvit.system.progress import busy, track

if TYPE_CHECKING:
    from fqvit.detect.model.detector import FloatDetector
    from fqvit.detect.program import DetectorProgram
    from fqvit.ir.program import Header
    from fqvit.models.load import FloatModel
    from fqvit.models.zoo import Row


@dataclass
class Images:
    """Images from a folder, from shards or from the package, shared between workers.

    skipped: number of unreadable images, known after a pass.
    reported: names of unreadable images already reported. A command with several passes shares this set between them.
    """

    source: Source
    where: str
    workers: Workers = SINGLE_PROCESS
    skipped: int = 0
    reported: set[str] = field(default_factory=set)

    def batches(self, size: int, label: str) -> Iterator[Batch]:
        """Yield this worker's batches of one pass. Worker 0 shows a progress bar and prints warnings.

        Exhaust this iterator: after the last batch, it collects the unreadable images of all workers and reports them.
        """
        share = self.workers.share(-(-len(self.source) // size))
        batches = self.source.batches(size, share)
        yield from track(batches, len(share), label) if self.workers.first else batches
        self.source.merge_skipped(self.workers)
        self.report()

    def report(self) -> None:
        """Warn about images that the pass could not read, unless all of them were reported before."""
        names = {name for name, _ in self.source.skipped}
        self.skipped = len(self.source.skipped)
        if self.workers.first and not names <= self.reported:
            warn_of_skipped(self.source)
        self.reported |= names


def labelled(
    path: Path | None,
    model: str,
    preprocess: Preprocess,
    classes: Sequence[str] | int,
    ids: Sequence[str],
    limit: int | None,
    workers: Workers = SINGLE_PROCESS,
) -> Images:
    """Return labelled test images: from --data, or for embedded models from the package."""
    if path is None:
        if model not in embedded.MODELS:
            raise FqvitError(f"{model}: no images given. Pass a folder with one sub-folder per class (--data DIR).")
        pixels, labels = embedded.test_images()
        _check_shape("--data", model, preprocess, pixels.shape[1:])
        count = classes if isinstance(classes, int) else len(classes)
        if count != len(embedded.FMNIST_CLASSES):
            raise FqvitError(
                f"{model}: {count} classes, but the embedded test images have {len(embedded.FMNIST_CLASSES)}."
                " Pass a folder with one sub-folder per class (--data DIR)."
            )
        inside = ImageArray(pixels, labels.tolist(), preprocess)
        return Images(inside if limit is None else inside.limit(limit), "embedded test images", workers)
    found = open_labelled(path, preprocess, classes, ids, workers)
    _agree(found, path, workers)
    return Images(found if limit is None else found.limit(limit), str(path), workers)


def unlabelled(
    path: Path | None, option: str, model: str, preprocess: Preprocess, limit: int, workers: Workers = SINGLE_PROCESS
) -> Images:
    """Return images without labels: from a folder or shards, or for embedded models from the package."""
    if path is None:
        if model not in embedded.MODELS:
            raise FqvitError(f"{model}: no images given. Pass a folder of images ({option} DIR); labels are not needed.")
        pixels = embedded.calibration_images()
        _check_shape(option, model, preprocess, pixels.shape[1:])
        return Images(ImageArray(pixels, None, preprocess).limit(limit), "embedded calibration images", workers)
    found = open_unlabelled(path, preprocess, workers)
    _agree(found, path, workers)
    return Images(found.limit(limit), str(path), workers)


def relative(path: str, where: str) -> str:
    """Return the name of an image without the folder `where` that contains it."""
    return path.removeprefix(where).lstrip("/\\") or path


def _agree(images: Source, place: Path, workers: Workers) -> None:
    """Raise FqvitError if workers on different machines have different image files. TarShards compares its files itself."""
    if workers.size == 1 or isinstance(images, TarShards):
        return
    if isinstance(images, ImageFolder):
        marks: Iterable[bytes] = (str(path.relative_to(place)).encode(errors="surrogateescape") for path in images.paths)
    else:
        marks = images.marks()
    digest = hashlib.sha256(b"\n".join(marks)).hexdigest()[:8]
    workers.agree(str(place), f"{len(images)} images (names {digest})", "Every machine needs the same files.")


def _check_shape(option: str, model: str, preprocess: Preprocess, inside: tuple[int, ...]) -> None:
    """Raise FqvitError if embedded images do not have the input size of the model, which depends on its weights."""
    wanted = (preprocess.height, preprocess.width, preprocess.channels)
    if wanted != inside:
        takes, has = ("x".join(map(str, shape)) for shape in (wanted, inside))
        raise FqvitError(
            f"{model}: expects images of {takes}, but the embedded images are {has}. Pass a folder of images ({option} DIR)."
        )


def warn_of_different_machines(workers: Workers) -> None:
    """Warn if workers have different torch builds or CPUs: torch's float results, used in calibration, may then differ."""
    if workers.size == 1:
        return
    import torch

    kinds = workers.gather(f"torch {torch.__version__} on {torch.backends.cpu.get_cpu_capability()}")
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None and workers.first:
        warn(
            f"worker {other} runs {kinds[other]}, worker 0 runs {kinds[0]}: the program will be correct, but its fingerprint"
            " may differ from that of a single machine."
        )


@dataclass(frozen=True)
class Classes:
    """Class names and ids. ids: names of class folders, such as ImageNet's wnids; empty if the file has none."""

    names: list[str]
    ids: list[str]


def read_classes(path: Path | None) -> Classes | None:
    """Read class names: a JSON list of names or of [id, name] pairs, or text with one name per line."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
    except OSError as error:
        raise FqvitError(f"{path}: cannot be read ({error.strerror}). Pass a file of class names.") from None
    except UnicodeDecodeError:
        raise FqvitError(f"{path}: not UTF-8 text. Pass a JSON list of names, or a text file with one name per line.") from None
    if not text.lstrip().startswith(("[", "{")):
        items: list[object] = list(text.rstrip("\n").split("\n"))
    else:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FqvitError(f"{path}: not valid JSON ({error}), expected a list of names or of [id, name] pairs.") from None
        if not isinstance(found, list):
            raise FqvitError(f"{path}: a JSON {type(found).__name__}, expected a list of names or of [id, name] pairs.")
        items = found
    names, ids = [], []
    for number, item in enumerate(items):
        id, name = item if isinstance(item, list) and len(item) == 2 else (None, item)
        if not isinstance(name, str) or not name.strip() or not name.strip().isprintable():
            raise FqvitError(f"{path}: class {number} is {repr(name)[:60]}, expected a name on one line.")
        names.append(name.strip())
        if isinstance(id, str):
            ids.append(id)
    return Classes(names, ids if len(ids) == len(names) else [])


def require_torch(command: str) -> None:
    """Raise FqvitError if torch is not installed. Commands that only run programs do not need it."""
    if importlib.util.find_spec("torch") is None:
        raise FqvitError(f'{command}: needs PyTorch, which is not installed. Run `pip install "fqvit[quantize]"`.')


def check_hub(*names: str | None) -> None:
    """Raise FqvitError if an hf: address is neither reachable nor in the cache, before torch is imported."""
    for name in names:
        if is_address(name) and name is not None:
            check_reachable(name)


def float_model(name: str | None, weights: str | None, classes: Path | None = None, **settings: Any) -> FloatModel:
    """Load a float model by name, path or hf: address. Without a name, it is taken from the checkpoint's file name or config.

    settings: size, heads, pool, activation, as in load_model
    """
    found = read_classes(classes)
    name, weights = located(name, weights)
    check_hub(name, weights)
    if name is None and weights is not None:
        name, weights = named(weights)
    if name is None and weights is None:
        name = embedded.MODELS[0]
    with busy(f"loading {name or weights}"):
        from fqvit.frontend.load import load_model
        from fqvit.models.device import keep_freed_memory

        keep_freed_memory()
        return load_model(name, weights, None if found is None else found.names, **settings)


def model_of_program(header: Header, weights: str | None, **settings: Any) -> FloatModel:
    """Load the float model of a program, at the image size of the program if the weights are those of the program."""
    if weights is None and header.source.startswith("module "):
        raise FqvitError(
            f"{header.model}: quantized from a module in memory, which a command cannot rebuild. Pass a checkpoint of it"
            " (--weights FILE), or compare in Python (fqvit.evaluate.compare)."
        )
    check_hub(weights)
    p = header.preprocess
    name = header.model if weights is not None else located(header.model, None)[0]
    with busy(f"loading {weights or name}"):
        from fqvit.frontend.load import captured
        from fqvit.models.device import keep_freed_memory
        from fqvit.models.load import load_for_program

        keep_freed_memory()
        return captured(load_for_program(name, weights, header.source, (p.height, p.width), **settings))


def classes_of(model: FloatModel) -> int:
    """Return the number of classes of a float model. Raises FqvitError if it has no classifier."""
    from fqvit.models.load import class_count

    count = class_count(model)
    if count is None:
        raise FqvitError(f"{model.name}: has no classifier, so it has no accuracy. Use a checkpoint with a classifier.")
    return count


def warn_of_other_name(model: FloatModel, weights: str | None) -> None:
    """Warn if the file name suggests a model with other preprocessing: ViT and DeiT weights have the same shapes."""
    from fqvit.models.transform import to_preprocess
    from fqvit.models.zoo import lookup, transform_of

    if weights is None or weights.startswith("hf:") or Path(weights).is_dir():
        return
    row = lookup(Path(weights).stem)
    if row is None or row.name == model.name:
        return
    p = model.preprocess
    if to_preprocess(transform_of(row), (p.height, p.width), p.channels, row.name)[0] != p:
        warn(
            f"{Path(weights).name} is named like {row.name}, but is loaded as {model.name}, whose preprocessing differs."
            f" If the file name is right, pass {row.name} as the model."
        )


def other_weights(model: FloatModel | FloatDetector, header: Header | DetectorProgram, file: Path) -> list[str]:
    """Return a warning if a program was quantized from weights other than those of the float model."""
    from fqvit.models.load import same_weights

    if same_weights(model.source, header.source):
        return []
    return [f"{file} was quantized from {header.source}, not from the given weights ({model.source})."]


def row_of(name: str | None, weights: str | None) -> Row | None:
    """Return the zoo's row of a model, by its name or the file name of its checkpoint; None for models outside the zoo."""
    from fqvit.models.zoo import check, lookup

    if name is None and weights is not None:
        name, _ = named(weights)
    return None if name is None or name.startswith("hf:") else lookup(check(name))


def check_output(path: Path, *read: Path | str | None) -> None:
    """Raise FqvitError if a file cannot be written, before minutes of work.

    read: the inputs of the command, which must not be overwritten; None is ignored.
    """
    if path.is_dir():
        raise FqvitError(f"{path}: is a folder, expected a file. Choose a file name.")
    if path.exists():
        if any(source is not None and os.path.exists(source) and path.samefile(source) for source in read):
            raise FqvitError(f"{path}: is an input of this command and would be overwritten. Choose another name.")
        if not os.access(path, os.W_OK):
            raise FqvitError(f"{path}: exists and is not writable. Choose another name.")
    check_parent(path)


def check_parent(path: Path) -> None:
    """Raise FqvitError if nothing can be created in the parent folder of `path`."""
    folder = path.parent
    if not folder.is_dir():
        raise FqvitError(f"{path}: no such folder {folder}. Create it first.")
    if not os.access(folder, os.W_OK):
        raise FqvitError(f"{path}: the folder is not writable. Choose another folder.")


def check_folder(path: Path, option: str) -> None:
    """Raise FqvitError if a folder for output files cannot be written, or cannot be created with its parents."""
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    if not existing.is_dir():
        raise FqvitError(f"{path}: {existing} is a file, expected a folder. Choose another folder ({option} DIR).")
    if not os.access(existing, os.W_OK):
        raise FqvitError(f"{path}: {existing} is not writable. Choose another folder ({option} DIR).")
