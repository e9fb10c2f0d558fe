"""Python's loader and the native loader accept and reject the same JSON texts of programs, in files with a valid fingerprint.

See also: test_loader_containers.py (the container around the JSON), test_loader_fields.py (fields of ops).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.hostile.containers import fingerprint_of, packed
from tests.robustness.hostile.test_loader_containers import TENSORS, TEXT, accepted, nested

HEADER = json.loads(TEXT)
PLAIN = json.dumps(HEADER)
OTHER = {"buffer": next(iter(HEADER["sites"])), "kind": "tokens", "scale": 1.0}


def replaced(**fields: Any) -> str:
    return json.dumps(HEADER | fields)


def recipe(text: str) -> str:
    return json.dumps({key: value for key, value in HEADER.items() if key != "recipe"})[:-1] + f', "recipe": {text}}}'


ACCEPTED_TEXTS = {
    "unchanged": PLAIN,
    "spaces around": f" \t\r\n{PLAIN}\n",
    "keys in another order": json.dumps(dict(reversed(HEADER.items()))),
    "escaped keys": PLAIN.replace('"model"', r'"\u006dodel"'),
    "a field given twice": PLAIN[:-1] + ', "source": "again"}',
    "the op field given twice": PLAIN.replace('"op": "permute"', '"op": "permute", "op": "permute"', 1),
    "a version given twice, and the last one is right": '{"version": 2, ' + PLAIN[1:],
    "defaults written out": replaced(others=[], input=None, moves={}),
    "images of 2^62": replaced(images=2**62),
    "negative images": replaced(images=-(2**62)),
    "images of -0": PLAIN.replace(f'"images": {HEADER["images"]}', '"images": -0'),
    "a scale that is an integer": replaced(output=HEADER["output"] | {"scale": 1}),
    "the smallest scale": replaced(output=HEADER["output"] | {"scale": 5e-324}),
    "the largest scale": replaced(output=HEADER["output"] | {"scale": 9.999999999999999e29}),
    "a mean of 10^40": replaced(preprocess=HEADER["preprocess"] | {"mean": [10**40, -(10**40), 0]}),
    "a mean of 1e-400": replaced(preprocess=HEADER["preprocess"] | {"mean": [1, 2, 987654321]}).replace("987654321", "1e-400"),
    "any recipe": recipe('{"a": [null, true, -0, -0.0, 1e5, 1E-5, "\\u0000\\ud83d\\ude00\x7f", {"a": 1, "a": 2}, 1e-999]}'),
    "a recipe of 2^64": recipe('{"a": 18446744073709551616}'),
    "a recipe of 300 digits": recipe('{"a": ' + "9" * 300 + "}"),
    "a recipe that nests 300 deep": recipe('{"a": ' + nested(300) + "}"),
    "names that are not ASCII": json.dumps(HEADER | {"source": "é\U0001f600\0"}, ensure_ascii=False).replace("\0", "\\u0000"),
    "moves of buffers that do not exist": replaced(moves={"none": {"kind": "grid"}, "": {"kind": "second", "of": "none"}}),
    "no sites": replaced(sites={}),
    "an output with a name": replaced(output=HEADER["output"] | {"name": "logits@-1:i32.x_Y+2"}),
    "an output with an empty name": replaced(output=HEADER["output"] | {"name": ""}),
    "an output with a name of 64 letters": replaced(output=HEADER["output"] | {"name": "a" * 64}),
    "an output with the name of its kind": replaced(output=HEADER["output"] | {"name": "logits"}),
    "two outputs with different names": replaced(output=HEADER["output"] | {"name": "a"}, others=[OTHER | {"name": "b"}]),
    "one output with a name and one without": replaced(output=HEADER["output"] | {"name": "a"}, others=[OTHER]),
    "an embedding of accumulators": replaced(output=HEADER["output"] | {"kind": "embedding"}),
    "the pixels as output": replaced(ops=[], sites={}, output={"buffer": "pixels", "kind": "map", "scale": 1.0}),
}

REJECTED_TEXTS = {
    "nothing": "",
    "null": "null",
    "a list": f"[{PLAIN}]",
    "a byte order mark": "\ufeff" + PLAIN,
    "more after the end": PLAIN + "0",
    "a NUL byte after the end": PLAIN + "\0",
    "a form feed": "\f" + PLAIN,
    "a trailing comma": PLAIN[:-1] + ",}",
    "single quotes": PLAIN.replace('"model"', "'model'"),
    "an unknown field": PLAIN[:-1] + ', "more": 1}',
    "a known field in another letter case": PLAIN[:-1] + ', "Model": "x"}',
    "the op field given twice with different values": PLAIN.replace('"op": "permute"', '"op": "permute", "op": "linear"', 1),
    "the op field given twice, first as null": PLAIN.replace('"op": "permute"', '"op": null, "op": "permute"', 1),
    "a field given twice, first with a wrong type": '{"source": 1, ' + PLAIN[1:],
    "a version that is a string": replaced(version="1"),
    "a version that is a boolean": replaced(version=True),
    "a version that is a float": replaced(version=1.0),
    "a version of 10^40": replaced(version=10**40),
    "images that are a float": replaced(images=1.0),
    "images in exponential notation": PLAIN.replace(f'"images": {HEADER["images"]}', '"images": 1e2'),
    "images of 2^62 + 1": replaced(images=2**62 + 1),
    "images of 2^63": replaced(images=2**63),
    "images of -2^62 - 1": replaced(images=-(2**62) - 1),
    "images of 5,000 digits": PLAIN.replace(f'"images": {HEADER["images"]}', '"images": ' + "9" * 5000),
    "images that are a boolean": replaced(images=True),
    "a leading zero": PLAIN.replace(f'"images": {HEADER["images"]}', '"images": 01'),
    "a plus sign": PLAIN.replace(f'"images": {HEADER["images"]}', '"images": +1'),
    "a scale of 0": replaced(output=HEADER["output"] | {"scale": 0}),
    "a negative scale": replaced(output=HEADER["output"] | {"scale": -1e-3}),
    "a scale of 1e30": replaced(output=HEADER["output"] | {"scale": 1e30}),
    "a scale of 10^30": replaced(output=HEADER["output"] | {"scale": 10**30}),
    "a scale of 1e-400": replaced(output=HEADER["output"] | {"scale": 987654321}).replace("987654321", "1e-400"),
    "a scale that is a string": replaced(output=HEADER["output"] | {"scale": "1"}),
    "an output with a zero point": replaced(output=HEADER["output"] | {"zero": 1}),
    "a name of 65 letters": replaced(output=HEADER["output"] | {"name": "a" * 65}),
    "a name with a space": replaced(output=HEADER["output"] | {"name": "a b"}),
    "a name with a line break": replaced(output=HEADER["output"] | {"name": "a\n"}),
    "a name with a null character": replaced(output=HEADER["output"] | {"name": "a\0"}),
    "a name that is not ASCII": replaced(output=HEADER["output"] | {"name": "é"}),
    "a name that is null": replaced(output=HEADER["output"] | {"name": None}),
    "two outputs with the same name": replaced(output=HEADER["output"] | {"name": "a"}, others=[OTHER | {"name": "a"}]),
    "a name that is the kind of another output": replaced(output=HEADER["output"] | {"name": OTHER["kind"]}, others=[OTHER]),
    "an embedding with a zero point": replaced(output=HEADER["output"] | {"kind": "embedding", "zero": 1}),
    "signs that are accumulators": replaced(output=HEADER["output"] | {"kind": "signs"}),
    "an output that is given twice": replaced(others=[HEADER["output"]]),
    "an output that no op writes": replaced(output=HEADER["output"] | {"buffer": "none"}),
    "an output of another kind": replaced(output=HEADER["output"] | {"kind": "tokens"}),
    "an output of an unknown kind": replaced(output=HEADER["output"] | {"kind": "Logits"}),
    "a mean of 1e400": replaced(preprocess=HEADER["preprocess"] | {"mean": [1, 2, 987654321]}).replace("987654321", "1e400"),
    "a std of 0": replaced(preprocess=HEADER["preprocess"] | {"std": [1, 0, 1]}),
    "two means": replaced(preprocess=HEADER["preprocess"] | {"mean": [1, 2]}),
    "two channels": replaced(preprocess=HEADER["preprocess"] | {"channels": 2}),
    "channels that are a float": replaced(preprocess=HEADER["preprocess"] | {"channels": 3.0}),
    "a width of 0": replaced(preprocess=HEADER["preprocess"] | {"width": 0}),
    "a resize of 8193": replaced(preprocess=HEADER["preprocess"] | {"resize": 8193}),
    "an unknown interpolation": replaced(preprocess=HEADER["preprocess"] | {"interpolation": "nearest"}),
    "a recipe that is a list": recipe("[]"),
    "a recipe that is null": recipe("null"),
    "a recipe of NaN": recipe('{"a": NaN}'),
    "a recipe of 1e999": recipe('{"a": 1e999}'),
    "a lone surrogate": recipe('{"a": "\\ud800"}'),
    "a lone low surrogate": recipe('{"a": "\\udc00"}'),
    "a surrogate and a letter": recipe('{"a": "\\ud800\\u0041"}'),
    "an unknown escape": recipe('{"a": "\\x41"}'),
    "a control character": recipe('{"a": "\1"}'),
    "a recipe that nests 3,000 deep": recipe('{"a": ' + nested(3000) + "}"),
    "a move of an unknown kind": replaced(moves={"x": {"kind": "shift"}}),
    "a move with a window of 257": replaced(moves={"x": {"kind": "windows", "window": 257}}),
    "a move without a kind": replaced(moves={"x": {}}),
    "an input of two axes": replaced(input={"shape": [4, 4], "scale": 1.0, "zero": 0}),
    "an input of 2^62 rows": replaced(input={"shape": [2**62, 1, 1], "scale": 1.0, "zero": 0}),
    "an input of another shape": replaced(input={"shape": [1, 1, 1], "scale": 1.0, "zero": 0}),
    "an empty input": replaced(input={"shape": [0, 1, 1], "scale": 1.0, "zero": 0}),
    "8193 ops": replaced(ops=[HEADER["ops"][0]] * 8193),
    "no ops": replaced(ops=[], sites={}),
    "ops that are an object": replaced(ops={}),
    "an op that is null": replaced(ops=[None]),
    "an op that is a list": replaced(ops=[list(HEADER["ops"][0].values())]),
    "a site of a buffer that no op writes": replaced(sites={"none": ["residual", 8, [1.0], [0]]}),
    "a site that is an object": replaced(sites={next(iter(HEADER["sites"])): {"role": "x", "bits": 8}}),
    "a site of one field": replaced(sites={next(iter(HEADER["sites"])): ["x"]}),
    "a site of ten fields": replaced(
        sites={next(iter(HEADER["sites"])): ["x", 8, [1.0], [0], None, False, False, None, [], 1]}
    ),
}


def text_file(text: str) -> bytes:
    return packed(text, fingerprint_of(text, TENSORS), TENSORS)


@pytest.mark.parametrize("case", ACCEPTED_TEXTS)
def test_both_loaders_accept_a_valid_program(case: str, tmp_path: Path) -> None:
    assert accepted(text_file(ACCEPTED_TEXTS[case]), tmp_path)


@pytest.mark.parametrize("case", REJECTED_TEXTS)
def test_both_loaders_reject_a_malformed_program(case: str, tmp_path: Path) -> None:
    assert not accepted(text_file(REJECTED_TEXTS[case]), tmp_path)


@pytest.mark.parametrize("field", HEADER)
@pytest.mark.parametrize("value", [None, True, 1, -1, 1.5, "x", [], {}, [1], [[]], {"x": 1}], ids=str)
def test_both_loaders_agree_on_every_type_of_every_field_of_the_program(field: str, value: Any, tmp_path: Path) -> None:
    accepted(text_file(json.dumps(HEADER | {field: value})), tmp_path)
    assert not accepted(text_file(json.dumps({key: x for key, x in HEADER.items() if key != field})), tmp_path)


@pytest.mark.parametrize("part", ["preprocess", "output", "input", "sites", "moves"])
def test_both_loaders_agree_on_every_type_of_every_field_of_each_program_part(part: str, tmp_path: Path) -> None:
    site = next(iter(HEADER["sites"]))
    whole: Any = {
        "preprocess": HEADER["preprocess"],
        "output": {"zero": 0, "alpha": None, "name": ""} | HEADER["output"],
        "input": {"shape": [12, 12, 3], "scale": 1.0, "zero": 0, "bits": 8},
        "sites": HEADER["sites"][site],
        "moves": {"kind": "windows", "window": 7, "shift": 3, "of": ""},
    }[part]
    inside = {"sites": lambda x: {site: x}, "moves": lambda x: {"b": x}}.get(part, lambda x: x)
    values = (
        None,
        True,
        0,
        1,
        -1,
        16,
        17,
        255,
        256,
        257,
        65535,
        65536,
        2**62,
        2**63,
        0.5,
        2.0,
        1e30,
        "",
        "x",
        [],
        {},
        [1],
        ["x"],
    )
    keys = list(range(len(whole))) if isinstance(whole, list) else [*whole, "more"]
    both = set()
    for key in keys:
        for value in (*values, "delete"):
            changed = list(whole) if isinstance(whole, list) else dict(whole)
            if value != "delete":
                changed[key] = value
            elif key != "more":
                del changed[key]
            both.add(accepted(text_file(json.dumps(HEADER | {part: inside(changed)})), tmp_path))
    assert both == {True, False}
