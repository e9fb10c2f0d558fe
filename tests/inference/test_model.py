"""Tests of fqvit.load: images of every kind give the same bits as the engine on preprocessed pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fqvit
from fqvit.data.images import UnreadableImage
from fqvit.detect.fixed.detector import IntegerDetector
from fqvit.errors import FqvitError
from fqvit.inference.model import load
from fqvit.inference.search import Neighbours

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
CLASSIFIER, TOKENS = GOLDEN / "fqvit_v1.fqvit", GOLDEN / "tokens_v1.fqvit"
DETECTOR = GOLDEN / "detectors" / "opencv_v1.fqvit"


def pictures(folder: Path, count: int) -> list[Path]:
    """Write PNG files of different sizes."""
    rng = np.random.default_rng(count)
    paths = []
    for number in range(count):
        pixels = rng.integers(0, 256, (20 + number, 30, 3)).astype(np.uint8)
        paths.append(folder / f"{number}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


def test_paths_pictures_and_arrays_give_the_same_bits_as_the_engine(tmp_path: Path) -> None:
    paths = pictures(tmp_path, 20)
    model, engine = load(TOKENS), fqvit.Engine(TOKENS)
    apply = engine.header.preprocess.apply
    expected = engine.run(np.stack([apply(Image.open(path)) for path in paths]))
    opened = [Image.open(path) for path in paths]
    for images in (paths, [str(path) for path in paths], opened, [np.asarray(image) for image in opened]):
        found = model.embed(images)
        np.testing.assert_array_equal(found.codes(), expected)
        assert found.fingerprint == engine.fingerprint and list(found.info) == ["tokens"]
    assert list(model.embed(paths).names) == [str(path) for path in paths]
    assert list(model.embed(opened[:1]).names) == [str(paths[0])]
    assert list(model.embed([np.asarray(opened[0])]).names) == ["image 0"]


def test_one_image_counts_as_a_list_of_one(tmp_path: Path) -> None:
    (path,) = pictures(tmp_path, 1)
    model = load(TOKENS)
    np.testing.assert_array_equal(model.embed(path).codes(), model.embed([path]).codes())
    assert len(model.embed([])) == 0 and model.embed([]).codes().shape[1:] == model.outputs["tokens"].shape


def test_gray_arrays_and_batches_are_accepted_as_images(tmp_path: Path) -> None:
    model = load(TOKENS)
    gray = np.random.default_rng(0).integers(0, 256, (25, 40)).astype(np.uint8)
    expected = model.embed(Image.fromarray(gray)).codes()
    np.testing.assert_array_equal(model.embed(gray).codes(), expected)
    np.testing.assert_array_equal(model.embed(gray[:, :, None]).codes(), expected)
    colour = np.repeat(gray[:, :, None], 3, axis=2)
    np.testing.assert_array_equal(model.embed(np.stack([colour, colour])).codes(), np.repeat(expected, 2, axis=0))


def test_decoded_embeddings_use_scale_and_zero(tmp_path: Path) -> None:
    found = load(TOKENS).embed(pictures(tmp_path, 2))
    info = found.output()
    scale = info.scale * np.exp2(np.array(info.alpha)) if info.alpha else info.scale
    np.testing.assert_allclose(found.float(), (found.codes().astype(float) - info.zero) * scale, rtol=1e-6)


def test_classes_are_sorted_by_score(tmp_path: Path) -> None:
    paths = pictures(tmp_path, 3)
    model, engine = load(CLASSIFIER), fqvit.Engine(CLASSIFIER)
    codes = engine.run(np.stack([engine.header.preprocess.apply(Image.open(path)) for path in paths]))
    every = model.classify(paths)
    assert [scores[0].index for scores in every] == codes.argmax(-1).tolist()
    for scores, row in zip(every, codes, strict=True):
        assert [score.code for score in scores] == sorted(row.tolist(), reverse=True)[:5]
        assert all(score.logit == score.code * engine.header.output.scale for score in scores)
    assert model.classify(paths[0], top=2) == every[0][:2]
    assert model.classify(np.asarray(Image.open(paths[1]))) == every[1]


def test_detect_gives_the_same_objects_as_the_detector(tmp_path: Path) -> None:
    paths = pictures(tmp_path, 2)
    model, detector = load(DETECTOR), IntegerDetector(DETECTOR)
    found = model.detect(paths)
    expected = detector.detect_image(Image.open(paths[1]))
    np.testing.assert_array_equal(found[1].boxes, expected.boxes)
    np.testing.assert_array_equal(found[1].scores, expected.scores)
    np.testing.assert_array_equal(model.detect(Image.open(paths[1])).boxes, expected.boxes)
    assert model.fingerprint == IntegerDetector(DETECTOR, backend="reference").fingerprint


@pytest.mark.parametrize(
    ("file", "method"), [(TOKENS, "classify"), (TOKENS, "detect"), (CLASSIFIER, "detect"), (DETECTOR, "embed")]
)
def test_a_method_that_the_program_does_not_support_is_rejected(file: Path, method: str, tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match=rf"so it has no {method}\(\)"):
        getattr(load(file), method)(pictures(tmp_path, 1)[0])


def test_outputs_are_chosen_by_name(tmp_path: Path) -> None:
    path = pictures(tmp_path, 1)
    assert list(load(TOKENS).embed(path, "tokens").info) == ["tokens"]
    with pytest.raises(FqvitError, match="no output 'mean', it has tokens"):
        load(TOKENS).embed(path, output=["mean"])


def test_errors_name_the_wrong_image(tmp_path: Path) -> None:
    model = load(TOKENS)
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(UnreadableImage, match=r"text.png: not an image"):
        model.embed([*pictures(tmp_path, 1), tmp_path / "text.png"])
    with pytest.raises(UnreadableImage, match="no such file"):
        model.embed(tmp_path / "none.png")
    with pytest.raises(FqvitError, match=r"image 0: float64 \[4, 4, 3\], expected uint8"):
        model.embed(np.zeros((4, 4, 3)))
    with pytest.raises(FqvitError, match="image 0: int, expected a path"):
        model.embed([3])  # type: ignore[list-item]


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match="no such file|cannot be read|No such file"):
        load(tmp_path / "none.fqvit")


def test_classifications_print_as_tables_with_probabilities(tmp_path: Path) -> None:
    paths = pictures(tmp_path, 3)
    model = load(CLASSIFIER)
    one, every = model.classify(paths[0], top=2), model.classify(tmp_path)
    lines = repr(one).splitlines()
    assert lines[0] == str(paths[0]) and lines[1].split() == ["name", "class", "probability", "logit"] and len(lines) == 5
    assert [line.split()[0] for line in repr(every).splitlines()[2:]] == list(map(str, paths))
    assert every == model.classify(paths) and isinstance(every, list)
    full = model.classify(paths[0], top=1000)
    assert abs(sum(score.probability for score in full) - 1) < 1e-9
    assert full[0].probability / full[1].probability == pytest.approx(np.exp(full[0].logit - full[1].logit))
    assert repr(model.classify([])) == "no images"
    with pytest.raises(FqvitError, match="top: 0, expected at least 1"):
        model.classify(paths[0], top=0)


def test_detections_print_as_a_table(tmp_path: Path) -> None:
    found = load(DETECTOR).detect(Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3)).astype(np.uint8)))
    lines = repr(found).splitlines()
    assert lines[0] == f"{len(found.labels)} objects in 90 x 60 pixels"
    assert lines[1].split() == ["object", "score", "left", "top", "right", "bottom"]


def test_models_print_their_name_purpose_and_file() -> None:
    assert repr(load(CLASSIFIER)).startswith(f"distilled: gives logits ({CLASSIFIER}, fingerprint ")
    assert repr(load(DETECTOR)).startswith("mask_rcnn: detects objects (")


def test_run_returns_all_outputs_by_name() -> None:
    model = load(TOKENS)
    pixels = np.zeros((2, *model.engine.input_shape), np.uint8)  # type: ignore[attr-defined]
    assert list(model.run(pixels)) == list(model.run(pixels, ["tokens"])) == ["tokens"]
    with pytest.raises(FqvitError, match=r"has no run\(\)"):
        load(DETECTOR).run(pixels)


@pytest.mark.parametrize("wrong", [3, None, b"x"], ids=str)
def test_images_and_files_of_the_wrong_kind_are_rejected(wrong: object) -> None:
    with pytest.raises(FqvitError, match="expected"):
        load(CLASSIFIER).classify(wrong)  # type: ignore[call-overload]
    with pytest.raises(FqvitError, match="expected a .fqvit file, hf:ORG/NAME or a Program"):
        load(wrong)  # type: ignore[arg-type]


def test_embeddings_and_neighbours_print_in_a_readable_form(tmp_path: Path) -> None:
    found = load(TOKENS).embed(pictures(tmp_path, 2))
    assert repr(found).startswith("Embeddings(tokens (u8 ") and " of 2 images, by " in repr(found)
    ints = np.array([[3, 1]])
    lines = repr(Neighbours(ints, ints * 2**22)).splitlines()
    assert lines[0].split("  ")[0] == "query" and "3 (0.7500)" in lines[2] and "1 (0.2500)" in lines[2]
    many = Neighbours(np.zeros((25, 1), np.int64), np.zeros((25, 1), np.int64))
    assert repr(many).endswith("... and 5 more queries")
