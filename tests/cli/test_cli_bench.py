"""Test the output structure and the errors of `fqvit bench`, but not the measured times."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from fqvit.bench import peers
from fqvit.runtime.native import instruction_sets
from tests.cli.command_line import assert_rejected, fqvit

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "fmnist_vit.fqvit"
    done = fqvit("quantize", "--images", 16, "-o", path)
    assert done.code == 0, done.err
    return path


def test_bench_compares_a_program_with_torch(program: Path) -> None:
    result = fqvit("bench", program, "--against", "torch", "--rounds", 2, "--json").json
    (setting,) = result["settings"]
    assert [row["name"] for row in setting["results"]] == ["fqvit", "torch fp32"]
    for row in setting["results"]:
        assert row["runs"] >= 2 and 0 < row["cpu_min"] <= row["cpu_median"] and row["peak_mb"] > 10
    assert result["model"] == "fmnist_vit" and result["recipe"] == "fqvit" and result["skipped"] == []
    assert result["instruction_set"] == instruction_sets()[0] and result["peak_gmacs"] > 0.1
    assert result["macs"]["fqvit"] > 20_000_000
    ours, peer = setting["results"]
    assert 0 < ours["peak_share"] < 1 and peer["peak_share"] is None
    assert result["peer_weights"].startswith("fmnist_vit.safetensors")  # the embedded weights


def test_every_combination_of_threads_and_batch_is_measured(program: Path) -> None:
    words = ("--against", "none", "--batch", "1,3", "--threads", "2,1", "--rounds", 1, "--json")
    result = fqvit("bench", program, *words).json
    settings = [(s["threads"], s["batch"], s["ratio_of"]) for s in result["settings"]]
    assert settings == [(2, 1, "wall"), (2, 3, "wall"), (1, 1, "cpu"), (1, 3, "cpu")]
    assert all(len(s["results"]) == 1 and s["results"][0]["ratio"] == 1.0 for s in result["settings"])


def test_bench_with_the_option_ops_lists_every_op(program: Path) -> None:
    done = fqvit("bench", program, "--against", "none", "--rounds", 1, "--ops")
    assert done.code == 0, done.err
    assert "1 thread, batch 1" in done.out and "GMAC/s" in done.out and "layernorm" in done.out
    assert f", {instruction_sets()[0]}; 1 round." in done.out and "of peak" in done.out
    result = fqvit("bench", program, "--against", "none", "--rounds", 1, "--ops", "--json").json["by_op"]
    assert sum(kind["count"] for kind in result["kinds"]) == len(result["ops"]) > 20
    assert sum(op["macs"] for op in result["ops"]) > 20_000_000


def test_a_missing_runtime_is_reported_and_the_others_are_measured(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "installed", lambda module: module not in ("openvino", "onnxruntime"))
    done = fqvit("bench", program, "--against", "openvino", "--rounds", 1)
    assert done.code == 0 and "fqvit" in done.out
    assert "Skipped openvino fp32: openvino not installed: pip install openvino" in done.out


def test_a_failed_measurement_process_is_reported_in_one_line(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "FQVIT_ISA", "abacus")
    assert_rejected(fqvit("bench", program, "--against", "none", "--rounds", 1), "abacus")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--against", "tensorrt"), "tensorrt"),
        (("--batch", "0"), "--batch 0"),
        (("--batch", "1,x"), "--batch 1,x"),
        (("--threads", ""), "--threads"),
        (("--threads", "1e3"), "--threads 1e3"),
        (("--rounds", "0"), "--rounds 0"),
        (("--weights", "nowhere.safetensors", "--rounds", "1", "--against", "torch"), "nowhere.safetensors"),
    ],
)
def test_invalid_options_are_reported_in_one_line(program: Path, words: tuple[str, ...], said: str) -> None:
    assert_rejected(fqvit("bench", program, *words), said)


def test_a_missing_program_is_rejected(tmp_path: Path) -> None:
    assert_rejected(fqvit("bench", tmp_path / "none.fqvit"), "none.fqvit")


@pytest.mark.parametrize("library", ["onnxruntime", "openvino"])
def test_other_runtimes_are_measured_if_installed(program: Path, library: str) -> None:
    here, _ = peers.choose((library,))
    if not here:
        pytest.skip(f"needs {library}")
    result = fqvit("bench", program, "--against", library, "--rounds", 1, "--json").json
    assert [row["name"] for row in result["settings"][0]["results"]] == ["fqvit", *(peer.name for peer in here)]
    assert result["warnings"] == []


def test_other_runtimes_read_the_float_model_from_an_onnx_file(program: Path, tmp_path: Path) -> None:
    for library in ("onnx", "onnxruntime"):
        pytest.importorskip(library)
    import fqvit as package
    from fqvit.bench.prepare import export

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracing exporter is deprecated; prepare.py explains why it is used
        file = export(package.load_model("fmnist_vit"), tmp_path)
    words = ("--against", "torch,onnxruntime", "--weights", file, "--rounds", 1, "--json")
    result = fqvit("bench", program, *words).json
    assert [row["name"] for row in result["settings"][0]["results"]][:2] == ["fqvit", "onnxruntime fp32"]
    assert result["skipped"][0]["peer"] == "torch fp32" and "needs a checkpoint" in result["skipped"][0]["reason"]
    assert result["peer_weights"] == "model.onnx" and result["warnings"] == []
