"""Round weights bit by bit (Bit-Split, Wang 2020).

Each bit is a ternary matrix, chosen with the other bits fixed.

W ~ Wq = a * 2^-(b-2) * q, q = sum_k 2^(b-2-k) * B_k over k = 0 .. b-2, B_k in {-1, 0, 1}, one scale a > 0 per output channel:
  1. initialize: alternate between scale a and codes q to minimize ||W - Wq||; B_k = sign(q) times binary digit k of |q|;
  2. minimize ||W - Wq||: alternate between the scale a and each bit in turn;
  3. minimize ||Y - X Wq^T|| in the same way, where X are the layer's inputs in the quantized network and Y its outputs in the
     float model, without the bias. Only X^T X, Y^T X and ||Y||^2 are needed.
See also: lockstep.py (X and Y of each layer), weights.py (rounding to nearest).
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
from fqvit.quant.methods.lockstep import InputBatches, LinearLayer, run_in_lockstep
from fqvit.quant.simulate import Simulation
from fqvit.quant.weights import QuantizedLinear, bits_and_group, quantize_linear
from fqvit.system.progress import Progress

START_ROUNDS = 200
WEIGHT_ROUNDS = 50
OUTPUT_ROUNDS = 100
CONVERGED = 1e-9  # steps 1 and 2 end for a row when the relative change of its scale is below this
WORTHWHILE = 1e-3  # step 3 ends for a row when a round reduces its output error by less than this share
# With fewer rows of X per input channel, step 3 would overfit and is skipped. The classification head has one row per image.
ROWS_PER_INPUT = 8
BLOCK = 32  # the residual is updated after this many inputs

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """Weights as one scale per row and ternary bits.

    scale: a, float64 [O]   bits: B_k in {-1, 0, 1}, most significant first, float64 [b-1, O, K]
    """

    scale: Array
    bits: Array

    def codes(self) -> Array:
        """Return the integers q [O, K], |q| <= 2^(b-1) - 1. The weights are a * 2^-(b-2) * q."""
        codes: Array = _sum(self.bits) * 2 ** (len(self.bits) - 1)
        return codes


@dataclass(frozen=True)
class Products:
    """Sums over `rows` rows, float64. inputs: X^T X [K, K]   outputs: Y^T X [O, K]   power: ||Y||^2 per output [O]"""

    inputs: Array
    outputs: Array
    power: Array
    rows: int

    @staticmethod
    def of(weight: Array, exact: Sequence[Tensor], quantized: Sequence[Tensor]) -> Products:
        """Compute the sums for one layer.

        weight: float [O, K]   exact, quantized: batches [..., K] of the layer's inputs in the float and the quantized model
        """
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
    """Return `calibration` with weights for every linear layer and the patch embedding; images: uint8 [n, H, W, C]."""
    simulation = Simulation(model, calibration)
    chosen: dict[str, QuantizedLinear] = {}

    def quantize_node(node: Node, exact: InputBatches, simulated: InputBatches) -> list[Tensor]:
        if isinstance(node.leaf, layers.Linear | layers.Patches):
            found = LinearLayer.of(node, model.preprocess)
            rows = [[found.rows(x) for x in batches] for batches in (exact[0], simulated[0])]
            scales = simulation.input_scales(node)
            assert scales is not None  # bit-split requires float nonlinear operations: every matrix product then reads codes
            bits, _ = bits_and_group(calibration.recipe, node)
            chosen[node.name] = fit(found, Products.of(found.weight, *rows), scales, bits)
            simulation.use(node, chosen[node.name])
        return [simulation.visit(node, simulation.call(node, list(xs))) for xs in zip(*simulated, strict=True)]

    run_in_lockstep(simulation.graph, model.preprocess, images, quantize_node, progress, "splitting weights")
    return replace(calibration, weights=chosen)


def fit(linear: LinearLayer, products: Products, input_scales: Array, bits: int) -> QuantizedLinear:
    """Quantize one linear layer or patch embedding whose inputs are codes with scales [K] or [1]."""
    scales = np.broadcast_to(input_scales, linear.weight.shape[1:])
    split = by_weights(linear.weight * scales, bits)
    if products.rows >= ROWS_PER_INPUT * len(scales):
        inputs, outputs = products.inputs / np.outer(scales, scales), products.outputs / scales
        split = by_outputs(split, replace(products, inputs=inputs, outputs=outputs))
    plain = quantize_linear(linear.weight, linear.bias, input_scales, bits)
    scale = split.scale / 2 ** (bits - 2)
    # Rows whose weights are (nearly) all zero: the bias would overflow in units of such a small scale.
    dead = scale < np.maximum(np.abs(linear.bias) / 2**30, np.finfo(np.float64).tiny)
    w = np.where(dead[:, None], plain.w, split.codes())
    scale = np.where(dead, plain.scale, scale)
    return QuantizedLinear(w.astype(np.int8), scale, np.floor(linear.bias / scale + 0.5).astype(np.int64))


def by_weights(weight: Array, bits: int) -> Split:
    """Steps 1 and 2: minimize the squared error of weight [O, K] by alternation. A row of zeros has scale 0."""
    largest = 2 ** (bits - 1) - 1
    unit, q = np.abs(weight).max(1) / largest, np.zeros_like(weight)
    live = np.flatnonzero(unit)  # rows that have not converged
    for _ in range(START_ROUNDS):
        w = weight[live]
        found = np.clip(np.floor(w / unit[live, None] + 0.5), -largest, largest)
        better = _least_squares(unit[live], _dots(w, found), _dots(found, found))
        moved = np.abs(better - unit[live]) > CONVERGED * better
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
        moved = (np.abs(better - scale[live]) > CONVERGED * better) | (i == 0)
        scale[live] = better
        live = live[moved]
        if len(live) == 0:
            break
        parts[:, live] = _update_bits_by_weights(weight[live] / scale[live, None], parts[:, live])
    return Split(scale, parts)


def _update_bits_by_weights(target: Array, bits: Array) -> Array:
    """Update the bits [b-1, O, K] in place, one after the other, to minimize the error of their sum against target [O, K]."""
    rest = target - _sum(bits)
    for size, bit in zip(_sizes(len(bits)), bits, strict=True):
        rest += size * bit
        np.copyto(bit, _ternary(rest / size))
        rest -= size * bit
    return bits


def by_outputs(split: Split, products: Products, rounds: int = OUTPUT_ROUNDS) -> Split:
    """Step 3: minimize the squared error of the outputs, starting from the result of step 2.

    Rows are independent; a converged row is not updated again.
    """
    gram, bits, scale = products.inputs, split.bits.copy(), split.scale.copy()
    live, error = np.flatnonzero(scale), np.full(len(scale), np.inf)
    for _ in range(rounds):
        if len(live) == 0:
            break
        outputs, here = products.outputs[live], bits[:, live]
        codes = _sum(here)
        products_of_codes = codes @ gram
        a = _least_squares(scale[live], _dots(outputs, codes), _dots(products_of_codes, codes))
        # From here on axis 0 is the input. residual: (Y - X Wq^T)^T X in units of a.
        residual = np.ascontiguousarray((outputs / a[:, None] - products_of_codes).T)
        here = np.ascontiguousarray(here.transpose(0, 2, 1))
        for size, bit in zip(_sizes(len(here)), here, strict=True):
            _update_bit_by_outputs(bit, residual, size, gram)
        here = here.transpose(0, 2, 1)
        scale[live], bits[:, live] = a, here
        codes = _sum(here)
        now = products.power[live] - a * _dots(outputs, codes) - a * a * _dots(residual.T, codes)  # ||Y - X Wq^T||^2
        worthwhile = now < (1 - WORTHWHILE) * error[live]
        error[live] = now
        live = live[worthwhile]
    return Split(scale, bits)


def _update_bit_by_outputs(bit: Array, residual: Array, size: float, gram: Array) -> None:
    """Set one bit of all weights, input by input, to whichever of -1, 0 and 1 has the least output error.

    bit, residual: [K, O], both updated in place   gram: A = X^T X [K, K]   size: 2^-k, the weight of the bit
    Replacing 0 by B at input n changes the error by a^2 * (size^2 * A[n, n] * B^2 - 2 * size * B * c), where c is the
    residual of input n with B = 0. So the best B is the one nearest to c / (size * A[n, n]).
    """
    for start in range(0, len(gram), BLOCK):
        end = min(start + BLOCK, len(gram))
        near = gram[start:end, start:end]
        changes = np.empty((end - start, bit.shape[1]))
        for i in range(end - start):
            old, change, own = bit[start + i], changes[i], near[i, i]
            if own <= 0:  # the input is always 0: its weights do not matter
                change[:] = 0
                continue
            np.dot(near[i, :i], changes[:i], out=change)
            wanted = (residual[start + i] - change) / (size * own) + old
            new = _ternary(wanted)
            np.subtract(new, old, out=change)
            change *= size
            bit[start + i] = new
        residual -= gram[:, start:end] @ changes


def _ternary(x: Array) -> Array:
    """Round to the nearest of -1, 0 and 1."""
    return np.sign(x) * (np.abs(x) >= 0.5)


def _sizes(count: int) -> list[float]:
    """Return 2^-k for each bit k, most significant first."""
    return [2.0**-k for k in range(count)]


def _sum(bits: Array) -> Array:
    """Return sum_k 2^-k * B_k for bits [b-1, ...]."""
    total: Array = np.tensordot(np.array(_sizes(len(bits))), bits, 1)
    return total


def _dots(a: Array, b: Array) -> Array:
    """Return the dot product of each row of a with the same row of b: [O, K], [O, K] -> [O]."""
    found: Array = np.einsum("ok,ok->o", a, b)
    return found


def _least_squares(before: Array, product: Array, square: Array) -> Array:
    """Return product / square for each row for which it is a positive scale, otherwise `before`."""
    found = product / np.where(square > 0, square, 1.0)
    return np.where((found > 0) & (square > 0), found, before)
