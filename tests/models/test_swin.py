"""Swin: the indices of windows and patch merging, and the traced module. Equality with timm is tested in test_parity.py."""

from __future__ import annotations

import pytest
import torch

from fqvit.models.config import SwinConfig
from fqvit.models.graph import trace
from fqvit.models.swin import Swin, inverse_index, merge_index, relative_position_index, shift_mask, window_index

SMALL = SwinConfig(image=(32, 32), patch=2, channels=3, classes=5, width=8, depths=(2, 2), heads=(2, 4), window=4)


@pytest.mark.parametrize("grid", [(8, 8), (7, 7), (5, 9)])
@pytest.mark.parametrize("shift", [0, 2])
def test_the_inverse_index_undoes_window_partitioning(grid: tuple[int, int], shift: int) -> None:
    index = window_index(grid, 4, shift)
    tokens = grid[0] * grid[1]
    assert torch.equal(index.flatten()[inverse_index(index, tokens)], torch.arange(tokens))


def test_patch_merging_concatenates_tokens_column_by_column() -> None:
    assert merge_index((2, 4)).tolist() == [[0, 4, 1, 5], [2, 6, 3, 7]]


def test_patch_merging_pads_an_odd_grid() -> None:
    assert merge_index((1, 3)).tolist() == [[0, -1, 1, -1], [2, -1, -1, -1]]


def test_only_shifted_windows_have_a_mask_and_every_position_sees_itself() -> None:
    assert shift_mask((8, 8), 4, 0) is None
    mask = shift_mask((8, 8), 4, 2)
    assert mask is not None
    assert bool(mask.diagonal(dim1=1, dim2=2).all())
    assert bool(mask[0].all()), "the first window contains one region"
    assert not bool(mask[-1].all()), "the last window contains four regions"


def test_relative_positions_use_every_row_of_the_bias_table() -> None:
    assert sorted(set(relative_position_index(3).flatten().tolist())) == list(range(25))


def test_the_traced_graph_equals_the_module() -> None:
    torch.manual_seed(0)
    model, images = Swin(SMALL).eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        logits = model(images)
        assert logits.shape == (2, 5)
        assert torch.equal(trace(model).run(images), logits)
