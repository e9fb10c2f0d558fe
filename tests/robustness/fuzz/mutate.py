"""Mutate valid .fqvit files as a hostile writer would: change a few parts and make the fingerprint valid again.

Most changes keep the JSON types and use existing names, because a file that fails the first check tests none of the later ones.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import struct
from dataclasses import dataclass
from typing import Any

from tests.robustness.hostile.containers import DETECTOR, PROGRAM, Tensors, fingerprint_of, packed, unpacked

INTS = (0, 1, -1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 61, 62, 63, 64, 127, 128, 255, 256, 65535, 65536)
FAR = (2**28, 2**30, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**40, -(2**31), -(2**63), -(10**40))
SIZES = (0, 1, -1, 2, 3, 4096, 8192, 8193, 2**27, 2**28, 2**31, 2**32, 2**62, 2**63, 2**64 - 1)
KINDS = ("lookup", "linear", "layernorm", "add", "mean", "take", "permute", "concat", "matmul", "log_softmax", "softmax")
KINDS += ("shift_matmul", "row_codes", "attend", "multiply", "rotary", "depthwise", "max", "exec")
WIDTHS = {"U8": 1, "I8": 1, "U16": 2, "I16": 2, "I32": 4, "I64": 8}
OTHER_DTYPES = ("F32", "BF16", "F64", "BOOL", "U32", "U64", "F8_E4M3", "I4", "C64", "")
WORDS = ("", "pixels", "classes", "\0", "é\ud800", "../x", "x" * 300, "1", "None", "Linear", "add")


@dataclass(frozen=True)
class Seed:
    """A valid file, unpacked. kind: PROGRAM or DETECTOR"""

    kind: str
    text: str
    tensors: Tensors

    @staticmethod
    def of(raw: bytes) -> Seed:
        (length,) = struct.unpack("<Q", raw[:8])
        kind = DETECTOR if DETECTOR in json.loads(raw[8 : 8 + length])["__metadata__"] else PROGRAM
        text, _, tensors = unpacked(raw, kind)
        return Seed(kind, text, tensors)


def mutated(rng: random.Random, seed: Seed) -> bytes:
    """Return the file with one to four changes. In one of sixteen files the container is damaged instead."""
    if rng.random() < 1 / 16:
        return _damaged(rng, seed)
    header, tensors = json.loads(seed.text), dict(seed.tensors)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        change = rng.choices(CHANGES, WEIGHTS)[0]
        # An earlier change may have removed the fields that this one needs.
        with contextlib.suppress(TypeError, LookupError, AttributeError, ValueError):
            change(rng, header, tensors)
    text = json.dumps(header, separators=(",", ":"))
    chance = rng.random()
    if chance < 0.02:
        text = _cut_text(rng, text)
    elif chance < 0.06:
        text = _spelled(rng, text)
    return packed(text, fingerprint_of(text, tensors), tensors, seed.kind)


# Changes to the JSON.


def _programs(header: Any) -> list[Any]:
    """Return the parts with ops: the program itself, or the programs of a detector."""
    if "ops" in header:
        return [header]
    return [part for part in (header.get("pyramid"), *header.get("boxes", ()), *header.get("masks", ())) if part]


def _ops(rng: random.Random, header: Any) -> list[Any]:
    return rng.choice(_programs(header))["ops"]


def _late(rng: random.Random, ops: list[Any]) -> int:
    """Choose an index, mostly a late one: the first ops only reshape pixels."""
    return min(int(len(ops) * rng.betavariate(2, 1)), len(ops) - 1)


def _change_op(rng: random.Random, header: Any, tensors: Tensors) -> None:
    ops = _ops(rng, header)
    if ops:
        op = ops[_late(rng, ops)]
        field = rng.choice(list(op))
        if field == "op":
            op["op"] = rng.choice(KINDS)
        else:
            op[field] = _other(rng, op[field], [o["y"] for o in ops if "y" in o], tensors)


def _change_ops(rng: random.Random, header: Any, tensors: Tensors) -> None:
    """Remove, duplicate or swap ops, change the kind of one, or add a field to one."""
    ops = _ops(rng, header)
    if not ops:
        return
    i, what = _late(rng, ops), rng.randrange(6)
    if what == 0:
        del ops[i]
    elif what == 1:
        again = dict(ops[i], y=f"{ops[i]['y']}.again")
        for name in [name for name in tensors if name.startswith(f"{ops[i]['y']}.")]:
            tensors[name.replace(ops[i]["y"], again["y"], 1)] = tensors[name]
        ops.insert(rng.randrange(i, len(ops) + 1), again)
    elif what == 2:
        j = rng.randrange(len(ops))
        ops[i], ops[j] = ops[j], ops[i]
    elif what == 3:
        ops[i]["op"] = rng.choice(ops)["op"]
    elif what == 4:
        donor = rng.choice(ops)
        field = rng.choice(list(donor))
        ops[i][field] = donor[field]
    else:
        fields = ("alpha", "index", "region", "group", "width", "codebooks", "weights_of", "select", "bits", "out")
        ops[i][rng.choice(fields)] = _word_or_int(rng, ops)


def _change_any(rng: random.Random, header: Any, tensors: Tensors) -> None:
    """Change any leaf of the JSON: preprocess, outputs, sites, settings, detector constants."""
    node: Any = header
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = rng.choice(keys)
        if key == "version" and rng.random() < 0.9:
            continue
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.9:
            node = node[key]
            continue
        if rng.random() < 0.05:
            del node[key]
        else:
            node[key] = _other(rng, node[key], list(tensors), tensors)
        return


def _other(rng: random.Random, value: Any, names: list[str], tensors: Tensors) -> Any:
    """Return another value, mostly of the same type."""
    if rng.random() < 0.03:
        return rng.choice((None, True, 1.5, "x", [], {}, [1], 1))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, 2 * value, -value, rng.choice(INTS), rng.choice(INTS), rng.choice(FAR)))
    if isinstance(value, float):
        return rng.choice((value * 2, value / 2, -value, 0.0, 1e-320, 1e30, 1e308, 2.0**-40, 5))
    if isinstance(value, str):
        return rng.choice(rng.choice((names, list(tensors), names, WORDS)) or WORDS)
    if isinstance(value, list):
        return _other_list(rng, value, names, tensors)
    if isinstance(value, dict) and value:
        field = rng.choice(list(value))
        return {**value, field: _other(rng, value[field], names, tensors)}
    return rng.choice((*INTS, *WORDS, *names))


def _other_list(rng: random.Random, value: list[Any], names: list[str], tensors: Tensors) -> list[Any]:
    value = list(value)
    what = rng.randrange(6) if value else 5
    if what == 0:
        rng.shuffle(value)
    elif what == 1:
        value.pop(rng.randrange(len(value)))
    elif what == 2:
        value.insert(rng.randrange(len(value) + 1), rng.choice(value))
    elif what < 5:
        i = rng.randrange(len(value))
        small = isinstance(value[i], int) and rng.random() < 0.5
        value[i] = rng.choice(SIZES) if small else _other(rng, value[i], names, tensors)
    else:
        value.append(rng.choice(INTS))
    return value


def _word_or_int(rng: random.Random, ops: list[Any]) -> Any:
    return rng.choice((rng.choice(ops)["y"], rng.choice(INTS), rng.choice(WORDS), "i32", "acc", [1, 2]))


def _cut_text(rng: random.Random, text: str) -> str:
    i = rng.randrange(len(text))
    return rng.choice(
        (text[:i], text[:i] + text[i + 1 :], text[:i] + rng.choice('{}[]",:0-e\\\x01é') + text[i:], f"{text} ", "", "[]")
    )


def _spelled(rng: random.Random, text: str) -> str:
    """Write a value of the JSON in another notation, or duplicate a key: loaders must agree on what they accept."""
    numbers = list(re.finditer(r"(?<=[:,\[])-?[0-9][0-9.e+-]*(?=[,}\]])", text))
    keys = list(re.finditer(r'(?<=[{,])"([^"\\]*)":', text))
    what = rng.randrange(4)
    if what < 2 and numbers:
        found = rng.choice(numbers)
        value = found.group()
        spellings = (f"{value}.0", f"{value}e0", f"{value}E+0", "-0", "-0.0", f"0{value}", f"+{value}", value + "0" * 30)
        other = rng.choice(spellings)
        return text[: found.start()] + other + text[found.end() :]
    if what == 2 and keys:
        found, value = rng.choice(keys), rng.choice(("null", "1", '"x"', "[]", "{}", "true", "1.0", '"pixels"'))
        return f"{text[: found.start()]}{found.group()}{value},{text[found.start() :]}"
    if keys:
        found = rng.choice(keys)
        escaped = "".join(f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else letter for letter in found.group(1))
        return f'{text[: found.start()]}"{escaped}": {text[found.end() :]}'
    return text


# Changes to the constants.


def _change_values(rng: random.Random, header: Any, tensors: Tensors) -> None:
    """Make one, a few or all values of a constant extreme, or flip one bit."""
    if not tensors:
        return
    name = rng.choice(list(tensors))
    dtype, shape, part = tensors[name]
    width = WIDTHS.get(dtype, 1)
    if len(part) < width:
        return
    data, count = bytearray(part), len(part) // width
    if rng.random() < 0.25:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        value = rng.choice((*INTS, *FAR, rng.getrandbits(64))) & (256**width - 1)
        entry, how = value.to_bytes(width, "little"), rng.random()
        indices = range(count) if how < 0.15 else [rng.randrange(count) for _ in range(1 if how < 0.7 else min(count, 5))]
        for i in indices:
            data[i * width : (i + 1) * width] = entry
    tensors[name] = dtype, shape, bytes(data)


def _change_tensor(rng: random.Random, header: Any, tensors: Tensors) -> None:
    """Change the type or shape of a constant, or remove, rename, swap or duplicate it.

    For the dtypes in WIDTHS, the number of bytes matches the shape.
    """
    if not tensors:
        return
    name, other = rng.choice(list(tensors)), rng.choice(list(tensors))
    dtype, shape, part = tensors[name]
    what = rng.randrange(9)
    if what == 0:
        del tensors[name]
    elif what == 1:
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif what == 2:
        tensors[rng.choice((*WORDS, f"{name}.again", name.rpartition(".")[0]))] = tensors.pop(name)
    elif what == 3:
        new = rng.choice(list(WIDTHS))
        count = len(part) // WIDTHS[new]
        tensors[name] = new, (shape if count * WIDTHS.get(dtype, 1) == len(part) else [count]), part[: count * WIDTHS[new]]
    elif what == 4:
        tensors[name] = dtype, rng.choice((shape[::-1], [1, *shape], [*shape, 1], [0, *shape])), part
        if 0 in tensors[name][1]:
            tensors[name] = dtype, tensors[name][1], b""
    elif what == 5 and shape:
        rows = rng.choice((0, 1, shape[0] - 1, shape[0] + 1, 2 * shape[0]))
        size = len(part) // shape[0] * max(rows, 0) if shape[0] else 0
        tensors[name] = dtype, [max(rows, 0), *shape[1:]], (part * 2 + bytes(size))[:size]
    elif what == 6:
        tensors[name] = rng.choice(OTHER_DTYPES[:6]), [len(part)], part
    elif what == 7:
        linear = ("w", "bias", "mult", "shift", "table", "exponent", "choice", "codebooks")
        tensors[f"{other}.{rng.choice(linear)}"] = tensors[name]
    else:
        tensors[name] = dtype, [len(part) // WIDTHS.get(dtype, 1)], part


CHANGES = (_change_op, _change_ops, _change_any, _change_values, _change_tensor)
WEIGHTS = (28, 8, 12, 44, 8)


# Damage to the container.


def _damaged(rng: random.Random, seed: Seed) -> bytes:
    raw = packed(seed.text, fingerprint_of(seed.text, seed.tensors), seed.tensors, seed.kind)
    what = rng.randrange(8)
    (length,) = struct.unpack("<Q", raw[:8])
    if what == 0:
        return raw[: rng.randrange(len(raw))]
    if what == 1:
        return raw + rng.randbytes(rng.randrange(1, 20))
    if what == 2:
        return struct.pack("<Q", rng.choice((0, 1, length - 1, length + 1, length + 8, 2**31, 2**63, 2**64 - 1))) + raw[8:]
    if what == 3:
        data = bytearray(raw)
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    table, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    names = [name for name in table if name != "__metadata__"]
    if not names:
        return raw[:-1]
    entry = table[rng.choice(names)]
    if what == 4:
        entry["data_offsets"] = rng.choice(
            ([0, 0], [8, 0], [0, 2**63], [2**64 - 1, 0], [0, len(data) + 1], [-1, 4], [0], "x", None)
        )
    elif what == 5:
        i = rng.randrange(2)
        entry["data_offsets"][i] = max(entry["data_offsets"][i] + rng.choice((-8, -1, 1, 8, 2**32)), -1)
    elif what == 6:
        entry["shape"] = _other_list(rng, [*entry["shape"], rng.choice(SIZES)], [], {})
    else:
        entry[rng.choice(("dtype", "shape", "more"))] = rng.choice((*OTHER_DTYPES, None, 1, {}))
    if rng.random() < 0.1:
        table["__metadata__"] = rng.choice(({}, {"fqvit": "{}"}, {"fqvit": 1}, None, [], {"fingerprint": "x"}))
    head = json.dumps(table).encode()
    if rng.random() < 0.1:  # a duplicate name
        name = rng.choice(names)
        head = head[:-1] + f", {json.dumps(name)}: {json.dumps(table[rng.choice(names)])}".encode() + b"}"
    return struct.pack("<Q", len(head)) + head + data
