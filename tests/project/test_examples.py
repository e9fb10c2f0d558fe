"""Every example in examples/ runs as examples/README.md describes."""

from __future__ import annotations

import http.client
import importlib.util
import io
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fqvit as fqvit_package
from fqvit.models import embedded
from tests.cli.command_line import fqvit

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the program that quantize.py writes."""
    out = tmp_path_factory.mktemp("examples") / "vit.fqvit"
    said = run("quantize.py", out)
    assert "on 1000 test images" in said and float(said.split("top-1 ")[1].split(" %")[0]) > 90
    return out


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "shoe.png"
    Image.fromarray(embedded.test_images()[0][0, :, :, 0]).save(path)
    return path


def test_the_readme_lists_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[{path.name}]({path.name})" in page for path in EXAMPLES.iterdir() if path.name != "README.md")


def test_run_names_the_class_of_each_image(program: Path, image: Path) -> None:
    assert run("run.py", program, image).startswith(f"{image}: ")


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a program that outputs an embedding."""
    path = tmp_path_factory.mktemp("features") / "features.fqvit"
    assert fqvit("quantize", "fmnist_vit", "--images", 16, "--features", "pooled", "-o", path).code == 0
    return path


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one sub-folder of images per class."""
    root = tmp_path_factory.mktemp("gallery")
    images, labels = embedded.test_images()
    for i in range(40):
        folder = root / str(labels[i])
        folder.mkdir(exist_ok=True)
        Image.fromarray(images[i, :, :, 0]).save(folder / f"{i:02}.png")
    return root


def test_near_duplicates_are_listed(features: Path, gallery: Path, tmp_path: Path) -> None:
    for path in sorted(gallery.glob("*/*.png"))[:3]:
        image = Image.open(path)
        image.save(tmp_path / path.name)
        image.point(lambda value: min(255, value + 1)).save(tmp_path / f"copy_{path.name}")
    pairs = [line.split()[1:] for line in run("near_duplicates.py", features, tmp_path, 0.99).splitlines()]
    assert {(Path(a).name, Path(b).name) for a, b in pairs} >= {
        (path.name, f"copy_{path.name}") for path in sorted(gallery.glob("*/*.png"))[:3]
    }


def test_images_are_found_by_text(features: Path, gallery: Path, tmp_path: Path) -> None:
    paths = sorted(gallery.glob("*/*.png"))
    images = fqvit_package.load(features).embed(paths)
    images.save(tmp_path / "images.safetensors")
    np.savez(tmp_path / "text.npz", embeddings=images.float()[:2], names=np.array(["first", "second"]))
    lines = run("text_search.py", tmp_path / "images.safetensors", tmp_path / "text.npz").splitlines()
    assert lines[0] == "first" and str(paths[0]) in lines[1]
    assert lines[6] == "second" and str(paths[1]) in lines[7]


def test_the_nearest_example_decides_the_class(features: Path, gallery: Path) -> None:
    image = sorted(gallery.glob("*/*.png"))[5]
    assert run("knn.py", features, gallery, image).startswith(f"{image}: {image.parent.name} (cosine 1.000")


def test_the_recipe_can_be_used(tmp_path: Path) -> None:
    done = fqvit("quantize", "--images", 16, "--recipe", EXAMPLES / "recipe.toml", "-o", tmp_path / "x.fqvit")
    assert done.code == 0, done.err


def test_golden_vectors_are_checked_op_by_op(program: Path, tmp_path: Path) -> None:
    assert fqvit("export", program, "--to", "vectors", "-o", tmp_path / "golden").code == 0
    assert "all their values are equal" in run("golden.py", tmp_path / "golden")


def test_the_server_classifies_images_and_rejects_other_requests(program: Path, image: Path) -> None:
    spec = importlib.util.spec_from_file_location("serve", EXAMPLES / "serve.py")
    assert spec is not None and spec.loader is not None
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    with serve.server(str(program), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        with urllib.request.urlopen(address, image.read_bytes()) as reply:
            assert json.load(reply)["name"]
        with pytest.raises(urllib.error.HTTPError) as rejected:
            urllib.request.urlopen(address, io.BytesIO(b"not an image").read())
        assert rejected.value.code == 400
        rejected.value.close()
        for length in (-1, 10**9, "many"):  # announced but not sent: the server must not wait for the body
            connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
            connection.request("POST", "/", headers={"Content-Length": str(length)})
            assert connection.getresponse().status == 413
            connection.close()
        server.shutdown()
