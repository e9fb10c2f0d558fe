"""Search for the nearest embeddings by cosine similarity, or by Hamming distance for binary ones, with integers only.

    index = Index(codes, zero)
    found = index.search(query_codes, query_zero, count=5)

Scores are exact functions of the codes (products.py), and equal scores are ordered by position, so every machine returns the
same neighbours. See also: embeddings.py (files of embeddings), zero_shot.py (text embeddings as the index).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError
from fqvit.inference.embeddings import SIGNS, Embeddings
from fqvit.inference.products import ONE, Codes, Ints, Norms, Products, candidates, cosines, groups, norms
from fqvit.ir.fixed import round_divide
from fqvit.system.text import table

MIDDLE = 1 << 15  # zero point of reduced i32 vectors
POSITION_BITS = 37  # bits of the position in a sort key: cosine * 2^37 - position
NORM_ROWS = 1 << 16  # rows whose norms are computed at a time
POPCOUNT = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


class Described(Protocol):
    """The description of one output of an engine or of an embedding file."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def alpha(self) -> tuple[int, ...]: ...


Output = TypeVar("Output", bound=Described)


SHOWN = 20  # maximum number of queries in a printed table of neighbours


@dataclass(frozen=True, repr=False)
class Neighbours:
    """The best rows of each query, best first. rows, scores: i64 [Q, k]; scores in units of 2^-24, so 2^24 is a cosine of 1."""

    rows: Ints
    scores: Ints

    def __repr__(self) -> str:
        """Return a table of rows and cosines, of at most SHOWN queries."""
        lines = [
            (str(query), *(f"{row} ({score / ONE:.4f})" for row, score in zip(rows, scores, strict=True)))
            for query, (rows, scores) in enumerate(zip(self.rows[:SHOWN].tolist(), self.scores[:SHOWN].tolist(), strict=True))
        ]
        more = f"\n... and {len(self.rows) - SHOWN} more queries" if len(self.rows) > SHOWN else ""
        return table(("query", *(f"row {rank} (cosine)" for rank in range(1, self.rows.shape[1] + 1))), lines) + more


class Index:
    """Embeddings to search in: codes [N, C] of dtype u8, u16 or i32, value = code - zero, up to a common scale.

    u8 and u16 codes are used in place, for example memory-mapped. i32 values are reduced to 16 bits: all are shifted right and
    rounded, by the smallest number of bits for which all of them fit.
    """

    def __init__(self, codes: Codes, zero: int = 0, threads: int | None = None) -> None:
        if codes.ndim != 2 or not len(codes):
            raise FqvitError(f"index: embeddings of shape {list(codes.shape)}, expected [N, C] with N > 0.")
        self.codes, self.zero = reduced(codes, zero)
        self.threads = threads
        blocks = range(0, len(codes), NORM_ROWS)
        parts = [norms(self.codes[at : at + NORM_ROWS].astype(np.int64) - self.zero) for at in blocks]
        self.norms = Norms(*map(np.concatenate, zip(*parts, strict=True)))

    def __len__(self) -> int:
        return len(self.codes)

    def search(self, queries: Codes, zero: int = 0, count: int = 5) -> Neighbours:
        """Return the `count` rows with the highest cosine to each query. queries: u8, u16 or i32 [Q, C]"""
        best = [_Best(count) for _ in queries]
        for i, block, dots, gallery, query in self._products(queries, zero):
            best[i].add_cosines(block.start, dots, gallery, query)
        return _neighbours(best, min(count, len(self)))

    def scores(self, queries: Codes, zero: int = 0) -> Ints:
        """Return the cosine of every query and row in units of 2^-24: i64 [Q, N]."""
        found = np.zeros((len(queries), len(self)), np.int64)
        for i, block, dots, gallery, query in self._products(queries, zero):
            found[i, block] = cosines(dots, gallery, query)
        return found

    def _products(self, queries: Codes, zero: int) -> Iterator[tuple[int, slice, Ints, Norms, Norms]]:
        """Yield query, block of rows, their dot products, the norms of the rows and the norm of the query."""
        if queries.ndim != 2 or queries.shape[1] != self.codes.shape[1]:
            wanted = self.codes.shape[1]
            raise FqvitError(f"queries: embeddings of shape {list(queries.shape)}, expected [N, {wanted}] as in the index.")
        codes, zero = reduced(queries, zero)
        values = codes.astype(np.int64) - zero
        for some in groups(values, self.codes.dtype):
            products = Products(values[some], self.codes.dtype, self.threads)
            lengths, shifts = norms(values[some]), self.zero * values[some].sum(1)
            for block in products.blocks(len(self)):
                gallery, dots = self.norms.at(block), products(self.codes[block])
                for i, shift in enumerate(shifts):
                    yield some.start + i, block, dots[i] - shift, gallery, lengths.at(i)


class BinaryIndex:
    """Binary embeddings to search in: u8 [N, B], eight sign bits per byte. The score is the cosine of vectors of +1 and -1."""

    def __init__(self, signs: NDArray[np.uint8]) -> None:
        if signs.ndim != 2 or signs.dtype != np.uint8 or not signs.size:
            raise FqvitError(f"index: {signs.dtype} {list(signs.shape)}, expected sign bits, uint8 [N, bytes].")
        self.signs = signs

    def __len__(self) -> int:
        return len(self.signs)

    def search(self, queries: Codes, zero: int = 0, count: int = 5) -> Neighbours:
        """Return the `count` rows with the smallest Hamming distance to each query. queries: u8 [Q, B]   zero: must be 0"""
        best = [_Best(count) for _ in queries]
        for i, block, scores in self._scores(queries, zero):
            best[i].add(np.arange(block.start, block.stop), scores)
        return _neighbours(best, min(count, len(self)))

    def scores(self, queries: Codes, zero: int = 0) -> Ints:
        """Return the cosine of every query and row, as vectors of +1 and -1, in units of 2^-24: i64 [Q, N]."""
        found = np.zeros((len(queries), len(self)), np.int64)
        for i, block, scores in self._scores(queries, zero):
            found[i, block] = scores
        return found

    def _scores(self, queries: Codes, zero: int) -> Iterator[tuple[int, slice, Ints]]:
        wanted = self.signs.shape[1]
        if queries.dtype != np.uint8 or queries.ndim != 2 or queries.shape[1] != wanted or zero:
            raise FqvitError(f"queries: {queries.dtype} {list(queries.shape)}, expected sign bits, uint8 [N, {wanted}].")
        bits = 8 * wanted
        for at in range(0, len(self), NORM_ROWS):
            rows = self.signs[at : at + NORM_ROWS]
            for i, query in enumerate(queries):
                different = POPCOUNT[rows ^ query].sum(1, dtype=np.int64)
                yield i, slice(at, at + len(rows)), round_divide((bits - 2 * different) * ONE, np.int64(bits))


def nearest(
    gallery: Embeddings, queries: Embeddings, output: str | None = None, count: int = 5, threads: int | None = None
) -> Neighbours:
    """Return the `count` most similar rows of the gallery for each query. Both must come from the same program.

    output: the name of an output of both; None: the first embedding of the gallery
    """
    gallery.check_same_program(queries, "queries")
    index, name = index_of(gallery, output, threads), searchable(gallery.info, gallery.model, output).name
    return index.search(queries.codes(name), queries.output(name).zero, count)


def index_of(embeddings: Embeddings, output: str | None = None, threads: int | None = None) -> Index | BinaryIndex:
    """Return an index of one output. None: the first one that search supports."""
    info = searchable(embeddings.info, embeddings.model, output)
    codes = embeddings.codes(info.name)
    return BinaryIndex(codes) if info.kind == SIGNS else Index(codes, info.zero, threads)


def searchable(outputs: Mapping[str, Output], model: str, name: str | None = None) -> Output:
    """Return the output of this name, or the first vector that is an embedding. Raises FqvitError if there is none."""
    found = [one for one in outputs.values() if len(one.shape) == 1 and not one.alpha and one.kind != "logits"]
    if name is None and found:
        return found[0]
    for one in found:
        if one.name == name:
            return one
    has = ", ".join(f"{one.name} {list(one.shape)}" for one in outputs.values())
    wanted = "an embedding" if name is None else f"output {name!r}"
    raise FqvitError(f"{model}: cannot search by {wanted}, its outputs are {has}. Quantize with --output embedding.")


def reduced(codes: Codes, zero: int) -> tuple[Codes, int]:
    """Return u8 or u16 codes and their zero point. i32 values are shifted right until they fit 16 bits."""
    if codes.dtype in (np.uint8, np.uint16):
        return codes, zero
    if codes.dtype != np.int32:
        raise FqvitError(f"embeddings: {codes.dtype}, expected uint8, uint16 or int32 as a program returns them.")
    values = codes.astype(np.int64) - zero
    largest = int(np.abs(values).max(initial=0))
    shift = max(0, largest.bit_length() - 15)
    if shift:
        values = (values + (1 << (shift - 1))) >> shift
    return (values.clip(-MIDDLE, MIDDLE - 1) + MIDDLE).astype(np.uint16), MIDDLE


class _Best:
    """Collect the best rows of one query block by block. Keys are score * 2^37 - row: unique, so their order is total."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise FqvitError(f"neighbours: {count}, expected at least 1.")
        self.count = count
        self.keys: Ints = np.zeros(0, np.int64)

    def add(self, rows: Ints, scores: Ints) -> None:
        """Add rows and their scores, i64 [N] each."""
        self.keys = np.concatenate([self.keys, (scores << POSITION_BITS) - rows])
        if len(self.keys) > self.count:
            self.keys = np.partition(self.keys, len(self.keys) - self.count)[-self.count :]

    def add_cosines(self, first_row: int, dots: Ints, gallery: Norms, query: Norms) -> None:
        """Add the rows from `first_row` on, given their dot products with the query."""
        least = _score(int(self.keys.min())) if len(self.keys) == self.count else 0
        if least > 0:
            some = candidates(dots, gallery, query, least)
            self.add(first_row + some, cosines(dots[some], gallery.at(some), query))
        else:
            self.add(first_row + np.arange(len(dots)), cosines(dots, gallery, query))


def _score(key: Any) -> Any:
    return -(-key >> POSITION_BITS)


def _neighbours(best: list[_Best], count: int) -> Neighbours:
    keys = np.array([np.sort(found.keys)[::-1] for found in best], np.int64).reshape(-1, count)
    scores = _score(keys)
    return Neighbours((scores << POSITION_BITS) - keys, scores)
