"""`fqvit detect draw`: draw the detections of a program, or those in a results file of predict or eval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fqvit.cli import inputs
from fqvit.cli.commands import detectors
from fqvit.cli.output import Unreadable, say, say_json
from fqvit.data.images import UnreadableImage, existing_folder
from fqvit.detect.draw import draw
from fqvit.detect.image_files import expand_folders, read_rgb
from fqvit.detect.results import NamedResult, read_results
from fqvit.errors import FqvitError
from fqvit.system.files import replacing
from fqvit.system.progress import track


def run(
    file: Path | None,
    images: list[Path],
    results: Path | None,
    data: Path | None,
    out: Path | None,
    score: float,
    threads: int | None,
    as_json: bool,
) -> None:
    least = detectors.check_score(score)
    if (file is None) == (results is None):
        raise FqvitError("detect draw: pass either FILE.fqvit and images, or results (--results FILE.json --data DIR).")
    if out is None:
        raise FqvitError("detect draw: no output folder given. Pass one (-o DIR).")
    inputs.check_folder(out, "-o")
    if file is not None:
        if data is not None or not images:
            raise FqvitError("detect draw: with FILE.fqvit, expected images after it and no --data.")
        paths = expand_folders(images)
        targets = _targets(out, paths, paths)
        unreadable = Unreadable(len(paths))
        found = detectors.detect_images(detectors.load_program(file, None, threads), paths, least, unreadable)
    else:
        assert results is not None
        if data is None:
            raise FqvitError(f"{results}: no image folder given. Pass the folder of its images (--data DIR).")
        by_file, folder = _by_file(results, read_results(results)), existing_folder(data)
        paths_by_name = {name: _image_path(folder, name) for name in by_file}
        targets = _targets(out, [Path(name) for name in by_file], list(paths_by_name.values()))
        unreadable = Unreadable(len(by_file))
        found = _read_images(by_file, paths_by_name, least, unreadable)
    objects = 0
    for one in found:
        drawn = draw(one.image, one.results, str(one.name))
        out.mkdir(parents=True, exist_ok=True)
        with replacing(targets[one.index]) as temporary:
            drawn.save(temporary, "PNG", compress_level=3)
        objects += len(one.results)
    count = unreadable.total - len(unreadable.errors)
    if as_json:
        say_json({"out": str(out), "pictures": count, "objects": objects, "score": least})
    elif count:
        images_text = "1 image" if count == 1 else f"{count} images"
        objects_text = "1 object" if objects == 1 else f"{objects} objects"
        say(f"{out}: {images_text} with {objects_text} of score {least:g} or more")
    unreadable.raise_if_any()


def _by_file(path: Path, results: list[NamedResult]) -> dict[str, list[NamedResult]]:
    """Group the results by the name of their image. path: their file, for an error message"""
    if not results:
        raise FqvitError(f"{path}: an empty list, expected at least one detection. Pass a file with detections.")
    by_file: dict[str, list[NamedResult]] = {}
    for result in results:
        by_file.setdefault(result["file_name"], []).append(result)
    return by_file


def _read_images(
    by_file: dict[str, list[NamedResult]], paths: dict[str, Path], least: float, unreadable: Unreadable
) -> Iterator[detectors.ImageResults]:
    """Read the image of each group of results. paths: {name of an image in the results: its path}."""
    for number, (name, found) in track(enumerate(by_file.items()), len(by_file), "drawing", "images"):
        try:
            image = read_rgb(paths[name])
        except UnreadableImage as error:
            unreadable.add(error)
            continue
        yield detectors.ImageResults(number, Path(name), image, [result for result in found if result["score"] >= least])


def _image_path(folder: Path, name: str) -> Path:
    """Return the path of an image in the results: `name` relative to the folder, or its base name if no such file exists.

    `detect predict` writes names as they were given on the command line, which may be relative to another folder.
    """
    return folder / name if (folder / name).is_file() else folder / Path(name).name


def _targets(out: Path, names: Sequence[Path], images: Sequence[Path]) -> list[Path]:
    """Return one distinct output path per image. Raises FqvitError if an input image would be overwritten."""
    input_ids = {known for path in images if (known := _file_id(path)) is not None}
    taken: set[str] = set()
    targets = [out / _free(name.stem, taken) for name in names]
    for target in targets:
        if _file_id(target) in input_ids:
            raise FqvitError(f"{target}: is an input image and would be overwritten. Choose another folder (-o DIR).")
    return targets


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return (device, inode), which identify a file under any name or link; None if it does not exist."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return None
    return found.st_dev, found.st_ino


def _free(stem: str, taken: set[str]) -> str:
    """Return a file name that is not taken yet, and mark it as taken."""
    name, number = f"{stem}.png", 1
    while name.casefold() in taken:  # a.png and A.png are the same file on many file systems
        number += 1
        name = f"{stem}-{number}.png"
    taken.add(name.casefold())
    return name
