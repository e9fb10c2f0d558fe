"""Test the commands that use embeddings: search, classify --zero-shot, eval --knn and eval --zero-shot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fqvit.inference import embeddings
from fqvit.inference.model import load
from fqvit.models import embedded
from tests.cli.command_line import assert_rejected, fqvit


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantize the embedded ViT without its classifier."""
    path = tmp_path_factory.mktemp("program") / "features.fqvit"
    done = fqvit("quantize", "fmnist_vit", "--images", 32, "--features", "pooled", "-o", path)
    assert done.code == 0, done.err
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("classifier") / "logits.fqvit"
    assert fqvit("quantize", "fmnist_vit", "--images", 8, "-o", path).code == 0
    return path


def written(root: Path, first: int, last: int) -> Path:
    """Write embedded test images, one sub-folder per class."""
    images, labels = embedded.test_images()
    for i in range(first, last):
        folder = root / embedded.FMNIST_CLASSES[labels[i]].replace("/", "_")
        folder.mkdir(exist_ok=True)
        Image.fromarray(images[i, :, :, 0]).save(folder / f"{i:04}.png")
    return root


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("gallery"), 0, 200)


@pytest.fixture(scope="module")
def queries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("queries"), 200, 300)


@pytest.fixture(scope="module")
def index(program: Path, gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index") / "gallery.safetensors"
    embeddings.write(path, load(program).embed(sorted(gallery.glob("*/*.png"))))
    return path


@pytest.fixture(scope="module")
def text(program: Path, gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write "text" embeddings: the mean embedding of each class of the gallery."""
    model = load(program)
    names = sorted(folder.name for folder in gallery.iterdir())
    means = [model.embed(sorted((gallery / name).glob("*.png"))).float().mean(0) for name in names]
    path = tmp_path_factory.mktemp("text") / "text.npz"
    np.savez(path, embeddings=np.stack(means), names=np.array(names))
    return path


def test_search_ranks_an_image_of_the_index_first(index: Path, program: Path, gallery: Path) -> None:
    image = sorted(gallery.glob("*/*.png"))[7]
    result = fqvit("search", index, image, "--model", program, "--top", 3, "--json").json
    (found,) = result["results"]
    assert result["vectors"] == 200 and found["query"] == str(image)
    assert found["neighbours"][0]["name"] == str(image)
    assert len(found["neighbours"]) == 3 and abs(found["neighbours"][0]["score"] - 2**24) <= 2


def test_search_prints_a_table(index: Path, program: Path, gallery: Path) -> None:
    image = sorted(gallery.glob("*/*.png"))[3]
    done = fqvit("search", index, image, "--model", program)
    assert done.code == 0 and "cosine" in done.out and "1.0000" in done.out


def test_search_accepts_a_file_of_embeddings_as_queries(index: Path) -> None:
    result = fqvit("search", index, "--queries", index, "--top", 1, "--json").json
    same = [row["neighbours"][0]["name"] == row["query"] for row in result["results"]]
    assert len(same) == 200 and sum(same) >= 195  # a few images have equal codes


def test_search_continues_after_an_unreadable_image(index: Path, program: Path, gallery: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    done = fqvit("search", index, bad, sorted(gallery.glob("*/*.png"))[0], "--model", program, "--json")
    assert done.code == 2 and "bad.png" in done.err and "1 of 2 images" in done.err
    assert '"results": [{' in done.out


def test_search_rejects_wrong_inputs(index: Path, program: Path, classifier: Path, gallery: Path, tmp_path: Path) -> None:
    image = sorted(gallery.glob("*/*.png"))[0]
    assert_rejected(fqvit("search", index), "either images")
    assert_rejected(fqvit("search", index, image), "--model FILE.fqvit")
    assert_rejected(fqvit("search", index, image, "--model", classifier), "logits.fqvit")
    assert_rejected(fqvit("search", index, "--queries", index, "--top", 0), "--top 0")
    assert_rejected(fqvit("search", index, "--queries", index, "--output", "tokens"), "cannot search by output 'tokens'")
    assert_rejected(fqvit("search", tmp_path / "none.npy", image), "no such file")
    assert_rejected(fqvit("search", program, image, "--model", program), ".fqvit")
    other = embeddings.read(index)
    path = tmp_path / "other.safetensors"
    embeddings.write(path, embeddings.Embeddings(other.names, other.vectors, other.info, other.model, "f" * 64))
    assert_rejected(fqvit("search", path, image, "--model", program), "different programs")
    assert_rejected(fqvit("search", path, "--queries", index), "different programs")


def test_nearest_neighbours_classify_well_and_agree_with_the_float_model(program: Path, gallery: Path, queries: Path) -> None:
    result = fqvit("eval", program, "--knn", gallery, "--data", queries, "--weights", embedded_weights(), "--json").json
    assert result["images"] == 100 and result["gallery"] == 200
    assert result["top1"] > 70 and result["top5"] >= result["top1"]
    assert result["agreement"] >= 95 and abs(result["top1"] - result["float_top1"]) <= 4
    done = fqvit("eval", program, "--knn", gallery, "--data", queries)
    assert f"top-1 {result['top1']:.2f} %" in done.out


def embedded_weights() -> Path:
    from fqvit.models.load import embedded_weights as path_of

    return Path(path_of("fmnist_vit"))


def test_zero_shot_assigns_the_class_of_the_nearest_text(program: Path, text: Path, queries: Path) -> None:
    result = fqvit("eval", program, "--zero-shot", text, "--data", queries, "--json").json
    assert result["classes"] == 10 and result["top1"] > 70
    image = sorted(queries.glob("Sandal/*.png"))[0]
    shown = fqvit("classify", program, image, "--zero-shot", text, "--json").json["results"][0]["top"]
    assert len(shown) == 5 and shown[0]["name"] == "Sandal"
    assert shown[0]["score"] >= shown[1]["score"] and isinstance(shown[0]["score"], int)
    assert "cosine" in fqvit("classify", program, image, "--zero-shot", text).out


def test_wrong_embedding_options_are_rejected(
    program: Path, classifier: Path, text: Path, gallery: Path, queries: Path, tmp_path: Path
) -> None:
    image = sorted(queries.glob("*/*.png"))[0]
    short = tmp_path / "short.npz"
    np.savez(short, embeddings=np.ones((2, 5)), names=np.array(["a", "b"]))
    assert_rejected(fqvit("classify", program, image), "features.fqvit", "outputs features")
    assert_rejected(fqvit("classify", program, image, "--output", "pooled"), "--zero-shot")
    assert_rejected(fqvit("classify", program, image, "--zero-shot", short), "5 values per text embedding")
    assert_rejected(fqvit("classify", program, image, "--zero-shot", tmp_path / "no.npz"), "no such file")
    assert_rejected(fqvit("classify", classifier, image, "--zero-shot", text), "cannot search by an embedding")
    assert_rejected(fqvit("eval", program, "--knn", gallery, "--zero-shot", text, "--data", queries), "only one of them")
    assert_rejected(fqvit("eval", program, "--knn", gallery), "--data DIR")
    assert_rejected(fqvit("eval", program, "--knn", tmp_path / "no", "--data", queries), "no such folder")
    assert_rejected(fqvit("eval", program, "--knn", tmp_path, "--data", queries), "no images found")
    assert_rejected(fqvit("eval", "fmnist_vit", "--knn", gallery, "--data", queries), "Pass a .fqvit file")
    assert_rejected(fqvit("eval", program, "--zero-shot", text, "--data", queries, "--weights", "x"), "--weights")
    assert_rejected(fqvit("eval", program, "--zero-shot", text, "--data", queries, "--heads", "3"), "--heads")
    assert_rejected(fqvit("eval", program, "--knn", gallery, "--data", queries, "--backend", "reference"), "--backend")
    assert_rejected(fqvit("eval", program, "--knn", gallery, "--data", queries, "--device", "cuda"), "--device")
    assert_rejected(fqvit("eval", program, "--knn", "gallery.parquet", "--data", queries), "gallery.parquet", "--classes FILE")
    assert_rejected(fqvit("eval", classifier, "--size", "28"), "a program has fixed settings", "--size")
    assert_rejected(fqvit("eval", classifier, "--output", "embedding"), "--knn or --zero-shot")
