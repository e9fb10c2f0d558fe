"""Tests of a program's header: sites and outputs that are accepted or rejected, defaults and JSON of the fields."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.ir.ops import Term
from fqvit.ir.program import AnyOp, CodeInput, Header, Move, Output, Program, Site
from fqvit.ir.value import Scope, Value

C = 6
CONSTANTS = {
    "alpha": np.array([0, 1, 2, 0, 1, 2], np.uint8),
    "steps": np.array([1, 2, 3, 4, 5, 6], np.uint16),
    "zero step": np.array([1, 2, 0, 4, 5, 6], np.uint16),
    "two": np.array([3, 5], np.uint16),
}
BUFFERS = {
    "codes": Value("u8", (4, C), 0, 255),
    "wide": Value("u16", (4, C), 0, 256),
    "few": Value("u8", (4, C), 0, 3),
    "numbers": Value("i32", (C,), -9, 9),
    "pooled": Value("u8", (C,), 0, 255),
    "map": Value("u8", (2, 2, C), 0, 255),
    "wide map": Value("u16", (2, 2, C), 0, 256),
    "scores": Value("i32", (2, 2, C), -9, 9),
    "matrix": Value("i32", (2, C), -9, 9),
}


def scope(op: str) -> Scope:
    return Scope(BUFFERS, CONSTANTS, op)


GOOD_SITES = {
    "8 bits": ("codes", Site("norm", 8, (0.5,), (3,))),
    "more bits than the codes need": ("codes", Site("norm", 9, (0.5,), (3,))),
    "two scales": ("codes", Site("norm", 8, (0.5, 0.25), (3, 4))),
    "one scale per channel": ("codes", Site("norm", 8, (0.5,) * C, (3,) * C)),
    "alpha": ("codes", Site("norm", 8, (0.5,), (3,), "alpha")),
    "one zero point per value of alpha": ("codes", Site("norm", 8, (0.5,), (3, 4, 5), "alpha")),
    "log2 without scale and zero": ("codes", Site("attention", 8, log2=True)),
    "one level per code, only one of them above 0": ("few", Site("attention", 2, levels=(0, 1, 0, 0))),
    "one scale with steps": ("codes", Site("norm", 8, (0.5,), (3,), steps="steps")),
    "three scales with steps": ("codes", Site("qkv", 8, (0.5, 0.25, 0.1), (1, 2, 3), steps="two")),
}
BAD_SITES = {
    "too few bits": ("codes", Site("norm", 7, (0.5,), (3,)), "7 bits for codes up to 255"),
    "one bit too few": ("wide", Site("norm", 8, (0.5,), (3,)), "8 bits for codes up to 256"),
    "one level too few": ("few", Site("attention", 2, levels=(1, 1, 1)), "3 levels for codes up to 3"),
    "only levels of 0": ("few", Site("attention", 2, levels=(0,) * 4), "no level above 0"),
    "more zero points than scales": ("codes", Site("norm", 8, (0.5,), (3, 4)), "1 scales and 2 zero points"),
    "no zero points": ("codes", Site("norm", 8, (0.5,), ()), "1 scales and 0 zero points"),
    "too few zero points for alpha": ("codes", Site("norm", 8, (0.5,), (3, 4), "alpha"), "1 scales and 2 zero points"),
    "two scales with alpha": ("codes", Site("norm", 8, (0.5, 0.5), (3, 4, 5), "alpha"), "2 scales and 3 zero points"),
    "three zero points without alpha": ("codes", Site("norm", 8, (0.5,), (3, 4, 5)), "1 scales and 3 zero points"),
    "neither scale nor zero": ("codes", Site("norm", 8), "0 scales for 6 channels"),
    "a step of 0": ("codes", Site("norm", 8, (0.5,), (3,), steps="zero step"), "constant 'zero step' has a step of 0"),
    "four scales for six channels": ("codes", Site("norm", 8, (0.5,) * 4, (3,) * 4), "4 scales for 6 channels"),
}


@pytest.mark.parametrize("case", GOOD_SITES)
def test_site_check_accepts(case: str) -> None:
    buffer, site = GOOD_SITES[case]
    site.check(scope("site"), BUFFERS[buffer])


@pytest.mark.parametrize("case", BAD_SITES)
def test_site_check_rejects(case: str) -> None:
    buffer, site, message = BAD_SITES[case]
    with pytest.raises(FqvitError, match=f"^site: {message}"):
        site.check(scope("site"), BUFFERS[buffer])


@pytest.mark.parametrize(
    "site, scale, zero",
    [
        (Site("norm", 8, (0.5, 0.25), (3, 4)), [0.5, 0.25], [3, 4]),
        (Site("norm", 8, (0.5,), (3,), "alpha"), [0.5], [3]),  # alpha is not applied here, since there is one zero point
        (Site("norm", 8, (0.5,), (3, 4, 5), "alpha"), [0.5, 1, 2, 0.5, 1, 2], [3, 4, 5, 3, 4, 5]),
        (Site("norm", 8, (0.5,), (3, 4), "alpha"), None, None),
        (Site("norm", 8, (0.5,), (3,), steps="steps"), [0.5, 1, 1.5, 2, 2.5, 3], [3] * 6),
        (Site("qkv", 8, (0.5, 0.25, 0.125), (1, 2, 3), steps="two"), [0.5, 0.5, 0.25, 0.25, 0.375, 0.625], [1, 1, 2, 2, 3, 3]),
    ],
)
def test_scales_and_zeros_follow_from_the_fields_of_a_site(
    site: Site, scale: list[float] | None, zero: list[int] | None
) -> None:
    if scale is None:
        with pytest.raises(IndexError):  # check() rejects such a site
            site.scales_and_zeros(CONSTANTS)
    else:
        found = site.scales_and_zeros(CONSTANTS)
        assert (found[0].tolist(), found[1].tolist()) == (scale, zero)


GOOD_OUTPUTS = [
    Output("numbers", "logits", 0.5),
    Output("codes", "tokens", 0.5, 3, "alpha"),
    Output("wide", "tokens", 0.5, 3),
    Output("pooled", "pooled", 0.5, 3),
    Output("map", "map", 0.5, 3),
    Output("scores", "scores", 0.5),
    Output("scores", "deltas", 0.5),
    Output("numbers", "deltas", 0.5),
    Output("pooled", "embedding", 0.5, 3),
    Output("numbers", "embedding", 0.5, name="embedding:i32"),
    Output("pooled", "signs", 1.0),
]
BAD_OUTPUTS = [
    (Output("numbers", "logits", 0.5, 1), "logits with a zero point or alpha, expected neither"),
    (Output("numbers", "logits", 0.5, 0, "alpha"), "logits with a zero point or alpha, expected neither"),
    (Output("scores", "scores", 0.5, 1, "alpha"), "scores with a zero point or alpha, expected neither"),
    (Output("scores", "logits", 0.5), "logits of shape .* expected 1 axes"),
    (Output("pooled", "tokens", 0.5), "tokens of shape .* expected 2 axes"),
    (Output("codes", "pooled", 0.5), "pooled of shape .* expected 1 axes"),
    (Output("codes", "map", 0.5), "map of shape .* expected 3 axes"),
    (Output("matrix", "scores", 0.5), "scores of shape .* expected 3 axes"),
    (Output("matrix", "deltas", 0.5), "deltas of shape .* expected 1 or 3 axes"),
    (Output("numbers", "pooled", 0.5), ".*'numbers' is i32"),
    (Output("pooled", "logits", 0.5), ".*'pooled' is u8"),
    (Output("wide map", "map", 0.5), ".*'wide map' is u16"),
    (Output("codes", "embedding", 0.5), "embedding of shape .* expected 1 axes"),
    (Output("pooled", "embedding", 0.5, 3, "alpha"), "embedding with alpha, expected one scale"),
    (Output("numbers", "embedding", 0.5, 3), "embedding with a zero point or alpha, expected neither"),
    (Output("pooled", "signs", 1.0, 1), "signs with a zero point or alpha, expected neither"),
    (Output("numbers", "signs", 1.0), ".*'numbers' is i32, expected u8"),
]


@pytest.mark.parametrize("output", GOOD_OUTPUTS, ids=lambda o: f"{o.buffer} as {o.kind}")
def test_output_check_accepts_a_buffer_of_its_kind(output: Output) -> None:
    assert output.check(scope("output")) is BUFFERS[output.buffer]


@pytest.mark.parametrize("output, message", BAD_OUTPUTS)
def test_output_check_rejects_a_buffer_of_another_kind(output: Output, message: str) -> None:
    with pytest.raises(FqvitError, match=f"^output: {message}"):
        output.check(scope("output"))


@pytest.mark.parametrize("output", GOOD_OUTPUTS, ids=lambda o: f"{o.buffer} as {o.kind}")
def test_only_outputs_of_classifiers_have_features(output: Output) -> None:
    if output.kind in ("logits", "tokens", "pooled"):
        assert output.features() == output.kind
    else:
        found = rf"^{output.buffer}: output of kind {output.kind}, expected logits"
        with pytest.raises(FqvitError, match=found):
            output.features()


HEADER = Header(
    version=1,
    model="test",
    preprocess=Preprocess(4, 2, 3, 4, "bicubic", (0.5,) * 3, (0.5,) * 3),
    ops=(),
    output=GOOD_OUTPUTS[0],
    sites={},
    recipe={},
    source="",
    images=1,
)


def test_programs_that_read_codes_are_rejected_where_pixels_are_needed() -> None:
    Program(HEADER, {}).check_pixels("this")
    Program(msgspec.structs.replace(HEADER, others=(GOOD_OUTPUTS[1],)), {}).check_pixels("this")
    with pytest.raises(FqvitError, match=r"^test: reads codes \(part of a detector\), which this does not support\.$"):
        Program(msgspec.structs.replace(HEADER, input=CodeInput((1, 1, 1), 0.5, 0)), {}).check_pixels("this")


EXAMPLES = [Output("y", "logits", 0.5), CodeInput((1, 1, 1), 0.5, 0), Move("grid"), Site("norm", 8)]


@pytest.mark.parametrize("cls", [Header, *map(type, EXAMPLES), *get_args(AnyOp), Term])
def test_structs_of_a_program_are_frozen_and_forbid_unknown_fields(cls: Any) -> None:
    assert cls.__struct_config__.frozen and cls.__struct_config__.forbid_unknown_fields


# The values of fields that a file omits (docs/reference/format.md). Changing a default changes the format.
DEFAULTS: dict[str, dict[str, object]] = {
    "Term": {"zero": 0, "alpha": None},
    "Lookup": {"alpha": None, "y_zero": (), "bits": 8},
    "Linear": {"out": "codes", "y_zero": 0, "bits": 8, "group": 0, "weights_of": None, "width": 0, "codebooks": 0},
    "LayerNorm": {"zero": 0, "alpha": None, "bits": 8, "center": True, "fraction": 24},
    "Add": {"y_zero": 0, "y_alpha": None, "bits": 8},
    "Take": {"fill": 0},
    "Permute": {"shape": (), "select": None},
    "Concat": {},
    "Mean": {"skip": 0, "zero": 0, "alpha": None, "y_zero": 0, "bits": 8},
    "MatMul": {"a_zero": 0, "b_zero": 0, "b_rows": False, "index": None, "y_zero": 0, "bits": 8},
    "LogSoftmax": {"bits": 4, "region": None},
    "Softmax": {"bits": 8, "region": None},
    "ShiftMatMul": {"v_zero": 0, "a_bits": 4, "zero_code": False, "y_zero": 0, "bits": 8},
    "RowCodes": {"region": None},
    "Attend": {"levels": (), "v_zero": 0, "y_zero": 0, "bits": 8},
    "Multiply": {"a_zero": 0, "b_zero": 0, "y_zero": 0, "bits": 8},
    "Rotary": {"zero": 0, "y_zero": 0, "bits": 8},
    "Depthwise": {"fill": 0, "y_zero": 0, "bits": 8},
    "Max": {},
}


@pytest.mark.parametrize("cls", [*get_args(AnyOp), Term])
def test_omitted_fields_have_the_documented_defaults_and_defaults_are_omitted(cls: Any) -> None:
    fields = msgspec.structs.fields(cls)
    assert {f.name: f.default for f in fields if f.default is not msgspec.NODEFAULT} == DEFAULTS[cls.__name__]
    assert cls.__struct_config__.omit_defaults and (cls is Term or cls.__struct_config__.tag_field == "op")


SITE = Site("norm", 8, (0.5,), (3,))
ENDS = [{"bits": 1}, {"bits": 16}, {"scale": (1e-30, 9.9e29)}, {"zero": (0, 65535)}, {"levels": (0, 65535)}]
BEYOND = [{"bits": 0}, {"bits": 17}, {"scale": (0.0,)}, {"scale": (1e30,)}, {"zero": (-1,)}, {"zero": (65536,)}]


@pytest.mark.parametrize("fields", ENDS)
def test_numbers_of_a_site_are_read_up_to_their_limits(fields: dict[str, Any]) -> None:
    site = msgspec.structs.replace(SITE, **fields)
    text = msgspec.json.encode(site)
    assert text.startswith(b"[") and msgspec.json.decode(text, type=Site) == site


@pytest.mark.parametrize("fields", BEYOND)
def test_numbers_of_a_site_are_rejected_beyond_their_limits(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(SITE, **fields)), type=Site)


def test_fields_with_default_values_are_not_written() -> None:
    """A program must keep its fingerprint when the format gets new fields."""
    written = [msgspec.json.encode(example) for example in EXAMPLES[:3]]
    assert written == [
        b'{"buffer":"y","kind":"logits","scale":0.5}',
        b'{"shape":[1,1,1],"scale":0.5,"zero":0}',
        b'{"kind":"grid"}',
    ]
    assert CodeInput((1, 1, 1), 0.5, 0).bits == 8 and (Move("grid").window, Move("grid").shift) == (0, 0)
    assert not {"others", "input", "moves"} & msgspec.to_builtins(HEADER).keys() and not SITE.zero_code
