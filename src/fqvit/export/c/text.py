"""Write C identifiers, comments and constant arrays from names and values of an untrusted program.

Identifiers contain only letters, digits and _. Comments contain nothing that could end them.
"""

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
NUMBERS_PER_FILE = 1 << 20  # compilers need a few hundred bytes of memory per number
MAX_NAME = 80


@dataclass(frozen=True)
class Prefix:
    """The prefix of all names that other code can see: `names` for functions and constants, `macros` for macros."""

    names: str = "model"
    macros: str = "FQVIT"

    @staticmethod
    def of(given: str | None) -> Prefix:
        """Return the prefix that the user gave; None is the default. Models with different prefixes can be linked together."""
        if given is None:
            return Prefix()
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", given) or given.startswith("fqvit"):
            said = "expected up to 31 lower-case letters, digits and _, starting with a letter but not with fqvit"
            raise FqvitError(f"prefix {given!r}: {said}. Choose another one, such as 'my_model'.")
        return Prefix(given, given.upper())

    def apply(self, text: str) -> str:
        """Replace the default prefix in C code."""
        return text.replace("model_run", f"{self.names}_run").replace("FQVIT_", f"{self.macros}_")


def comment(text: str) -> str:
    """Return text that is safe between /* and */: printable, without *, and without anything that -Wall warns about."""
    return re.sub(r"[^\w .,:;=<>()\[\]{}+\-|^'/]", "_", text, flags=re.ASCII).replace("//", "/_")


class Identifiers:
    """Maps names to unique C identifiers."""

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
    """Collects the constants that the code uses, each once, in the order of their first use."""

    def __init__(self, identifiers: Identifiers, prefix: Prefix) -> None:
        self._identifiers, self._prefix = identifiers, prefix
        self._arrays: dict[str, Array] = {}

    def add(self, name: str, array: Array) -> str:
        """Add a constant with the array's element type and return its identifier."""
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
        """Yield the definitions for one file at a time, at most NUMBERS_PER_FILE numbers each unless one array is larger."""
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
