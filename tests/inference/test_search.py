"""Tests of search: exact dot products on the engine, integer cosine similarity, and the order of neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.inference.embeddings import Embeddings, Info
from fqvit.inference.products import ONE, ROWS, Products, candidates, cosines, norms
from fqvit.inference.search import BinaryIndex, Index, index_of, reduced

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(5)


def codes(dtype: str, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    return RANDOM.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


def brute_force(gallery: Array, zero: int, queries: Array, query_zero: int, count: int) -> list[list[int]]:
    """Return the nearest rows by the definition of the score, in Python integers."""
    found = []
    for query in queries.astype(np.int64) - query_zero:
        scores = []
        for row in gallery.astype(np.int64) - zero:
            dot = int(row @ query)
            scores.append(int(cosines(np.array([dot]), norms(row[None]), norms(query[None]))[0]))
        found.append(sorted(range(len(gallery)), key=lambda i: (-scores[i], i))[:count])
    return found


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("largest", [127, 255, 65535])
@pytest.mark.parametrize("length", [1, 7, 384])
def test_products_are_exact_for_random_rows_and_queries(dtype: str, largest: int, length: int) -> None:
    rows = codes(dtype, ROWS + 3, length)
    queries = RANDOM.integers(-largest, largest, (3, length), endpoint=True)
    np.testing.assert_array_equal(Products(queries, rows.dtype, 1)(rows), queries @ rows.astype(np.int64).T)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_products_are_exact_at_the_extremes_of_the_longest_vectors(dtype: str) -> None:
    rows = np.full((2, 8192), np.iinfo(dtype).max, dtype)
    queries = np.array([[65535] * 8192, [-65535] * 8192, [127] * 8192, [-128] * 8192])
    np.testing.assert_array_equal(Products(queries, rows.dtype, 1)(rows), queries @ rows.astype(np.int64).T)


@pytest.mark.parametrize("values", [1, 3, 255, 65535])
def test_the_cosine_of_a_vector_with_itself_is_one(values: int) -> None:
    vector = np.full((1, 8192), values)
    length = norms(vector)
    assert abs(int(cosines(vector @ vector[0], length, length)[0]) - ONE) <= 2
    assert abs(int(cosines(-vector @ vector[0], length, length)[0]) + ONE) <= 2


def test_cosines_equal_the_real_cosine_up_to_rounding() -> None:
    a, b = RANDOM.integers(-255, 256, (50, 384)), RANDOM.integers(-65535, 65536, (20, 384))
    real = (a @ b.T) / np.outer(np.sqrt((a * a).sum(1)), np.sqrt((b * b).sum(1)))
    found = np.stack([cosines(a @ vector, norms(a), norms(vector[None])) for vector in b], 1)
    assert np.abs(found / ONE - real).max() < 2e-7


def test_a_vector_of_zeros_has_cosine_zero() -> None:
    zeros = np.zeros((1, 4), np.int64)
    assert cosines(zeros[0, :1], norms(zeros), norms(zeros)).tolist() == [0]


def test_candidates_contain_every_row_that_reaches_the_required_cosine() -> None:
    rows, query = RANDOM.integers(-255, 256, (5000, 24)), RANDOM.integers(-255, 256, (1, 24))
    rows[:100] = np.repeat(query, 100, 0) + RANDOM.integers(-20, 21, (100, 24))
    gallery, length = norms(rows), norms(query).at(0)
    scores = cosines(rows @ query[0], gallery, length)
    for threshold in (1, ONE // 3, *sorted(scores[scores > 0])[-200:]):
        some = candidates(rows @ query[0], gallery, length, int(threshold))
        assert set(np.flatnonzero(scores >= threshold)) <= set(some)
        assert len(some) <= (scores >= threshold - 64).sum()


@pytest.mark.parametrize("gallery, zero", [("uint8", 128), ("uint8", 7), ("uint16", 32768), ("int32", 0)])
@pytest.mark.parametrize("query, query_zero", [("uint8", 128), ("uint16", 1000), ("int32", 0)])
def test_search_agrees_with_the_definition(gallery: str, zero: int, query: str, query_zero: int) -> None:
    rows, queries = codes(gallery, 40, 24), codes(query, 5, 24)
    found = Index(rows, zero, 1).search(queries, query_zero, 6)
    small_rows, small_queries = reduced(rows, zero), reduced(queries, query_zero)
    assert found.rows.tolist() == brute_force(*small_rows, *small_queries, 6)
    assert (np.diff(found.scores, axis=1) <= 0).all()


def test_equal_vectors_are_found_in_the_order_of_their_rows() -> None:
    row = codes("uint8", 1, 16)
    found = Index(np.repeat(row, 2500, 0), 128, 1).search(row, 128, 4)
    assert found.rows.tolist() == [[0, 1, 2, 3]]


def test_the_neighbours_do_not_depend_on_blocks_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, queries = codes("uint8", 5 * ROWS + 17, 32), codes("uint8", 9, 32)
    wanted = Index(rows, 100, 1).search(queries, 90, 7)
    monkeypatch.setattr("fqvit.inference.products.BLOCK_BYTES", 1)
    monkeypatch.setattr("fqvit.inference.products.MAX_OUTPUTS", 4)
    monkeypatch.setattr("fqvit.inference.search.NORM_ROWS", 1000)
    found = Index(rows, 100, 2).search(queries, 90, 7)
    np.testing.assert_array_equal(found.rows, wanted.rows)
    np.testing.assert_array_equal(found.scores, wanted.scores)


def test_asking_for_more_neighbours_than_rows_gives_all_rows() -> None:
    rows = codes("uint8", 3, 8)
    assert sorted(Index(rows, 128, 1).search(rows[:1], 128, 10).rows[0].tolist()) == [0, 1, 2]


def test_a_search_without_queries_gives_no_neighbours() -> None:
    assert Index(codes("uint8", 3, 8), 0, 1).search(np.zeros((0, 8), np.uint8)).rows.shape == (0, 3)


def test_i32_values_are_all_reduced_by_the_same_shift() -> None:
    values = np.array([[2**31 - 1, 1 - 2**31, 2**16, 0]], np.int32)
    assert (reduced(values, 0)[0].astype(np.int64) - 32768).tolist() == [[32767, -32768, 1, 0]]
    small = np.array([[5, -7]], np.int32)
    assert (reduced(small, 0)[0].astype(np.int64) - 32768).tolist() == [[5, -7]]


def test_a_binary_index_searches_by_hamming_distance() -> None:
    signs = codes("uint8", 3000, 6)
    query = signs[1234:1235] ^ np.array([1, 0, 0, 0, 0, 0], np.uint8)
    found = BinaryIndex(signs).search(query, 0, 2)
    assert found.rows[0, 0] == 1234
    assert found.scores[0, 0] == round((48 - 2) * ONE / 48)


@pytest.mark.parametrize(
    "fails, said",
    [
        (lambda: Index(np.zeros((0, 4), np.uint8)), "expected [N, C] with N > 0"),
        (lambda: Index(np.zeros(4, np.uint8)), "expected [N, C]"),
        (lambda: Index(np.zeros((2, 4), np.float32)), "expected uint8, uint16 or int32"),
        (lambda: Index(np.zeros((2, 9000), np.uint8)), "9000 values per vector"),
        (lambda: Index(np.zeros((2, 4), np.uint8)).search(np.zeros((1, 5), np.uint8)), "expected [N, 4] as in the index"),
        (lambda: Index(np.zeros((2, 4), np.uint8)).search(np.zeros((1, 4), np.uint8), 0, 0), "expected at least 1"),
        (lambda: BinaryIndex(np.zeros((2, 4), np.uint16)), "expected sign bits"),  # type: ignore[arg-type]
        (lambda: BinaryIndex(np.zeros((2, 4), np.uint8)).search(np.zeros((2, 3), np.uint8)), "uint8 [N, 4]"),
        (lambda: BinaryIndex(np.zeros((2, 4), np.uint8)).search(np.zeros((2, 4), np.uint8), 7), "expected sign bits"),
    ],
)
def test_wrong_arrays_are_rejected(fails: Any, said: str) -> None:
    with pytest.raises(FqvitError) as error:
        fails()
    assert said in str(error.value)


def embeddings(*outputs: Info) -> Embeddings:
    rows = {one.name: codes({"u8": "uint8", "u16": "uint16", "i32": "int32"}[one.dtype], 30, *one.shape) for one in outputs}
    return Embeddings([f"{i}.png" for i in range(30)], rows, {one.name: one for one in outputs}, "vit", "0" * 64)


VECTOR = Info("embedding", "embedding", 0.1, 120, "u8", (12,))
SIGN_BITS = Info("embedding:sign", "signs", 1.0, 0, "u8", (6,))
TOKENS = Info("tokens@9", "tokens", 0.1, 3, "u8", (4, 12))
LOGITS = Info("logits", "logits", 0.1, 0, "i32", (10,))
SHIFTED = Info("class@3", "pooled", 0.1, 0, "u8", (2,), (1, 0))


def test_an_index_uses_the_first_output_that_is_an_embedding() -> None:
    found = embeddings(LOGITS, TOKENS, SHIFTED, VECTOR, SIGN_BITS)
    index = index_of(found)
    assert isinstance(index, Index) and index.zero == 120 and len(index) == 30
    assert isinstance(index_of(found, "embedding:sign"), BinaryIndex)


@pytest.mark.parametrize("name", ["logits", "tokens@9", "class@3", "unknown"])
def test_outputs_that_cannot_be_searched_are_rejected(name: str) -> None:
    with pytest.raises(FqvitError, match=f"cannot search by output '{name}'"):
        index_of(embeddings(LOGITS, TOKENS, SHIFTED, VECTOR), name)
    with pytest.raises(FqvitError, match="cannot search by an embedding, its outputs are logits"):
        index_of(embeddings(LOGITS))


def test_scores_of_all_rows_contain_those_of_the_neighbours() -> None:
    for index in (index_of(embeddings(VECTOR)), index_of(embeddings(SIGN_BITS))):
        queries = index.codes[:4] if isinstance(index, Index) else index.signs[:4]
        zero = 120 if isinstance(index, Index) else 0
        found, every = index.search(queries, zero, 3), index.scores(queries, zero)
        assert every.shape == (4, 30)
        np.testing.assert_array_equal(np.take_along_axis(every, found.rows, 1), found.scores)
