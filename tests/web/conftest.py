"""Use a small page in tests, because only `make wasm web` builds the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fqvit.web import page


@pytest.fixture
def small_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "built" / "index.html"
    path.parent.mkdir()
    path.write_text('<html><meta name="fqvit-model" content=""><p>é</p></html>', encoding="utf-8")
    monkeypatch.setattr(page, "page_path", lambda: path)
    return path
