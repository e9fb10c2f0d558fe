"""Cells of a table: the same predictions as the engine, cached so that no finished step runs twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import fqvit
from fqvit.cli.inputs import Images
from fqvit.data.images import Batch, ImageArray
from fqvit.errors import FqvitError
from fqvit.models import embedded
from fqvit.quant.recipe import load_recipe
from fqvit.study import cells
from fqvit.study.cells import Bench, Cache
from fqvit.study.methods import FLOAT, Method
from fqvit.study.table import row


class Counted(ImageArray):
    """Images that count how often they are read, and can interrupt the run at a given batch."""

    passes = 0
    interrupt_at: int | None = None

    def batches(self, size: int = 16, share: range | None = None) -> Iterator[Batch]:
        self.passes += 1
        for number, batch in enumerate(super().batches(size, share)):
            if number == self.interrupt_at:
                raise KeyboardInterrupt
            yield batch

    def limit(self, count: int) -> Counted:
        return self  # the same object, so that the count is kept


@pytest.fixture(scope="module")
def model() -> fqvit.FloatModel:
    return fqvit.load_model("fmnist_vit")


def calibration_images(count: int) -> Counted:
    return Counted(embedded.calibration_images()[:count], None, embedded.FMNIST_PREPROCESS)


def labelled_images(count: int = 64, interrupt_at: int | None = None) -> Counted:
    pixels, labels = embedded.test_images()
    found = Counted(pixels[:count], labels[:count].tolist(), embedded.FMNIST_PREPROCESS)
    found.interrupt_at = interrupt_at
    return found


MINMAX = Method("minmax", msgspec.structs.replace(load_recipe("minmax"), images=32))


def bench(model: fqvit.FloatModel, folder: Path, calib: Counted, data: Counted, fresh: bool = False) -> Bench:
    return Bench(model, lambda limit: Images(calib, "here"), Images(data, "here"), Cache(folder, fresh))


def test_a_cell_has_the_same_predictions_as_the_program(model: fqvit.FloatModel, tmp_path: Path) -> None:
    here = bench(model, tmp_path, calibration_images(32), labelled_images())
    result, reused = here.result(MINMAX)
    exact, _ = here.result(FLOAT)
    calibration = fqvit.calibrate(model, [embedded.calibration_images()[:32]], MINMAX.recipe)
    program = fqvit.lower(model, calibration)
    pixels, labels = embedded.test_images()
    logits = fqvit.Engine(program).run(pixels[:64])
    assert not reused and result.fingerprint == program.fingerprint() and result.calibration_images == 32
    assert np.array_equal(result.predicted(), logits.argmax(-1))
    found = row(model.name, MINMAX, result, exact)
    assert found.top1 == 100 * np.mean(logits.argmax(-1) == labels[:64]) and found.runs == "integer"
    program.save(tmp_path / "a.fqvit")
    assert found.file_bytes == (tmp_path / "a.fqvit").stat().st_size


def test_a_finished_cell_is_not_repeated(model: fqvit.FloatModel, tmp_path: Path) -> None:
    calib, data = calibration_images(32), labelled_images()
    first, _ = bench(model, tmp_path, calib, data).result(MINMAX)
    again, reused = bench(model, tmp_path, calib, data).result(MINMAX)
    assert reused and again == first and (calib.passes, data.passes) == (1, 1)
    _, reused = bench(model, tmp_path, calib, data, fresh=True).result(MINMAX)
    assert not reused and (calib.passes, data.passes) == (2, 2)


def test_an_interrupted_run_keeps_its_calibration(model: fqvit.FloatModel, tmp_path: Path) -> None:
    calib = calibration_images(32)
    with pytest.raises(KeyboardInterrupt):
        bench(model, tmp_path, calib, labelled_images(interrupt_at=2)).result(MINMAX)
    resumed, reused = bench(model, tmp_path, calib, labelled_images()).result(MINMAX)
    whole, _ = bench(model, tmp_path / "other", calibration_images(32), labelled_images()).result(MINMAX)
    assert not reused and calib.passes == 1
    assert resumed.fingerprint == whole.fingerprint and resumed.predictions == whole.predictions
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"seconds": 1, "calibration": "{}"}'])
def test_damaged_cache_files_are_ignored(model: fqvit.FloatModel, tmp_path: Path, damage: bytes) -> None:
    calib, data = calibration_images(32), labelled_images()
    first, _ = bench(model, tmp_path, calib, data).result(MINMAX)
    for path in tmp_path.iterdir():
        path.write_bytes(damage)
    again, reused = bench(model, tmp_path, calib, data).result(MINMAX)
    assert not reused and again.fingerprint == first.fingerprint and again.predictions == first.predictions


def test_different_images_recipes_or_code_give_different_cells(
    model: fqvit.FloatModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calib, data = calibration_images(32), labelled_images()
    bench(model, tmp_path, calib, data).result(MINMAX)
    assert not bench(model, tmp_path, calib, labelled_images(48)).result(MINMAX)[1]
    assert not bench(model, tmp_path, calibration_images(48), data).result(MINMAX)[1]
    other = Method("minmax", msgspec.structs.replace(MINMAX.recipe, weight_bits=7))
    assert not bench(model, tmp_path, calib, data).result(other)[1]
    renamed = Method("another", msgspec.structs.replace(MINMAX.recipe, name="another"))
    assert bench(model, tmp_path, calib, data).result(renamed)[1], "the name does not change the result"
    monkeypatch.setattr(cells, "code_digest", lambda: "newer")
    assert not bench(model, tmp_path, calib, data).result(MINMAX)[1]


@pytest.mark.parametrize("part", cells.DECIDING)
def test_every_part_of_the_code_digest_exists(part: str) -> None:
    root = Path(fqvit.__file__).parent
    assert any(path.is_relative_to(root / part) for path in cells.deciding_files(root))
    assert all(path.is_file() for path in cells.deciding_files(root))


def test_the_code_digest_covers_sub_folders() -> None:
    root = Path(fqvit.__file__).parent
    found = {path.relative_to(root).as_posix() for path in cells.deciding_files(root)}
    assert {"models/checkpoints/fold.py", "lowering/lower.py", "data/preprocess.py", "study/cells.py"} <= found


def test_the_digest_of_images_covers_names_and_sizes(tmp_path: Path) -> None:
    from PIL import Image

    model = fqvit.load_model("fmnist_vit")
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        Image.new("L", (28, 28), number).save(folder / f"{number}.png")

    def digest() -> str:
        return fqvit.ImageFolder.unlabelled(folder, model.preprocess).digest()

    first = digest()
    assert digest() == first
    (folder / "2.png").rename(folder / "3.png")
    renamed = digest()
    Image.effect_noise((28, 28), 50).save(folder / "3.png")
    assert len({first, renamed, digest()}) == 3


def test_a_cache_folder_that_cannot_be_created_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FqvitError, match="--cache"):
        Cache(tmp_path / "file" / "cells")
