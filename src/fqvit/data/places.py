"""Open the images that a user names: image files, a folder, tar shards or Parquet files.

See also: images.py (folders), shards.py (tar), parquet.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fqvit.data.images import ImageFolder, Source
from fqvit.data.parquet import ENDING, ParquetImages, are_parquet, parquet_paths
from fqvit.data.preprocess import Preprocess
from fqvit.data.shards import ENDINGS, TarShards, are_shards, shard_paths
from fqvit.distributed.workers import SINGLE_PROCESS, Workers
from fqvit.errors import FqvitError


def open_unlabelled(place: Path, preprocess: Preprocess, workers: Workers = SINGLE_PROCESS) -> Source:
    """Return the images of a folder, of tar shards or of Parquet files. Every worker must make this call."""
    if are_parquet(place):
        return ParquetImages.unlabelled(place, preprocess)
    if are_shards(place):
        return TarShards.unlabelled(place, preprocess, workers)
    return ImageFolder.unlabelled(place, preprocess)


def open_labelled(
    place: Path,
    preprocess: Preprocess,
    classes: Sequence[str] | int,
    ids: Sequence[str] = (),
    workers: Workers = SINGLE_PROCESS,
) -> Source:
    """Return labelled images. classes, ids: as in images.class_indices."""
    if are_parquet(place):
        return ParquetImages.labelled(place, preprocess, classes, ids)
    if are_shards(place):
        return TarShards.labelled(place, preprocess, classes, ids, workers)
    return ImageFolder.labelled(place, preprocess, classes, ids)


def open_images(places: Sequence[Path], preprocess: Preprocess, workers: Workers = SINGLE_PROCESS) -> Source:
    """Return the images of one folder, of tar or Parquet files, or of image files, which keep the given order."""
    if is_collection(places):
        return open_unlabelled(places[0], preprocess, workers)
    other = next((place for place in places if place.is_dir() or _is_archive(place)), None)
    if other is not None:
        raise FqvitError(
            f"{other}: one of {len(places)} inputs, expected a single folder, tar or Parquet file, or only image files."
        )
    return ImageFolder(list(places), None, preprocess)


def archives(places: Sequence[Path]) -> list[Path]:
    """Return the tar or Parquet files that the places name, sorted; none if they are images or a folder of images.

    Raises FqvitError if two files have the same name, or if there are files of both kinds.
    """
    found: set[Path] = set()
    kinds = {are_parquet(place) for place in places if are_parquet(place) or are_shards(place)}
    if len(kinds) > 1:
        raise FqvitError(f"{places[0]}: tar and Parquet files together. Pass files of one kind.")
    for place in places:
        if are_parquet(place):
            found |= set(parquet_paths(place))
        elif are_shards(place):
            found |= set(shard_paths(place))
        elif kinds:
            raise FqvitError(f"{place}: not a tar or Parquet file, unlike the other inputs. Pass files of one kind.")
    stems: dict[str, Path] = {}
    for path in sorted(found):
        if stems.setdefault(path.stem, path) != path:
            raise FqvitError(
                f"{path}: same name as {stems[path.stem]}, so both results would go to the same file. Rename one of them."
            )
    return sorted(found)


def short_name(name: str, places: Sequence[Path]) -> str:
    """Return an image's name relative to the named folder or the folder of the named archive. Named images keep their path."""
    if is_collection(places):
        root = places[0] if places[0].is_dir() else places[0].parent
        name = name.removeprefix(f"{root}{os.sep}") if str(root) != "." else name
    return name.replace(os.sep, "/")


def is_collection(places: Sequence[Path]) -> bool:
    """Return whether the places are one folder, tar or Parquet file, not image files."""
    return len(places) == 1 and (places[0].is_dir() or _is_archive(places[0]))


def _is_archive(place: Path) -> bool:
    return place.name.endswith((ENDING, *ENDINGS))
