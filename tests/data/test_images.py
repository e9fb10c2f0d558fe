"""Tests of ImageFolder: order, labels, unreadable images and unusable folders."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fqvit.data.images import ImageFolder, UnreadableImage, class_indices, read_image
from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError

GREY = Preprocess(8, 8, 1, 8, "bicubic", (0.5,), (0.5,))


def save(path: Path, value: int = 0, size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).save(path)


def values(folder: ImageFolder, size: int = 16) -> list[int]:
    return [int(image[0, 0, 0]) for batch in folder.batches(size) for image in batch.images]


def test_images_are_sorted_by_path_at_any_depth_and_split_into_batches_of_fixed_size(tmp_path: Path) -> None:
    for value, name in enumerate(["a/1.png", "a/b/2.PNG", "a/c.bmp", "d.tiff", "e.gif"]):
        save(tmp_path / name, value)
    folder = ImageFolder.unlabelled(tmp_path, GREY)
    batches = list(folder.batches(2))
    assert [len(b.paths) for b in batches] == [2, 2, 1]
    assert values(folder) == [0, 1, 2, 3, 4]
    assert batches[0].images.dtype == np.uint8
    assert batches[0].images.shape == (2, 8, 8, 1)
    assert batches[0].labels is None
    assert [Path(p).name for b in batches for p in b.paths] == ["1.png", "2.PNG", "c.bmp", "d.tiff", "e.gif"]


def test_hidden_files_other_files_and_link_cycles_are_skipped(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png")
    save(tmp_path / "a" / "._1.png")
    save(tmp_path / ".cache" / "2.png")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert len(ImageFolder.unlabelled(tmp_path, GREY)) == 1


def test_a_symbolic_link_to_a_class_folder_is_followed(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere" / "1.png", 3)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cat").symlink_to(tmp_path / "elsewhere")
    assert values(ImageFolder.labelled(tmp_path / "data", GREY, ["cat"])) == [3]


def test_batches_have_the_labels_of_their_images(tmp_path: Path) -> None:
    for index, name in enumerate(["n01", "n02", "n03"]):
        for copy in range(3):
            save(tmp_path / name / f"{copy}.png", index)
    folder = ImageFolder.labelled(tmp_path, GREY, 3)
    for batch in folder.batches(4):
        assert batch.labels is not None
        assert batch.labels.dtype == np.int64
        assert batch.labels.tolist() == batch.images[:, 0, 0, 0].tolist()


@pytest.mark.parametrize(
    ("folders", "classes", "expected"),
    [
        (["n01", "n02"], 2, [0, 1]),
        (["n01", "n02"], ["tench", "goldfish"], [0, 1]),
        (["coat", "t_shirt_top"], ["T-shirt/top", "Trouser", "Coat"], [2, 0]),
        (["bag", "coat"], ["Coat", "Bag"], [1, 0]),  # names take precedence over positions
        (["1", "10", "2"], 11, [1, 10, 2]),
        (["0", "1", "10", "2", "3", "4", "5", "6", "7", "8", "9"], 11, [0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9]),
        (["001", "002"], 2, [0, 1]),
        (["crane", "maillot"], ["crane", "crane"], [0, 1]),  # an ambiguous name is ignored
    ],
)
def test_class_folders_are_matched_to_classes(folders: list[str], classes: list[str] | int, expected: list[int]) -> None:
    assert list(class_indices("data", folders, classes).values()) == expected


def test_class_folders_are_matched_by_id_if_ids_are_known() -> None:
    names, ids = ["tench", "crane", "crane", "cock"], ["n01", "n02", "n09", "n03"]
    for folders, expected in ((["n03", "n09"], [3, 2]), (["cock", "tench"], [3, 0]), (["3"], [3])):
        assert list(class_indices("data", folders, names, ids).values()) == expected
    assert class_indices("data", ["n03"], 4, ids) == {"n03": 3}
    with pytest.raises(FqvitError, match="'n04' is neither a class id or name nor"):
        class_indices("data", ["n03", "n04"], names, ids)
    with pytest.raises(FqvitError, match=r"'n03' is neither a class name nor.*--classes"):
        class_indices("data", ["n03", "n09"], names)


@pytest.mark.parametrize(
    ("folders", "classes"),
    [(["a", "b"], 3), (["cat", "dig"], ["cat", "dog", "cow"]), (["1", "10", "2"], 3), (["cat", "CAT"], ["cat", "dog", "cow"])],
)
def test_class_folders_that_match_no_rule_are_rejected(folders: list[str], classes: list[str] | int) -> None:
    with pytest.raises(FqvitError, match=r"data: \d class sub-folders for a model of 3 classes.*one sub-folder per class"):
        class_indices("data", folders, classes)


def test_limit_selects_evenly_spaced_images(tmp_path: Path) -> None:
    for value in range(10):
        save(tmp_path / f"{value // 5}" / f"{value}.png", value)
    folder = ImageFolder.labelled(tmp_path, GREY, 2)
    assert values(folder.limit(4)) == [0, 2, 5, 7]
    assert folder.limit(4).labels == [0, 0, 1, 1]
    assert len(folder.limit(99)) == 10
    with pytest.raises(FqvitError, match="at least 1"):
        folder.limit(0)


def test_one_unreadable_image_in_a_hundred_is_skipped_and_counted(tmp_path: Path) -> None:
    for value in range(100):
        save(tmp_path / f"{value:03}.png", value)
    (tmp_path / "000.png").write_bytes(b"not an image")
    folder = ImageFolder.unlabelled(tmp_path, GREY)
    assert values(folder) == list(range(1, 100))
    assert folder.skipped == [(str(tmp_path / "000.png"), "not an image")]
    assert values(folder, 1) == list(range(1, 100))
    assert len(folder.skipped) == 1


def test_folders_and_missing_files_are_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImage, match=f"^{tmp_path}: is a directory. Expected an image file"):
        read_image(tmp_path, GREY)
    with pytest.raises(UnreadableImage, match="none.png: no such file"):
        read_image(tmp_path / "none.png", GREY)


def test_more_than_one_percent_of_unreadable_images_is_an_error_that_names_the_first(tmp_path: Path) -> None:
    for value in range(100):
        save(tmp_path / f"{value:03}.png", value)
    (tmp_path / "005.png").write_bytes(b"")
    (tmp_path / "090.png").write_bytes(b"")
    with pytest.raises(FqvitError, match=r"005.png: not an image. 2 of 100 images cannot be read, at most 1 % may be"):
        values(ImageFolder.unlabelled(tmp_path, GREY))


def test_one_unreadable_image_of_two_is_rejected(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"\x89PNG")
    with pytest.raises(FqvitError, match="1 of 2 images"):
        values(ImageFolder.unlabelled(tmp_path, GREY))


def test_truncated_missing_and_oversized_images_are_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for name in ("a.jpg", "a.png", "a.webp", "a.gif", "a.tif"):
        path = tmp_path / name
        Image.fromarray(noise).save(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UnreadableImage, match=name):
            read_image(path, GREY)
    with pytest.raises(UnreadableImage, match="no such file"):
        read_image(tmp_path / "none.png", GREY)
    save(tmp_path / "big.png", size=(30, 20))
    for limit in (500, 100):  # PIL warns above its limit and raises above twice the limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(UnreadableImage, match=r"limit|decompression bomb"):
            read_image(tmp_path / "big.png", GREY)


@pytest.mark.filterwarnings("default::PIL.Image.DecompressionBombWarning")
def test_an_oversized_image_is_unreadable_even_if_warnings_are_not_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "big.png", size=(30, 20))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with (
        pytest.warns(Image.DecompressionBombWarning),
        pytest.raises(UnreadableImage, match="30 x 20 pixels, at most 500 are allowed"),
    ):
        read_image(tmp_path / "big.png", GREY)


def test_unusable_folders_are_rejected_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match="no such folder"):
        ImageFolder.unlabelled(tmp_path / "none", GREY)
    with pytest.raises(FqvitError, match="no images found"):
        ImageFolder.unlabelled(tmp_path, GREY)
    save(tmp_path / "a.png")
    with pytest.raises(FqvitError, match="a file, expected a folder"):
        ImageFolder.unlabelled(tmp_path / "a.png", GREY)
    with pytest.raises(FqvitError, match="no class sub-folders"):
        ImageFolder.labelled(tmp_path, GREY, 2)
    save(tmp_path / "cat" / "b.png")
    with pytest.raises(FqvitError, match=r"images outside the class sub-folders: 1 \(a.png first\)"):
        ImageFolder.labelled(tmp_path, GREY, ["cat"])


def test_closing_the_batches_early_stops_the_threads(tmp_path: Path) -> None:
    for value in range(20):
        save(tmp_path / f"{value:03}.png", value)
    batches = ImageFolder.unlabelled(tmp_path, GREY).batches(2)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("fqvit-decode")]
