"""Compare pasted masks with torch's grid_sample and run lengths with pycocotools; test round trips and damaged runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from fqvit.detect.float.masks import paste
from fqvit.detect.masks import Runs, check_lengths, from_runs, run_lengths, to_runs
from fqvit.errors import FqvitError

MASKS = arrays(bool, array_shapes(min_dims=2, max_dims=2, max_side=40))


@pytest.mark.parametrize(
    "box", [(3.2, 4.1, 20.7, 15.5), (-5.0, -4.0, 60.0, 50.0), (10.0, 10.0, 10.4, 10.3), (0.0, 0.0, 40.0, 30.0)]
)
def test_pasting_interpolates_as_grid_sample_does(box: tuple[float, ...]) -> None:
    torch = pytest.importorskip("torch")
    probabilities = np.random.default_rng(0).uniform(size=(28, 28))
    x1, y1, x2, y2 = box
    x = ((torch.arange(40).double() + 0.5) - x1) / (x2 - x1) * 2 - 1
    y = ((torch.arange(30).double() + 0.5) - y1) / (y2 - y1) * 2 - 1
    grid = torch.stack(torch.broadcast_tensors(x[None, :], y[:, None]), -1)
    sample = torch.nn.functional.grid_sample
    expected = sample(torch.tensor(probabilities)[None, None], grid[None], align_corners=False)[0, 0].numpy()
    sure = abs(expected - 0.5) > 1e-9  # not so close to the threshold that rounding decides
    assert (paste(probabilities, np.array(box), 30, 40, 0.5) == (expected >= 0.5))[sure].all()


def test_a_box_of_width_0_shows_the_mask_and_a_box_outside_the_image_does_not() -> None:
    ones = np.ones((28, 28))
    assert paste(ones, np.array([5.0, 5, 5, 9]), 20, 20, 0.5).sum() == 2 * 4
    assert not paste(ones, np.array([50.0, 50, 60, 60]), 20, 20, 0.5).any()


def test_run_lengths_are_column_major_and_start_with_false() -> None:
    assert run_lengths(np.array([[1, 0], [1, 1]], bool)) == [0, 2, 1, 1]
    assert run_lengths(np.zeros((3, 2), bool)) == [6]


@given(MASKS)
def test_decoding_run_lengths_gives_the_mask(mask: NDArray[np.bool_]) -> None:
    assert (from_runs(to_runs(mask)) == mask).all()


@given(MASKS)
def test_encoded_run_lengths_equal_those_of_pycocotools(mask: NDArray[np.bool_]) -> None:
    tools = pytest.importorskip("pycocotools.mask")
    expected = tools.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert to_runs(mask) == {"size": list(mask.shape), "counts": expected["counts"].decode()}


def test_long_runs_survive_encoding() -> None:
    mask = np.zeros((300, 400), bool)
    mask[100:250, 30:380] = True
    assert (from_runs(to_runs(mask)) == mask).all()


@given(st.text(alphabet=[chr(i) for i in range(40, 120)], max_size=12))
def test_damaged_runs_are_rejected_or_give_a_mask_of_the_given_size(counts: str) -> None:
    try:
        assert from_runs(Runs(size=[4, 5], counts=counts)).shape == (4, 5)
    except FqvitError as error:
        assert "damaged" in str(error)


@pytest.mark.parametrize("counts", ["o" * 4000 + "0", "o" * 1_000_000, "_" * 20_000 + "0", "o" * 13 + "0", "o" * 12 + "/"])
def test_overlong_encodings_are_rejected_quickly(counts: str) -> None:
    with pytest.raises(FqvitError, match=r"^run lengths: .{1,60} damaged\.$"):
        from_runs(Runs(size=[4, 5], counts=counts))


@pytest.mark.parametrize("lengths", [[10**4000, 3], [-(10**4000), 10**4000, 20], [9 * 10**4299] * 20, [21], [-1, 21]])
def test_lengths_beyond_the_image_are_rejected_without_printing_them(lengths: list[int]) -> None:
    with pytest.raises(FqvitError, match=r"^run lengths: .{1,80} damaged\.$"):
        check_lengths(lengths, (4, 5))


def test_the_error_about_a_wrong_sum_of_lengths_shows_the_sum() -> None:
    with pytest.raises(FqvitError, match="19 pixels in total, expected 4 x 5"):
        check_lengths([10, 9], (4, 5))
    check_lengths([0, 20], (4, 5))
