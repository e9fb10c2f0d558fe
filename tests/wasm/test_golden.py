"""Test that the WebAssembly modules give the stored outputs of all golden files, bit for bit."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fqvit.ir.program import Program
from fqvit.runtime.native import Engine
from tests.factories import assert_same
from tests.golden.test_golden import DETECTORS, FILES, OUTPUTS
from tests.wasm.node import THREADED, VARIANTS, Node

ENGINES = [*((variant, 1) for variant in VARIANTS), *(("simd128-threads", threads) for threads in (1, 2)), (THREADED[1], 3)]


@pytest.fixture(scope="module", params=ENGINES, ids=lambda engine: f"{engine[0]}-{engine[1]}")
def engine(request: pytest.FixtureRequest) -> Iterator[Node]:
    with Node(*request.param) as running:
        yield running


@pytest.mark.parametrize("path", [*FILES, *OUTPUTS], ids=lambda path: path.stem)
def test_a_golden_file_gives_the_same_bits(engine: Node, path: Path) -> None:
    expected = np.load(path.with_suffix(".npz"))
    wanted = [expected[name] for name in sorted(expected) if name.startswith("output")]
    for instruction_set in engine.call("sets"):
        model = engine.load("model", path.read_bytes(), instruction_set)
        assert model["fingerprint"] == str(expected["fingerprint"]) and model["instructionSet"] == instruction_set
        assert model["macs"] == Engine(path, 1).macs and model["threads"] == engine.threads
        found = engine.run(model["handle"], expected["images"])
        assert len(found) == len(wanted)
        for i, (data, output) in enumerate(zip(found, wanted, strict=True)):
            array = np.frombuffer(data, output.dtype).reshape(output.shape)
            assert_same(array, output, f"{path.stem}: output {i} on {instruction_set}, computed and stored")
        engine.call("free", kind="model", handle=model["handle"])


@pytest.mark.parametrize("path", DETECTORS, ids=lambda path: path.stem)
def test_a_golden_detector_gives_the_same_detections(engine: Node, path: Path) -> None:
    expected = np.load(path.with_suffix(".npz"))
    for instruction_set in engine.call("sets"):
        detector = engine.load("detector", path.read_bytes(), instruction_set)
        assert detector["fingerprint"] == str(expected["fingerprint"])
        for i, picture in enumerate(expected["pictures"]):
            height, width, _ = picture.shape
            found = engine.call("detect", handle=detector["handle"], pixels=picture.tobytes(), width=width, height=height)
            parts = {key: [base64.b64decode(one[key]) for one in found] for key in ("fields", "probabilities", "mask")}
            fields = np.frombuffer(b"".join(parts["fields"]), np.int64).reshape(-1, 7)
            name = f"{path.stem}, picture {i} on {instruction_set}"
            assert_same(fields[:, :4], expected[f"boxes{i}"], f"{name}: boxes")
            assert_same(fields[:, 4], expected[f"scores{i}"], f"{name}: scores")
            assert_same(fields[:, 5], expected[f"labels{i}"], f"{name}: labels")
            stored = expected[f"probabilities{i}"]
            assert_same(
                np.frombuffer(b"".join(parts["probabilities"]), np.int32).reshape(stored.shape), stored, f"{name}: masks"
            )
            masks = np.frombuffer(b"".join(parts["mask"]), np.uint8)
            assert_same(np.packbits(masks), expected[f"masks{i}"], f"{name}: masks in pixels")
        engine.call("free", kind="detector", handle=detector["handle"])


@pytest.mark.parametrize("size", [(7, 5), (12, 12), (100, 37), (33, 240)])
def test_images_are_preprocessed_as_in_python(engine: Node, size: tuple[int, int]) -> None:
    path = next(path for path in FILES if path.stem == "tiny_v1")
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    wanted = Program.load(path).header.preprocess.apply(Image.fromarray(pixels))
    model = engine.load("model", path.read_bytes())
    found = engine.call(
        "preprocess", handle=model["handle"], pixels=pixels.tobytes(), width=size[0], height=size[1], size=wanted.size
    )
    assert_same(np.frombuffer(base64.b64decode(found), np.uint8).reshape(wanted.shape), wanted, "preprocessed pixels")
