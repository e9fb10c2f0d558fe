"""The documentation site builds in strict mode, loads nothing from the network, and its generated pages are current."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["modules.md", "cli.md"])
def test_generated_pages_are_current(generator: ModuleType, name: str) -> None:
    committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert committed == generator.PAGES[name](), f"docs/reference/{name} is out of date. Run `make docs` and commit the page."


def test_every_page_is_generated_by_a_tested_function(generator: ModuleType) -> None:
    assert sorted(generator.PAGES) == ["cli.md", "modules.md"]


def test_the_site_builds_in_strict_mode_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="needs the extra `docs`")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))  # and the page for missing addresses
    loaded = re.compile(r"<(?:script|link|img|iframe|source)[^>]+(?:src|href)=\"?(?:https?:)?//[^\" >]+")
    found = {str(page.relative_to(tmp_path)): loaded.findall(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: urls for name, urls in found.items() if urls} == {}
