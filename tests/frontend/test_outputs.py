"""Tests of named outputs of captured families: the blocks, prefix tokens and norms that are found, and output values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fqvit.data.images import read_image
from fqvit.frontend.capture import capture
from fqvit.frontend.load import load_model
from fqvit.lowering.lower import lower
from fqvit.models.config import BeitConfig, DinoV3Config, SwinV2Config, VisionConfig
from fqvit.models.families.build import build_family
from fqvit.models.graph import trace, value_shapes
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.models.streams import Streams
from fqvit.quant.calibrate import calibrate
from fqvit.quant.recipe import load_recipe
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference
from tests.factories import assert_same, calibration_of, float_model, images_for
from tests.factories import one_thread as one_thread

SIZES: dict[str, Any] = {"image": (16, 16), "patch": 4, "channels": 3, "width": 24, "depth": 2, "heads": 3, "hidden": 48}
SWIN: dict[str, Any] = {"image": (16, 16), "patch": 2, "channels": 3, "width": 8, "depths": (2, 1), "heads": (2, 2)}
# {family: (configuration, tokens before the patches, whether the last norm comes before pooling, leaf of the embedding)}
FAMILIES: dict[str, tuple[Any, int, bool, str | None]] = {
    "CLIP": (VisionConfig(**SIZES, outputs=10, norm_pre=True, head_bias=False, activation="quick_gelu"), 1, True, "Linear"),
    "CLIP, norm after pooling": (
        VisionConfig(**SIZES, outputs=10, norm_pre=True, head_bias=False, norm=False, fc_norm=True), 1, False, "Linear"
    ),
    "DINOv2 with registers": (VisionConfig(**SIZES, outputs=0, registers=4, prefix_positions=False), 5, True, "Take"),
    "DINOv2 giant": (VisionConfig(**SIZES, outputs=0, swiglu=True, layer_scale=True), 1, True, "Take"),
    "SigLIP": (VisionConfig(**SIZES, outputs=0, class_token=False, pool="map"), 0, True, "Add"),
    "mean": (VisionConfig(**SIZES, outputs=0, pool="avg"), 1, True, "Mean"),
    "token and mean": (VisionConfig(**SIZES, outputs=0, pool="token_avg"), 1, True, "Join"),
    "tokens": (VisionConfig(**SIZES, outputs=0, pool="none"), 1, True, None),
    "DINOv3": (DinoV3Config(**SIZES, outputs=0), 5, True, "Take"),
    "BEiT": (BeitConfig(**SIZES, outputs=0), 1, False, "LayerNorm"),
    "SwinV2": (SwinV2Config(**SWIN, outputs=0, windows=(4, 4), pretrained_windows=(0, 0)), 0, True, "MeanRows"),
}  # fmt: skip


def model_of(family: str) -> FloatModel:
    config = FAMILIES[family][0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = build_family(config).eval()
        for name, parameter in module.named_parameters():
            if not name.endswith("norm.weight"):
                torch.nn.init.normal_(parameter, 0, 0.3)
    preprocess = float_model("vit").preprocess
    p = type(preprocess)(16, 16, 3, 16, "bicubic", (0.5,) * 3, (0.5,) * 3)
    return FloatModel(family, capture(module, (3, 16, 16)), p, None, "random")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_a_family_are_found(family: str) -> None:
    _, prefix, before, leaf = FAMILIES[family]
    graph = trace(model_of(family).module)
    streams = Streams(graph, value_shapes(graph, (3, 16, 16)))
    assert [name.rpartition(".")[0].rpartition("layers.")[2] for name in streams.layers] == (
        ["0.blocks.0", "0.blocks.1", "1.blocks.0"] if family == "SwinV2" else ["blocks.0", "blocks.1"]
    )
    assert streams.prefix == prefix and streams.classifier is None
    assert streams.last_norm is not None and streams.last_norm.first == before
    found = None if streams.embedding is None else type(streams.nodes[streams.embedding].leaf).__name__
    assert found == leaf


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_of_a_family_match_the_reference_bit_for_bit_and_are_close_to_float(family: str) -> None:
    config, prefix, _, leaf = FAMILIES[family]
    outputs = ["mean", "tokens", "tokens@0:u8", "mean@-1:sign", *(["class", "class@0"] if prefix else [])]
    outputs += ["embedding", "embedding:l2", "embedding:u16"] if leaf else []
    outputs += ["embedding:i32"] if leaf == "Linear" else []
    model = model_of(family)
    for recipe in ("fqvit", "fq-vit"):
        calibration = calibration_of(model, recipe, outputs=outputs)
        program = lower(model, calibration)
        images = images_for(model.preprocess, 4, 7)
        expected = Reference(program).run_all(images)
        with torch.no_grad():
            exact = calibration.graph(model).run_all(normalise(images, model.preprocess))
        for name, found, want, close, output in zip(
            outputs, Engine(program, 1).run_all(images), expected, exact, program.header.outputs, strict=True
        ):
            assert_same(found, want, f"{family}, {recipe}, {name}")
            if output.kind == "signs":
                continue
            power = 1.0 if output.alpha is None else np.exp2(program.constants[output.alpha].astype(float))
            values = (found.astype(float) - output.zero) * output.scale * power
            noise = np.square(values - close.numpy()).sum() / np.square(close.numpy()).sum()
            assert noise < (0.1 if recipe == "fq-vit" else 0.03), (name, recipe, noise)
            assert output.kind == "tokens" or (output.kind == "embedding" and output.alpha is None)
        if leaf == "Linear":
            assert expected[-1].dtype == np.int32 and config.outputs == expected[-1].shape[1]


def test_outputs_of_the_real_dinov2_are_close_to_the_float_model(shared_data: Path) -> None:
    path = shared_data / "weights" / "dinov2_vits14.safetensors"
    if not path.exists():
        pytest.skip("needs the weights of DINOv2")
    model = load_model("dinov2_vits14", path, size=112)
    files = sorted((shared_data / "imagenet" / "calib").glob("*/*.jpg"))[::40][:12]
    images = np.stack([read_image(file, model.preprocess) for file in files])
    outputs = ("embedding", "embedding:l2", "embedding:sign", "tokens", "tokens@9", "class@5")
    calibration = calibrate(model, [images], load_recipe("fqvit"), outputs=outputs)
    program = lower(model, calibration)
    expected = Reference(program, "torch").run_all(images[:2])
    with torch.no_grad():
        exact = calibration.graph(model).run_all(normalise(images[:2], model.preprocess))
    for name, found, want, close, output in zip(
        outputs, Engine(program).run_all(images[:2]), expected, exact, program.header.outputs, strict=True
    ):
        assert_same(found, want, name)
        if output.kind == "signs":
            assert (np.unpackbits(found) == np.unpackbits(close.numpy().astype(np.uint8))).mean() > 0.93
            continue
        values = (found.astype(float) - output.zero) * output.scale
        lengths = np.linalg.norm(values, axis=-1) * np.linalg.norm(close.numpy(), axis=-1)
        assert ((values * close.numpy()).sum(-1) / lengths).mean() > 0.95, name
