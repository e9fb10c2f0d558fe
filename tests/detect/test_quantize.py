"""fqvit.quantize_detector: from a checkpoint and images to a detector in one call, the same as the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fqvit
from fqvit.errors import FqvitError
from tests.cli.command_line import fqvit as command
from tests.factories import one_thread as one_thread

pytest.importorskip("torch")

from .saved import here as here
from .saved import home as home
from .saved import shape_detector


def test_quantize_detector_gives_the_same_program_as_the_command(tmp_path: Path) -> None:
    words = ("--weights", "shapes.safetensors", "--calib", "train", "-o", tmp_path / "a.fqvit", "--json")
    expected = command("detect", "quantize", *words).json["fingerprint"]
    paths = sorted(Path("train").iterdir())
    pictures = [Image.open(path) for path in paths]
    for images in ("train", paths, pictures, [np.asarray(picture.convert("RGB")) for picture in pictures]):
        found = fqvit.quantize_detector("shapes.safetensors", images, progress=None)
        assert found.fingerprint() == expected
    found = fqvit.quantize_detector(shape_detector(), "train", "fast", limit=1, progress=None)
    assert found.pyramid.header.images == 1 and found.pyramid.header.recipe["name"] == "fast"
    found.save(tmp_path / "b.fqvit")
    assert len(fqvit.load(tmp_path / "b.fqvit").detect(pictures[0]).boxes) >= 0


def test_settings_are_a_mapping_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("score = 0.3\n")
    for settings in ({"score": 0.3}, tmp_path / "s.toml"):
        found = fqvit.quantize_detector("shapes.safetensors", "train", settings=settings, limit=1, progress=None)
        assert found.settings.score == 0.3


@pytest.mark.parametrize(
    "images, said",
    [
        (3, "images: int, expected a folder"),
        ([], "no images"),
        ([3], "an item is int"),
        ([np.zeros((4, 4), np.uint8)], r"uint8 \[4, 4\]"),
        ("none", "no such folder"),
    ],
)
def test_mistakes_are_reported(images: Any, said: str) -> None:
    with pytest.raises(FqvitError, match=said):
        fqvit.quantize_detector("shapes.safetensors", images, progress=None)
    with pytest.raises(FqvitError, match="settings: only valid for weights"):
        fqvit.quantize_detector(shape_detector(), "train", settings={"score": 0.3}, progress=None)
