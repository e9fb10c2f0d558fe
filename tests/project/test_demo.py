"""Test that `make demo` prints its table. The models are untrained and the images are few."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from fqvit.models import embedded
from fqvit.models.load import build
from fqvit.models.zoo import find


def test_the_demo_prints_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # monkeypatch restores it after the test; the script would not
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("demo", root / "scripts" / "demo.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    for name in embedded.MODELS:
        save_file(dict(build(find(name).config).state_dict()), tmp_path / f"{name}.safetensors")
    monkeypatch.setattr("fqvit.models.load.embedded_weights", lambda name: tmp_path / f"{name}.safetensors")
    few = embedded.calibration_images()[:8]
    monkeypatch.setattr(demo, "calibration_images", lambda: few)
    monkeypatch.setattr(demo, "test_images", lambda: (few, np.zeros(8, np.int64)))
    monkeypatch.chdir(tmp_path)
    demo.main()
    said = capsys.readouterr().out
    assert "fmnist_vit" in said and "fmnist_swin" in said and "agreement" in said
    assert (tmp_path / "build" / "demo" / "fmnist_swin.fqvit").exists()
