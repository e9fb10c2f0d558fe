"""Images as Python programs have them: every kind gives the pixels that the preprocessing of the model gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fqvit.data.collect import holds_arrays, open_any
from fqvit.data.images import ImageFolder
from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError

INPUT = Preprocess(12, 16, 3, 14, "bicubic", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
GRAY = Preprocess(12, 16, 1, 14, "bicubic", (0.286,), (0.353,))
RAW = np.random.default_rng(0).integers(0, 256, (5, 20, 24, 3)).astype(np.uint8)
PICTURES = [Image.fromarray(array) for array in RAW]
READY = np.stack([INPUT.apply(picture) for picture in PICTURES])


def pixels(images: object, preprocess: Preprocess = INPUT, limit: int = 100) -> np.ndarray:
    return np.concatenate([batch.images for batch in open_any(images, preprocess, limit).batches(2)])


class Pairs(Dataset[Any]):
    """Samples of an image and a label, as the datasets of torchvision return them."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index >= len(self):
            raise IndexError
        return self.images[index], 7


def normalised(prepared: np.ndarray) -> torch.Tensor:
    values = (torch.from_numpy(prepared) / 255 - torch.tensor(INPUT.mean)) / torch.tensor(INPUT.std)
    return values.permute(0, 3, 1, 2)


def files(folder: Path) -> list[Path]:
    paths = [folder / f"{number}.png" for number in range(len(PICTURES))]
    for path, picture in zip(paths, PICTURES, strict=True):
        picture.save(path)
    return paths


@pytest.mark.parametrize(
    "images",
    [
        PICTURES,
        tuple(PICTURES),
        iter(PICTURES),
        RAW,
        list(RAW),
        READY,
        torch.from_numpy(RAW).permute(0, 3, 1, 2),
        torch.from_numpy(READY),
        normalised(READY),
        normalised(READY).numpy(),
        torch.from_numpy(READY).permute(0, 3, 1, 2) / 255,
        (READY / 255).astype(np.float32),
        Pairs(PICTURES),
        Pairs(normalised(READY)),
        DataLoader(TensorDataset(normalised(READY), torch.arange(5)), batch_size=2),
        DataLoader(TensorDataset(torch.from_numpy(READY).permute(0, 3, 1, 2)), batch_size=2),
        DataLoader(Pairs(torch.from_numpy(READY).permute(0, 3, 1, 2) / 255), batch_size=3),
        DataLoader(Pairs(PICTURES), batch_size=2, collate_fn=lambda samples: [image for image, _ in samples]),
        ({"pixel_values": batch} for batch in normalised(READY).split(2)),
        [{"label": 3, "image": picture} for picture in PICTURES],
        [{"label": 3, "photo": picture} for picture in PICTURES],
    ],
    ids=lambda images: type(images).__name__,
)
def test_every_kind_of_images_gives_the_same_pixels(images: object) -> None:
    assert np.array_equal(pixels(images), READY)


def test_folders_paths_and_sources_are_read_from_disk(tmp_path: Path) -> None:
    paths = files(tmp_path)
    for images in (tmp_path, str(tmp_path), paths, list(map(str, paths)), ImageFolder.unlabelled(tmp_path, INPUT)):
        assert np.array_equal(pixels(images), READY)
    assert np.array_equal(pixels([{"bytes": path.read_bytes(), "path": None} for path in paths]), READY)
    assert np.array_equal(pixels([{"image": {"bytes": None, "path": str(path)}} for path in paths]), READY)


def test_one_picture_or_array_is_one_image() -> None:
    for image in (PICTURES[0], RAW[0], torch.from_numpy(RAW[0]).permute(2, 0, 1)):
        assert np.array_equal(pixels(image), READY[:1])


def test_gray_images_and_models_of_one_channel() -> None:
    gray = RAW[:, :, :, 0]
    expected = np.stack([GRAY.apply(Image.fromarray(array)) for array in gray])
    for images in (list(gray), gray[..., None], torch.from_numpy(gray)[:, None], torch.from_numpy(gray)[:, None] / 255):
        assert np.array_equal(pixels(images, GRAY), expected)


def test_half_precision_and_interpolated_tensors_are_rounded_to_the_nearest_pixel() -> None:
    half = pixels(normalised(READY).to(torch.bfloat16))
    assert np.abs(half.astype(int) - READY).max() <= 2
    smooth = torch.nn.functional.interpolate(torch.from_numpy(RAW).permute(0, 3, 1, 2) / 255, (12, 16), mode="bilinear")
    assert np.array_equal(pixels(smooth), (255 * smooth.double()).round().byte().permute(0, 2, 3, 1).numpy())


def test_limits_spread_over_sequences_and_take_the_first_of_iterables() -> None:
    assert np.array_equal(pixels(RAW, limit=2), READY[[0, 2]])
    assert np.array_equal(pixels(iter(RAW), limit=2), READY[:2])


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (3, "images: int, expected a folder"),
        (b"abc", "images: bytes"),
        ({1, 2}, "images: set"),
        (Pairs, "images: type"),
        ([], "no images. Pass at least one"),
        (iter([]), "list_iterator without images"),
        ({"train": PICTURES}, "images: dict of train.* Pass one of its values"),
        ([3], "image 0: int, expected a path"),
        (RAW.astype(np.int32), "image 0: int32, expected uint8"),
        (np.full((1, 8, 8, 3), 300.0), "image 0: float values 300 to 300, expected 0 to 1"),
        (torch.zeros(2, 5, 8, 8), r"image 0: float32 \[5, 8, 8\], expected one image of 1 or 3 channels"),
        (torch.full((1, 1, 12, 16), -2.0), "float values -2 to -2"),
        ([{"label": 1}], "a row with label, none of which holds an image"),
        ("nowhere", "nowhere: no such folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_everything_else_is_rejected_in_one_line(images: object, message: str) -> None:
    with pytest.raises(FqvitError, match=message) as caught:
        pixels(images)
    assert "\n" not in str(caught.value)


def test_a_dataset_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"label": datasets.Value("int64"), "picture": datasets.Image()})
    rows = datasets.Dataset.from_dict({"label": list(range(5)), "picture": PICTURES}, features=features)
    undecoded = rows.cast_column("picture", datasets.Image(decode=False))
    for images in (rows, undecoded, rows.to_iterable_dataset(), rows.rename_column("picture", "image").with_format("torch")):
        assert np.array_equal(pixels(images), READY)
    with pytest.raises(FqvitError, match="DatasetDict of train"):
        pixels(datasets.DatasetDict({"train": rows}))


def test_prepared_arrays_are_told_from_other_images() -> None:
    assert all(map(holds_arrays, (READY, list(READY), iter(READY), [])))
    assert not any(map(holds_arrays, ("photos", PICTURES, Pairs(PICTURES), DataLoader(Pairs(PICTURES)), 3)))


def test_digests_depend_on_the_pixels() -> None:
    first, second = open_any(PICTURES, INPUT, 9).digest(), open_any(PICTURES[::-1], INPUT, 9).digest()
    assert first == open_any(RAW, INPUT, 9).digest() != second
