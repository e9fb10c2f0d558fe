"""Embed images on a Ray cluster. Needs the extra `ray`.

    from fqvit.integrations.ray import Embedder, embed_shards
    embed_shards("model.fqvit", "shards/", "embeddings/", concurrency=8)           # one file per tar or Parquet file
    dataset.map_batches(Embedder, fn_constructor_args=("model.fqvit",), concurrency=8)  # a step of your own pipeline

Every actor loads the program once. embed_shards runs one task per file, and Ray repeats the task of a lost actor or machine. A
file appears when it is complete, and complete files are not computed again. All machines must see the same paths.
See also: inference/folder.py (the same with torchrun).
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fqvit.data.images import UnreadableImage, check_not_too_many_skipped, decode, decode_ahead
from fqvit.errors import FqvitError
from fqvit.inference.folder import FolderDone, Format, Piece, add, embed_piece, make_folder, pieces
from fqvit.inference.model import BATCH, ProgramModel

BYTES = "bytes"  # the column that ray.data.read_binary_files fills
COLUMNS = ("file", "images", "resumed", "kept", "skipped", "reasons", "error")  # of the results of ShardEmbedder
PICTURES = "image"  # the column that ray.data.read_images fills, and that Hugging Face datasets use


class Embedder:
    """Add the embeddings of images to the batches of a Ray dataset, one column per output. For `Dataset.map_batches`.

    column: encoded images, structs with `bytes` as Hugging Face datasets have them, or uint8 arrays [H, W, C]; None: the column
    `bytes` if there is one, else `image`. Rows with unreadable images are dropped and logged.
    threads: None uses the CPUs that Ray assigned to the actor.
    """

    def __init__(
        self, file: str, output: str | Sequence[str] | None = None, column: str | None = None, threads: int | None = None
    ) -> None:
        self.model = ProgramModel(Path(file), threads or assigned_cpus())
        self.wanted, self.column = self.model.chosen(output), column

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        images = self._images(batch)
        kept: list[int] = []
        pixels: list[NDArray[np.uint8]] = []
        for indices, decoded in decode_ahead(lambda index: self._read(images[index], index), [range(len(images))]):
            for index, future in zip(indices, decoded, strict=True):
                try:
                    pixels.append(future.result())
                    kept.append(index)
                except UnreadableImage as error:
                    name = batch["path"][index] if "path" in batch else error.name
                    logging.getLogger(__name__).warning("skipped %s: %s", name, error.reason)
        shape = (0, *self.model.engine.input_shape)
        found = self.model.run(np.stack(pixels) if pixels else np.zeros(shape, np.uint8), self.wanted)
        return {name: values[kept] for name, values in batch.items()} | found

    def _images(self, batch: dict[str, NDArray[Any]]) -> NDArray[Any]:
        column = self.column or (BYTES if BYTES in batch else PICTURES)
        if column not in batch:
            raise FqvitError(f"no column {column!r} with images, the dataset has {', '.join(batch)}. Pass column=NAME.")
        return batch[column]

    def _read(self, image: Any, index: int) -> NDArray[np.uint8]:
        name = f"row {index}"
        if isinstance(image, dict):
            image = image.get("bytes")
        if isinstance(image, bytes | bytearray | memoryview):
            return decode(io.BytesIO(image), name, self.model.preprocess)
        if isinstance(image, np.ndarray) and image.dtype == np.uint8:
            return self.model.preprocess.apply(Image.fromarray(image[:, :, 0] if image.shape[2:] == (1,) else image))
        raise UnreadableImage(name, f"{type(image).__name__}, expected encoded bytes or a uint8 array")


def embed_shards(
    file: str | Path,
    places: str | Path | Sequence[str | Path],
    out: str | Path,
    output: str | Sequence[str] | None = None,
    kind: Format = "parquet",
    batch: int = BATCH,
    concurrency: int = 1,
    cpus: int = 1,
) -> FolderDone:
    """Embed tar or Parquet files, or a folder of images, into the folder `out`: one file per tar or Parquet file.

    concurrency: number of actors   cpus: CPUs of each actor, and threads of its engine
    Call it again after an interruption: files that are complete are kept.
    """
    ray = _ray()
    paths = [Path(place).absolute() for place in ([places] if isinstance(places, str | Path) else places)]
    folder = Path(out).absolute()
    model = ProgramModel(Path(file).absolute())  # rejects a wrong file, output or input before any actor starts
    model.chosen(output)
    todo, _ = pieces(paths, model.preprocess, folder)
    make_folder(folder)
    settings = {"file": str(model.path), "out": str(folder), "output": output, "kind": kind, "batch": batch}
    rows = [
        {"places": "\n".join(map(str, piece.places)), "name": piece.name, "first": -1 if piece.first is None else piece.first}
        for piece in todo
    ]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))  # one block per task
    # A pool that may shrink: the actors of a lost machine may have no other machine to start on.
    strategy = ray.data.ActorPoolStrategy(
        min_size=1, max_size=min(concurrency, len(rows)), initial_size=min(concurrency, len(rows))
    )
    results = dataset.map_batches(
        ShardEmbedder, fn_constructor_kwargs=settings, batch_size=1, batch_format="numpy", compute=strategy, num_cpus=cpus
    )
    total = FolderDone()
    errors: list[str] = []
    for row in results.iter_rows():
        if row["error"]:
            errors.append(row["error"])
            continue
        skipped = [(name, reason) for name, reason in zip(row["skipped"], row["reasons"], strict=True)]
        add(total, FolderDone(int(row["images"]), int(row["resumed"]), skipped, 0.0, 1, int(row["kept"]), [str(row["file"])]))
    if errors:
        kept = f" {len(errors)} of {len(rows)} files failed, the others are complete." if len(rows) > 1 else ""
        raise FqvitError(f"{min(errors)}{kept}")
    total.names.sort()
    check_not_too_many_skipped(total.skipped, total.images + len(total.skipped))
    return total


class ShardEmbedder:
    """The actor of embed_shards: embed the piece that each row describes, and return its result in COLUMNS."""

    def __init__(self, file: str, out: str, output: str | Sequence[str] | None, kind: Format, batch: int) -> None:
        self.model = ProgramModel(Path(file), assigned_cpus())
        self.wanted = self.model.chosen(output)
        self.out, self.kind, self.batch = Path(out), kind, batch

    def __call__(self, rows: dict[str, NDArray[Any]]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        for places, name, first in zip(rows["places"], rows["name"], rows["first"], strict=True):
            piece = Piece(tuple(Path(place) for place in str(places).split("\n")), str(name), None if first < 0 else int(first))
            done, error = FolderDone(names=[""]), ""
            try:
                done = embed_piece(self.model, piece, self.out, self.wanted, self.kind, self.batch)
            except FqvitError as mistake:  # returned, not raised: Ray would end all tasks and print pages of text
                error = str(mistake)
            images, reasons = [image for image, _ in done.skipped], [reason for _, reason in done.skipped]
            values = (done.names[0], done.images, done.resumed, done.kept, images, reasons, error)
            for column, value in zip(COLUMNS, values, strict=True):
                found[column].append(value)
        return found


def assigned_cpus() -> int:
    """Return the number of CPUs that Ray assigned to this actor, at least 1; outside Ray, all cores."""
    ray = _ray()
    if not ray.is_initialized():
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("ray", "pyarrow", "pandas"):
            raise
        raise FqvitError(
            'fqvit.integrations.ray: needs Ray Data, which is not installed. Run `pip install "fqvit[ray]"`.'
        ) from None
    return ray
