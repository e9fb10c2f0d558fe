"""Python's loader and the native loader accept and reject the same values of every field of every op.

See also: test_native_engine.py (rules that involve several fields or constants), test_loader_containers.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from fqvit import _native
from fqvit.errors import FqvitError
from fqvit.ir.ops import Op, Term
from fqvit.ir.program import AnyOp
from tests.robustness.fuzz.oracle import verdicts
from tests.robustness.hostile.small_programs import CASES, SHARED, Case, file_of, text_with

OPS: dict[str, type[Op]] = {op.__struct_config__.tag: op for op in get_args(AnyOp)}  # type: ignore[dict-item]
INTS = (0, 1, -1, 2, 5, 8, 16, 17, 32, 33, 52, 53, 62, 63, 64, 255, 256, 65535, 65536)
INTS += tuple(2**n + d for n in (29, 30, 31, 58, 62, 63, 64) for d in (-1, 0, 1)) + (-(2**62), -(2**62) - 1, -(2**63), 10**40)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    1.0,
    0.5,
    "",
    "x",
    "none",
    "alpha",
    "alphas",
    "region",
    "acc",
    "i32",
    [],
    {},
    [None],
)
OTHERS += ([1], [1, 2], [1, 2, 3], [0] * 6, [0] * 7, [1.0], ["x"], [-1], [2**62 + 1], [[1]], {"x": 1}, [True])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.fqvit"


def accepted(path: Path, case: Case, text: str) -> bool:
    """Return whether the loaders accept a case whose op has this JSON text. Both must agree."""
    path.write_bytes(file_of(text_with(text, case), SHARED | case.constants))
    found = verdicts(path)
    assert isinstance(found.python, FqvitError) == isinstance(found.native, FqvitError), (text, found)
    return not isinstance(found.native, FqvitError)


def whole(case: Case) -> dict[str, Any]:
    """Return the op with its default values written out."""
    op = {"op": case.op["op"]} | msgspec.to_builtins(_defaults(OPS[case.op["op"]])) | case.op
    if "terms" in op:
        op["terms"] = [_defaults(Term) | term for term in op["terms"]]
    return op


def _defaults(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.default for field in msgspec.structs.fields(struct) if not field.required}


@pytest.mark.parametrize("name", CASES)
def test_defaults_may_be_written_out_or_omitted(name: str, path: Path) -> None:
    case = CASES[name]
    op = whole(case)
    assert set(op) == {"op", *(field.name for field in msgspec.structs.fields(OPS[case.op["op"]]))}
    assert accepted(path, case, json.dumps(op)) and accepted(path, case, json.dumps(case.op))
    assert accepted(path, case, json.dumps(dict(reversed(op.items()))))


@pytest.mark.parametrize("name", CASES)
def test_both_loaders_agree_on_many_values_of_every_field(name: str, path: Path) -> None:
    case = CASES[name]
    op = whole(case)
    for field in op:
        found = {accepted(path, case, json.dumps(op | {field: value})) for value in (*INTS, *OTHERS)}
        assert False in found, field


def test_both_loaders_agree_on_many_values_of_every_field_of_a_term(path: Path) -> None:
    case = CASES["add"]
    op = whole(case)
    for i in range(2):
        for field in op["terms"][i]:
            for value in (*INTS, *OTHERS):
                terms = list(op["terms"])
                terms[i] = terms[i] | {field: value}
                accepted(path, case, json.dumps(op | {"terms": terms}))
            terms[i] = {key: value for key, value in op["terms"][i].items() if key != field}
            assert accepted(path, case, json.dumps(op | {"terms": terms})) == (field not in ("x", "mult"))
    for terms in ([], op["terms"][:1], op["terms"] * 2, [*op["terms"], {}], [None, None], {}, [{}, {}], [[], []]):
        assert not accepted(path, case, json.dumps(op | {"terms": terms}))


@pytest.mark.parametrize("name", CASES)
def test_both_loaders_agree_on_missing_unknown_null_and_duplicate_fields(name: str, path: Path) -> None:
    case = CASES[name]
    op, optional = whole(case), _defaults(OPS[case.op["op"]])
    text = json.dumps(op)
    for field, value in op.items():
        missing = accepted(path, case, json.dumps({key: x for key, x in op.items() if key != field}))
        assert missing or field not in optional or optional[field] != value
        assert not missing or field in optional
        null = accepted(path, case, json.dumps(op | {field: None}))
        assert not null or (field in optional and optional[field] is None)
        # Of duplicate fields, the last one is used, but all must have the right type.
        assert accepted(path, case, f"{text[:-1]}, {json.dumps(field)}: {json.dumps(value)}}}")
        assert not accepted(path, case, f"{text[:-1]}, {json.dumps(field)}: {{}}}}")
        assert not accepted(path, case, f"{{{json.dumps(field)}: {{}}, {text[1:]}")
    for more in ("more", "Op", "X", "y ", "", "y.w", "w", "shift\0", "parts"):
        assert not accepted(path, case, json.dumps(op | {more: 1}))


def test_integers_must_be_written_without_a_decimal_point_or_an_exponent(path: Path) -> None:
    case = CASES["mean"]
    text = json.dumps(whole(case))
    for spelled in ("33.0", "33e0", "3.3e1", "033", "+33", "0x21", "33.", '"33"', "33f", "３３"):
        assert not accepted(path, case, text.replace('"shift": 33', f'"shift": {spelled}'))
    assert accepted(path, case, text.replace('"shift": 33', '"shift":\n\t33 '))
    assert accepted(path, case, text.replace('"skip": 1', '"skip": -0'))


def test_the_engine_reads_the_same_fields_as_python() -> None:
    """Compare the field names, required flags, defaults and tag of every op."""
    listed = json.loads(_native.op_fields())
    assert set(listed) == {*OPS, "term"}
    for tag, struct in {**OPS, "term": Term}.items():
        expected = {
            field.name: {"required": True} if field.required else {"required": False, "default": _plain(field.default)}
            for field in msgspec.structs.fields(struct)
        }
        assert listed[tag] == expected, tag


def _plain(value: Any) -> Any:
    """Write a default as the engine does: its zero points are always lists."""
    return list(value) if isinstance(value, tuple) else value
