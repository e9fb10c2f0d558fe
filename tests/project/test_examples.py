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

import pytest
from PIL import Image

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


def test_the_page_lists_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[{path.name}]({path.name})" in page for path in EXAMPLES.iterdir() if path.name != "README.md")


def test_run_names_the_class_of_each_image(program: Path, image: Path) -> None:
    assert run("run.py", program, image).startswith(f"{image}: ")


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
