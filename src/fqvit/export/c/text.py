"""Words of C: identifiers, comments, and constants as arrays. Names come from a file that anybody may have written, so that
nothing of them but letters, digits and _ reaches the code, and nothing that could end a comment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fqvit.errors import FqvitError
from fqvit.ir.value import NAMES

Array = np.ndarray[Any, Any]
C_TYPES = {"u8": "uint8_t", "i8": "int8_t", "u16": "uint16_t", "i16": "int16_t", "i32": "int32_t"}
NUMBERS_PER_LINE = 64
NUMBERS_PER_FILE = 1 << 20  # compilers take a few hundred bytes of memory for each
MAX_NAME = 80


@dataclass(frozen=True)
class Prefix:
    """What the names begin with that other files see: functions and constants, and macros."""

    names: str = "model"
    macros: str = "FQVIT"

    @staticmethod
    def of(given: str | None) -> Prefix:
        """One of its own for each model, so that several fit into one program; None: the usual."""
        if given is None:
            return Prefix()
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", given) or given.startswith("fqvit"):
            said = "expected up to 31 small letters, digits and _, a letter first, and not fqvit"
            raise FqvitError(f"prefix {given!r}: {said}. Choose another, such as shoes.")
        return Prefix(given, given.upper())

    def apply(self, text: str) -> str:
        """C that was written for the usual one."""
        return text.replace("model_run", f"{self.names}_run").replace("FQVIT_", f"{self.macros}_")


def comment(text: str) -> str:
    """Text for between /* and */: printable, without * or what -Wall warns of."""
    return re.sub(r"[^\w .,:;=<>()\[\]{}+\-|^'/]", "_", text, flags=re.ASCII).replace("//", "/_")


class Identifiers:
    """Identifiers, one for each name, each once."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, name: str) -> str:
        if name not in self._given:
            base = re.sub(r"\W", "_", name, flags=re.ASCII)[:MAX_NAME] or "_"
            free, count = base, 1
            while free.lower() in self._taken:
                count += 1
                free = f"{base}_{count}"
            self._taken.add(free.lower())
            self._given[name] = free
        return self._given[name]


class Arrays:
    """The constants that the code names, each once, in the order in which they were first asked for."""

    def __init__(self, identifiers: Identifiers, prefix: Prefix) -> None:
        self._identifiers, self._prefix = identifiers, prefix
        self._arrays: dict[str, Array] = {}

    def add(self, name: str, array: Array) -> str:
        """-> the identifier of a constant of its own type."""
        assert NAMES[array.dtype] in C_TYPES, array.dtype
        identifier = f"{self._prefix.names}_{self._identifiers(f'{name} {NAMES[array.dtype]}')}"
        self._arrays[identifier] = array
        return identifier

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def declarations(self) -> Iterator[str]:
        for identifier, array in self._arrays.items():
            yield f"extern const {C_TYPES[NAMES[array.dtype]]} {identifier}[{array.size}];\n"

    def files(self) -> Iterator[list[str]]:
        """The definitions, in as many parts as files are wanted."""
        part: list[str] = []
        numbers = 0
        for identifier, array in self._arrays.items():
            if part and numbers + array.size > NUMBERS_PER_FILE:
                yield part
                part, numbers = [], 0
            numbers += array.size
            shape = ", ".join(map(str, array.shape)) or "1"
            part.append(f"\nconst {C_TYPES[NAMES[array.dtype]]} {identifier}[{array.size}] = {{ /* [{shape}] */\n")
            flat = array.reshape(-1).tolist()
            for i in range(0, len(flat), NUMBERS_PER_LINE):
                part.append(",".join(map(str, flat[i : i + NUMBERS_PER_LINE])) + ",\n")
            part.append("};\n")
        yield part
