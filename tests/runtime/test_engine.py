"""The native engine matches the reference on whole networks, for every instruction set, thread count and batch size.

See also: test_engine_ops.py (single ops), tests/robustness/hostile/test_native_engine.py (input that the C++ code rejects).
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fqvit.data.images import ImageFolder
from fqvit.distributed.workers import cores
from fqvit.errors import FqvitError
from fqvit.ir.program import Program
from fqvit.lowering.lower import lower
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.load import load_model
from fqvit.quant.calibrate import calibrate
from fqvit.quant.recipe import load_recipe
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import run
from tests.factories import assert_same, calibration_of, images_for, model_of
from tests.golden.test_golden import FILES
from tests.runtime.programs import ISAS, compare_with_reference
from tests.runtime.test_networks import every_pair, lowered

# Sizes that are mostly not multiples of the vector length: 7 to 197 tokens, head widths of 5 to 64, 10 to 1000 classes.
WIDER: dict[str, ViTConfig | SwinConfig] = {
    "7 tokens of 20": ViTConfig((8, 12), 4, 3, 10, 20, 1, 4, 28),
    "49 tokens of 100": ViTConfig((28, 28), 4, 1, 1000, 100, 1, 5, 132, prefix=0, pool="mean"),
    "50 tokens of 64": ViTConfig((28, 28), 4, 3, 10, 64, 2, 2, 200),
    "65 tokens of 36": ViTConfig((64, 64), 8, 3, 33, 36, 1, 3, 72),
    "197 tokens of 192": ViTConfig((56, 56), 4, 3, 1000, 192, 1, 3, 384),
    "66 tokens of 128, distilled": ViTConfig((32, 32), 4, 3, 100, 128, 1, 2, 256, prefix=2),
    "swin, windows of 7": SwinConfig((56, 56), 4, 3, 10, 32, (2, 1), (1, 2), 7, hidden_ratio=2),
    "swin, padded windows of 7": SwinConfig((44, 36), 2, 1, 17, 32, (2,), (1,), 7, hidden_ratio=2),
}


@cache
def wider(kind: str, recipe: str) -> tuple[Program, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return a program, four images (including noise, a white and a black one) and the reference's output."""
    model = model_of(WIDER[kind], kind)
    program = lower(model, calibration_of(model, recipe, count=4))
    images = images_for(model.preprocess, 4, 1)
    return program, images, run(program, images)


@every_pair
def test_every_buffer_matches_the_reference(kind: str, recipe: str) -> None:
    model, _, program, _ = lowered(kind, recipe)
    compare_with_reference(program, images_for(model.preprocess, 5, 1), f"{kind}, {recipe}")


@pytest.mark.parametrize("recipe", ["fqvit", "fq-vit", "minmax"])
@pytest.mark.parametrize("kind", WIDER)
def test_every_buffer_of_wider_networks_matches_the_reference(kind: str, recipe: str) -> None:
    program, images, _ = wider(kind, recipe)
    compare_with_reference(program, images[1:3], f"{kind}, {recipe}", 2)


@pytest.mark.parametrize("features", ["tokens", "pooled"])
@pytest.mark.parametrize("kind", ["mean", "distilled", "swin"])
def test_features_match_the_reference(kind: str, features: Any) -> None:
    for recipe in ("fq-vit", "fqvit"):
        model, _, program, _ = lowered(kind, recipe, features)
        compare_with_reference(program, images_for(model.preprocess, 2, 1), f"{kind}, {recipe}, {features}", 3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["vit", "padded swin"])
def test_results_do_not_depend_on_batch_size_or_threads(kind: str, threads: int, isa: str) -> None:
    for recipe in ("fqvit", "fq-vit"):
        model, _, program, _ = lowered(kind, recipe)
        images = images_for(model.preprocess, 7, 3)
        expected = run(program, images)
        engine = Engine(program, threads, isa=isa)
        assert (engine.threads, engine.isa) == (threads, isa)
        for count in (5, 0, 1, 2, 3, 4, 7):
            output = engine.run(images[:count])
            assert output.dtype == np.int32
            assert_same(output, expected[:count], f"{kind}, {recipe}: {count} images")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["65 tokens of 36", "50 tokens of 64", "swin, windows of 7"])
def test_results_of_wider_networks_do_not_depend_on_threads(kind: str, isa: str) -> None:
    for recipe in ("fqvit", "fq-vit"):
        program, images, expected = wider(kind, recipe)
        for threads in (1, 2, 3, 8):
            engine = Engine(program, threads, isa=isa)
            for count in (1, 4):
                assert_same(
                    engine.run(images[:count]), expected[:count], f"{kind}, {recipe}: {threads} threads, {count} images"
                )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_files_give_their_stored_outputs(path: Path, isa: str) -> None:
    expected = np.load(path.with_suffix(".npz"))
    for threads in (1, 2):
        assert_same(
            Engine(path, threads, isa=isa).run(expected["images"]), expected["output"], f"{path.stem}: computed and stored"
        )


def test_two_engines_shared_by_eight_python_threads_match_the_reference() -> None:
    cases = [wider(kind, recipe) for kind, recipe in (("50 tokens of 64", "fqvit"), ("65 tokens of 36", "fq-vit"))]
    engines = [Engine(cases[0][0], 2), Engine(cases[1][0], 3)]
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for turn in range(6):
            which = (number + turn) % 2
            _, images, expected = cases[which]
            first = (number + turn) % 3
            assert_same(engines[which].run(images[first:]), expected[first:], f"thread {number}, turn {turn}")

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()


def test_run_releases_the_gil() -> None:
    """With a switch interval of an hour no thread is preempted: `stop` is set only if run() releases the GIL."""
    program, images, _ = wider("7 tokens of 20", "fqvit")
    engine, begun, stop = Engine(program, 1), threading.Event(), threading.Event()
    runs: list[bool] = []

    def work() -> None:
        begun.set()
        while len(runs) < 2000 and not stop.is_set():
            engine.run(images)
            runs.append(stop.is_set())

    before = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        stop.set()
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(runs) < 2000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_can_run_the_engine_of_its_parent() -> None:
    program, images, expected = wider("50 tokens of 64", "fqvit")
    engine = Engine(program, threads=3)
    engine.run(images)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if (engine.run(images) == expected).all() else 1
            del engine
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_same(engine.run(images), expected, "parent")


def test_engines_are_created_and_destroyed_without_a_run() -> None:
    program = wider("7 tokens of 20", "fqvit")[0]
    for threads in (1, 2, 5, 16):
        assert Engine(program, threads).threads == threads


def test_running_does_not_change_the_images_or_the_program() -> None:
    program, images, expected = wider("50 tokens of 64", "fqvit")
    before, fingerprint = images.copy(), program.fingerprint()
    images.flags.writeable = False
    engine = Engine(program, 2)
    for number in (1, 2):
        assert_same(engine.run(images), expected, f"run {number}")
    images.flags.writeable = True
    assert_same(images, before, "images")
    assert program.fingerprint() == fingerprint


def test_later_runs_do_not_overwrite_earlier_outputs() -> None:
    program, images, expected = wider("7 tokens of 20", "fqvit")
    engine = Engine(program, 1)
    first, second = engine.run(images[:2]), engine.run(images[2:])
    del engine
    assert_same(np.concatenate([first, second]), expected, "both runs")


def test_images_may_have_any_memory_layout() -> None:
    program, images, expected = wider("7 tokens of 20", "fqvit")
    engine = Engine(program, 1)
    assert_same(engine.run(images[::-1]), expected[::-1], "reversed")
    assert_same(engine.run(images[::2]), expected[::2], "every second image")
    assert_same(engine.run(np.asfortranarray(images)), expected, "Fortran order")
    channels_first = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    assert_same(engine.run(channels_first.transpose(0, 2, 3, 1)), expected, "channels first")
    assert_same(engine.run(np.broadcast_to(images[:1], images.shape)), np.repeat(expected[:1], 4, 0), "broadcast image")


@pytest.mark.parametrize(
    "images, found",
    [
        (np.zeros((1, 12, 12, 3), np.float32), "float32"),
        (np.zeros((1, 12, 12, 3), np.int8), "int8"),
        (np.zeros((12, 12, 3), np.uint8), r"\[12, 12, 3\]"),
        (np.zeros((1, 3, 12, 12), np.uint8), r"\[1, 3, 12, 12\]"),
        (np.zeros((0, 12, 12, 1), np.uint8), r"\[0, 12, 12, 1\]"),
        ([1, 2], r"int\d+ \[2\]"),
    ],
)
def test_images_of_the_wrong_dtype_or_shape_are_rejected(images: Any, found: str) -> None:
    with pytest.raises(FqvitError, match=found + r".*expected uint8 \[N, 12, 12, 3\]"):
        Engine(lowered("vit", "fq-vit")[2], 1).run(images)


def test_files_that_are_not_programs_give_the_same_error_as_in_python(tmp_path: Path) -> None:
    good, path = FILES[0].read_bytes(), tmp_path / "x.fqvit"
    contents: dict[bytes | None, str] = {
        None: "no such file. Check the path, or make one with `fqvit quantize -o x.fqvit`.",
        b"# Notes\nThis is a text file.\n": "not a .fqvit file, expected one written by `fqvit quantize`. Check the path.",
        b"": "not a .fqvit file, expected one written by `fqvit quantize`. Check the path.",
        good[:-1]: "damaged or truncated, expected a complete .fqvit file. Quantize again.",
        good[:100]: "damaged or truncated, expected a complete .fqvit file. Quantize again.",
        good[:-1] + bytes([good[-1] ^ 1]): "the fingerprint does not match the contents. The file is damaged. Quantize again.",
    }
    for content, message in contents.items():
        if content is not None:
            path.write_bytes(content)
        for load in (Program.load, Engine):
            with pytest.raises(FqvitError) as caught:
                load(path)
            assert str(caught.value) == f"{path}: {message}"
    with pytest.raises(FqvitError, match=r": not a regular file\. Check the path\.$"):
        Engine(tmp_path)


@pytest.mark.parametrize("threads", [0, -1])
def test_fewer_than_one_thread_is_rejected(threads: int) -> None:
    with pytest.raises(FqvitError, match=rf"^threads: {threads}, expected 1 or more\.$"):
        Engine(wider("7 tokens of 20", "fqvit")[0], threads)


def test_the_outputs_are_described_as_in_the_header() -> None:
    for path in FILES:
        program = Program.load(path)
        values = program.verify().buffers
        found = Engine(path, 1).outputs
        assert len(found) == len(program.header.outputs)
        for got, want in zip(found, program.header.outputs, strict=True):
            value, alpha = values[want.buffer], program.constants.get(want.alpha or "")
            assert (got.name, got.kind, got.scale, got.zero) == (want.label, want.kind, want.scale, want.zero)
            assert (got.dtype, got.shape) == (value.dtype, value.shape)
            assert got.alpha == (() if alpha is None else tuple(alpha.tolist()))


def test_an_unknown_instruction_set_is_rejected_with_a_list_of_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    program, images, expected = wider("7 tokens of 20", "fqvit")
    monkeypatch.setenv("FQVIT_ISA", "nonsense")
    with pytest.raises(FqvitError, match="FQVIT_ISA.*nonsense.*" + ", ".join(ISAS)) as raised:
        Engine(program, 1)
    assert "\n" not in str(raised.value)
    for isa in ISAS:
        monkeypatch.setenv("FQVIT_ISA", isa)
        engine = Engine(program, 1)
        assert engine.isa == isa
        assert_same(engine.run(images), expected, isa)


def test_the_default_number_of_threads_is_the_number_of_available_cores() -> None:
    assert Engine(wider("7 tokens of 20", "fqvit")[0]).threads == cores()


@pytest.mark.parametrize("name", ["deit_tiny", "vit_tiny"])
def test_pretrained_models_match_the_reference_on_real_images(shared_data: Path, name: str) -> None:
    model = load_model(name, shared_data / "weights" / f"{name}_patch16_224.safetensors")
    calib = ImageFolder.unlabelled(shared_data / "imagenet" / "calib", model.preprocess).limit(32)
    program = lower(model, calibrate(model, (batch.images for batch in calib.batches()), load_recipe("fqvit")))
    folder = ImageFolder.unlabelled(shared_data / "imagenet" / "val", model.preprocess).limit(16)
    images = np.concatenate([batch.images for batch in folder.batches()])
    expected = run(program, images)
    for isa in ISAS:
        count = 2 if isa == "scalar" else 16
        assert_same(Engine(program, isa=isa).run(images[:count]), expected[:count], f"{name}: {isa}")
