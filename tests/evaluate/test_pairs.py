"""Tests of paired differences: counts, and a score interval checked against a grid search for the maximum likelihood."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fqvit.evaluate.pairs import NORMAL_95, pair, score_interval


def test_lost_and_gained_images_are_counted() -> None:
    first = np.array([True, True, True, False, False])
    second = np.array([True, False, False, True, False])
    found = pair(first, second)
    assert (found.images, found.lost, found.gained) == (5, 2, 1)
    assert found.difference == pytest.approx(-20)
    assert found.low < -20 < found.high


def direct_score(images: int, gained: int, lost: int, d: float) -> float:
    """Return the score statistic of the difference d. A grid search finds q, the most likely share of `lost` images."""
    q = np.linspace(max(0.0, -d), (1 - d) / 2, 200_001)
    with np.errstate(divide="ignore"):
        log_likelihood = (images - gained - lost) * np.log(np.maximum(1 - 2 * q - d, 0))
        log_likelihood += (gained * np.log(np.maximum(q + d, 0)) if gained else 0) + (lost * np.log(q) if lost else 0)
    best = float(q[np.argmax(log_likelihood)])
    return (gained - lost - images * d) / math.sqrt(images * (2 * best + d * (1 - d)))


@pytest.mark.parametrize(("images", "gained", "lost"), [(1000, 30, 40), (44, 0, 1), (50, 12, 3), (1000, 5, 5), (200, 0, 20)])
def test_the_score_is_the_critical_value_at_both_ends_of_the_interval(images: int, gained: int, lost: int) -> None:
    low, high = score_interval(images, gained, lost)
    assert low < (gained - lost) / images < high
    assert direct_score(images, gained, lost, low) == pytest.approx(NORMAL_95, abs=2e-3)
    assert direct_score(images, gained, lost, high) == pytest.approx(-NORMAL_95, abs=2e-3)


def test_the_interval_approaches_the_normal_approximation_for_many_images() -> None:
    images, gained, lost = 50_000, 1200, 1500
    error = NORMAL_95 * math.sqrt(gained + lost - (gained - lost) ** 2 / images) / images
    low, high = score_interval(images, gained, lost)
    assert low == pytest.approx((gained - lost) / images - error, rel=0.01)
    assert high == pytest.approx((gained - lost) / images + error, rel=0.01)


def test_swapping_the_classifiers_mirrors_the_interval() -> None:
    low, high = score_interval(100, 7, 2)
    assert score_interval(100, 2, 7) == pytest.approx((-high, -low))


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (10, 0), (0, 10), (5, 5)])
def test_the_interval_stays_between_minus_1_and_1(gained: int, lost: int) -> None:
    low, high = score_interval(10, gained, lost)
    assert -1 <= low <= (gained - lost) / 10 <= high <= 1
    assert high > low
