"""Multiply integer vectors exactly on the engine's kernels, and turn dot products into integer cosines.

A set of queries becomes a program with one Linear op: its weights are the queries, its input rows are the codes of the gallery
as they are stored. So the gallery is neither copied nor packed, and it may be a memory-mapped file. Weights are i8: larger
queries are split into digits of base 128, u16 rows into their two bytes, and the partial products are added in int64.
Products are exact, and cosines are a fixed integer function of them, so every machine gets the same results.

See also: search.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.ir.fixed import ilog2, isqrt, round_divide
from fqvit.ir.ops import Linear
from fqvit.ir.program import INPUT, CodeInput, Header, Output, Program
from fqvit.runtime.native import Engine

Codes = np.ndarray[Any, Any]
Ints = NDArray[np.int64]
ONE = 1 << 24  # a cosine of 1
MAX_LENGTH = 8192  # values per vector: sum v^2 < 2^45
ROWS = 1024  # gallery rows per engine input, which the engine counts as one image
BLOCK_BYTES = 32 << 20  # bytes of products that are in memory at a time
MAX_OUTPUTS = 512  # columns of one program
BASE_BITS = 7


class Products:
    """Dot products of a fixed set of queries with any number of rows: exact, int64.

    queries: i64 [Q, C], |value| < 2^16   row_dtype: u8 or u16, the dtype of the rows
    """

    def __init__(self, queries: Ints, row_dtype: np.dtype[Any], threads: int | None = None) -> None:
        _check_length(queries.shape[1])
        self.count, self.length = queries.shape
        self.bytes_per_value = row_dtype.itemsize
        digits = _digits(queries)
        # Column (digit, byte, query) holds this digit of the query for the low (0) or high (1) bytes of a row; the other
        # bytes have weight 0.
        weights = np.zeros((len(digits), self.bytes_per_value, self.count, self.length, self.bytes_per_value), np.int8)
        for byte in range(self.bytes_per_value):
            weights[:, byte, ..., byte] = np.stack(digits)
        flat = weights.reshape(-1, self.length * self.bytes_per_value)
        self.columns = weights.shape[:3]
        self.engine = Engine(_program(flat), threads)
        self.images = max(1, BLOCK_BYTES // (4 * ROWS * len(flat)))

    def __call__(self, rows: Codes) -> Ints:
        """Return the dot products with rows u8 or u16 [N, C]: i64 [Q, N]. Zero points are not subtracted."""
        count = len(rows)
        data = np.ascontiguousarray(rows.astype(rows.dtype.newbyteorder("<"), copy=False)).view(np.uint8)
        if missing := -count % ROWS:
            data = np.concatenate([data, np.zeros((missing, data.shape[1]), np.uint8)])
        parts = self.engine.run(data.reshape(-1, ROWS, 1, data.shape[1])).reshape(-1, *self.columns)[:count]
        digits, places, _ = self.columns
        total = parts[:, 0, 0].T.astype(np.int64, order="C")
        for digit in range(digits):
            for byte in range(places):
                if digit or byte:
                    total += parts[:, digit, byte].T.astype(np.int64) << (BASE_BITS * digit + 8 * byte)
        return total

    def blocks(self, count: int) -> Iterator[slice]:
        """Divide `count` rows into slices whose products fit into BLOCK_BYTES."""
        step = ROWS * self.images
        return (slice(at, min(at + step, count)) for at in range(0, count, step))


def groups(queries: Ints, row_dtype: np.dtype[Any]) -> Iterator[slice]:
    """Divide queries into groups that fit into one program each."""
    step = max(1, MAX_OUTPUTS // (len(_digits(queries)) * row_dtype.itemsize))
    return (slice(at, at + step) for at in range(0, len(queries), step))


class Norms(NamedTuple):
    """Lengths of vectors, i64 [N]: |v| = norm / 2^(8 + exponent), rounded down; norm has 31 bits, or is 0."""

    norm: Ints
    exponent: Ints

    def at(self, where: slice | int | Ints) -> Norms:
        """Select some of the vectors."""
        return Norms(self.norm[where], self.exponent[where])


def norms(vectors: Ints) -> Norms:
    """Return the length of each vector: norm = isqrt(2^16 * sum((2^exponent * v)^2)). vectors: i64 [N, C], |value| < 2^16"""
    _check_length(vectors.shape[1])
    squares = np.einsum("nc,nc->n", vectors, vectors)
    exponent = (45 - ilog2(np.maximum(squares, 1))) >> 1  # the scaled sum of squares is in [2^44, 2^46)
    return Norms(isqrt(squares << (16 + 2 * exponent)), exponent)


def cosines(dots: Ints, gallery: Norms, query: Norms) -> Ints:
    """Return cosines in units of 2^-24 from the dot products with one query [N] and the norms of both; 0 for zero vectors.

    d = 2^(e_v + e_w) * dot,   t = floor(2^32 * d / norm_v),   cosine = floor(2^8 * t / norm_w + 1/2)
    for a gallery row v and the query w with the exponents e_v and e_w. |d| < 2^46 and |t| < 2^47. 2^32 * d would not fit int64,
    so t is computed by long division.
    """
    divisor = np.maximum(gallery.norm, 1)
    whole, rest = np.divmod(dots << (gallery.exponent + query.exponent), divisor)
    t = (whole << 32) + (rest << 32) // divisor
    found: Ints = round_divide(t << 8, np.maximum(query.norm, 1))
    return found


def candidates(dots: Ints, gallery: Norms, query: Norms, threshold: int) -> Ints:
    """Return the positions of all rows whose cosine may be at least `threshold` > 0, without a division per row.

    In the notation of `cosines`, cosine >= threshold means t >= T = floor((2 * threshold - 1) * norm_w / 2^9),
    hence d >= T * norm_v / 2^32 >= (T >> 24) * (norm_v >> 8).
    """
    bound = ((2 * threshold - 1) * int(query.norm) >> 9) >> 24
    found: Ints = np.flatnonzero(dots << (gallery.exponent + query.exponent) >= bound * (gallery.norm >> 8))
    return found


def _check_length(length: int) -> None:
    if not 0 < length <= MAX_LENGTH:
        raise FqvitError(f"embeddings: {length} values per vector, expected 1 to {MAX_LENGTH}.")


def _digits(values: Ints) -> list[NDArray[np.int8]]:
    """Split integers into digits of base 128, lowest first: each -64..63, the last any i8. Values that fit i8 are one digit."""
    found = []
    while values.size and (values.min() < -128 or values.max() > 127):
        low = ((values + 64) & 127) - 64
        found.append(low.astype(np.int8))
        values = (values - low) >> BASE_BITS
    return [*found, values.astype(np.int8)]


def _program(weights: NDArray[np.int8]) -> Program:
    """Return the program y = x @ w^T: u8 [ROWS, 1, K] -> i32 [ROWS, 1, O], for weights i8 [O, K]."""
    header = Header(
        version=1,
        model="dot products",
        preprocess=Preprocess(1, 1, 1, 1, "bilinear", (0.0,), (1.0,)),  # unused: the input is codes
        ops=(Linear(y="products", x=INPUT, out="acc"),),
        output=Output("products", "scores", 1.0),
        sites={},
        recipe={},
        source="queries",
        images=0,
        input=CodeInput((ROWS, 1, weights.shape[1]), 1.0, 0),
    )
    return Program(header, {"products.w": weights, "products.bias": np.zeros(len(weights), np.int32)})
