"""Wrap the array functions that differ between numpy and torch, so that ops are written once.

Matrix products run in float64 BLAS. They are exact: verify() proves every accumulator below 2^31, and float64 represents all
integers up to 2^53.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fqvit.ir.fixed import Array

DTYPES = {"u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16, "i32": np.int32, "i64": np.int64}


class Kit(Protocol):
    """Array functions of one library.

    wide: convert to int64   narrow: convert to a dtype of DTYPES   row_max: the maximum over the last axis, kept with size 1
    repeat: [...] -> [count, ...], broadcast   asarray, numpy: convert from and to numpy arrays
    matmul: the exact integer product, int64   permute, concat, where: like transpose(axes), concatenate and where of numpy
    """

    def asarray(self, x: np.ndarray[Any, Any]) -> Array: ...
    def numpy(self, x: Array) -> np.ndarray[Any, Any]: ...
    def wide(self, x: Array) -> Array: ...
    def narrow(self, x: Array, dtype: str) -> Array: ...
    def matmul(self, a: Array, b: Array) -> Array: ...
    def row_max(self, x: Array) -> Array: ...
    def where(self, condition: Array, a: Array, b: Array | int) -> Array: ...
    def permute(self, x: Array, axes: Sequence[int]) -> Array: ...
    def concat(self, xs: Sequence[Array], axis: int) -> Array: ...
    def repeat(self, x: Array, count: int) -> Array: ...


class NumpyKit:
    """Kit on numpy arrays."""

    def asarray(self, x: np.ndarray[Any, Any]) -> Array:
        return x

    def numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def wide(self, x: Array) -> Array:
        return x.astype(np.int64)

    def narrow(self, x: Array, dtype: str) -> Array:
        return x.astype(DTYPES[dtype])

    def matmul(self, a: Array, b: Array) -> Array:
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64)

    def row_max(self, x: Array) -> Array:
        return x.max(axis=-1, keepdims=True)

    def where(self, condition: Array, a: Array, b: Array | int) -> Array:
        return np.where(condition, a, b)

    def permute(self, x: Array, axes: Sequence[int]) -> Array:
        return x.transpose(axes)

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        return np.concatenate(xs, axis)

    def repeat(self, x: Array, count: int) -> Array:
        """x [...] -> [count, ...]"""
        return np.broadcast_to(x, (count, *x.shape))


class TorchKit:
    """Kit on torch CPU tensors. Imports torch when it is created."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.dtypes = {
            "u8": torch.uint8,
            "i8": torch.int8,
            "u16": torch.int32,  # torch has no arithmetic on uint16; int32 holds the same values
            "i16": torch.int16,
            "i32": torch.int32,
            "i64": torch.int64,
        }

    def asarray(self, x: np.ndarray[Any, Any]) -> Array:
        wide = x.astype(np.int32) if x.dtype == np.uint16 else x
        return self.torch.from_numpy(np.array(wide))

    def numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return x.numpy()  # type: ignore[no-any-return]

    def wide(self, x: Array) -> Array:
        return x.to(self.torch.int64)

    def narrow(self, x: Array, dtype: str) -> Array:
        return x.to(self.dtypes[dtype])

    def matmul(self, a: Array, b: Array) -> Array:
        return self.torch.matmul(a.double(), b.double()).to(self.torch.int64)

    def row_max(self, x: Array) -> Array:
        return x.amax(-1, keepdim=True)

    def where(self, condition: Array, a: Array, b: Array | int) -> Array:
        return self.torch.where(condition, a, b)

    def permute(self, x: Array, axes: Sequence[int]) -> Array:
        return x.permute(*axes)

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        return self.torch.cat(list(xs), axis)

    def repeat(self, x: Array, count: int) -> Array:
        return x.expand(count, *x.shape)


def kit(name: str) -> Kit:
    """Return the kit of "numpy" or "torch"."""
    return TorchKit() if name == "torch" else NumpyKit()
