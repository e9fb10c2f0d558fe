"""Weights chosen for what the quantized network really feeds them, one linear map after the other, without labels.

The walk of walk.py goes through the float model and the simulation, as far as it is quantized already. At each linear map,
with x the float inputs and x' the simulated ones:
  1. rounding: columns in order, the error of each carried over to those still to be rounded (GPTQ, Frantar 2022);
  2. bias: the mean of W x - W' x', so that no mean error goes on.
Neighbours: walk.py, simulate.py (the walk's other half), weights.py (plain rounding).
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
from fqvit.quant.methods.walk import Columns, side_by_side
from fqvit.quant.simulate import Simulation
from fqvit.quant.weights import QuantizedLinear, bits_and_group, quantize_linear, short_output_scales
from fqvit.system.progress import Progress

DAMPING = 0.01  # of the mean square of the inputs, added to all: columns that never move must not take errors
BLOCK = 64  # columns whose errors are carried over together


@dataclass
class Moments:
    """Over all tokens: the covariance of the simulated inputs [K, K], their mean and the float inputs' mean [K]; float64."""

    square: Tensor
    mean_simulated: Tensor
    mean_float: Tensor

    @staticmethod
    def of(exact: Sequence[Tensor], simulated: Sequence[Tensor]) -> Moments:
        """Of batches [..., K]."""
        size = exact[0].shape[-1]
        # Counted from about the middle, so that float32 products keep the digits of small movements around large means.
        middle = simulated[0].reshape(-1, size).mean(0)
        square = torch.zeros(size, size, dtype=torch.float64)
        simulated_sum, float_sum = torch.zeros(2, size, dtype=torch.float64)
        count = 0
        for x, y in zip(exact, simulated, strict=True):
            rows = y.reshape(-1, size) - middle
            square += rows.T @ rows
            simulated_sum += rows.sum(0)
            float_sum += x.reshape(-1, size).sum(0)
            count += len(rows)
        mean = simulated_sum / count
        return Moments(square / count - torch.outer(mean, mean), mean + middle, float_sum / count)


@torch.no_grad()
def compensate(
    model: FloatModel,
    calibration: Calibration,
    images: NDArray[np.uint8],
    progress: Progress | None = None,
) -> Calibration:
    """`calibration` with the weights of every linear map behind a quantized site, from uint8 images [n, H, W, C]."""
    simulation = Simulation(model, calibration)
    chosen: dict[str, QuantizedLinear] = {}

    def step(node: Node, exact: Columns, simulated: Columns) -> list[Tensor]:
        steps = simulation.input_scales(node) if isinstance(node.leaf, layers.Linear) else None
        if steps is not None:
            chosen[node.name] = fit(node, Moments.of(exact[0], simulated[0]), steps, calibration)
            simulation.use(node, chosen[node.name])
        return [simulation.visit(node, simulation.call(node, list(xs))) for xs in zip(*simulated, strict=True)]

    side_by_side(simulation.graph, model.preprocess, images, step, progress, "rounding weights")
    return replace(calibration, weights=chosen)


def fit(node: Node, moments: Moments, steps: NDArray[np.float64], calibration: Calibration) -> QuantizedLinear:
    """The integers of one linear map. steps: float64 [K], of its inputs' codes."""
    leaf = node.leaf
    assert isinstance(leaf, layers.Linear)
    weight = leaf.weight.detach().cpu().double()
    bias = torch.zeros(len(weight), dtype=torch.float64) if leaf.bias is None else leaf.bias.detach().cpu().double()
    bits, group = bits_and_group(calibration.recipe, leaf)
    # Plain rounding settles scales and exponents; the codes are then chosen again, column by column.
    width = torch.from_numpy(np.broadcast_to(steps, weight.shape[1:]).copy())
    square = moments.square / torch.outer(width, width)
    importance = square.diagonal().numpy()
    plain = quantize_linear(
        weight.numpy(),
        bias.numpy(),
        steps,
        bits,
        group=group,
        importance=importance,
        output_scales=short_output_scales(calibration.recipe, leaf, calibration.sites.get(node.name), len(weight)),
        halves=calibration.recipe.weight_ends == "halves",
    )
    units = torch.from_numpy(plain.scale)[:, None] * torch.ones(1, weight.shape[1], dtype=torch.float64)
    if plain.exponent is not None:
        units = units * torch.from_numpy(2.0 ** plain.exponent[:, np.arange(weight.shape[1]) // group])
    rounded = round_in_turn(weight * width, square, units, 2 ** (bits - 1) - 1)
    mean = bias + weight @ moments.mean_float - (rounded / width) @ moments.mean_simulated
    w = np.rint((rounded / torch.from_numpy(plain.scale)[:, None]).numpy()).astype(np.int8)
    limit = 2.0**30
    integer_bias = np.floor(np.clip(mean.numpy() / plain.scale, -limit, limit) + 0.5).astype(np.int64)
    return QuantizedLinear(w, plain.scale, integer_bias, plain.exponent)


def round_in_turn(values: Tensor, square: Tensor, units: Tensor, largest: int) -> Tensor:
    """[O, K] values rounded to whole units, |code| <= largest: least error of values x for inputs of covariance `square`.

    Columns of large inputs come first; the error of each is spread over those after it, by the Cholesky factor of the inverse.
    """
    size = values.shape[1]
    mean = float(square.diagonal().mean())
    if mean <= 0:
        return (values / units + 0.5).floor().clamp(-largest, largest) * units
    order = torch.argsort(square.diagonal(), descending=True, stable=True)
    factor = _factor(square[order][:, order], mean)
    left, unit, rounded = values[:, order].clone(), units[:, order], torch.empty_like(values)
    for first in range(0, size, BLOCK):
        last = min(first + BLOCK, size)
        block, errors = left[:, first:last], torch.empty(len(values), last - first, dtype=torch.float64)
        inner = factor[first:last, first:last]
        for k in range(last - first):
            column = (block[:, k] / unit[:, first + k] + 0.5).floor().clamp(-largest, largest) * unit[:, first + k]
            rounded[:, first + k] = column
            errors[:, k] = (block[:, k] - column) / inner[k, k]
            block[:, k + 1 :] -= torch.outer(errors[:, k], inner[k, k + 1 :])
        left[:, last:] -= errors @ factor[first:last, last:]
    return rounded[:, torch.argsort(order)]


def _factor(square: Tensor, mean: float) -> Tensor:
    """Upper Cholesky factor of the inverse, damped as far as it takes: a covariance of next to nothing is rounding noise."""
    damping = DAMPING * mean
    while True:
        lower, failed = torch.linalg.cholesky_ex(square + damping * torch.eye(len(square), dtype=torch.float64))
        if not failed:
            factor: Tensor
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return factor
        damping *= 10
