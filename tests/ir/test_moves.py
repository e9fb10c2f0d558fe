"""Ops that move values: the ends of what they accept, and what they pass on. Their bits: test_ops.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.ir.kit import DTYPES, NumpyKit, kit
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.value import MAX_AXES, Scope, Value

X = Value("u8", (2, 2, 6), 3, 200)  # four rows of six channels


def scope(x: Value = X, **constants: Any) -> Scope:
    return Scope({"x": x, "masked": Value("u8", (1, 6), 0, 255, masked=True)}, constants, "y")


@pytest.mark.parametrize("index", [[-1, 0], [3, 0], [-1, 3], [0]])
def test_rows_that_are_there_can_be_taken(index: list[int]) -> None:
    value, proofs = Take(y="y", x="x", index="i", fill=3).infer(scope(i=np.array(index, np.int32)))
    assert (value, proofs) == (Value("u8", (len(index), 6), 3, 200), [])


@pytest.mark.parametrize("index", [[-2, 0], [4, 0], [0, -2], [-1, 4], [-2, 4], [4]])
def test_rows_that_are_not_there_are_refused(index: list[int]) -> None:
    with pytest.raises(FqvitError, match="^y: constant 'i' points outside 4 rows"):
        Take(y="y", x="x", index="i", fill=3).infer(scope(i=np.array(index, np.int32)))


@pytest.mark.parametrize("fill", [3, 200, (3, 200), (7, 9, 11)])
def test_what_fills_is_a_value_of_the_rows(fill: Any) -> None:
    Take(y="y", x="x", index="i", fill=fill).infer(scope(i=np.zeros(1, np.int32)))


@pytest.mark.parametrize("fill", [0, 2, 201, (2, 200), (3, 201)])
def test_what_fills_is_no_other_value(fill: Any) -> None:
    with pytest.raises(FqvitError, match=r"^y: fill is outside 3\.\.200"):
        Take(y="y", x="x", index="i", fill=fill).infer(scope(i=np.zeros(1, np.int32)))


def test_an_empty_place_is_0_unless_said_otherwise() -> None:
    assert Take(y="y", x="x", index="i").fill == 0


def permute(view: tuple[int, ...], perm: tuple[int, ...] | None = None, **more: Any) -> tuple[int, ...]:
    left = len(view) - (more.get("select") is not None)
    return Permute(y="y", x="x", view=view, perm=tuple(range(left)) if perm is None else perm, **more).infer(scope())[0].shape


def test_a_view_has_as_many_axes_as_buffers_may_have() -> None:
    assert permute((1,) * (MAX_AXES - 1) + (24,)) == (1,) * (MAX_AXES - 1) + (24,)
    with pytest.raises(FqvitError, match=f"^y: view has {MAX_AXES + 1} axes, at most {MAX_AXES}"):
        permute((1,) * MAX_AXES + (24,), shape=(24,))


@pytest.mark.parametrize("view", [(-4, -6), (-1, 4, -6), (0, 24), (23,), (48,)])
def test_a_view_of_other_elements_is_refused(view: tuple[int, ...]) -> None:
    with pytest.raises(FqvitError, match="^y: view .* does not fit"):
        permute(view)


def test_a_view_without_axes_is_refused_even_of_one_element() -> None:
    with pytest.raises(FqvitError, match=r"^y: view \[\] does not fit"):
        Permute(y="y", x="x", view=(), perm=(), shape=(1, 1)).infer(scope(Value("u8", (1, 1), 0, 255)))


@pytest.mark.parametrize("select, left", [((0, 1), (3, 4)), ((1, 2), (2, 4)), ((2, 0), (2, 3)), ((2, 3), (2, 3))])
def test_select_drops_an_axis_of_the_view(select: tuple[int, int], left: tuple[int, ...]) -> None:
    assert permute((2, 3, 4), select=select) == left


@pytest.mark.parametrize("select", [(-1, 0), (3, 0), (0, 2), (0, -1), (2, 4)])
def test_select_outside_the_view_is_refused(select: tuple[int, int]) -> None:
    with pytest.raises(FqvitError, match="^y: select .* is outside the view"):
        permute((2, 3, 4), select=select)


@pytest.mark.parametrize("shape", [(-1, -4, 6), (4, 5), (0,), (0, 24), (23,), (48,)])
def test_a_shape_of_other_elements_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(FqvitError, match="^y: shape .* does not fit"):
        permute((4, 6), shape=shape)


def test_nothing_is_left_of_an_axis_that_is_selected_from() -> None:
    with pytest.raises(FqvitError, match=r"^y: shape \[\] does not fit"):
        permute((24,), select=(0, 0))


@pytest.mark.parametrize("xs", [("masked", "c"), ("c", "masked")])
def test_joined_rows_are_masked_if_some_are(xs: tuple[str, ...]) -> None:
    constants = {"c": np.array([[1] * 6, [7] * 6], np.uint8)}
    assert Concat(y="y", xs=xs).infer(scope(**constants))[0] == Value("u8", (3, 6), 0, 255, masked=True)


def test_constants_are_joined_to_every_image_however_many_rows_they_have() -> None:
    values = {"c": np.arange(8, dtype=np.uint8).reshape(4, 2), "x": np.full((2, 1, 2), 9, np.uint8)}
    y = Concat(y="y", xs=("c", "x")).run(NumpyKit(), values.__getitem__)
    assert y.tolist() == [[*values["c"].tolist(), [9, 9]]] * 2


@pytest.mark.parametrize("name", DTYPES)
def test_torch_has_the_same_values_in_the_same_types_except_u16(name: str) -> None:
    torch = pytest.importorskip("torch")
    from fqvit.ir.kit import TorchKit

    info = np.iinfo(DTYPES[name])
    x = np.array([info.min, 1, info.max], DTYPES[name])
    found = TorchKit().asarray(x)
    assert found.tolist() == x.tolist()
    assert found.dtype == (torch.int32 if name == "u16" else getattr(torch, x.dtype.name))


def test_a_kit_is_of_the_library_that_is_asked_for() -> None:
    torch = pytest.importorskip("torch")
    for name, array in (("numpy", np.ndarray), ("torch", torch.Tensor)):
        assert isinstance(kit(name).asarray(np.zeros(1)), array)
