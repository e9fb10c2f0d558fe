"""Tests of reading and quantizing text embeddings, and of classifying with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.inference.zero_shot import LARGEST, read_text

RANDOM = np.random.default_rng(3)
NAMES = np.array(["cat", "dog", "boat"])
VALUES = RANDOM.normal(size=(3, 32)).astype(np.float32)


def saved(path: Path, **arrays: Any) -> Path:
    np.savez(path / "text.npz", **arrays)
    return path / "text.npz"


def test_codes_are_the_normalised_values_in_15_bits(tmp_path: Path) -> None:
    text = read_text(saved(tmp_path, embeddings=VALUES, names=NAMES))
    unit = VALUES.astype(np.float64) / np.linalg.norm(VALUES.astype(np.float64), axis=1, keepdims=True)
    assert text.names == ("cat", "dog", "boat")
    np.testing.assert_array_equal(text.codes.astype(np.int64) - 2**15, np.rint(unit * LARGEST))


def test_several_prompts_per_class_are_normalised_and_averaged(tmp_path: Path) -> None:
    prompts = np.stack([VALUES, 3 * VALUES], 1)
    text = read_text(saved(tmp_path, embeddings=prompts, names=NAMES))
    one = read_text(saved(tmp_path, embeddings=VALUES, names=NAMES))
    assert np.abs(text.codes.astype(int) - one.codes).max() <= 1


def test_images_get_the_class_with_the_nearest_text(tmp_path: Path) -> None:
    text = read_text(saved(tmp_path, embeddings=VALUES, names=NAMES))
    images = np.rint(VALUES[[2, 0, 1, 1]] * 30 + 128).clip(0, 255).astype(np.uint8)
    found = text.index(1).search(images, 128, 2)
    assert found.rows[:, 0].tolist() == [2, 0, 1, 1]
    assert found.rows.shape == (4, 2)


def test_text_and_image_embeddings_must_have_the_same_length(tmp_path: Path) -> None:
    text = read_text(saved(tmp_path, embeddings=VALUES, names=NAMES))
    text.check_length("text.npz", 32, "the image model")
    with pytest.raises(FqvitError, match="32 values per text embedding, but the image model has 384"):
        text.check_length("text.npz", 384, "the image model")


@pytest.mark.parametrize(
    "arrays, said",
    [
        ({"embeddings": VALUES}, "no array 'names' (has embeddings)"),
        ({"names": NAMES}, "no array 'embeddings'"),
        ({}, "no array 'embeddings' (has none)"),
        ({"embeddings": VALUES.astype(np.int32), "names": NAMES}, "embeddings are int32 [3, 32]"),
        ({"embeddings": VALUES[0], "names": NAMES}, "expected float [classes, C]"),
        ({"embeddings": VALUES, "names": NAMES[:2]}, "one string per class: [3]"),
        ({"embeddings": VALUES, "names": np.arange(3)}, "one string per class: [3]"),
        ({"embeddings": VALUES, "names": NAMES[[0, 1, 0]]}, "class 'cat' occurs twice"),
        ({"embeddings": VALUES * np.nan, "names": NAMES}, "NaN"),
        ({"embeddings": VALUES * np.array([[1], [0], [1]]), "names": NAMES}, "the embedding of 'dog' is zero"),
        ({"embeddings": np.ones((1, 9000)), "names": NAMES[:1]}, "at most 8192"),
        ({"embeddings": VALUES, "names": NAMES.astype(object)}, "cannot be read"),
    ],
)
def test_files_with_invalid_arrays_are_named_in_the_error(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    path = saved(tmp_path, **arrays)
    with pytest.raises(FqvitError) as error:
        read_text(path)
    assert said in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"text", None])
def test_errors_name_damaged_and_missing_files(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "text.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FqvitError) as error:
        read_text(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
