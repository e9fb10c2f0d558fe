"""Tests of the comparison of embeddings: cosine similarity, percentiles, nearest neighbours, ties and sign bits."""

from __future__ import annotations

import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.evaluate.similarity import OutputVectors, cosines, described_outputs
from fqvit.inference.embeddings import Info, decode

RNG = np.random.default_rng(0)
EMBEDDING = Info("embedding", "embedding", 0.05, 128, "u8", (16,))


def quantized(values: np.ndarray, scale: float = 0.05, zero: int = 128) -> np.ndarray:
    return np.clip(np.round(values / scale) + zero, 0, 255).astype(np.uint8)


def names(count: int) -> list[str]:
    return [f"{i}.png" for i in range(count)]


def test_the_cosine_of_an_image_is_the_mean_over_its_tokens() -> None:
    a, b = RNG.normal(size=(2, 3, 5, 8))
    expected = [np.mean([x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(*image)]) for image in zip(a, b)]
    np.testing.assert_allclose(cosines(a, b), expected, rtol=1e-12)


def test_zero_vectors_have_cosine_1_to_each_other_and_0_to_others() -> None:
    first, second = np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]), np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    assert cosines(first, second).tolist() == [1.0, 0.0, 0.0]


def test_tiny_vectors_keep_their_cosine() -> None:
    a = RNG.normal(size=(4, 8))
    np.testing.assert_allclose(cosines(a * 1e-30, a), 1.0, rtol=1e-12)


def test_mean_percentile_and_worst_image_cover_all_batches() -> None:
    values = RNG.normal(size=(40, 16)).astype(np.float32)
    found = OutputVectors(EMBEDDING)
    codes = quantized(values)
    codes[23] = quantized(-values[23])
    for at in range(0, 40, 16):
        found.add(names(40)[at : at + 16], values[at : at + 16], codes[at : at + 16])
    expected = cosines(values, decode(EMBEDDING, codes))
    result = found.result(found.neighbours())
    assert (result.images, result.worst_image, result.worst) == (40, "23.png", expected.min())
    assert result.mean_cosine == pytest.approx(expected.mean(), rel=1e-12)
    assert result.first_percentile == pytest.approx(np.quantile(expected, 0.01), rel=1e-12)
    assert found.worst(3) == np.argsort(expected)[:3].tolist()


def brute_force(values: np.ndarray) -> list[int]:
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    scores = unit @ unit.T
    np.fill_diagonal(scores, -2)
    return scores.argmax(1).tolist()


@pytest.mark.parametrize(
    "info",
    [
        EMBEDDING,
        Info("pooled", "pooled", 0.01, 100, "u8", (16,), tuple(range(4)) * 4),
        Info("embedding", "embedding", 1e-5, 0, "i32", (16,)),
    ],
)
def test_neighbours_are_those_of_a_brute_force_search(info: Info) -> None:
    values = RNG.normal(size=(300, 16)).astype(np.float32)
    if info.dtype == "i32":
        codes = np.round(values / info.scale).astype(np.int32)
    else:
        codes = quantized(values, info.scale * np.exp2(np.array(info.alpha or (0,))), info.zero)
    found = OutputVectors(info)
    found.add(names(300), values, codes)
    neighbours = found.neighbours()
    assert neighbours is not None
    expected_float, expected_integer = (
        brute_force(values.astype(np.float64)),
        brute_force(decode(info, codes).astype(np.float64)),
    )
    assert neighbours.by_float.tolist() == expected_float
    differing = np.flatnonzero(neighbours.by_integer != expected_integer)
    assert len(differing) <= (0 if info.dtype == "u8" else 2)  # i32 vectors are reduced to 16 bits
    same = np.array(expected_float) == neighbours.by_integer
    assert neighbours.agreement == pytest.approx(100 * same.mean())
    assert neighbours.agreement < 100 or info.dtype == "i32"


def test_duplicates_of_the_nearest_image_count_as_the_same_neighbour() -> None:
    values = np.repeat(RNG.normal(size=(5, 16)), 3, axis=0).astype(np.float32)
    noisy = values * RNG.uniform(1 - 1e-7, 1 + 1e-7, (15, 1)).astype(np.float32)
    found = OutputVectors(EMBEDDING)
    found.add(names(15), noisy, quantized(values))
    neighbours = found.neighbours()
    assert neighbours is not None and neighbours.agreement == 100
    assert all(own != near and own // 3 == near // 3 for own, near in enumerate(neighbours.by_integer.tolist()))


def test_a_different_neighbour_lowers_the_agreement() -> None:
    values = np.array([[1, 0.1], [1, 0], [0.9, -0.2], [0, 1]], np.float32)
    codes = values.copy()
    codes[0] = 0.3, 1.0  # now nearest to the last image
    found = OutputVectors(Info("embedding", "embedding", 0.01, 100, "u8", (2,)))
    found.add(names(4), values, quantized(codes, 0.01, 100))
    neighbours = found.neighbours()
    assert neighbours is not None
    assert neighbours.by_float.tolist() == [1, 0, 1, 0] and neighbours.by_integer.tolist() == [3, 2, 1, 0]
    assert neighbours.same.tolist() == [False, False, True, True] and neighbours.agreement == 50


def test_sign_bits_are_compared_as_plus_and_minus_one() -> None:
    values = RNG.normal(size=(20, 24))
    info = Info("embedding:sign", "signs", 1.0, 0, "u8", (3,))
    packed = np.packbits(values > 0, axis=1)
    changed = packed.copy()
    changed[4, 0] ^= 0b1010_0000
    found = OutputVectors(info)
    cosine = found.add(names(20), packed.astype(np.float32), changed)
    assert cosine[4] == pytest.approx(1 - 2 * 2 / 24) and (np.delete(cosine, 4) == 1).all()
    neighbours = found.neighbours()
    assert neighbours is not None and neighbours.same.sum() >= 15


def test_two_images_and_tokens_have_no_neighbour_agreement() -> None:
    few, tokens = OutputVectors(EMBEDDING), OutputVectors(Info("tokens", "tokens", 0.05, 128, "u8", (9, 16)))
    values = RNG.normal(size=(8, 9, 16)).astype(np.float32)
    few.add(names(2), values[:2, 0], quantized(values[:2, 0]))
    tokens.add(names(8), values, quantized(values))
    assert few.neighbours() is None and tokens.neighbours() is None
    assert tokens.result(None).neighbour_agreement is None and not tokens.floats


def test_nan_in_the_outputs_of_the_float_model_is_rejected() -> None:
    with pytest.raises(FqvitError, match="embedding: the float model gives NaN or infinite values"):
        OutputVectors(EMBEDDING).add(["a"], np.full((1, 16), np.nan, np.float32), np.zeros((1, 16), np.uint8))


def test_a_result_without_images_is_rejected() -> None:
    with pytest.raises(FqvitError, match="no images"):
        OutputVectors(EMBEDDING).result(None)


def test_described_outputs_equal_those_of_the_engine(features) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import asdict

    from fqvit.runtime.native import Engine

    assert [asdict(one) for one in described_outputs(features.program)] == [
        asdict(one) for one in Engine(features.program).outputs
    ]
