"""Tests of views of the draft graph: identity views, views that contain every element once, concatenation, pruning."""

from __future__ import annotations

import torch

from fqvit.frontend.draft import (
    Step,
    View,
    compact,
    concatenate,
    constant,
    factor_per_head,
    forget_positions,
    positions,
    pruned,
    uniform,
)


def step(*shape: int) -> Step:
    return Step("linear", "layer", [], shape)


def test_a_reshaped_view_is_the_identity() -> None:
    view = step(4, 6).view()
    assert view.reshaped(2, 12).is_identity()
    assert not view.transposed(0, 1).is_identity()
    assert not view.moved(lambda x: x[:2]).is_identity()


def test_a_materialised_index_is_recognised_like_a_strided_one() -> None:
    view = step(4, 6).view()
    assert View(view.steps, view.index.clone()).is_identity()
    assert View(view.steps, view.index.T.contiguous()).is_whole()
    assert not View(view.steps, view.index.T.contiguous()).is_identity()


def test_a_view_is_whole_if_every_element_occurs_once() -> None:
    view = step(4, 6).view()
    assert view.transposed(0, 1).is_whole()
    assert view.moved(lambda x: x.flip(0)).is_whole()
    assert not view.moved(lambda x: x[:2].repeat(2, 1)).is_whole()
    assert not view.moved(lambda x: x[:1].expand(4, 6)).is_whole()
    assert not View(view.steps, torch.full((4, 6), -1)).is_whole()


def test_a_view_stays_the_identity_when_the_shared_buffer_of_positions_grows() -> None:
    forget_positions()
    small = step(2, 3).view()
    positions(10_000)
    assert small.is_identity() and small.transposed(0, 1).is_whole()


def test_the_inverse_finds_every_element() -> None:
    view = step(3, 5).view().transposed(0, 1)
    flat = view.index.flatten()
    assert torch.equal(flat[view.inverse()], torch.arange(15))


def test_concatenated_views_list_each_step_once() -> None:
    a, b = step(2, 4), step(3, 4)
    view = concatenate([a.view(), b.view(), a.view(), constant(torch.ones(1, 4))], 0)
    assert view.steps == (a, b)
    assert view.shape == (8, 4)
    assert view.index[:2].flatten().tolist() == view.index[5:7].flatten().tolist() == list(range(8))
    assert bool((view.index[7] == -1).all()) and view.offset is not None and bool((view.offset[7] == 1).all())


def test_a_part_of_a_view_is_numbered_within_its_step() -> None:
    a, b = step(2, 4), step(3, 4)
    inside, index = concatenate([a.view(), b.view()], 0).part(b)
    assert inside.sum() == 12 and index.tolist() == list(range(12))


def test_pruning_drops_steps_that_no_element_refers_to() -> None:
    a, b = step(2, 4), step(3, 4)
    both = concatenate([a.view(), b.view()], 0)
    rest = pruned(both.moved(lambda x: x[2:]))
    assert rest.steps == (b,) and rest.is_identity()
    assert pruned(both) is both


def test_a_broadcast_factor_takes_no_memory() -> None:
    view = step(100, 100).view().scaled(torch.tensor(3.0))
    assert view.scale is not None and compact(view.scale).numel() == 1
    assert uniform(view.scale) == 3.0 == view.scalar_scale()
    assert uniform(torch.tensor([1.0, 2.0])) is None


def test_factors_are_per_head_only_if_constant_within_each_head() -> None:
    factors = torch.tensor([1.0, 2.0])
    assert factor_per_head(factors.view(2, 1, 1).expand(2, 3, 4)).tolist() == [1.0, 2.0]  # type: ignore[union-attr]
    assert factor_per_head(torch.arange(24.0).view(2, 3, 4)) is None
