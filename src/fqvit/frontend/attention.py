"""Handlers of matrix products of two activations, and of the softmax between them.

The text of a NotImplementedError is the second half of a sentence: read.py puts the name of the op in front of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fqvit.frontend.draft import Step, View, broadcast_shape, constant, factor_per_head, pruned
from fqvit.frontend.elementwise import add, linear
from fqvit.frontend.operands import Pending, Reader, as_tensor, drop_leading_ones, natural


def matmul(reader: Reader, a: View | Tensor, b: View | Tensor) -> View:
    """[..., M, K] x [..., K, N] -> [..., M, N]"""
    x, y = as_tensor(a), as_tensor(b)
    if y is not None and isinstance(a, View):
        if y.ndim != 2:
            raise NotImplementedError("with a constant of more than two axes is not supported")
        return linear(reader, a, y.T.contiguous())
    assert isinstance(b, View)
    if x is not None:
        return _constant_query(reader, x, b.transposed(-1, -2))
    assert isinstance(a, View)
    front = broadcast_shape(a.shape[:-2], b.shape[:-2])
    a, b = a.broadcast((*front, *a.shape[-2:])), b.broadcast((*front, *b.shape[-2:]))
    order = _heads_last(b, len(front))
    if order is not None:
        a, b = (view.moved(lambda t: t.permute(*order, -2, -1)) for view in (a, b))
        back = sorted(range(len(front)), key=order.__getitem__)
        return _product(reader, a, b).moved(lambda t: t.permute(*back, -2, -1))
    return _product(reader, a, b)


def _product(reader: Reader, a: View, b: View) -> View:
    """[..., H, M, K] x [..., H, K, N] -> [..., H, M, N]"""
    front = a.shape[:-2]
    shape = (*front, a.shape[-2], b.shape[-1])
    windows = _windows(front)
    left = pruned(a.reshaped(*windows, *a.shape[-2:]))
    if len(left.steps) == 1 and left.step.kind == "softmax":
        return _context(reader, left, pruned(b.reshaped(*windows, *b.shape[-2:])), shape)
    right = pruned(b.reshaped(*windows, *b.shape[-2:]).transposed(-1, -2))
    return _scores(reader, left, right).reshaped(*shape)


def _heads_last(view: View, axes: int) -> list[int] | None:
    """Return the order of the first axes of K or V that puts heads after windows; None if they already are in this order.

    Heads are an axis along which the channels change but the row does not.
    """
    if len(view.steps) != 1 or axes < 2:
        return None
    channels = view.step.shape[-1]
    heads = []
    for axis in range(axes):
        first, last = (view.index.select(axis, i) for i in (0, -1))
        if not torch.equal(first, last) and torch.equal(first // channels, last // channels):
            heads.append(axis)
    order = [*(axis for axis in range(axes) if axis not in heads), *heads]
    return None if order == list(range(axes)) else order


def _windows(front: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes before tokens: (heads,) or (windows, heads)."""
    front = drop_leading_ones(front)
    if len(front) <= 1:
        return front or (1,)
    return (math.prod(front[:-1]), front[-1])


def _scores(reader: Reader, q: View, k: View) -> View:
    """q [.., H, M, K], k [.., H, N, K] -> [.., H, M, N]. Factors of q and k, one per head, become a factor of the scores."""
    q, k = _unified(q), _unified(k)
    heads = q.shape[-3]
    factor = torch.ones(heads, dtype=torch.float64)
    operands = []
    for view in (q, k):
        if view.scale is not None:
            per_head = factor_per_head(view.scale)
            if per_head is not None and view.offset is None:
                factor = factor * per_head
                view = View(view.steps, view.index)
        operands.append(view)
    step = reader.step("scores", operands, (*q.shape[:-1], k.shape[-2]), scale=factor)
    return step.view()


def _unified(view: View) -> View:
    """Merge tokens without and with rotary positions: cat([x[:n], rotate(x[n:])]) is a rotation by 0 for the first n tokens."""
    rotary = [step for step in view.steps if step.kind == "rotary"]
    if len(view.steps) != 2 or len(rotary) != 1 or view.scale is not None or view.offset is not None:
        return view
    (turned,) = rotary
    (other,) = (step for step in view.steps if step is not turned)
    cosines, sines = turned.inputs
    if cosines.steps != (other,):
        return view
    start = 0 if view.steps[0] is other else turned.size
    from_other = (view.index >= start) & (view.index < start + other.size)
    inside = torch.where(from_other, 0, view.index - (0 if start else other.size))
    parts = []
    for part, identity in ((cosines, 1.0), (sines, 0.0)):
        index = torch.where(from_other, view.index - start, part.index.flatten()[inside])
        scale = torch.ones(part.shape, dtype=torch.float64) if part.scale is None else part.scale
        values = torch.where(from_other, identity, scale.flatten()[inside])
        parts.append(View((other,), index, values))
    return Step("rotary", turned.path, parts, view.shape).view()


def _context(reader: Reader, attention: View, v: View, shape: tuple[int, ...]) -> View:
    """attention [.., H, M, N], v [.., H, N, D] -> a view [.., H, M, D] of a step whose output is [.., M, H * D]"""
    *windows, heads, rows, _ = attention.shape
    width = v.shape[-1]
    step = reader.step("context", [attention, v], (*windows, rows, heads * width))
    view = step.view().reshaped(*windows, rows, heads, width)
    return view.transposed(-2, -3).reshaped(*shape)


def _constant_query(reader: Reader, q: Tensor, k: View) -> View:
    """Scores of a constant query are a linear layer: q [.., H, M, K] constant, k [.., H, N, K] -> [.., H, M, N]"""
    front = k.shape[:-2]
    heads = drop_leading_ones(front)
    q = q.broadcast_to((*front, *q.shape[-2:])).reshape(-1, *q.shape[-2:])
    if len(heads) > 1:
        raise NotImplementedError("of a constant query and keys in several windows is not supported")
    h, m, width = q.shape
    tokens = k.shape[-2]
    rows = k.reshaped(h, tokens, width).moved(lambda t: t.transpose(0, 1)).reshaped(tokens, h * width)
    weight = torch.zeros(h, m, h, width, dtype=torch.float64)
    for head in range(h):
        weight[head, :, head] = q[head]
    scores = linear(reader, rows, weight.reshape(h * m, h * width))
    return scores.moved(lambda t: t.transpose(0, 1)).reshaped(*front, m, tokens)


def softmax(reader: Reader, x: View, dim: int, *rest: Any) -> View:
    if dim % len(x.shape) != len(x.shape) - 1:
        return softmax(reader, x.transposed(dim, -1), -1).transposed(dim, -1)
    shape = drop_leading_ones(x.shape)
    view, restore = natural(x) if len(x.steps) == 1 and x.step.kind == "scores" else (x, None)
    if restore is None:
        if len(shape) < 3:
            shape = (1,) * (3 - len(shape)) + shape
        if len(shape) > 4:
            shape = (math.prod(shape[:-3]), *shape[-3:])
        view = x.reshaped(*shape)
        return reader.step("softmax", [view], shape).view().reshaped(*x.shape)
    return restore(reader.step("softmax", [view], view.shape))


def attention(
    reader: Reader,
    q: View | Tensor,
    k: View,
    v: View,
    mask: Tensor | View | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    **rest: Any,
) -> View:
    """scaled_dot_product_attention: softmax(q @ k^T * scale + mask) @ v"""
    width = q.shape[-1]
    factor = torch.tensor(1 / math.sqrt(width) if scale is None else scale, dtype=torch.float64)
    scores = matmul(reader, q, k.transposed(-1, -2) if isinstance(k, View) else k.transpose(-1, -2)).scaled(factor)
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.shifted(torch.where(allowed, 0.0, -torch.inf))
    if mask is not None:
        term = mask if isinstance(mask, Tensor) else as_tensor(mask)
        if term is None:
            raise NotImplementedError("with a mask that depends on the image is not supported")
        scores = scores.shifted(torch.where(term, 0.0, -torch.inf) if term.dtype == torch.bool else term)
    return matmul(reader, softmax(reader, scores, -1), v)


def einsum(reader: Reader, equation: str, operands: list[View | Tensor], **rest: Any) -> View:
    """Two operands: contracted axes become K, shared axes that remain become the leading axes of a matrix product."""
    if len(operands) != 2 or "." in equation:
        raise NotImplementedError(f"{equation} is not supported")
    terms, result = equation.replace(" ", "").split("->")
    first, second = terms.split(",")
    a, b = (constant(x) if isinstance(x, Tensor) else x for x in operands)
    shared = [c for c in first if c in second and c in result]
    summed = [c for c in first if c in second and c not in result]
    left, right = [c for c in first if c not in second], [c for c in second if c not in first]
    sizes = {**dict(zip(first, a.shape, strict=True)), **dict(zip(second, b.shape, strict=True))}

    def arranged(view: View, letters: str, order: list[str], shape: tuple[int, ...]) -> View:
        return view.moved(lambda t: t.permute(*(letters.index(c) for c in order))).reshaped(*shape)

    def size(letters: list[str]) -> int:
        return math.prod(sizes[c] for c in letters)

    front = tuple(sizes[c] for c in shared)
    x = arranged(a, first, [*shared, *left, *summed], (*front, size(left), size(summed)))
    y = arranged(b, second, [*shared, *summed, *right], (*front, size(summed), size(right)))
    product = matmul(reader, *((view.offset if not view.steps else view) for view in (x, y)))  # type: ignore[arg-type]
    order = [*shared, *left, *right]
    product = product.reshaped(*(sizes[c] for c in order))
    return product.moved(lambda t: t.permute(*(order.index(c) for c in result)))


def baddbmm(reader: Reader, term: View | Tensor, a: View, b: View, beta: float = 1, alpha: float = 1) -> View | Pending:
    """beta * term + alpha * (a @ b)"""
    product = matmul(reader, a, b).scaled(torch.tensor(float(alpha)))
    if beta == 0:
        return product
    return add(reader, product, term, beta)


def addmm(reader: Reader, term: Tensor, x: View, weight: Tensor, beta: float = 1, alpha: float = 1) -> View | Pending:
    """beta * term + alpha * (x @ weight)"""
    if beta == alpha == 1 and isinstance(weight, Tensor) and isinstance(term, Tensor) and term.ndim == 1:
        return linear(reader, x, weight.T.contiguous(), term)
    return baddbmm(reader, term, x, weight, beta, alpha)  # type: ignore[arg-type]


HANDLERS: dict[str, Callable[..., Any]] = {
    "matmul": matmul, "bmm": matmul, "mm": matmul, "softmax": softmax, "_softmax": softmax,
    "scaled_dot_product_attention": attention, "einsum": einsum, "baddbmm": baddbmm, "addmm": addmm,
}  # fmt: skip
