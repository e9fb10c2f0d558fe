"""The notebook docs/notebooks/first-model.ipynb: committed without outputs, and every cell runs in an empty folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "first-model.ipynb"
SECONDS_PER_CELL = 300  # the whole notebook takes about a minute on an idle machine
PICTURES = {"image/png", "image/svg+xml"}


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = code_cells()
    assert 12 <= len(cells) <= 18
    assert [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []


def test_readme_and_site_link_the_notebook() -> None:
    links = {"README.md": "docs/notebooks/first-model.ipynb", "mkdocs.yml": "notebooks/index.md"}
    links |= {"docs/notebooks/index.md": "(first-model.ipynb)", "docs/index.md": "notebooks/index.md"}
    assert [page for page, link in links.items() if link not in (ROOT / page).read_text(encoding="utf-8")] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of Jupyter's packages
def test_every_cell_runs_and_there_are_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra `dev`")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra `dev`")
    pytest.importorskip("ipykernel", reason="needs the extra `dev`")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=SECONDS_PER_CELL, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []
    assert sum(bool(PICTURES & set(output.get("data", {}))) for output in outputs) >= 3
    for name in ("vit.fqvit", "vit4.fqvit", "vit.onnx", "vit_c/model.c", "README.md"):
        assert (tmp_path / name).exists(), name
