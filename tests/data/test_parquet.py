"""Test images in Parquet files: the same batches as from a folder, and labels as Hugging Face datasets store them."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fqvit.data.images import ImageFolder
from fqvit.data.parquet import ParquetImages
from fqvit.data.places import archives, open_images, short_name
from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
GREY = Preprocess(8, 8, 1, 8, "bicubic", (0.5,), (0.5,))


def png(value: int) -> bytes:
    data = io.BytesIO()
    Image.new("L", (8, 8), value).save(data, "png")
    return data.getvalue()


def structs(values: list[int]) -> list[dict[str, Any]]:
    return [{"bytes": png(value), "path": f"{value:03}.png"} for value in values]


def pack(path: Path, columns: dict[str, Any], group: int = 7, names: list[str] | None = None) -> Path:
    table = arrow.table(columns)
    if names is not None:
        about = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=group)
    return path


def values(source: ParquetImages) -> list[int]:
    return [int(image[0, 0, 0]) for batch in source.batches(4) for image in batch.images]


@pytest.mark.parametrize("kind", ["structs", "bytes"])
def test_parquet_gives_the_same_batches_as_a_folder(tmp_path: Path, kind: str) -> None:
    every = list(range(100))
    for value in every:
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / f"{value:03}.png").write_bytes(png(value))
    for number, part in enumerate((every[:41], every[41:42], every[42:])):
        images: Any = structs(part) if kind == "structs" else [png(value) for value in part]
        pack(tmp_path / "files" / f"x-{number}.parquet", {"id": part, "image": images})
    folder = ImageFolder.unlabelled(tmp_path / "folder", GREY)
    found = ParquetImages.unlabelled(tmp_path / "files", GREY)
    assert len(found) == 100
    for limit in (1000, 100, 30, 3):
        for batch, expected in zip(found.limit(limit).batches(9), folder.limit(limit).batches(9), strict=True):
            np.testing.assert_array_equal(batch.images, expected.images)
            if kind == "structs":
                assert [Path(name).name for name in batch.paths] == [Path(name).name for name in expected.paths]
    assert found.name(0) == str(tmp_path / "files" / "x-0.parquet" / ("000.png" if kind == "structs" else "0"))


def test_rows_are_read_in_any_order(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.parquet", {"image": structs(list(range(90)))})
    found = ParquetImages.unlabelled(path, GREY)
    order = np.random.default_rng(0).permutation(90).tolist()
    assert values(found.take(order)) == order
    assert values(found.take(order).take([5, 3])) == [order[5], order[3]]


def test_the_digest_depends_on_the_files_and_the_selection(tmp_path: Path) -> None:
    a = ParquetImages.unlabelled(pack(tmp_path / "a" / "x.parquet", {"image": structs([1, 2])}), GREY)
    same = ParquetImages.unlabelled(pack(tmp_path / "b" / "x.parquet", {"image": structs([1, 2])}), GREY)
    more = ParquetImages.unlabelled(pack(tmp_path / "c" / "x.parquet", {"image": structs([1, 2, 3])}), GREY)
    assert a.digest() == same.digest()
    assert len({a.digest(), more.digest(), a.take([1]).digest()}) == 3


def test_labels_are_indices_or_names(tmp_path: Path) -> None:
    def labels(column: list[Any], names: list[str] | None = None, classes: Any = ("cat", "dog", "owl")) -> list[int] | None:
        path = pack(tmp_path / "x.parquet", {"image": structs(list(range(len(column)))), "label": column}, names=names)
        return ParquetImages.labelled(path, GREY, classes).labels

    assert labels([0, 2, 1]) == [0, 2, 1]
    assert labels([0, 2, 1], classes=3) == [0, 2, 1]
    assert labels(["owl", "cat", "dog"]) == [2, 0, 1]
    assert labels([0, 1, 1], ["Dog", "Cat"]) == [1, 0, 0]
    assert labels([0, 2, 1], ["x", "y", "z"]) == [0, 2, 1]
    with pytest.raises(FqvitError, match="class 3, expected 0 to 2"):
        labels([0, 3])
    with pytest.raises(FqvitError, match="row 1 has label None"):
        labels([0, None])
    pack(tmp_path / "mixed" / "a.parquet", {"image": structs([1]), "label": [0]})
    pack(tmp_path / "mixed" / "b.parquet", {"image": structs([2]), "label": ["cat"]})
    with pytest.raises(FqvitError, match="row 1 has label 'cat', but row 0 has 0. Use class indices only"):
        ParquetImages.labelled(tmp_path / "mixed", GREY, 3)
    with pytest.raises(FqvitError, match="no column `label`"):
        ParquetImages.labelled(pack(tmp_path / "y.parquet", {"image": structs([1])}), GREY, 3)


def test_a_few_unreadable_rows_are_skipped_and_named(tmp_path: Path) -> None:
    images = structs([value % 250 for value in range(300)])
    images[17] = {"bytes": b"no picture", "path": "bad.png"}
    images[18] = {"bytes": None, "path": "elsewhere.png"}
    found = ParquetImages.unlabelled(pack(tmp_path / "x.parquet", {"image": images}), GREY)
    assert len(values(found)) == 298
    (bad, reason), (empty, cause) = found.skipped
    assert (bad, reason) == (str(tmp_path / "x.parquet" / "bad.png"), "not an image")
    assert (empty, cause) == (str(tmp_path / "x.parquet" / "elsewhere.png"), "an empty cell, expected the bytes of an image")


def test_errors_name_the_invalid_file(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no table")
    with pytest.raises(FqvitError, match=r"text.parquet: not a complete Parquet file"):
        ParquetImages.unlabelled(tmp_path / "text.parquet", GREY)
    with pytest.raises(FqvitError, match=r"no column of images.*It has a \(int64\)"):
        ParquetImages.unlabelled(pack(tmp_path / "a.parquet", {"a": [1]}), GREY)
    with pytest.raises(FqvitError, match=r"several columns of bytes \(a, b\)"):
        ParquetImages.unlabelled(pack(tmp_path / "b.parquet", {"a": [b""], "b": [b""]}), GREY)
    with pytest.raises(FqvitError, match=r"no rows \(Parquet files read: 1\)"):
        ParquetImages.unlabelled(pack(tmp_path / "c.parquet", {"image": arrow.array([], arrow.binary())}), GREY)
    with pytest.raises(FqvitError, match="no such file"):
        ParquetImages.unlabelled(tmp_path / "none-{0..1}.parquet", GREY)


def test_the_error_for_a_damaged_page_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    table = arrow.table({"image": structs(list(range(200)))})
    parquet.write_table(table, path, row_group_size=50, compression="zstd", use_dictionary=False)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2 : len(damaged) // 2 + 400] = os.urandom(400)
    path.write_bytes(damaged)
    with pytest.raises(FqvitError) as error:
        values(ParquetImages.unlabelled(path, GREY))
    assert "\n" not in str(error.value) and "x.parquet" in str(error.value)


def test_memory_does_not_depend_on_the_size_of_row_groups(tmp_path: Path) -> None:
    noise = [np.random.default_rng(i).bytes(50_000) for i in range(600)]  # 30 MB in one row group, whose pages have 2 MB
    table = arrow.table({"image": noise})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=1000, use_dictionary=False, write_batch_size=16)
    del table
    found = ParquetImages.unlabelled(tmp_path / "x.parquet", GREY)
    before = peak = arrow.total_allocated_bytes()
    for row in range(len(found)):
        assert found._images.value(found.files[0], "image", row) == noise[row]
        peak = max(peak, arrow.total_allocated_bytes())
    assert peak - before < 16_000_000


def test_folders_parquet_files_and_lists_of_images_are_opened_by_kind(tmp_path: Path) -> None:
    pack(tmp_path / "files" / "x.parquet", {"image": structs([1, 2])})
    (tmp_path / "folder").mkdir()
    for value in (3, 4):
        (tmp_path / "folder" / f"{value}.png").write_bytes(png(value))
    for place, names in (("files", ["x.parquet/001.png", "x.parquet/002.png"]), ("folder", ["3.png", "4.png"])):
        places = [tmp_path / place]
        opened = open_images(places, GREY)
        assert [short_name(opened.name(index), places) for index in range(len(opened))] == names
    both = [tmp_path / "folder" / "4.png", tmp_path / "folder" / "3.png"]
    assert [short_name(open_images(both, GREY).name(index), both) for index in range(2)] == [str(path) for path in both]
    assert archives([tmp_path / "files"]) == [tmp_path / "files" / "x.parquet"]
    assert archives([tmp_path / "folder"]) == []
    with pytest.raises(FqvitError, match="one of 2 inputs"):
        open_images([both[0], tmp_path / "folder"], GREY)
    (tmp_path / "files" / "y.png").write_bytes(png(1))
    with pytest.raises(FqvitError, match=r"both Parquet files and images \(y.png\)"):
        open_images([tmp_path / "files"], GREY)
