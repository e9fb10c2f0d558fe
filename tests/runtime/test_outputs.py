"""Programs with named outputs: the same bits in every runtime, values close to the float model's, and exact sign bits.

See also: tests/export/test_outputs.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fqvit.ir.program import Program
from fqvit.lowering.lower import lower
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibration import Calibration
from fqvit.quant.simulate import Simulation
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference
from tests.captured import captured
from tests.factories import assert_same, calibration_of, float_model, images_for
from tests.factories import one_thread as one_thread
from tests.runtime.programs import ISAS, compare_with_reference

VECTORS = ("embedding", "embedding:u16", "embedding:l2", "embedding:u16:l2", "embedding:sign", "mean", "mean:sign", "mean@0:u8")
OUTPUTS = (*VECTORS, "mean@-1:l2", "tokens", "tokens:u16", "tokens:l2", "tokens@0", "tokens@-1:u8")
CLASS = ("class", "class@0", "class@0:sign", "class:u16:l2")
HEADS = ("vit", "distilled", "mean", "no class token", "swin", "padded swin", "classifier")
KINDS = (*HEADS, "features")


def model_of(kind: str) -> FloatModel:
    return captured(kind) if kind in ("features", "classifier") else float_model(kind)


def outputs_of(kind: str) -> tuple[str, ...]:
    token = () if kind in ("no class token", "swin", "padded swin") else CLASS
    return (*(() if kind == "features" else ("logits",)), *OUTPUTS, *token)


@cache
def made(kind: str, recipe: str, outputs: tuple[str, ...]) -> tuple[FloatModel, Calibration, Program]:
    model = model_of(kind)
    calibration = calibration_of(model, recipe, outputs=outputs)
    return model, calibration, lower(model, calibration)


def decoded(program: Program, i: int, codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    output = program.header.outputs[i]
    power = 1.0 if output.alpha is None else np.exp2(program.constants[output.alpha].astype(float))
    return (codes.astype(float) - output.zero) * output.scale * power


@pytest.mark.parametrize("recipe", ["fqvit", "fq-vit"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_outputs_have_the_same_bits_in_the_engine_and_in_the_reference(kind: str, recipe: str) -> None:
    outputs = outputs_of(kind)
    model, calibration, program = made(kind, recipe, outputs)
    images = images_for(model.preprocess, 4, 3)
    expected = Reference(program).run_all(images)
    assert_same(dict(enumerate(Reference(program, "torch").run_all(images))), dict(enumerate(expected)), "torch")
    for isa in ISAS:
        engine = Engine(program, 2, isa=isa)
        for name, found, want in zip(outputs, engine.run_all(images), expected, strict=True):
            assert_same(found, want, f"{kind}, {recipe}, {name}, {isa}")
            assert found.dtype == want.dtype
    assert tuple(info.name for info in engine.outputs) == calibration.outputs
    compare_with_reference(program, images[:1], f"{kind}, {recipe}")


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_have_the_requested_types_and_one_scale(kind: str) -> None:
    for recipe in ("fqvit", "fq-vit"):
        program = made(kind, recipe, outputs_of(kind))[2]
        for info in Engine(program, 1).outputs:
            name, *modifiers = info.name.split(":")
            kind_of = "signs" if "sign" in modifiers else name.partition("@")[0]
            assert info.kind == {"class": "embedding", "mean": "embedding"}.get(kind_of, kind_of)
            wide = "u16" in modifiers or (not modifiers and name.startswith(("class@", "mean@")))
            if info.kind in ("embedding", "signs"):
                normalised = kind != "mean" or name != "tokens"
                assert info.dtype == ("u16" if wide and normalised else "u8") and not info.alpha and len(info.shape) == 1
            if "l2" in modifiers:
                assert info.zero == (1 << (15 if "u16" in modifiers else 7))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_close_to_those_of_the_float_model(kind: str) -> None:
    outputs = outputs_of(kind)
    model, calibration, program = made(kind, "fqvit", outputs)
    images = images_for(model.preprocess, 6, 3)
    with torch.no_grad():
        exact = calibration.graph(model).run_all(normalise(images, model.preprocess))
    simulated = Simulation(model, calibration).run_all(images)
    for i, (name, integers) in enumerate(zip(outputs, Reference(program).run_all(images), strict=True)):
        if name.endswith("sign"):
            for close in (exact[i], simulated[i]):
                same = np.unpackbits(close.numpy().astype(np.uint8)) == np.unpackbits(integers)
                assert same.mean() > 0.95, name
            continue
        for close, worst in ((exact[i], 15), (simulated[i], 25)):
            noise = np.square(close.numpy() - decoded(program, i, integers)).sum()
            assert noise < np.square(close.numpy()).sum() * 10 ** (-worst / 10), (name, worst)


@pytest.mark.parametrize("kind", ["vit", "swin", "features"])
def test_sign_bits_are_those_of_16_bit_codes_packed_by_numpy(kind: str) -> None:
    names = ("embedding:u16", "embedding:sign", "mean@0:u16", "mean@0:sign")
    model, _, program = made(kind, "fqvit", names)
    images = images_for(model.preprocess, 9, 5)
    found = Engine(program, 2).run_all(images)
    for i in (0, 2):
        zero = program.header.outputs[i].zero
        assert_same(found[i + 1], np.packbits(found[i] > zero, axis=-1), names[i])


@pytest.mark.parametrize("kind", ["vit", "padded swin", "features"])
def test_normalised_vectors_have_length_1(kind: str) -> None:
    model, _, program = made(kind, "fqvit", ("embedding:l2", "embedding:u16:l2", "tokens:u16:l2"))
    images = images_for(model.preprocess, 12, 7)  # the calibration images: others may exceed the range of 8-bit codes
    for i, codes in enumerate(Engine(program, 1).run_all(images)):
        lengths = np.linalg.norm(decoded(program, i, codes), axis=-1)
        assert np.abs(lengths - 1).max() < (0.02 if i == 0 else 3e-4), i
    assert program.header.others[0].scale == 1 / 32767


# `fqvit` and `fast` round weights for all outputs together (as w4 learns them), so both programs get the same rounded weights.
@pytest.mark.parametrize("recipe", ["fqvit", "fq-vit", "fast", "fq-vit-original"])
@pytest.mark.parametrize("kind", ["vit", "padded swin", "classifier"])
def test_the_bits_of_an_output_do_not_depend_on_the_other_outputs(kind: str, recipe: str) -> None:
    model, calibration, program = made(kind, recipe, ("logits", *OUTPUTS))
    images = images_for(model.preprocess, 4, 3)
    found = Reference(program).run_all(images)
    for i, name in ((0, "logits"), (3, "embedding:l2"), (6, "mean"), (10, "tokens")):
        alone = made(kind, recipe, (name,))[1]
        same_weights = replace(alone, weights={layer: calibration.weights[layer] for layer in alone.weights})
        assert_same(Reference(lower(model, same_weights)).run(images), found[i], f"{recipe}, {name}")


def test_a_calibration_keeps_its_outputs_when_it_is_saved_as_json() -> None:
    model, calibration, program = made("vit", "fqvit", ("class@-1:l2", "logits"))
    assert calibration.outputs == ("class@1:l2", "logits")
    again = Calibration.from_json(calibration.to_json())
    assert again.outputs == calibration.outputs and lower(model, again).fingerprint() == program.fingerprint()


def test_the_models_own_output_gives_the_same_file_with_and_without_its_name() -> None:
    for kind, name in (("vit", "logits"), ("features", "embedding")):
        model = model_of(kind)
        named = made(kind, "fqvit", (name,))[2]
        assert named.fingerprint() == lower(model, calibration_of(model, "fqvit")).fingerprint()
        assert named.header.output.label == name and not named.header.output.name
