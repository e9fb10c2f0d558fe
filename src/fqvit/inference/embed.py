"""Embed many images: read, decode and run them in batches, and write one file.

Finished parts are kept in a hidden folder beside the output, .NAME.parts, until the file is complete. An interrupted run
continues after them if program, images and outputs are the same. Memory does not grow with the number of images. The result
does not depend on the batch size, the number of threads or the number of workers.
See also: model.py (a few images at once), folder.py (one file per tar or Parquet file), formats.py (the files).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fqvit.data.images import Batch, Source
from fqvit.distributed.workers import SINGLE_PROCESS, Workers
from fqvit.errors import FqvitError
from fqvit.inference import embeddings
from fqvit.inference.embeddings import Embeddings, Info, storable
from fqvit.inference.formats import DTYPES
from fqvit.inference.model import BATCH, ProgramModel
from fqvit.system.files import remedy, temporary_path, write_atomically
from fqvit.system.progress import Progress

PART_ROWS = 4096  # the largest number of images in a part
PART_BYTES = 32 << 20  # the largest size of a part's vectors, which are in memory while they are computed
PLAN = "plan.json"


@dataclass(frozen=True)
class Job:
    """What to compute. wanted: the outputs. rename: maps the name of an image in the source to its name in the file."""

    model: ProgramModel
    source: Source
    wanted: dict[str, Info]
    rename: Callable[[str], str] = str
    batch: int = BATCH

    @cached_property
    def digest(self) -> str:
        """Identify the images, the program and the outputs: files with the same digest have the same contents."""
        plan = [self.source.digest(), self.model.fingerprint, msgspec.to_builtins(list(self.wanted.values()))]
        return hashlib.sha256(json.dumps(plan).encode()).hexdigest()

    @property
    def part_rows(self) -> int:
        row = sum(int(np.prod(info.shape)) * DTYPES[info.dtype].itemsize for info in self.wanted.values())
        return max(1, min(PART_ROWS, PART_BYTES // row))

    @property
    def parts(self) -> int:
        return -(-len(self.source) // self.part_rows)


@dataclass
class Done:
    """images: number of images in the file. resumed: how many of them an earlier run had embedded.

    skipped: (name, reason) of unreadable images. seconds: time spent in the engine by this worker.
    """

    images: int = 0
    resumed: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0


def embed_file(job: Job, out: Path, workers: Workers = SINGLE_PROCESS, progress: Progress | None = None) -> Done:
    """Embed all images of a job and write one file atomically. Every worker must make this call.

    Raises FqvitError if the disk is full; finished parts are kept then, and the same call continues after them.
    """
    workers.agree(str(out), job.digest[:12], "Every machine needs the same images, program and command.")
    folder = PartsFolder(out, job.digest, job.parts)
    if workers.first:
        folder.prepare()
    workers.broadcast(None)  # wait until the folder exists
    done = Done()
    with folder.removed_if_useless(workers.first):
        mine = workers.share(job.parts)
        done.resumed = sum(len(folder[number]) for number in mine if folder.has(number))
        _compute(job, folder, [number for number in mine if not folder.has(number)], done, progress)
        done.resumed = sum(workers.gather(done.resumed))
        if workers.first:
            _finish(job, out, folder, done)
    done.images, skipped = workers.broadcast([done.images, [list(pair) for pair in done.skipped]])
    done.skipped = [(name, reason) for name, reason in skipped]
    return done


def _finish(job: Job, out: Path, folder: PartsFolder, done: Done) -> None:
    """Write the file from all parts, and remove them."""
    done.skipped = folder.skipped()
    done.images = sum(len(part) for part in folder)
    try:
        job.source.check_skipped(done.skipped)
        if not done.images:
            raise FqvitError(f"{done.skipped[0][0]}: {done.skipped[0][1]}. None of the images can be read. Repair them.")
    except FqvitError:
        folder.remove_skipped()
        raise
    with _saying_what_is_kept(folder):
        embeddings.write_parts(out, folder)
    folder.remove()


def _compute(job: Job, folder: PartsFolder, numbers: Sequence[int], done: Done, progress: Progress | None) -> None:
    """Compute and store these parts."""
    started: deque[tuple[int, bool]] = deque()  # per batch being read: its part, and whether it is the last one of that part

    def ranges() -> Iterator[range]:
        for number in numbers:
            end = min((number + 1) * job.part_rows, len(job.source))
            for start in range(number * job.part_rows, end, job.batch):
                started.append((number, start + job.batch >= end))
                yield range(start, min(start + job.batch, end))

    rows = (min((number + 1) * job.part_rows, len(job.source)) - number * job.part_rows for number in numbers)
    total = sum(-(-count // job.batch) for count in rows)
    batches: Iterable[Batch] = job.source.batches_of(ranges())
    names: list[str] = []
    vectors: list[dict[str, Any]] = []
    stored = 0  # skipped images that were stored with their part
    for batch in batches if progress is None else progress(batches, total, "embedding"):
        number, last = started.popleft()
        if batch.paths:
            start = time.perf_counter()
            vectors.append(job.model.run(batch.images, job.wanted))
            done.seconds += time.perf_counter() - start
            names += [storable(job.rename(path)) for path in batch.paths]
        if last:
            skipped = [(storable(job.rename(name)), reason) for name, reason in job.source.skipped[stored:]]
            folder.store(number, _part(job, names, vectors), skipped)
            names, vectors, stored = [], [], len(job.source.skipped)


def _part(job: Job, names: list[str], vectors: list[dict[str, Any]]) -> Embeddings:
    empty = {name: np.zeros((0, *info.shape), DTYPES[info.dtype]) for name, info in job.wanted.items()}
    joined = {name: np.concatenate([none, *(some[name] for some in vectors)]) for name, none in empty.items()}
    return Embeddings(names, joined, job.wanted, job.model.name, job.model.fingerprint, job.digest)


class PartsFolder(Sequence[Embeddings]):
    """The finished parts of an output file: a hidden folder beside it. Its items are read when they are accessed."""

    def __init__(self, out: Path, digest: str, parts: int) -> None:
        self.out, self.digest, self.parts = out, digest, parts
        self.folder = out.with_name(f".{out.name}.parts")

    def prepare(self) -> None:
        """Create the folder, or keep that of an interrupted run for the same images, program and outputs."""
        plan = json.dumps({"digest": self.digest, "parts": self.parts})
        try:
            if self.folder.exists() and _text(self.folder / PLAN) != plan:
                shutil.rmtree(self.folder)
            self.folder.mkdir(exist_ok=True)
            self._remove_temporary_files()
        except OSError as error:
            raise FqvitError(f"{self.folder}: cannot be created ({error.strerror or error}). {remedy(error)}") from None
        if not (self.folder / PLAN).exists():
            write_atomically(self.folder / PLAN, lambda temporary: temporary.write_text(plan))

    def path(self, number: int) -> Path:
        return self.folder / f"{number:06}.safetensors"

    def has(self, number: int) -> bool:
        return self.path(number).is_file()

    def store(self, number: int, part: Embeddings, skipped: list[tuple[str, str]]) -> None:
        """Write a part. The list of unreadable images is written first: the part counts as finished when its file exists."""
        with _saying_what_is_kept(self):
            if skipped:
                text = json.dumps(skipped)
                write_atomically(self.path(number).with_suffix(".json"), lambda temporary: temporary.write_text(text))
            embeddings.write(self.path(number), part)

    def skipped(self) -> list[tuple[str, str]]:
        """Return the (name, reason) of each unreadable image, in order."""
        texts = (_text(self.path(number).with_suffix(".json")) for number in range(self.parts))
        return [(name, reason) for text in texts if text for name, reason in json.loads(text)]

    def remove_skipped(self) -> None:
        """Remove the parts with unreadable images, so that the next run reads these images again."""
        for number in range(self.parts):
            if self.path(number).with_suffix(".json").exists():
                self.path(number).unlink(missing_ok=True)
                self.path(number).with_suffix(".json").unlink()

    @contextmanager
    def removed_if_useless(self, first: bool) -> Iterator[None]:
        """Remove the folder if the block fails before any part is finished. first: whether this is the first worker"""
        try:
            yield
        except BaseException:
            if first and not any(self.has(number) for number in range(self.parts)):
                self.remove()
            raise

    def remove(self) -> None:
        """Remove the folder, and temporary files of killed runs."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._remove_temporary_files()

    def _remove_temporary_files(self) -> None:
        named = re.compile(re.escape(temporary_path(self.out, "").name[: -len("01234567")]) + r"[0-9a-f]{8}\.tmp")
        places = (self.out.parent, self.folder) if self.folder.exists() else (self.out.parent,)
        for path in (path for place in places for path in place.iterdir()):
            if named.fullmatch(path.name) or (path.parent == self.folder and path.name.endswith(".tmp")):
                path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return self.parts

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.parts:
            raise IndexError(number)
        found = embeddings.read(self.path(number))
        if found.source != self.digest:
            raise FqvitError(f"{self.out}: another run, with other inputs, is writing to it. Choose another file.")
        return found


@contextmanager
def _saying_what_is_kept(folder: PartsFolder) -> Iterator[None]:
    """If the block raises FqvitError, append to its message how many finished parts are kept."""
    try:
        yield
    except FqvitError as error:
        count = sum(folder.has(number) for number in range(folder.parts))
        kept = f"{count} of {folder.parts} parts are finished and kept; run the same command again to continue."
        raise FqvitError(f"{error} {kept}") from error


def _text(path: Path) -> str | None:
    return path.read_text() if os.path.exists(path) else None
