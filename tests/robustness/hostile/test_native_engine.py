"""The native engine checks every record (the arguments of one op): it rejects invalid records one by one and never crashes.

Records that it accepts must run, stay inside their code range, and give the same bits on every instruction set, fused or not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from fqvit import _native
from fqvit.ir.program import AnyOp
from tests.robustness.hostile.records import Record, Recorded, send
from tests.runtime.programs import ISAS

NOTHING = np.zeros(0, np.uint8)
REJECTED = (_native.BadProgram, TypeError, MemoryError)
IMAGE = (4, 2, 3)
T, C = 4, 6


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def i64(*values: int) -> Any:
    return np.array(values, np.int64)


def linear_arrays(inputs: int = C, outputs: int = 5) -> list[Any]:
    w = (np.arange(outputs * inputs).reshape(outputs, inputs) % 9 - 4).astype(np.int8)
    return [w, np.ones(outputs, np.int32), np.full(outputs, 2**30, np.int32), np.full(outputs, 33, np.uint8), i32(7)]


EXPONENTIALS, CODES = i32(2**20, 2**10, 0), np.array([15, 3, 0], np.uint8)
REGION = np.array([[0, 1], [1, 1]], np.uint8)
SCORES = [2**30, 40, 3, 4, 0, 9, 8]
# Numbers of the values that BEFORE writes; the records below read them.
X, H, S, LOG, RELATIVE, ACC, WIDE_X, ROW, TOKEN, UNIFORM = range(1, 11)
BEFORE = [
    Record("permute", [0], [], [i64(T, C), i64(0, 1), i64(), i64()]),
    Record("permute", [X], [], [i64(2, 2, 2, 3), i64(0, 1, 2, 3), i64(), i64()]),
    Record("matmul", [H, H], SCORES, [NOTHING, NOTHING]),
    Record("log_softmax", [S], [4], [EXPONENTIALS, REGION]),
    Record("row_codes", [S], [], [CODES, REGION]),
    Record("linear", [X], [1, 8], linear_arrays(C, C)),
    Record("linear", [X], [0, 16], linear_arrays(C, C)),
    Record("", arrays=[np.arange(C).astype(np.int16)]),
    Record("", arrays=[np.full((2, C), 9, np.uint8)]),
    Record("softmax", [S], [2**40, 36, 8], [EXPONENTIALS, NOTHING]),
]
NORM = [np.stack([np.full(C, 2**30), np.full(C, 2**20)]).astype(np.int32), i32(5), np.full(C, 2, np.uint8)]
BIAS = [np.ones((3, 2), np.int32), np.array([[0, 1], [2, 0]], np.uint16)]
VALID = {
    "lookup": Record(
        "lookup", [X], [8], [np.arange(256).astype(np.int16), np.array([0, 1, 2, 0, 1, 2], np.uint8), i32(1, 2, 3)]
    ),
    "linear": Record("linear", [X], [0, 8], linear_arrays()),
    "layernorm": Record("layernorm", [X], [9, 32, 10, 8], NORM),
    "add": Record(
        "add", [ACC, ROW], [20, 8], [i32(2**10), i32(0), NOTHING, i32(*[2**12] * C), i32(3), NOTHING, i32(4), NORM[2]]
    ),
    "mean": Record("mean", [X], [2**30, 33, 1, 3, 8], [i32(5), NOTHING]),
    "take": Record("take", [X], [], [i32(3, -1, 0), i32(9)]),
    "permute": Record("permute", [X], [], [i64(2, 2, 6), i64(1, 0), i64(12), i64(1, 1)]),
    "concat": Record("concat", [X, TOKEN], [], []),
    "matmul": Record("matmul", [H, H], SCORES, BIAS),
    "log_softmax": Record("log_softmax", [S], [4], [EXPONENTIALS, REGION]),
    "softmax": Record("softmax", [S], [2**40, 36, 8], [EXPONENTIALS, REGION]),
    "shift_matmul": Record("shift_matmul", [LOG, H], [2**30, 40, 5, 4, 1, 3, 8], []),
    "row_codes": Record("row_codes", [S], [], [CODES, REGION]),
    "attend": Record("attend", [RELATIVE, H], [2**28, 30, 5, 3, 8], [i32(*range(16))]),
}
FAR = (-1, -(2**63), 2**63 - 1)
OPS = tuple(VALID)


def engine_with(*records: Record) -> Any:
    engine = _native.Engine(list(IMAGE), ISAS[0], 1)
    for record in (*BEFORE, *records):
        send(engine, record)
    return engine


def assert_rejected(record: Record) -> None:
    """Assert that the engine rejects the record and can be used afterwards."""
    engine = engine_with()
    with pytest.raises(REJECTED):
        send(engine, record)
    engine.finish(send(engine, VALID["linear"]), False)
    assert engine.run(np.zeros((1, *IMAGE), np.uint8)).shape == (1, T, 5)


def changed(items: list[Any], i: int, value: Any) -> list[Any]:
    return [*items[:i], value, *items[i + 1 :]]


def test_every_op_has_a_record_that_is_accepted_and_runs() -> None:
    assert set(VALID) == {op.__struct_config__.tag for op in get_args(AnyOp)}
    for record in VALID.values():
        for isa in ISAS:
            program = Recorded(IMAGE, [*BEFORE, record], len(BEFORE) + 1)
            program.build(isa).run(np.full((2, *IMAGE), 77, np.uint8))


@pytest.mark.parametrize("tag", OPS)
def test_missing_inputs_and_inputs_of_another_kind_are_rejected(tag: str) -> None:
    record = VALID[tag]
    for i in range(len(record.inputs)):
        for value in (*FAR, 11, 12, 2**31, 2**32, ROW if tag != "add" else 11):
            assert_rejected(replace(record, inputs=changed(record.inputs, i, value)))
    if tag not in ("add", "take", "permute", "concat"):
        assert_rejected(replace(record, inputs=changed(record.inputs, 0, ACC)))
        assert_rejected(replace(record, inputs=changed(record.inputs, 0, TOKEN)))


@pytest.mark.parametrize("tag", OPS)
def test_too_few_and_too_many_fields_are_rejected(tag: str) -> None:
    record = VALID[tag]
    changes: list[dict[str, Any]] = [{"ints": [*record.ints, 1]}, {"arrays": [*record.arrays, NOTHING]}, {"inputs": []}]
    changes += [{"tag": tag + "x"}, {"tag": tag.upper()}, {"tag": "linear\0"}]
    if tag != "concat":
        changes.append({"inputs": [*record.inputs, X]})
    if record.ints:
        changes += [{"ints": record.ints[:-1]}, {"ints": []}]
    if record.arrays:
        changes += [{"arrays": record.arrays[:-1]}, {"arrays": []}]
    for change in changes:
        assert_rejected(replace(record, **change))


# {op: values outside the range of each of its integers}, in the order of runtime/native.py.
SHIFTS, BITS, ZERO = (0, 63, 64, 255, *FAR), (0, 17, 64, *FAR), (256, 2**16, *FAR)
SIDE, MULT = (2**16, *FAR), (2**31, *FAR)
INTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "lookup": (BITS,),
    "linear": ((3, *FAR), BITS),
    "layernorm": ((0, 2**62, *FAR), SHIFTS, (33, 64, *FAR), BITS),
    "add": (SHIFTS, BITS),
    "mean": (MULT, SHIFTS, (4, *FAR), ZERO, BITS),
    "matmul": (MULT, SHIFTS, SIDE, SIDE, (2, *FAR), ZERO, BITS),
    "log_softmax": ((0, 1, 5, *FAR),),
    "softmax": ((0, 2**58, *FAR), (0, 53, 63, *FAR), BITS),
    "shift_matmul": (MULT, SHIFTS, SIDE, (0, 1, 2, 3, 5, *FAR), (0, 2, *FAR), ZERO, BITS),
    "attend": ((2**29, *FAR), SHIFTS, SIDE, ZERO, BITS),
}


@pytest.mark.parametrize("tag", OPS)
def test_integers_out_of_range_are_rejected(tag: str) -> None:
    record = VALID[tag]
    assert len(record.ints) == len(INTS.get(tag, ()))
    for i, values in enumerate(INTS.get(tag, ())):
        for value in values:
            assert_rejected(replace(record, ints=changed(record.ints, i, value)))
        for value in (2**63, -(2**63) - 1, 1.5, "1", None):
            assert_rejected(replace(record, ints=changed(record.ints, i, value)))


TWO = np.zeros((2, 2), np.int32)
ARRAYS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "lookup": (
        (
            np.zeros(255, np.int16),
            np.zeros(257, np.int16),
            np.zeros((1, 256), np.int16),
            np.zeros(256, np.int8),
            i32(*[2**31 - 1] * 256),
        ),
        (np.full(C, 16, np.uint8), np.zeros(C + 1, np.uint8), np.zeros(C, np.int8), np.array([255] * C, np.uint8)),
        (i32(1, 2), i32(1, 2, 3, 4), i32(1, 2, 256), i32(-1, 2, 3), NOTHING),
    ),
    "linear": (
        (np.zeros((5, C + 1), np.int8), np.zeros((0, C), np.int8), np.zeros(C, np.int8), np.zeros((5, C), np.uint8), NOTHING),
        (np.ones(4, np.int32), np.ones(5, np.int64), np.full(5, 2**31 - 1, np.int32), np.full(5, -(2**31), np.int32), TWO),
        (np.ones(4, np.int32), np.full(5, -1, np.int32), np.full(5, 2**31, np.int64), NOTHING),
        (np.zeros(5, np.uint8), np.full(5, 63, np.uint8), np.full(5, -1, np.int8), np.ones(6, np.uint8), NOTHING),
        (i32(256), i32(-1), i32(1, 2), np.full(5, 2**40, np.int64), NOTHING),
    ),
    "layernorm": (
        (np.ones((2, C + 1), np.int32), np.ones((1, C), np.int32), np.ones(2 * C, np.int32), np.ones((2, C), np.int64)),
        (i32(65536), i32(-1), i32(1, 2), NOTHING),
        (np.full(C, 16, np.uint8), np.zeros(C - 1, np.uint8), np.zeros(C, np.int32)),
    ),
    "add": (
        (i32(2**30), i32(-1), i32(1, 2), NOTHING),
        (i32(65536), i32(-1), i32(1, 2), NOTHING),
        (np.full(C, 16, np.uint8), np.zeros(C + 1, np.uint8)),
        (i32(2**30), i32(-1), i32(1, 2), NOTHING),
        (i32(65536), i32(-1), i32(1, 2), NOTHING),
        (np.full(C, 16, np.uint8), np.zeros(C + 1, np.uint8)),
        (i32(256), i32(-1), i32(1, 2), NOTHING),
        (np.full(C, 16, np.uint8), np.zeros(C + 1, np.uint8)),
    ),
    "mean": ((i32(65536), i32(-1), i32(1, 2), NOTHING), (np.full(C, 16, np.uint8), np.zeros(C + 1, np.uint8))),
    "take": (
        (
            i32(4),
            i32(-2),
            i32(2**31 - 1),
            i32(-(2**31)),
            i64(0),
            np.zeros((0, 3), np.int32),
            np.zeros((1,) * 8, np.int32),
            NOTHING,
        ),
        (i32(256), i32(-1), i32(1, 2), NOTHING),
    ),
    "permute": (
        (i64(2, 2, 5), i64(-2, -2, 6), i64(2**62, 2**62, 0), i64(2**40, 2**40), i64(0), i64(*[1] * 9, 24), NOTHING),
        (i64(0, 0), i64(0, 2), i64(0, -1), i64(0), i64(0, 1, 2), i64(0, 2**62), NOTHING),
        (i64(11), i64(-12, -1), i64(2**62, 4), i64(0), i64(*[1] * 8, 12)),
        (i64(3, 0), i64(1, 2), i64(-1, 0), i64(1), i64(1, -1), i64(1, 1, 1), i64(2**62, 2**62)),
    ),
    "matmul": (
        (
            np.ones((3, 3), np.int32),
            np.ones((2, 2), np.int32),
            np.ones((0, 2), np.int32),
            np.ones(6, np.int32),
            np.full((3, 2), 2**31 - 1, np.int32),
            NOTHING,
        ),
        (np.full((2, 2), 3, np.uint16), np.full((2, 3), 1, np.uint16), np.ones((2, 2), np.int32), np.ones(4, np.uint16)),
    ),
    "attend": (
        (
            i32(*range(15)),
            i32(*range(257)),
            i32(*[0] * 16),
            i32(*[2**15 + 1] * 16),
            i32(*[-1] * 16),
            i32(*[5] * 16),
            i32(*range(16, 0, -1)),
        ),
    ),
}
REGIONS = (np.zeros((2, 3), np.uint8), np.zeros((3, 2), np.uint8), np.zeros(4, np.uint8), np.zeros((2, 2), np.int32))
ARRAYS["log_softmax"] = ((i32(0, 1), i32(1, -1), i32(2**31 - 1), EXPONENTIALS.astype(np.int64), CODES, TWO, NOTHING), REGIONS)
ARRAYS["softmax"] = ARRAYS["log_softmax"]
ARRAYS["row_codes"] = ((EXPONENTIALS, CODES.astype(np.int8), CODES[None], NOTHING), REGIONS)


@pytest.mark.parametrize("tag", OPS)
def test_arrays_with_a_wrong_type_shape_or_content_are_rejected(tag: str) -> None:
    record = VALID[tag]
    assert len(record.arrays) == len(ARRAYS.get(tag, ()))
    for i, values in enumerate(ARRAYS.get(tag, ())):
        for value in values:
            assert_rejected(replace(record, arrays=changed(record.arrays, i, value)))
        for value in (record.arrays[i].astype(np.float32), record.arrays[i].astype(np.complex64), None, "table", [1, 2]):
            assert_rejected(replace(record, arrays=changed(record.arrays, i, value)))


@pytest.mark.parametrize(
    "record",
    [
        replace(VALID["matmul"], inputs=[H, X]),
        replace(VALID["matmul"], inputs=[H, LOG]),
        replace(VALID["matmul"], ints=[2**30, 40, 65535, 65535, 0, 9, 8]),
        replace(VALID["shift_matmul"], inputs=[H, H]),
        replace(VALID["shift_matmul"], inputs=[WIDE_X, H]),
        replace(VALID["attend"], inputs=[LOG, H]),
        replace(VALID["attend"], inputs=[UNIFORM, H]),
        replace(VALID["attend"], inputs=[S, H]),
        replace(VALID["attend"], arrays=[i32(*[7] * 16)]),  # the masked code has a weight above 0
        replace(VALID["add"], inputs=[ROW, TOKEN]),
        replace(VALID["add"], inputs=[ACC, TOKEN]),
        replace(VALID["add"], inputs=[ACC, H]),
        replace(VALID["concat"], inputs=[TOKEN]),
        replace(VALID["concat"], inputs=[X, WIDE_X]),
        replace(VALID["concat"], inputs=[X, H]),
        replace(VALID["mean"], inputs=[H]),
        replace(VALID["log_softmax"], inputs=[X]),
        replace(VALID["linear"], inputs=[H]),
        replace(VALID["linear"], ints=[2, 8], arrays=changed(linear_arrays(), 3, np.ones(5, np.uint8))),
    ],
    ids=lambda record: f"{record.tag} {record.inputs}",
)
def test_inputs_that_do_not_match_the_op_or_each_other_are_rejected(record: Record) -> None:
    assert_rejected(record)


@pytest.mark.parametrize("tag", ["log_softmax", "row_codes"])
def test_attention_codes_must_come_directly_from_their_op(tag: str) -> None:
    """After a permutation it is unknown whether every row still has the largest weight."""
    same = [i64(2, 2, 2, 2), i64(0, 1, 3, 2), i64(), i64()]
    moved = Record("permute", [LOG if tag == "log_softmax" else RELATIVE], [], same)
    times_v = VALID["attend" if tag == "row_codes" else "shift_matmul"]
    engine = engine_with(moved)
    if tag == "row_codes":
        with pytest.raises(_native.BadProgram):
            send(engine, replace(times_v, inputs=[11, H]))
    else:  # masked codes stay masked
        with pytest.raises(_native.BadProgram):
            send(engine, replace(times_v, inputs=[11, H], ints=changed(times_v.ints, 4, 0)))


@pytest.mark.parametrize(
    "image", [[4, 2], [4, 2, 3, 1], [0, 2, 3], [-1, 2, 3], [2**28, 2, 3], [2**62, 4, 1], [2**63 - 1] * 3, []]
)
def test_invalid_image_shapes_are_rejected(image: list[int]) -> None:
    with pytest.raises(REJECTED):
        _native.Engine(image, "", 1)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 0), np.uint8),
        np.zeros(3, np.int8),
        np.zeros(3, np.int64),
        np.zeros(3, np.float32),
        np.zeros((1,) * 9, np.uint8),
        None,
    ],
)
def test_constants_that_cannot_be_buffers_are_rejected(array: Any) -> None:
    with pytest.raises(REJECTED):
        engine_with().constant(array)


@pytest.mark.parametrize("output", [0, -1, 12, ROW, TOKEN, 2**31 - 1, -(2**31), 2**31, 2**70, None])
def test_outputs_that_no_op_writes_are_rejected(output: Any) -> None:
    engine = engine_with()
    with pytest.raises(REJECTED):
        engine.finish(output, False)
    with pytest.raises(REJECTED):
        engine.finish(X, False, [ACC, output])
    engine.finish(X, False)


def test_outputs_must_differ_and_run_all_returns_them_in_order() -> None:
    engine, images = engine_with(), np.zeros((2, *IMAGE), np.uint8)
    for others in ([X], [ACC, ACC], [WIDE_X, X]):
        with pytest.raises(REJECTED):
            engine.finish(X, False, others)
    with pytest.raises(REJECTED):
        engine.run_all(images)
    engine.finish(X, False, [ACC, WIDE_X])
    single = engine_with()
    single.finish(ACC, False)
    x, acc, wide = engine.run_all(images)
    assert (x == engine.run(images)).all() and (acc == single.run(images)).all() and wide.dtype == np.uint16
    with pytest.raises(REJECTED):
        engine.run_all(np.zeros((1, 4, 3, 2), np.uint8))


def test_finish_must_be_called_once_and_before_any_run() -> None:
    engine, images = engine_with(), np.zeros((1, *IMAGE), np.uint8)
    for use in (lambda: engine.run(images), lambda: engine.profile(images, 1), lambda: engine.buffers(images, [X])):
        with pytest.raises(REJECTED):
            use()
    engine.finish(ACC, False)
    for use in (
        lambda: engine.finish(ACC, False),
        lambda: send(engine, VALID["linear"]),
        lambda: engine.constant(np.zeros(3, np.uint8)),
        lambda: engine.buffers(images, [X]),
        lambda: engine.profile(np.zeros((2, *IMAGE), np.uint8), 1),
        lambda: engine.profile(images, 0),
        lambda: engine.run(np.zeros((1, 4, 3, 2), np.uint8)),
        lambda: engine.run(np.zeros(IMAGE, np.uint8)),
        lambda: engine.run(None),
    ):
        with pytest.raises(REJECTED):
            use()
    assert engine.run(images).shape == (1, T, C)


@pytest.mark.parametrize("number", [0, ROW, TOKEN, 11, -1, 2**31 - 1])
def test_only_buffers_that_ops_write_can_be_read_back(number: int) -> None:
    engine = engine_with()
    engine.finish(ACC, True)
    image = np.zeros((1, *IMAGE), np.uint8)
    for numbers in ([number], [X, number]):
        with pytest.raises(_native.BadProgram):
            engine.buffers(image, numbers)
    with pytest.raises(_native.BadProgram):
        engine.buffers(np.zeros((2, *IMAGE), np.uint8), [X])
    assert [codes.dtype for codes in engine.buffers(image, [WIDE_X, X])] == [np.uint16, np.uint8]


def test_the_number_of_threads_is_clamped_to_1_and_256() -> None:
    for threads in (-(2**31), 0, 2**31 - 1):
        assert 1 <= _native.Engine(list(IMAGE), "", threads).threads <= 256
