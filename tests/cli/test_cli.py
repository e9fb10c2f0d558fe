"""Test the commands: their output, their errors, and the behavior of the process."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fqvit.models import embedded
from fqvit.models.load import build
from tests.cli.command_line import assert_rejected, fqvit


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of an untrained fmnist_vit."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "fmnist_vit.safetensors"
    save_file(dict(build(embedded.FMNIST_VIT_CONFIG).state_dict()), path)
    return path


@pytest.fixture(scope="module")
def program(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    names = folder / "names.json"
    names.write_text(json.dumps(list(embedded.FMNIST_CLASSES)))
    path = folder / "model.fqvit"
    done = fqvit("quantize", "fmnist_vit", "--weights", weights, "--images", 16, "--classes", names, "-o", path)
    assert done.code == 0, done.err
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 120 of the embedded test images, one sub-folder per class."""
    root = tmp_path_factory.mktemp("pictures")
    images, labels = embedded.test_images()
    for i in range(120):
        folder = root / str(labels[i])
        folder.mkdir(exist_ok=True)
        Image.fromarray(images[i, :, :, 0]).save(folder / f"{i:03}.png")
    return root


@pytest.fixture
def embedded_asset(monkeypatch: pytest.MonkeyPatch, weights: Path) -> None:
    monkeypatch.setattr("fqvit.models.load.embedded_weights", lambda name: weights)


# Results


def test_version_prints_the_version_of_the_package() -> None:
    done = fqvit("--version")
    assert (done.code, done.out.split()) == (0, ["fqvit", version("fqvit")])


def test_models_lists_every_model_with_its_size() -> None:
    listed = fqvit("models", "--json").json["models"]
    assert {"fmnist_vit", "deit_tiny_patch16_224", "swin_base_patch4_window12_384"} <= {row["name"] for row in listed}
    text = fqvit("models").out
    assert all(row["name"] in text for row in listed)
    tiny = next(row for row in listed if row["name"] == "deit_tiny_patch16_224")
    assert (tiny["input"], tiny["resize"], tiny["aliases"]) == ([224, 224, 3], 256, ["deit_tiny"])


def test_models_counts_the_parameters_of_the_torch_module() -> None:
    from fqvit.cli.commands.models import parameters

    vit = embedded.FMNIST_VIT_CONFIG
    pooled = replace(vit, prefix=0, pool="mean", norm_first=False, norm_last=True)
    wide_window = replace(embedded.FMNIST_SWIN_CONFIG, window=9)  # larger than the second stage, which is then one window
    for config in (vit, replace(vit, prefix=2), pooled, embedded.FMNIST_SWIN_CONFIG, wide_window):
        assert parameters(config) == sum(p.numel() for p in build(config).parameters()), config


@pytest.mark.usefixtures("embedded_asset")
def test_quantize_without_arguments_writes_the_embedded_model_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fqvit("quantize", "--images", 8, "--save-calibration", "calibration.json")
    assert done.code == 0, done.err
    assert sorted(os.listdir(tmp_path)) == ["calibration.json", "fmnist_vit.fqvit"]
    assert "0 floating-point ops" in done.out and done.err == ""
    from fqvit.quant.calibration import Calibration

    assert Calibration.from_json(Path("calibration.json").read_text()).images == 8
    assert fqvit("eval", "fmnist_vit.fqvit", "--limit", 10, "--json").json["images"] == 10
    compared = fqvit("compare", "fmnist_vit.fqvit", "--limit", 2)
    assert compared.code == 0 and compared.err == "" and "blocks.3.attn.softmax" in compared.out


def test_quantize_prints_one_json_object_and_is_deterministic(weights: Path, pictures: Path, tmp_path: Path) -> None:
    words = ("quantize", "--weights", weights, "--calib", pictures, "--images", 12, "--bits", "8/8/8", "--k", 2, "--json", "-o")
    first, second = fqvit(*words, tmp_path / "a.fqvit"), fqvit(*words, tmp_path / "b.fqvit")
    result = first.json
    assert len(first.out.splitlines()) == 1
    assert (result["model"], result["bits"], result["calibration_images"]) == ("fmnist_vit", "8/8/8", 12)
    assert result["fingerprint"] == second.json["fingerprint"]
    assert result["bytes"] == (tmp_path / "a.fqvit").stat().st_size


def test_quantize_accepts_recipe_files_and_features(weights: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('base = "fq-vit"\nimages = 4\n[sites."blocks.*.mlp.act"]\nbits = 6\n')
    out = tmp_path / "f.fqvit"
    done = fqvit("quantize", "--weights", weights, "--recipe", recipe, "--features", "pooled", "-o", out, "--json")
    assert (done.json["recipe"], done.json["output"]) == ("mine", "pooled")
    sites = fqvit("inspect", out, "--sites", "--json").json["sites"]
    assert {row["bits"] for row in sites if row["site"].endswith("mlp.act")} == {6}
    assert_rejected(fqvit("eval", out), "features (pooled)")
    assert_rejected(fqvit("classify", out, "x.png"), "features (pooled)")


def test_eval_measures_programs_and_float_models_on_a_folder(program: Path, weights: Path, pictures: Path) -> None:
    integer = fqvit("eval", program, "--data", pictures, "--json").json
    exact = fqvit("eval", "fmnist_vit", "--weights", weights, "--data", pictures, "--json").json
    assert {"top1", "top5", "images", "seconds", "skipped", "model", "backend"} <= set(integer)
    assert (integer["images"], integer["backend"], exact["backend"]) == (120, "native", "float")
    by_reference = fqvit("eval", program, "--data", pictures, "--backend", "reference", "--json").json
    assert by_reference["backend"] == "reference"
    assert (by_reference["top1"], by_reference["top5"]) == (integer["top1"], integer["top5"])
    assert abs(integer["top1"] - exact["top1"]) < 10
    assert 0 <= exact["top1"] <= exact["top5"] <= 100
    assert "top-1" in fqvit("eval", program, "--data", pictures, "--limit", 10).out


def test_one_unreadable_image_is_skipped_and_counted(program: Path, pictures: Path, tmp_path: Path) -> None:
    from fqvit.ir.program import Program
    from fqvit.runtime.reference import run

    images, labels = embedded.test_images()
    right = run(Program.load(program), images[:120]).argmax(-1) == labels[:120]
    for i in range(120):
        (tmp_path / str(labels[i])).mkdir(exist_ok=True)
        (tmp_path / str(labels[i]) / f"{i:03}.png").symlink_to(pictures / str(labels[i]) / f"{i:03}.png")
    (tmp_path / "3" / "broken.png").write_bytes(b"\x89PNG nothing")
    done = fqvit("eval", program, "--data", tmp_path, "--json")
    assert "fqvit: warning: skipped 1 image of 121" in done.err and "broken.png" in done.err
    assert len(done.err.splitlines()) == 1
    assert (done.json["skipped"], done.json["images"]) == (1, 120)
    assert done.json["top1"] == pytest.approx(100 * right.mean(), abs=1e-3)


def test_classify_lists_the_five_best_classes(program: Path, pictures: Path) -> None:
    files = sorted(pictures.rglob("*.png"))[:2]
    results = fqvit("classify", program, *files, "--json").json["results"]
    assert [row["image"] for row in results] == list(map(str, files))
    best = results[0]["top"]
    assert len(best) == 5 and best[0]["name"] == embedded.FMNIST_CLASSES[best[0]["class"]]
    assert [row["logit"] for row in best] == sorted((row["logit"] for row in best), reverse=True)
    text = fqvit("classify", program, *files).out
    assert best[0]["name"] in text and "logit" in text


def test_classify_continues_after_an_unreadable_image_and_fails_at_the_end(
    program: Path, pictures: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_text("not a picture")
    done = fqvit("classify", program, bad, next(pictures.rglob("*.png")))
    assert done.code == 2 and "logit" in done.out
    assert "bad.jpg: not an image" in done.err and "1 of 2 images cannot be read" in done.err
    assert_rejected(fqvit("classify", program, bad), "bad.jpg: not an image")  # a single image is reported once


def test_inspect_prints_a_summary_and_the_requested_lists(program: Path) -> None:
    done = fqvit("inspect", program)
    for words in ("0 floating-point ops, 0 float buffers", "fingerprint", "16 calibration images", "No overflow", "tightest"):
        assert words in done.out
    whole = fqvit("inspect", program, "--sites", "--ops", "--proofs", "--json").json
    assert whole["float_ops"] == 0 and len(whole["ops"]) == whole["op_count"] and len(whole["proofs"]) == whole["proof_count"]
    assert sum(whole["bytes_by_kind"].values()) == whole["bytes"]
    text = fqvit("inspect", program, "--sites", "--ops", "--proofs").out
    assert "blocks.0.attn.softmax" in text and "row_codes" in text and "attend" in text


def test_compare_lists_sites_worst_first(program: Path, weights: Path, pictures: Path) -> None:
    found = fqvit("compare", program, "--weights", weights, "--data", pictures, "--limit", 4, "--json").json
    noise = [row["integer_db"] for row in found["sites"]]
    assert found["images"] == 4 and noise == sorted(noise) and "head" in {row["site"] for row in found["sites"]}


def test_class_names_are_read_from_pairs_and_from_lines(tmp_path: Path) -> None:
    from fqvit.cli.inputs import Classes, read_classes

    (tmp_path / "pairs.json").write_text('[["n01", "tench"], ["n02", "goldfish"]]')
    (tmp_path / "lines.txt").write_text("tench\r\ngoldfish\n")
    assert read_classes(tmp_path / "pairs.json") == Classes(["tench", "goldfish"], ["n01", "n02"])
    assert read_classes(tmp_path / "lines.txt") == Classes(["tench", "goldfish"], [])
    (tmp_path / "marked.txt").write_text("tench\ngoldfish\n", encoding="utf-8-sig")  # with a byte order mark
    assert read_classes(tmp_path / "marked.txt") == Classes(["tench", "goldfish"], [])


# Errors


def test_files_that_are_not_programs_are_rejected(program: Path, weights: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.fqvit"
    data = bytearray(program.read_bytes())
    data[-100] ^= 1
    damaged.write_bytes(data)
    short = tmp_path / "short.fqvit"
    short.write_bytes(program.read_bytes()[:1000])
    for words in (("inspect",), ("classify", "x.png"), ("eval",), ("compare",)):
        command, rest = words[0], words[1:]
        assert_rejected(fqvit(command, tmp_path / "none.fqvit", *rest), "no such file")
        if command != "eval":  # eval measures the float model instead
            assert_rejected(fqvit(command, weights, *rest), "not a quantized program")
        assert_rejected(fqvit(command, damaged, *rest), "damaged")
        assert_rejected(fqvit(command, short, *rest), "truncated")
    assert_rejected(fqvit("eval", "nowhere.safetensors"), "no such file")


def test_unknown_names_and_invalid_options_are_rejected_with_a_hint() -> None:
    assert_rejected(fqvit("quantize", "deit_tinny"), "not a name that fqvit knows", "deit_tiny")
    assert_rejected(fqvit("eval", "deit_tinny"), "not a name that fqvit knows", "deit_tiny")
    assert_rejected(fqvit("quantize", "--recipe", "fq_vit"), "no such recipe", "fqvit", "fq-vit")
    assert_rejected(fqvit("quantize", "--recipe", "none.toml"), "cannot be read")
    assert_rejected(fqvit("quantize", "--bits", "8/8"), "8/8/4")
    assert_rejected(fqvit("quantize", "--bits", "8/8/16"), "from 2 to 8")
    assert_rejected(fqvit("quantize", "--images", 0), "at least 1")
    assert_rejected(fqvit("quantize", "--k", 9), "0 to 8")


def test_missing_inputs_are_named_with_the_remedy(program: Path, weights: Path, deit: Path) -> None:
    assert_rejected(fqvit("quantize", "deit_tiny"), "no weights given", "--weights")
    assert_rejected(fqvit("eval", "deit_tiny"), "no weights given", "--weights")
    assert_rejected(fqvit("quantize", "--weights", "none.safetensors"), "no such file")
    assert_rejected(fqvit("quantize", "deit_tiny", "--weights", "none.safetensors"), "no such file")
    assert_rejected(fqvit("quantize", "deit_tiny", "--weights", deit), "no images given", "--calib")
    assert_rejected(fqvit("eval", "deit_tiny", "--weights", deit), "no images given", "--data")


@pytest.fixture(scope="module")
def deit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of a model that is not embedded: DeiT-Tiny with two classes."""
    from fqvit.models.zoo import find

    path = tmp_path_factory.mktemp("deit") / "deit.safetensors"
    config = replace(find("deit_tiny").config, classes=2)
    save_file(dict(build(config).state_dict()), path)
    return path


def test_image_folders_are_checked(program: Path, weights: Path, pictures: Path, tmp_path: Path) -> None:
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    (broken / "0").mkdir(parents=True)
    (broken / "0" / "a.png").write_text("nothing")
    for words in (("quantize", "--weights", weights, "--calib"), ("eval", program, "--data")):
        assert_rejected(fqvit(*words, tmp_path / "none"), "no such folder")
        assert_rejected(fqvit(*words, program), "a file, expected a folder")
        assert_rejected(fqvit(*words, empty), "no ")
        assert_rejected(fqvit(*words, broken), "a.png")
    assert_rejected(fqvit("compare", program, "--weights", weights, "--data", empty), "no images found")
    assert_rejected(fqvit("eval", program, "--data", pictures / "0"), "no class sub-folders")
    assert_rejected(fqvit("eval", program, "--data", pictures, "--limit", 0), "at least 1")


def test_unwritable_outputs_are_rejected_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_rejected(fqvit("quantize", "-o", tmp_path / "none" / "x.fqvit"), "no such folder")
    assert_rejected(fqvit("quantize", "-o", tmp_path), "is a folder")
    assert_rejected(fqvit("quantize", "--save-calibration", tmp_path / "none" / "x.json"), "no such folder")
    (tmp_path / "old.fqvit").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or Path(path).is_dir())
    assert_rejected(fqvit("quantize", "-o", tmp_path / "old.fqvit"), "exists and is not writable")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert_rejected(fqvit("quantize", "-o", tmp_path / "x.fqvit"), "is not writable")


def test_no_command_overwrites_its_inputs(program: Path, weights: Path, tmp_path: Path) -> None:
    mine, names = tmp_path / "mine.safetensors", tmp_path / "names.json"
    mine.write_bytes(weights.read_bytes())
    names.write_text("[]")
    (tmp_path / "link").symlink_to(program)
    before = program.read_bytes()
    for words in (
        ("export", program, "--to", "onnx", "-o", program),
        ("export", tmp_path / "link", "--to", "qdq", "-o", program),
        ("report", program, "-o", tmp_path / "link"),
        ("quantize", "fmnist_vit", "--weights", mine, "-o", mine),
        ("table", "--classes", names, "-o", names),
    ):
        assert_rejected(fqvit(*words), str(words[-1]), "is an input of this command and would be overwritten")
    assert program.read_bytes() == before and mine.read_bytes() == weights.read_bytes() and names.read_text() == "[]"


def test_invalid_class_names_are_rejected(weights: Path, tmp_path: Path) -> None:
    words = ("quantize", "fmnist_vit", "--weights", weights, "--images", 1, "-o", tmp_path / "x.fqvit", "--classes")
    for text, said in (
        ("a\nb\n", "2 class names for 10"),
        ('{"a": 1}', "expected a list"),
        ("[1]", "class 0 is 1"),
        ("[", "not valid JSON"),
    ):
        (tmp_path / "names").write_text(text)
        assert_rejected(fqvit(*words, tmp_path / "names"), said)
    assert_rejected(fqvit(*words, tmp_path / "none.json"), "cannot be read")


def test_unavailable_backends_and_devices_are_rejected(program: Path, weights: Path) -> None:
    assert_rejected(fqvit("eval", "fmnist_vit", "--weights", weights, "--backend", "reference"), "float model")
    assert_rejected(fqvit("eval", program, "--weights", weights), "Leave out --weights")
    assert_rejected(fqvit("eval", program, "--device", "cuda"), "run on the CPU")
    if not torch.cuda.is_available():
        assert_rejected(fqvit("eval", "fmnist_vit", "--weights", weights, "--device", "cuda"), "not available")
        assert_rejected(fqvit("quantize", "--weights", weights, "--device", "cuda"), "not available")
    assert_rejected(fqvit("quantize", "--weights", weights, "--device", "toaster"), "not available")


def test_missing_torch_is_reported_with_the_install_command(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for words in (("quantize",), ("eval", "fmnist_vit"), ("compare", program)):
        assert_rejected(fqvit(*words), 'pip install "fqvit[quantize]"')


def test_usage_errors_have_exit_code_2() -> None:
    for words in (("nonsense",), ("quantize", "--nonsense"), ("classify",), ("eval", "x.fqvit", "--backend", "abacus")):
        assert fqvit(*words).code == 2


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (OSError(28, "Disk full", "x"), 2, "fqvit: x: Disk full. Free disk space or choose another disk.\n"),
        (PermissionError(13, "Permission denied", "x"), 2, "fqvit: x: Permission denied.\n"),
    ],
)
def test_system_errors_have_an_exit_code_and_print_at_most_one_line(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(as_json: bool) -> None:
        raise error

    monkeypatch.setattr("fqvit.cli.commands.models.run", stop)
    done = fqvit("models")
    assert (done.code, done.out, done.err) == (code, "", said)


# The process


def test_a_closed_pipe_gives_exit_code_141_and_no_message() -> None:
    process = subprocess.Popen([sys.executable, "-m", "fqvit", "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141 and said == b""


def test_a_closed_stdout_is_not_an_error() -> None:
    found = subprocess.run(f"{shlex.quote(sys.executable)} -m fqvit models >&-", shell=True, capture_output=True, check=False)
    assert (found.returncode, found.stderr) == (0, b"")


def test_programs_run_without_torch(program: Path, pictures: Path) -> None:
    picture = str(next(pictures.rglob("*.png")))
    commands = [
        ["models"],
        ["inspect", str(program), "--sites"],
        ["classify", str(program), picture],
        ["eval", str(program), "--limit", "3"],
    ]
    code = f"""
import sys
sys.modules["torch"] = None
from fqvit.cli.app import main
for words in {commands!r}:
    sys.argv = ["fqvit", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_help_takes_less_than_300_ms_of_cpu() -> None:
    spent = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-m", "fqvit", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        spent.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(spent) < 0.3
