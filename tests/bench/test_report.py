"""Tests of benchmark reports (tables, CSV rows, JSON summaries) on made-up timings."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fqvit.bench import ops, report, worker
from fqvit.bench.measure import Measured, Note
from fqvit.bench.ops import OpTime
from fqvit.bench.peers import Skipped
from fqvit.bench.rounds import Timing, differing_logits
from fqvit.runtime.native import Peak

PEAK = Peak("avx2", 40.0)


def timing(name: str, threads: int = 1, batch: int = 2, cpu: float = 0.004, wall: float = 0.002) -> Timing:
    return Timing(name, threads, batch, [cpu * 3, cpu, cpu * 0.5], [wall * 3, wall, wall * 0.5], 50_000_000, 0.1)


@pytest.fixture
def found() -> Measured:
    one = [timing("fqvit"), timing("torch fp32", cpu=0.008, wall=0.02)]
    two = [timing("fqvit", threads=2), timing("torch fp32", threads=2, cpu=0.008, wall=0.02)]
    notes = {"fqvit": Note(True, "avx2 kernels"), "torch fp32": Note(None, "2.13, eager")}
    skipped = [Skipped("openvino fp32", "pip install openvino")]
    return Measured([one, two], notes, skipped, [], "random weights", PEAK, {"fqvit": 10_000_000})


def test_times_are_per_image_and_ratios_use_cpu_time_for_one_thread_and_wall_time_for_several(found: Measured) -> None:
    one, two = (report.rows(timings) for timings in found.timings)
    assert (one[0].cpu_median, one[0].cpu_min, one[0].wall_median, one[0].wall_min) == (2.0, 1.0, 1.0, 0.5)
    assert [row.ratio for row in one] == [1.0, 2.0]  # CPU time for one thread
    assert [row.ratio for row in two] == [1.0, 10.0]  # wall time for several
    assert one[0].peak_mb == 50.0 and one[0].runs == 3


def test_the_share_of_the_peak_counts_all_threads_and_is_given_for_programs_only(found: Measured) -> None:
    one, two = (report.rows(timings, found) for timings in found.timings)
    assert [row.peak_share for row in one] == [0.125, None]  # 10 million MACs in 2 ms of CPU time: 5 of 40 GMAC/s
    assert [row.peak_share for row in two] == [0.125, None]  # 10 million MACs in 1 ms of wall time, on two threads
    assert "12 %" in report.text(found)
    assert "40 billion per second and thread that the avx2 micro-kernel" in report.text(found)
    result = report.summary(found)
    assert (result["instruction_set"], result["peak_gmacs"], result["macs"]) == ("avx2", 40.0, {"fqvit": 10_000_000})


def test_values_that_the_system_does_not_report_are_left_out(found: Measured) -> None:
    """Windows reports no peak memory, and counts CPU time in units longer than a run."""
    found.timings[0][0].memory = None
    assert report.rows(found.timings[0])[0].peak_mb is None and json.loads(json.dumps(report.summary(found), allow_nan=False))
    assert " - " in report.text(found)
    assert [report.clock(threads, coarse) for threads, coarse in ((1, False), (1, True), (2, False))] == ["cpu", "wall", "wall"]


def test_peak_memory_is_none_if_neither_proc_nor_the_resource_module_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (worker.peak_memory() or 0) > 10_000_000
    monkeypatch.setattr("builtins.open", _no_file)
    assert (worker.peak_memory() or 0) > 10_000_000
    monkeypatch.setitem(sys.modules, "resource", None)
    assert worker.peak_memory() is None


def _no_file(*_: object) -> None:
    raise FileNotFoundError


def test_the_text_has_one_table_per_setting_and_the_skipped_peers(found: Measured) -> None:
    text = report.text(found)
    assert "1 thread, batch 2\n" in text and "2 threads, batch 2\n" in text
    assert "CPU ratio" in text and "wall ratio" in text
    assert "torch fp32: 2.13, eager." in text and "Skipped openvino fp32: pip install openvino" in text
    assert "random weights" in text


def test_the_summary_is_json_with_the_same_values(found: Measured) -> None:
    result = json.loads(json.dumps(report.summary(found), allow_nan=False))
    assert [(s["threads"], s["batch"], s["ratio_of"]) for s in result["settings"]] == [(1, 2, "cpu"), (2, 2, "wall")]
    ours, peer = result["settings"][0]["results"]
    assert ours["name"] == "fqvit" and ours["exact"] is True and peer["exact"] is None and peer["ratio"] == 2.0
    assert result["skipped"] == [{"peer": "openvino fp32", "reason": "pip install openvino"}]
    assert isinstance(result["machine"]["cpu"], str)


def test_float_peers_with_different_logits_are_found() -> None:
    timings = [timing(name) for name in "abcd"]
    for each, first in zip(timings, ([1.0, -2.0], [1.001, -2.0], [1.5, -2.0], [9.0, 9.0])):
        each.first = first
    assert differing_logits(timings, ["a", "b", "c"]) == {"c": pytest.approx(0.25)}
    timings[1].first = [1.0]
    assert set(differing_logits(timings, ["a", "b"])) == {"b"}


TIMES = [
    OpTime("patch", "linear", 0.002, 20_000_000),
    OpTime("norm", "layernorm", 0.001, 0),
    OpTime("fc1", "linear", 0.001, 30_000_000),
    OpTime("tiny", "matmul", 1e-9, 1000),
]


def test_op_times_are_summed_by_kind_slowest_first() -> None:
    assert [(op.tag, op.name, op.macs) for op in ops.by_tag(TIMES)] == [
        ("linear", "2", 50_000_000),
        ("layernorm", "1", 0),
        ("matmul", "1", 1000),
    ]


def test_speeds_are_compared_with_the_peak() -> None:
    text = ops.text(TIMES, PEAK)
    assert "100 % of peak is 40.0 GMAC/s" in text and "75 %" in text  # fc1 reaches 30 GMAC/s
    assert "layernorm" in ops.text([TIMES[1]], PEAK)


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch")
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "speed.py"
    monkeypatch.syspath_prepend(path.parent)  # as when the script runs
    spec = importlib.util.spec_from_file_location("speed", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_results_are_appended_below_one_header(
    speed: ModuleType, found: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "RESULTS", tmp_path / "speed.csv")
    for _ in range(2):
        speed.append("deit_tiny_patch16_224", "real", ("fqvit",), 3, found)
    with (tmp_path / "speed.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 8 and tuple(lines[0]) == speed.FIELDS
    assert [line["peer"] for line in lines[:2]] == ["recipe fqvit", "torch fp32"]
    assert lines[1]["ratio"] == "2.000" and lines[3]["ratio"] == "10.000" and lines[0]["model"] == "deit_tiny_patch16_224"
    assert [(line["instruction set"], line["share of peak"]) for line in lines[:2]] == [("avx2", "0.125"), ("avx2", "")]


def test_random_checkpoints_are_reproducible_and_within_three_sigma(speed: ModuleType) -> None:
    from fqvit.models import zoo
    from fqvit.models.load import build

    state = build(zoo.find("fmnist_swin").config).state_dict()
    first, second = (sys.modules["speed_models"].clipped_weights(state) for _ in range(2))
    assert all((first[key] == second[key]).all() for key in first)
    weight = first["layers.0.blocks.0.mlp.fc1.weight"]
    assert float(weight.abs().max()) <= 3.001 * weight.shape[1] ** -0.5
    assert abs(float(first["norm.weight"].mean()) - 1) < 0.1
