"""Rounding bit by bit (Bit-Split, Wang 2020): each bit of the codes is a ternary matrix, chosen with the other bits fixed.

W ~ a 2^-(b-2) q, q = sum_k 2^(b-2-k) B_k over k = 0 .. b-2, B_k in {-1, 0, 1}, one a > 0 an output channel:
  1. start: a and q by turns, for least ||W - a q||; |q| in binary times its sign gives the B_k;
  2. a, then bit after bit, again and again for least ||W - Wq||;
  3. the same for least ||Y - X Wq^T||, with X what the quantized network feeds the layer and Y the float model's outputs
     without bias: of X and Y only X^T X, Y^T X and ||Y||^2 are needed.
Neighbours: walk.py (X and Y of each layer), weights.py (plain rounding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.models import layers
from fqvit.models.graph import Node
from fqvit.models.load import FloatModel
from fqvit.quant.calibration import Calibration
from fqvit.quant.methods.walk import Columns, LinearMap, side_by_side
from fqvit.quant.simulate import Simulation
from fqvit.quant.weights import QuantizedLinear, bits_and_group, quantize_linear
from fqvit.system.progress import Progress

START_ROUNDS = 200
WEIGHT_ROUNDS = 50
OUTPUT_ROUNDS = 100
SETTLED = 1e-9  # of a: a smaller change, relative to it, is none
WORTHWHILE = 1e-3  # of a row's output error: a round that takes away less is its last
ROWS_AN_INPUT = 8  # with fewer step 3 learns the rows by heart and is left out: a head sees one row an image
BLOCK = 32  # inputs whose changes reach the others together

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """scale: float64 [O], a   bits: float64 [b-1, O, K], the B_k of -1, 0 and 1, most significant first"""

    scale: Array
    bits: Array

    def codes(self) -> Array:
        """q: whole numbers within +-(2^(b-1) - 1), [O, K]. The weights are a 2^-(b-2) times that."""
        codes: Array = _sum(self.bits) * 2 ** (len(self.bits) - 1)
        return codes


@dataclass(frozen=True)
class Products:
    """Sums over `rows` rows, float64. inputs: X^T X [K, K]   outputs: Y^T X [O, K]   power: ||Y||^2 [O], of each output"""

    inputs: Array
    outputs: Array
    power: Array
    rows: int

    @staticmethod
    def of(weight: Array, exact: Sequence[Tensor], quantized: Sequence[Tensor]) -> Products:
        """Batches of rows [..., K] that the float model and the quantized one feed a layer of float weights [O, K]."""
        size = weight.shape[1]
        inputs, mixed, float_inputs = torch.zeros(3, size, size, dtype=torch.float64)
        count = 0
        for x, y in zip(exact, quantized, strict=True):
            float_rows, rows = x.reshape(-1, size), y.reshape(-1, size)
            inputs += rows.T @ rows
            mixed += float_rows.T @ rows
            float_inputs += float_rows.T @ float_rows
            count += len(rows)
        return Products(inputs.numpy(), weight @ mixed.numpy(), _dots(weight @ float_inputs.numpy(), weight), count)


@torch.no_grad()
def bit_split(
    model: FloatModel, calibration: Calibration, images: NDArray[np.uint8], progress: Progress | None = None
) -> Calibration:
    """`calibration` with the weights of every linear map and the patch embedding, from uint8 images [n, H, W, C]."""
    simulation = Simulation(model, calibration)
    chosen: dict[str, QuantizedLinear] = {}

    def step(node: Node, exact: Columns, simulated: Columns) -> list[Tensor]:
        if isinstance(node.leaf, layers.Linear | layers.Patches):
            found = LinearMap.of(node, model.preprocess)
            rows = [[found.rows(x) for x in batches] for batches in (exact[0], simulated[0])]
            steps = simulation.input_scales(node)
            assert steps is not None  # every product reads codes where nonlinear operations stay float
            bits, _ = bits_and_group(calibration.recipe, node.leaf)
            chosen[node.name] = fit(found, Products.of(found.weight, *rows), steps, bits)
            simulation.use(node, chosen[node.name])
        return [simulation.visit(node, simulation.call(node, list(xs))) for xs in zip(*simulated, strict=True)]

    side_by_side(simulation.graph, model.preprocess, images, step, progress, "splitting weights")
    return replace(calibration, weights=chosen)


def fit(linear: LinearMap, products: Products, steps: Array, bits: int) -> QuantizedLinear:
    """The integers of one linear map, whose inputs have codes with these steps [K] or [1]."""
    width = np.broadcast_to(steps, linear.weight.shape[1:])
    split = by_weights(linear.weight * width, bits)
    if products.rows >= ROWS_AN_INPUT * len(width):
        inputs, outputs = products.inputs / np.outer(width, width), products.outputs / width
        split = by_outputs(split, replace(products, inputs=inputs, outputs=outputs))
    plain = quantize_linear(linear.weight, linear.bias, steps, bits)
    scale = split.scale / 2 ** (bits - 2)
    # Rows of (nearly) no weights, whose bias would not fit in units of their own.
    dead = scale < np.maximum(np.abs(linear.bias) / 2**30, np.finfo(np.float64).tiny)
    w = np.where(dead[:, None], plain.w, split.codes())
    scale = np.where(dead, plain.scale, scale)
    return QuantizedLinear(w.astype(np.int8), scale, np.floor(linear.bias / scale + 0.5).astype(np.int64))


def by_weights(weight: Array, bits: int) -> Split:
    """Steps 1 and 2: the split of [O, K] of least squared error, as far as turns find it. A row of zeros has a = 0."""
    largest = 2 ** (bits - 1) - 1
    unit, q = np.abs(weight).max(1) / largest, np.zeros_like(weight)
    live = np.flatnonzero(unit)  # rows that have not settled
    for _ in range(START_ROUNDS):
        w = weight[live]
        found = np.clip(np.floor(w / unit[live, None] + 0.5), -largest, largest)
        better = _least_squares(unit[live], _dots(w, found), _dots(found, found))
        moved = np.abs(better - unit[live]) > SETTLED * better
        unit[live], q[live] = better, found
        live = live[moved]
        if len(live) == 0:
            break
    magnitude = np.abs(q).astype(np.int64)
    parts = np.stack([(magnitude >> k & 1) * np.sign(q) for k in reversed(range(bits - 1))])
    scale = unit * 2 ** (bits - 2)
    live = np.flatnonzero(scale)
    for i in range(WEIGHT_ROUNDS):
        codes = _sum(parts[:, live])
        better = _least_squares(scale[live], _dots(weight[live], codes), _dots(codes, codes))
        moved = (np.abs(better - scale[live]) > SETTLED * better) | (i == 0)
        scale[live] = better
        live = live[moved]
        if len(live) == 0:
            break
        parts[:, live] = _turns_for_weights(weight[live] / scale[live, None], parts[:, live])
    return Split(scale, parts)


def _turns_for_weights(target: Array, bits: Array) -> Array:
    """Each bit of [b-1, O, K] in turn, for the least error of their sum beside target [O, K]."""
    rest = target - _sum(bits)
    for size, bit in zip(_sizes(len(bits)), bits, strict=True):
        rest += size * bit
        np.copyto(bit, _ternary(rest / size))
        rest -= size * bit
    return bits


def by_outputs(split: Split, products: Products, rounds: int = OUTPUT_ROUNDS) -> Split:
    """Step 3, from what step 2 found. Rows do not depend on each other; those that settled are not looked at again."""
    square, bits, scale = products.inputs, split.bits.copy(), split.scale.copy()
    live, error = np.flatnonzero(scale), np.full(len(scale), np.inf)
    for _ in range(rounds):
        if len(live) == 0:
            break
        outputs, here = products.outputs[live], bits[:, live]
        codes = _sum(here)
        felt = codes @ square
        a = _least_squares(scale[live], _dots(outputs, codes), _dots(felt, codes))
        # Inputs first from here on. left: of Y^T X, in units of a, what the codes have not taken away yet.
        left = np.ascontiguousarray((outputs / a[:, None] - felt).T)
        here = np.ascontiguousarray(here.transpose(0, 2, 1))
        for size, bit in zip(_sizes(len(here)), here, strict=True):
            _turn_for_outputs(bit, left, size, square)
        here = here.transpose(0, 2, 1)
        scale[live], bits[:, live] = a, here
        codes = _sum(here)
        now = products.power[live] - a * _dots(outputs, codes) - a * a * _dots(left.T, codes)  # ||Y - X Wq^T||^2
        worthwhile = now < (1 - WORTHWHILE) * error[live]
        error[live] = now
        live = live[worthwhile]
    return Split(scale, bits)


def _turn_for_outputs(bit: Array, left: Array, size: float, square: Array) -> None:
    """One bit [K, O] of all weights, input after input: -1, 0 or 1, whichever leaves the least error. Changes bit and left, too
    [K, O].

    B in place of 0 at input n adds a^2 (size^2 A[n, n] B^2 - 2 size B c) to the error, c the left of n without it; so B is the
    one of the three nearest to c / (size A[n, n]).
    """
    for start in range(0, len(square), BLOCK):
        end = min(start + BLOCK, len(square))
        near = square[start:end, start:end]
        changes = np.empty((end - start, bit.shape[1]))
        for i in range(end - start):
            old, change, own = bit[start + i], changes[i], near[i, i]
            if own <= 0:  # an input that was always 0 says nothing of its weights
                change[:] = 0
                continue
            np.dot(near[i, :i], changes[:i], out=change)
            wanted = (left[start + i] - change) / (size * own) + old
            new = _ternary(wanted)
            np.subtract(new, old, out=change)
            change *= size
            bit[start + i] = new
        left -= square[:, start:end] @ changes


def _ternary(x: Array) -> Array:
    """-1, 0 or 1, the nearest."""
    return np.sign(x) * (np.abs(x) >= 0.5)


def _sizes(count: int) -> list[float]:
    """2^-k of the bits, most significant first."""
    return [2.0**-k for k in range(count)]


def _sum(bits: Array) -> Array:
    """Bits [b-1, ...] stitched: sum_k 2^-k B_k."""
    total: Array = np.tensordot(np.array(_sizes(len(bits))), bits, 1)
    return total


def _dots(a: Array, b: Array) -> Array:
    """Row by row: [O, K] x 2 -> [O]"""
    found: Array = np.einsum("ok,ok->o", a, b)
    return found


def _least_squares(before: Array, product: Array, square: Array) -> Array:
    """product / square where that is a scale at all; elsewhere what it was before."""
    found = product / np.where(square > 0, square, 1.0)
    return np.where((found > 0) & (square > 0), found, before)
