"""Draw random inputs for one op: buffers with their values, and constants. See also: test_ops.py (one case per op)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fqvit.ir.kit import DTYPES
from fqvit.ir.value import Value

IMAGES = 2
STYLES = ("random", "lowest", "highest", "mixed")


@dataclass
class Draw:
    """The random choices of one case and the buffers and constants drawn so far.

    style: the contents of buffers, one of STYLES: random codes, only the lowest, only the highest, or a mix of these two
    """

    rng: np.random.Generator
    style: str
    buffers: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    constants: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def int(self, lo: int, hi: int) -> int:
        return int(self.rng.integers(lo, hi, endpoint=True))

    def one(self, *choices: Any) -> Any:
        return choices[self.int(0, len(choices) - 1)]

    def integers(self, lo: int, hi: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
        x = self.rng.integers(lo, hi, shape, endpoint=True)
        if self.style == "lowest":
            x = np.full(shape, lo)
        elif self.style == "highest":
            x = np.full(shape, hi)
        elif self.style == "mixed":
            x = np.where(self.rng.random(shape) < 0.5, lo, hi)
        return x.astype(DTYPES[dtype])

    def buffer(self, name: str, shape: tuple[int, ...], bits: int = 8, **known: Any) -> str:
        dtype = "u8" if bits <= 8 else "u16"
        self.buffers[name] = self.integers(0, 2**bits - 1, (IMAGES, *shape), dtype)
        self.values[name] = Value(dtype, shape, 0, 2**bits - 1, **known)
        return name

    def accumulator(self, name: str, shape: tuple[int, ...], largest: int = 2**31 - 1) -> str:
        self.buffers[name] = self.integers(-largest, largest, (IMAGES, *shape), "i32")
        self.values[name] = Value("i32", shape, -largest, largest)
        return name

    def constant(self, name: str, lo: int, hi: int, shape: tuple[int, ...], dtype: str) -> str:
        self.constants[name] = self.rng.integers(lo, hi, shape, endpoint=True).astype(DTYPES[dtype])
        return name

    def zero(self, name: str, channels: int, bits: int = 8) -> Any:
        """Draw a zero point: 0, the last code, any code, one per group, or a constant with one per channel."""
        last, kind = 2**bits - 1, self.int(0, 4)
        if kind < 3:
            return (0, last, self.int(0, last))[kind]
        if kind == 3:
            groups = [g for g in (1, 2, 3) if channels % g == 0][-1]
            return tuple(self.int(0, last) for _ in range(groups))
        return self.constant(name, 0, last, (channels,), "u8" if bits <= 8 else "u16")

    def alpha(self, name: str, channels: int, k: int = 3) -> str | None:
        return self.one(None, self.constant(name, 0, k, (channels,), "u8"))  # type: ignore[no-any-return]

    def requantizer(self, reach: int) -> tuple[int, int]:
        """Draw mult and shift that scale accumulators of about `reach` to 8-bit codes, or sometimes extreme values."""
        if self.int(0, 4) == 0:
            return self.one(0, 1, 2**30, 2**31 - 1), self.one(1, 62)
        shift = min(max(22 + max(reach, 1).bit_length(), 1), 62)
        return self.int(2**30, 2**31 - 1), shift
