"""Run the tests of the npm package and of the page with node: `make wasm web` builds what they need.

Skipped, with the reason, if node, its packages, the built page or Chromium is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.web.fixtures import write_fixtures

WEB = Path(__file__).parent.parent.parent / "web"
NODE = shutil.which("node")


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if NODE is None:
        pytest.skip("needs node 20 or later")
    if not (WEB / "package" / "dist" / "node.js").is_file() or not (WEB / "node_modules").is_dir():
        pytest.skip("needs the built npm package (make wasm web)")
    folder = tmp_path_factory.mktemp("fixtures")
    write_fixtures(folder)
    return folder


def run(test: str, fixtures: Path, **more: str) -> None:
    assert NODE is not None
    environment = {**os.environ, "FQVIT_FIXTURES": str(fixtures), **more}
    done = subprocess.run(
        [NODE, "--test", f"test/{test}"], check=False, cwd=WEB, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_the_npm_package_gives_the_same_bits_as_python(fixtures: Path) -> None:
    run("package.test.mjs", fixtures)


def test_the_page_works_in_chromium(fixtures: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium")
    run("page.test.mjs", fixtures, FQVIT_CHROMIUM=chromium)
