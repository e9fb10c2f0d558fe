"""`fqvit embed`: write the embeddings of images to one file, or to one file per tar or Parquet file."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fqvit.cli import inputs
from fqvit.cli.output import say, say_json, warn
from fqvit.data.places import open_images, short_name
from fqvit.distributed.workers import Workers
from fqvit.errors import FqvitError
from fqvit.inference.embed import Done, Job, embed_file
from fqvit.inference.embeddings import Info, check_suffix
from fqvit.inference.folder import FolderDone, embed_folder
from fqvit.inference.formats import INSTALL
from fqvit.inference.model import ProgramModel
from fqvit.system.progress import track

if TYPE_CHECKING:
    from fqvit.inference.folder import Format


def run(
    file: Path,
    images: list[Path],
    out: str,
    output: str | None,
    batch: int,
    threads: int | None,
    kind: Format | None,
    as_json: bool,
) -> None:
    if batch < 1:
        raise FqvitError(f"--batch {batch}: expected at least 1.")
    workers = Workers.from_environment()
    to_folder = out.endswith(("/", os.sep)) or os.path.isdir(out)
    path = Path(out)
    if not to_folder:
        suffix = check_suffix(path)
        inputs.check_output(path, file, *images)
        if kind is not None:
            raise FqvitError(f"--format {kind}: only for a folder ({out}/); the suffix of a file name decides. Leave it out.")
    else:
        kind = kind or "parquet"
        suffix = f".{kind}"
        inputs.check_folder(path, "-o")
    if suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise FqvitError(
            f"{out}: Parquet needs pyarrow, which is not installed. {INSTALL} .safetensors files need no other package."
        )
    model = ProgramModel(file, threads)
    wanted = model.chosen(output)
    if suffix == ".npy" and len(wanted) > 1:
        names = ", ".join(wanted)
        raise FqvitError(
            f"{out}: a .npy file holds one output, {file} has {names}. Choose one (--output NAME), or another format."
        )
    start = time.perf_counter()
    progress = track if workers.first else None
    done: Done
    if kind is not None:
        done = embed_folder(model, images, path, wanted, kind, batch, workers, progress)
    else:
        job = Job(model, open_images(images, model.preprocess, workers), wanted, lambda name: short_name(name, images), batch)
        done = embed_file(job, path, workers, progress)
    if workers.first:
        _report(file, out, model, wanted, done, workers.size, time.perf_counter() - start, as_json)


def _report(
    file: Path, out: str, model: ProgramModel, wanted: dict[str, Info], done: Done, workers: int, seconds: float, as_json: bool
) -> None:
    for name, reason in done.skipped:
        warn(f"skipped {name}: {reason}.")
    folder = done if isinstance(done, FolderDone) else None
    if as_json:
        say_json(
            {
                "file": str(file),
                "model": model.name,
                "fingerprint": model.fingerprint,
                "out": out,
                "outputs": [
                    {"name": info.name, "kind": info.kind, "dtype": info.dtype, "shape": list(info.shape)}
                    for info in wanted.values()
                ],
                "images": done.images,
                "resumed": done.resumed,
                "skipped": [{"image": name, "reason": reason} for name, reason in done.skipped],
                **({} if folder is None else {"files": folder.files, "kept": folder.kept}),
                "workers": workers,
                "seconds": round(seconds, 3),
            }
        )
        return
    what = ", ".join(f"{info.name} ({info.dtype} {' x '.join(map(str, info.shape))})" for info in wanted.values())
    count = "1 image" if done.images == 1 else f"{done.images} images"
    where = out if folder is None else f"{out} (files: {folder.files}, already complete: {folder.kept})"
    resumed = f", {done.resumed} of them by an earlier run" if done.resumed else ""
    say(f"{where}: {what} of {count}{resumed} in {seconds:.1f} s")
