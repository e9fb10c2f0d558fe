"""Batches of calibration images: cutting, shuffling, and the random sample."""

from __future__ import annotations

import numpy as np

from fqvit.quant.batches import ImageSample, mark_last, rebatch, shuffle_batches
from tests.factories import float_model, images_for

IMAGES = images_for(float_model("vit").preprocess, 20, 4)
SHAPE = IMAGES.shape[1:]


def test_the_shuffled_order_depends_only_on_the_number_of_images_and_the_seed() -> None:
    def order(seed: int, parts: list[int], size: int = 6) -> list[int]:
        found = list(shuffle_batches(np.split(IMAGES, parts), size, seed))
        assert [len(batch) for batch in found] == [6, 6, 6, 2]
        return [next(i for i, other in enumerate(IMAGES) if (other == image).all()) for batch in found for image in batch]

    assert sorted(order(0, [])) == list(range(20)) and order(0, []) == order(0, [1, 8, 9, 9])
    assert list(range(20)) != order(0, []) != order(1, [])
    assert list(shuffle_batches([], 6, 0)) == []


def test_mark_last_marks_only_the_last_batch() -> None:
    assert list(mark_last([])) == []
    assert [(len(batch), last) for batch, last in mark_last([IMAGES[:3], IMAGES[:2], IMAGES])] == [
        (3, False),
        (2, False),
        (20, True),
    ]


def test_all_batches_except_the_last_have_the_same_size() -> None:
    assert [len(b) for b in rebatch([IMAGES[:7], IMAGES[7], IMAGES[8:]], SHAPE, 6, 100)] == [6, 6, 6, 2]
    assert [len(b) for b in rebatch([IMAGES], SHAPE, 6, 13)] == [6, 6, 1]
    np.testing.assert_array_equal(np.concatenate(list(rebatch(iter(IMAGES), SHAPE, 3, 100))), IMAGES)


def test_the_sample_does_not_depend_on_how_the_sequence_is_cut() -> None:
    numbers = np.arange(90, dtype=np.uint8).reshape(90, 1, 1, 1)

    def sampled(cuts: list[int], size: int = 8) -> list[int]:
        sample = ImageSample(size)
        for part in np.split(numbers, cuts):
            sample.add(part)
        assert sample.seen == 90
        return sample.images()[:, 0, 0, 0].tolist()  # type: ignore[no-any-return]

    whole = sampled([])
    assert whole == sampled([1, 2, 50]) == sampled(list(range(90))) and len(set(whole)) == 8
    assert max(whole) > 8  # not only the first images
    assert sampled([40], 90) == sampled([], 200) == list(range(90))


def test_a_sample_does_not_keep_whole_batches_in_memory() -> None:
    sample = ImageSample(3)
    for start in range(0, 20, 4):
        sample.add(IMAGES[start : start + 4])
    assert all(image.base is None for image in sample.kept.values())


def test_every_image_is_sampled_with_the_same_probability() -> None:
    seen = np.zeros(20)
    for seed in range(2000):
        sample = ImageSample(5)
        sample.random = np.random.default_rng(seed)
        sample.add(np.arange(20, dtype=np.uint8).reshape(20, 1, 1, 1))
        seen[sample.images().ravel()] += 1
    assert (np.abs(seen / 2000 - 0.25) < 0.05).all()
