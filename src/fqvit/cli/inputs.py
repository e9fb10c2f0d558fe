"""What several commands ask for: class names, images with or without labels, weights, torch. Errors here come early and cheap.

No torch at import. Neighbours: images.py (folders), shards.py (tar files), models/embedded.py (images inside the package).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fqvit.cli.output import warn, warn_of_skipped
from fqvit.data.images import Batch, ImageArray, ImageFolder, Source
from fqvit.data.preprocess import Preprocess
from fqvit.data.shards import TarShards, are_shards
from fqvit.distributed.workers import SINGLE_PROCESS, Workers
from fqvit.errors import FqvitError
from fqvit.models import embedded
from fqvit.system.progress import track

if TYPE_CHECKING:
    from fqvit.ir.program import Header
    from fqvit.models.load import FloatModel
    from fqvit.models.zoo import Row

CHECKPOINTS = (".safetensors", ".pth", ".pt", ".bin", ".npz")


@dataclass
class Images:
    """Images from outside or from inside the package, which `workers` share. `skipped` is known after the pass.

    told: names of unreadable images that were told already; a command that passes over its images again and again shares it
    """

    source: Source
    where: str
    workers: Workers = SINGLE_PROCESS
    skipped: int = 0
    told: set[str] = field(default_factory=set)

    def batches(self, size: int, label: str) -> Iterator[Batch]:
        """This worker's part of one pass, to be taken to its end. The first worker shows a progress bar and warns."""
        share = self.workers.share(-(-len(self.source) // size))
        batches = self.source.batches(size, share)
        yield from track(batches, len(share), label) if self.workers.first else batches
        self.source.merge_skipped(self.workers)
        self.report()

    def report(self) -> None:
        """Says what the pass could not read, unless all of it was said before."""
        names = {name for name, _ in self.source.skipped}
        self.skipped = len(self.source.skipped)
        if self.workers.first and not names <= self.told:
            warn_of_skipped(self.source)
        self.told |= names


def labelled(
    place: Path | None,
    model: str,
    preprocess: Preprocess,
    classes: Sequence[str] | int,
    ids: Sequence[str],
    limit: int | None,
    workers: Workers = SINGLE_PROCESS,
) -> Images:
    """Test images with labels: --data, or for embedded models the test images of the package."""
    if place is None:
        if model not in embedded.MODELS:
            raise FqvitError(f"{model}: no images given. Pass a folder with one sub-folder a class (--data DIR).")
        pixels, labels = embedded.test_images()
        _check_shape("--data", model, preprocess, pixels.shape[1:])
        count = classes if isinstance(classes, int) else len(classes)
        if count != len(embedded.FMNIST_CLASSES):
            raise FqvitError(
                f"{model}: {count} classes, but the images inside the package have {len(embedded.FMNIST_CLASSES)}."
                " Pass a folder with one sub-folder a class (--data DIR)."
            )
        inside = ImageArray(pixels, labels.tolist(), preprocess)
        return Images(inside if limit is None else inside.limit(limit), "embedded test images", workers)
    if are_shards(place):
        found: Source = TarShards.labelled(place, preprocess, classes, ids, workers)
    else:
        found = ImageFolder.labelled(place, preprocess, classes, ids)
        _agree(found, place, workers)
    return Images(found if limit is None else found.limit(limit), str(place), workers)


def unlabelled(
    place: Path | None, option: str, model: str, preprocess: Preprocess, limit: int, workers: Workers = SINGLE_PROCESS
) -> Images:
    """Images without labels: a folder or shards, or for embedded models the calibration images of the package."""
    if place is None:
        if model not in embedded.MODELS:
            raise FqvitError(f"{model}: no images given. Pass a folder of images ({option} DIR); labels are not needed.")
        pixels = embedded.calibration_images()
        _check_shape(option, model, preprocess, pixels.shape[1:])
        return Images(ImageArray(pixels, None, preprocess).limit(limit), "embedded calibration images", workers)
    if are_shards(place):
        return Images(TarShards.unlabelled(place, preprocess, workers).limit(limit), str(place), workers)
    found = ImageFolder.unlabelled(place, preprocess)
    _agree(found, place, workers)
    return Images(found.limit(limit), str(place), workers)


def _agree(folder: ImageFolder, place: Path, workers: Workers) -> None:
    """Workers on machines with other files would deal each other batches that they do not have."""
    names = "\n".join(str(path.relative_to(place)) for path in folder.paths)
    digest = hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()[:8]
    workers.agree(str(place), f"{len(folder)} images (names {digest})", "Every machine needs the same files.")


def _check_shape(option: str, model: str, preprocess: Preprocess, inside: tuple[int, ...]) -> None:
    """A model may have an embedded one's name and weights of another size."""
    wanted = (preprocess.height, preprocess.width, preprocess.channels)
    if wanted != inside:
        takes, has = ("x".join(map(str, shape)) for shape in (wanted, inside))
        raise FqvitError(
            f"{model}: takes images of {takes}, those inside the package are {has}. Pass a folder of images ({option} DIR)."
        )


def warn_of_unlike_machines(workers: Workers) -> None:
    """Integer programs run alike everywhere; torch's float results are the same for one build and kind of processor only."""
    if workers.size == 1:
        return
    import torch

    kinds = workers.gather(f"torch {torch.__version__} on {torch.backends.cpu.get_cpu_capability()}")
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None and workers.first:
        warn(
            f"worker {other} runs {kinds[other]}, worker 0 {kinds[0]}: the program will be sound, but its fingerprint may"
            " not be that of one machine."
        )


@dataclass(frozen=True)
class Classes:
    """ids: what ImageNet calls wnids, as folders are named; empty where the file has none."""

    names: list[str]
    ids: list[str]


def read_classes(path: Path | None) -> Classes | None:
    """A JSON list of names or of (id, name) pairs, or text with a name a line."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a mark
    except OSError as error:
        raise FqvitError(f"{path}: cannot be read ({error.strerror}). Pass a file of class names.") from None
    except UnicodeDecodeError:
        raise FqvitError(f"{path}: not UTF-8 text. Pass a JSON list of names, or a text file with one name a line.") from None
    if not text.lstrip().startswith(("[", "{")):
        items: list[object] = list(text.rstrip("\n").split("\n"))
    else:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FqvitError(f"{path}: not JSON ({error}). Expected a list of names or of [id, name] pairs.") from None
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
    """Before anything slow: running a program needs no torch, the other commands do."""
    if importlib.util.find_spec("torch") is None:
        raise FqvitError(f'{command}: needs PyTorch, which is not installed. Run `pip install "fqvit[quantize]"`.')


def float_model(name: str | None, weights: str | None, classes: Path | None = None) -> FloatModel:
    """The model of a zoo name or hf: address. Without a name: the hub's, or that of the checkpoint's file name."""
    found = read_classes(classes)
    if name is None and weights is not None:
        name, weights = _name_from(weights)
    from fqvit.models.device import keep_freed_memory
    from fqvit.models.load import load_model

    keep_freed_memory()
    return load_model(name or embedded.MODELS[0], weights, None if found is None else found.names)


def warn_of_other_name(model: FloatModel, weights: str | None) -> None:
    """ViT and DeiT have the same shapes and other preprocessing, so a file of one loads as the other. Its name may tell."""
    from fqvit.models.checkpoints.fold import Hints
    from fqvit.models.load import preprocess_of
    from fqvit.models.zoo import lookup

    if weights is None or weights.startswith("hf:") or Path(weights).is_dir():
        return
    row = lookup(Path(weights).stem)
    if row is None or row.name == model.name:
        return
    if preprocess_of(row, model.module.config, Hints(), row.name) != model.preprocess:  # type: ignore[arg-type]
        warn(
            f"{Path(weights).name} is named like {row.name}, but is loaded as {model.name}, which prepares images otherwise."
            f" If the file is what its name says, pass {row.name} as the model."
        )


def other_weights(model: FloatModel, header: Header, file: Path) -> list[str]:
    """A warning if a program was made from other weights than the float model has."""
    mine, own = (source.rpartition("sha256:")[2] for source in (model.source, header.source))
    return [] if mine == own else [f"these weights ({model.source}) are not those that {file} was made from ({header.source})."]


def check_name(name: str | None) -> None:
    """Refuses an unknown model before torch is imported."""
    if name is not None and not name.startswith("hf:"):
        from fqvit.models.zoo import find

        find(name)


def row_of(name: str | None, weights: str | None) -> Row | None:
    """The row of a model that is named, or whose checkpoint is named like it; None for an hf: address."""
    from fqvit.models.zoo import find

    if name is None and weights is not None:
        name, _ = _name_from(weights)
    return None if name is None or name.startswith("hf:") else find(name)


def _name_from(weights: str) -> tuple[str, str | None]:
    if weights.startswith("hf:"):
        return weights, None
    from fqvit.models.zoo import BY_NAME

    stem = Path(weights).stem.split(".")[0]
    if stem not in BY_NAME:
        raise FqvitError(f"{weights}: which model is this? Name it first, such as deit_tiny; `fqvit models` lists the names.")
    return stem, weights


def check_output(path: Path, *read: Path | str | None) -> None:
    """Refuses a place that cannot be written before minutes of work go into what should be written there.

    read: what the command reads (None: nothing), which must not be lost under what it writes
    """
    if path.is_dir():
        raise FqvitError(f"{path}: is a folder. Choose a file name, in it or elsewhere.")
    if path.exists():
        if any(source is not None and os.path.exists(source) and path.samefile(source) for source in read):
            raise FqvitError(f"{path}: is read by this command, and would be lost. Choose another name.")
        if not os.access(path, os.W_OK):
            raise FqvitError(f"{path}: is there and may not be written to. Choose another name.")
    check_beside(path)


def check_beside(path: Path) -> None:
    """As check_output, whatever stands there now: an export may be a folder."""
    folder = path.parent
    if not folder.is_dir():
        raise FqvitError(f"{path}: there is no folder {folder}. Create it first.")
    if not os.access(folder, os.W_OK):
        raise FqvitError(f"{path}: the folder may not be written to. Choose another.")


def check_folder(path: Path, option: str) -> None:
    """The same for a folder that files will be written to, and that is made with those above it if it is not there."""
    there = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    if not there.is_dir():
        raise FqvitError(f"{path}: {there} is a file, expected a folder. Choose another ({option} DIR).")
    if not os.access(there, os.W_OK):
        raise FqvitError(f"{path}: {there} may not be written to. Choose another folder ({option} DIR).")
