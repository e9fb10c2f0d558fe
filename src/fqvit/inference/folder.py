"""Embed tar or Parquet files into a folder: one output file per input file, in any order and on any number of workers.

A file that is complete for the same images, program and outputs is kept, so a new run after an interruption or the loss of a
worker computes only what is missing. A folder of images is cut into pieces of PIECE images.
See also: embed.py (one file).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fqvit.data.images import Source, check_not_too_many_skipped
from fqvit.data.places import archives, open_images, open_unlabelled, short_name
from fqvit.data.preprocess import Preprocess
from fqvit.distributed.workers import SINGLE_PROCESS, Workers
from fqvit.errors import FqvitError
from fqvit.inference.embed import Done, Job, PartsFolder, embed_file
from fqvit.inference.embeddings import Info, source_of
from fqvit.inference.model import BATCH, ProgramModel
from fqvit.system.files import remedy
from fqvit.system.progress import Progress

Format = Literal["parquet", "safetensors"]
PIECE = 10_000
TOLERATED = 10  # unreadable images allowed per file; of all images, at most 1 % may be unreadable, as everywhere


@dataclass(frozen=True)
class Piece:
    """The input of one output file: a tar or Parquet file, or PIECE images of a folder, starting with image number `first`.

    name: the name of the output file, without suffix
    """

    places: tuple[Path, ...]
    name: str
    first: int | None = None


@dataclass
class FolderDone(Done):
    """The sum over all files. files: number of files. kept: how many were complete before. names: names of the files."""

    files: int = 0
    kept: int = 0
    names: list[str] = field(default_factory=list)


def pieces(places: Sequence[Path], preprocess: Preprocess, out: Path) -> tuple[list[Piece], Source | None]:
    """Return one piece per output file, in order, and the image source that all pieces share (None for archives).

    Raises FqvitError if an input file is in the folder `out`, where it could be overwritten.
    """
    found = archives(places)
    inside = next((path for path in found if path.parent.resolve() == out.resolve()), None)
    if inside is not None:
        raise FqvitError(f"{out}: contains the input {inside.name}, which could be overwritten. Choose another folder.")
    if found:
        return [Piece((path,), path.stem) for path in found], None
    images = open_images(places, preprocess)
    starts = range(0, len(images), PIECE)
    return [Piece(tuple(places), f"part-{first // PIECE:05}", first) for first in starts], images


def embed_piece(
    model: ProgramModel,
    piece: Piece,
    out: Path,
    wanted: dict[str, Info],
    kind: Format = "parquet",
    batch: int = BATCH,
    images: Source | None = None,
) -> FolderDone:
    """Embed one piece into out/NAME.KIND, unless that file is complete. out must exist. images: from `pieces`, if known"""
    if piece.first is None:
        source = open_unlabelled(piece.places[0], model.preprocess)
    else:
        source = images or open_images(piece.places, model.preprocess)
        source = source.take(range(piece.first, min(piece.first + PIECE, len(source))))
    source.tolerated = TOLERATED
    job = Job(model, source, wanted, lambda name: short_name(name, piece.places), batch)
    path = out / f"{piece.name}.{kind}"
    if source_of(path) == job.digest:
        PartsFolder(path, job.digest, job.parts).remove()  # if an earlier run was killed before it could do so
        return FolderDone(images=len(source), files=1, kept=1, names=[path.name])
    done = embed_file(job, path)
    return FolderDone(done.images, done.resumed, done.skipped, done.seconds, files=1, names=[path.name])


def embed_folder(
    model: ProgramModel,
    places: Sequence[Path],
    out: Path,
    wanted: dict[str, Info],
    kind: Format = "parquet",
    batch: int = BATCH,
    workers: Workers = SINGLE_PROCESS,
    progress: Progress | None = None,
) -> FolderDone:
    """Embed all pieces into a folder, which is created. Every worker must make this call and embeds its share of the files."""
    todo, images = pieces(places, model.preprocess, out)
    make_folder(out)
    workers.agree(str(places[0]), f"{len(todo)} files", "Every machine needs the same files.")
    share = [todo[number] for number in workers.share(len(todo))]
    total = FolderDone()
    for piece in share if progress is None else progress(share, len(share), "embedding"):
        add(total, embed_piece(model, piece, out, wanted, kind, batch, images))
    rows = workers.gather([total.images, total.resumed, total.files, total.kept, [list(pair) for pair in total.skipped]])
    total.images, total.resumed, total.files, total.kept = (sum(row[column] for row in rows) for column in range(4))
    total.skipped = [(name, reason) for row in rows for name, reason in row[4]]
    check_not_too_many_skipped(total.skipped, total.images + len(total.skipped))
    return total


def add(total: FolderDone, one: FolderDone) -> None:
    """Add the numbers of one piece to the sum."""
    total.images += one.images
    total.resumed += one.resumed
    total.skipped += one.skipped
    total.seconds += one.seconds
    total.files += one.files
    total.kept += one.kept
    total.names += one.names


def make_folder(out: Path) -> None:
    """Create a folder and its parents. Raises FqvitError if that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FqvitError(f"{out}: cannot be created ({error.strerror or error}). {remedy(error)}") from None
