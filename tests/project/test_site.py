"""The documentation site: it builds in strict mode, needs no network and fits a phone; its generated pages are current."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOADED = re.compile(r"<(?:script|link|img|iframe|source)[^>]+(?:src|href)=\"?(?:https?:)?//[^\" >]+")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site in strict mode and return its folder."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_generator_writes_three_pages(generator: ModuleType) -> None:
    assert sorted(generator.PAGES) == ["c-api.md", "cli.md", "modules.md"]


def test_every_function_and_type_of_the_c_header_has_a_section(generator: ModuleType) -> None:
    header = re.sub(r"/\*.*?\*/", "", generator.C_HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    declared = re.findall(r"\b(fqvit_\w+)\(", header) + re.findall(r"\} (fqvit_\w+);", header)
    page = generator.PAGES["c-api.md"]()
    assert len(declared) > 15 and [name for name in declared if f"\n## {name}\n" not in page] == []
    assert re.findall(r"^\| `[^`]*` \|  \|$", page, re.MULTILINE) == []  # every member is explained


@pytest.mark.parametrize("name", ["c-api.md", "cli.md", "modules.md"])
def test_generated_pages_are_current(generator: ModuleType, name: str) -> None:
    committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert committed == generator.PAGES[name](), f"docs/reference/{name} is out of date. Run `make docs` and commit the page."


def test_every_page_is_built_and_loads_nothing_from_the_network(site: Path) -> None:
    pages = [page.with_suffix(".html").relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if not (site / page).exists()] == []
    found = {str(page): LOADED.findall((site / page).read_text(encoding="utf-8")) for page in pages}
    assert {name: urls for name, urls in found.items() if urls} == {}


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_the_screen_in_a_browser(site: Path, width: int, scheme: str) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=options)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        for name in ("index", "architecture", "reference/recipes", "reference/api", "reference/cli", "explanation/numerics"):
            page.goto((site / f"{name}.html").as_uri())
            page.wait_for_function("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
            overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(overflow) <= 0, name
        browser.close()
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
