"""Tests of take, permute and concat (limits of their fields, facts about their outputs), and of the array libraries of kit.py.

See also: test_ops.py.
"""

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
def test_take_accepts_indices_of_existing_rows(index: list[int]) -> None:
    value, proofs = Take(y="y", x="x", index="i", fill=3).infer(scope(i=np.array(index, np.int32)))
    assert (value, proofs) == (Value("u8", (len(index), 6), 3, 200), [])


@pytest.mark.parametrize("index", [[-2, 0], [4, 0], [0, -2], [-1, 4], [-2, 4], [4]])
def test_take_rejects_indices_of_missing_rows(index: list[int]) -> None:
    with pytest.raises(FqvitError, match="^y: constant 'i' points outside 4 rows"):
        Take(y="y", x="x", index="i", fill=3).infer(scope(i=np.array(index, np.int32)))


@pytest.mark.parametrize("fill", [3, 200, (3, 200), (7, 9, 11)])
def test_take_accepts_a_fill_within_the_range_of_its_input(fill: Any) -> None:
    Take(y="y", x="x", index="i", fill=fill).infer(scope(i=np.zeros(1, np.int32)))


@pytest.mark.parametrize("fill", [0, 2, 201, (2, 200), (3, 201)])
def test_take_rejects_a_fill_outside_the_range_of_its_input(fill: Any) -> None:
    with pytest.raises(FqvitError, match=r"^y: fill is outside 3\.\.200"):
        Take(y="y", x="x", index="i", fill=fill).infer(scope(i=np.zeros(1, np.int32)))


def test_the_default_fill_is_0() -> None:
    assert Take(y="y", x="x", index="i").fill == 0


def permute(view: tuple[int, ...], perm: tuple[int, ...] | None = None, **more: Any) -> tuple[int, ...]:
    left = len(view) - (more.get("select") is not None)
    return Permute(y="y", x="x", view=view, perm=tuple(range(left)) if perm is None else perm, **more).infer(scope())[0].shape


def test_a_view_has_at_most_the_maximum_number_of_axes() -> None:
    assert permute((1,) * (MAX_AXES - 1) + (24,)) == (1,) * (MAX_AXES - 1) + (24,)
    with pytest.raises(FqvitError, match=f"^y: view has {MAX_AXES + 1} axes, at most {MAX_AXES}"):
        permute((1,) * MAX_AXES + (24,), shape=(24,))


@pytest.mark.parametrize("view", [(-4, -6), (-1, 4, -6), (0, 24), (23,), (48,)])
def test_a_view_with_the_wrong_number_of_elements_is_rejected(view: tuple[int, ...]) -> None:
    with pytest.raises(FqvitError, match="^y: view .* does not fit"):
        permute(view)


def test_a_view_without_axes_is_rejected_even_for_one_element() -> None:
    with pytest.raises(FqvitError, match=r"^y: view \[\] does not fit"):
        Permute(y="y", x="x", view=(), perm=(), shape=(1, 1)).infer(scope(Value("u8", (1, 1), 0, 255)))


@pytest.mark.parametrize("select, left", [((0, 1), (3, 4)), ((1, 2), (2, 4)), ((2, 0), (2, 3)), ((2, 3), (2, 3))])
def test_select_removes_an_axis_of_the_view(select: tuple[int, int], left: tuple[int, ...]) -> None:
    assert permute((2, 3, 4), select=select) == left


@pytest.mark.parametrize("select", [(-1, 0), (3, 0), (0, 2), (0, -1), (2, 4)])
def test_select_outside_the_view_is_rejected(select: tuple[int, int]) -> None:
    with pytest.raises(FqvitError, match="^y: select .* is outside the view"):
        permute((2, 3, 4), select=select)


@pytest.mark.parametrize("shape", [(-1, -4, 6), (4, 5), (0,), (0, 24), (23,), (48,)])
def test_a_shape_with_the_wrong_number_of_elements_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(FqvitError, match="^y: shape .* does not fit"):
        permute((4, 6), shape=shape)


def test_selecting_from_the_only_axis_is_rejected() -> None:
    with pytest.raises(FqvitError, match=r"^y: shape \[\] does not fit"):
        permute((24,), select=(0, 0))


@pytest.mark.parametrize("xs", [("masked", "c"), ("c", "masked")])
def test_concat_is_masked_if_any_input_is(xs: tuple[str, ...]) -> None:
    constants = {"c": np.array([[1] * 6, [7] * 6], np.uint8)}
    assert Concat(y="y", xs=xs).infer(scope(**constants))[0] == Value("u8", (3, 6), 0, 255, masked=True)


def test_constants_are_concatenated_to_every_image() -> None:
    values = {"c": np.arange(8, dtype=np.uint8).reshape(4, 2), "x": np.full((2, 1, 2), 9, np.uint8)}
    y = Concat(y="y", xs=("c", "x")).run(NumpyKit(), values.__getitem__)
    assert y.tolist() == [[*values["c"].tolist(), [9, 9]]] * 2


@pytest.mark.parametrize("name", DTYPES)
def test_torch_has_the_same_values_and_dtypes_except_for_u16(name: str) -> None:
    torch = pytest.importorskip("torch")
    from fqvit.ir.kit import TorchKit

    info = np.iinfo(DTYPES[name])
    x = np.array([info.min, 1, info.max], DTYPES[name])
    found = TorchKit().asarray(x)
    assert found.tolist() == x.tolist()
    assert found.dtype == (torch.int32 if name == "u16" else getattr(torch, x.dtype.name))


def test_kit_returns_the_requested_library() -> None:
    torch = pytest.importorskip("torch")
    for name, array in (("numpy", np.ndarray), ("torch", torch.Tensor)):
        assert isinstance(kit(name).asarray(np.zeros(1)), array)
