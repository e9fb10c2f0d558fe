"""Round weights so that later columns and biases compensate earlier rounding errors.

The float model and the simulation run in lockstep; all layers before the current one are already quantized. For each linear
layer, with inputs x in the float model and x' in the simulation, weights W and rounded weights W':
  1. rounding: column by column; the error of each column is distributed over the columns after it (GPTQ, Frantar 2022);
  2. bias: add the mean of W x - W' x', so that no mean error is passed on.
With rounding "compensated", all tokens have the same weight, and the patch embedding is not compensated. With rounding
"weighted", tokens are weighted by their influence on the outputs of the model, and the patch embedding is compensated, too.
See also: lockstep.py (runs both networks), importance.py (the influence of tokens), simulate.py (the quantized network),
weights.py (rounding to nearest).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.models import layers
from fqvit.models.graph import Node
from fqvit.models.load import FloatModel
from fqvit.quant import channels
from fqvit.quant.calibration import Calibration
from fqvit.quant.codebooks import Groups
from fqvit.quant.doubling import offsets
from fqvit.quant.importance import token_weights
from fqvit.quant.methods.lockstep import InputBatches, LinearLayer, run_batches_in_lockstep, run_in_lockstep
from fqvit.quant.methods.ranges import least_error, sample_rows
from fqvit.quant.plan import SitePlan, plan
from fqvit.quant.qparams import QParams
from fqvit.quant.recipe import Recipe
from fqvit.quant.simulate import Simulation
from fqvit.quant.weights import LinearLeaf, QuantizedLinear, bits_and_group, quantize_linear, rounded
from fqvit.system.progress import Progress

SEARCHED = ("norm", "qkv", "value", "query", "key", "context", "gelu")  # roles whose scales are searched
SEARCH_BATCHES = 4  # batches that the scales of attention times V are searched on
DAMPING = 0.01  # share of the mean variance, added to the covariance's diagonal so that constant inputs do not absorb errors
BLOCK = 64  # columns whose errors are distributed together
PRODUCT_BLOCK = 192  # columns of a symmetric product that are computed together
MAX_COLUMNS = 4608  # layers with more inputs are compensated in blocks: the time for one block is cubic in its columns
FEATURE_BATCH = 128  # RoI features per batch


@dataclass
class Moments:
    """Moments over all tokens, float64: covariance [K, K] and mean [K] of simulated inputs, mean [K] of float inputs."""

    covariance: Tensor
    mean_simulated: Tensor
    mean_float: Tensor

    @staticmethod
    def of(exact: Sequence[Tensor], simulated: Sequence[Tensor], weights: Tensor | None = None) -> Moments:
        """Compute the moments of batches [N, ..., K]; weights: one per position [...], equal by default."""
        size = exact[0].shape[-1]
        # Subtract an approximate mean first: float32 products then stay precise for small variances around large means.
        middle = simulated[0].reshape(-1, size).mean(0)
        square = torch.zeros(size, size, dtype=torch.float64)
        simulated_sum, float_sum = torch.zeros(2, size, dtype=torch.float64)
        count = 0.0
        for x, y in zip(exact, simulated, strict=True):
            rows, values = y.reshape(-1, size) - middle, x.reshape(-1, size)
            weighted = rows
            if weights is None:
                count += len(rows)
            else:
                each = weights.to(rows.dtype).expand(y.shape[:-1]).reshape(-1, 1)
                weighted, values = rows * each, values * each
                count += float(each.double().sum())
            square += _symmetric_product(rows, weighted)
            simulated_sum += weighted.sum(0)
            float_sum += values.sum(0)
        mean = simulated_sum / count
        return Moments(square / count - torch.outer(mean, mean), mean + middle, float_sum / count)


def _symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a^T b [K, K], which is symmetric. Blocks below the diagonal are copied: for large K, this saves up to half."""
    parts = a.shape[1] // PRODUCT_BLOCK or 1
    ends = [a.shape[1] * i // parts for i in range(parts + 1)]
    found = a.new_empty(a.shape[1], a.shape[1])
    for first, last in itertools.pairwise(ends):
        found[first:last, first:] = a[:, first:last].T @ b[:, first:]
        found[first:last, :first] = found[:first, first:last].T
    return found


class Compensation:
    """Round the weights of the network node by node; with `ranges = "least-error"`, also choose the scales of sites."""

    def __init__(self, model: FloatModel, calibration: Calibration) -> None:
        self.model, self.calibration, self.recipe = model, calibration, calibration.recipe
        self.token_weights: Mapping[str, Tensor] = {}  # per layer, only with rounding "weighted"
        self.simulation = Simulation(model, calibration)
        self.graph = self.simulation.graph
        self.plans = plan(self.graph, self.recipe)
        self.offsets = offsets(self.graph, self.recipe.doubled, calibration.sites)  # of the copies of doubled neurons, by layer
        self.chosen: dict[str, QuantizedLinear] = {}
        self.spread: dict[str, float] = {}
        self.first_calls: dict[layers.Leaf, str] = {}  # the first node of every layer with chosen weights
        self.searched = {name for name, site in self.plans.items() if self._is_searched(site)}

    def _is_searched(self, site: SitePlan) -> bool:
        return self.recipe.ranges == "least-error" and site.role in SEARCHED and site.fixed is None and site.bits < 8

    def quantize_node(self, node: Node, exact: InputBatches, simulated: InputBatches) -> list[Tensor]:
        """Choose the parameters of a node and return its outputs in the quantized network, one tensor per batch."""
        simulation = self.simulation
        inputs = list(zip(*simulated, strict=True))
        if node.name in self.searched:
            alike = isinstance(node.leaf, layers.Linear | layers.LayerNorm | layers.Gelu)
            few = [tuple(sample_rows(xs) for xs in simulated)] if alike else inputs[:SEARCH_BATCHES]
            self._search(node, [node.leaf(*xs, *node.params) for xs in few])
        weighted = self.recipe.rounding == "weighted"
        is_linear = isinstance(node.leaf, LinearLeaf) or (weighted and isinstance(node.leaf, layers.Patches))
        scales = simulation.input_scales(node) if is_linear else None
        if scales is not None:
            self.chosen[node.name] = self._shared(node, scales) or self._fitted(node, exact, simulated, scales)
            self.first_calls.setdefault(node.leaf, node.name)
            simulation.use(node, self.chosen[node.name])
        outputs = [simulation.call(node, list(xs)) for xs in inputs]
        if scales is not None:
            self.spread[node.name] = float(outputs[0].std())
        return [simulation.visit(node, y) for y in outputs]

    def _fitted(self, node: Node, exact: InputBatches, simulated: InputBatches, scales: NDArray[np.float64]) -> QuantizedLinear:
        """Round the weights of a layer whose inputs are codes with these scales."""
        layer = LinearLayer.of(node, self.model.preprocess)
        rows = [[layer.rows(x) for x in part[0]] for part in (exact, simulated)]
        each = self.token_weights.get(node.name)
        weights = None if each is None else each.flatten()
        moments = [
            Moments.of([x[..., part] for x in rows[0]], [x[..., part] for x in rows[1]], weights)
            for part in column_blocks(layer.weight.shape[1])
        ]
        output = self.simulation.short_output_scales(node)
        found = fit(node, moments, scales, self.recipe, layer, output)
        offset = self.offsets.get(node.name, np.zeros(1))
        return replace(found, bias=found.bias + np.rint(offset / found.scale).astype(np.int64))

    def _shared(self, node: Node, scales: NDArray[np.float64]) -> QuantizedLinear | None:
        """Return the codes of an earlier call of the same layer, for the input scales of this call; None if there are none.

        A detector's proposal head runs on every level of the pyramid, and a file stores equal codes once.
        """
        first = self.first_calls.get(node.leaf)
        if first is None or self.simulation.short_output_scales(node) is not None:
            return None
        before = self.simulation.input_scales(self.graph.node(first))
        if before is None or len({*before.tolist()}) > 1 or len({*scales.tolist()}) > 1:
            return None
        found = self.chosen[first]
        scale = found.scale * (scales[0] / before[0])
        return QuantizedLinear(found.w, scale, _integer_bias(found.bias * found.scale, scale), found.groups)

    def _search(self, node: Node, values: list[Tensor]) -> None:
        """Choose the scales of a site whose values before encoding are given."""
        q, source = self.simulation.sites[node.name], self.simulation.value_site(node)
        rows = sample_rows(values)
        if source is not None:
            q = self._context(rows, q, self.simulation.sites[source])
        site, spaced = self.plans[node.name], self.recipe.gelu == "spaced" and self.plans[node.name].bits < 8
        self.simulation.sites[node.name] = least_error(site, rows, q, self._importance(node, rows.shape[-1]), spaced)

    def _context(self, rows: Tensor, q: QParams, value: QParams) -> QParams:
        """Return scales of attention times V that cover the rows: those of V times one factor."""
        v = value.group(2) if len(value.scale) == 3 * len(q.scale) else value
        if len(q.scale) == 1:
            return q
        ends = rows.double().numpy()
        return channels.context(ends.min(0), ends.max(0), v, q.bits)

    def _importance(self, node: Node, size: int) -> Tensor:
        """Return the weight [C] of errors of each channel: the squared norm of the weights that read it."""
        total = torch.zeros(size)
        for reader in self.graph.nodes:
            if node.name in reader.inputs and isinstance(reader.leaf, layers.Linear) and reader.leaf.weight.shape[1] == size:
                total += reader.leaf.weight.detach().float().square().sum(0).cpu()
        return total if float(total.max()) > 0 else torch.ones(size)

    def over(self, images: NDArray[Any], progress: Progress | None, label: str) -> None:
        """Quantize all nodes. images: uint8 [n, H, W, C], or RoI features float32 [n, side, side, C] for a detector's head"""
        if self.model.square is None:
            run_in_lockstep(self.graph, self.model.preprocess, images, self.quantize_node, progress, label)
            return
        exact = torch.split(torch.from_numpy(images), FEATURE_BATCH)
        quantized = [self.simulation.encode_input(x) for x in exact]
        run_batches_in_lockstep(self.graph, exact, quantized, self.quantize_node, progress, label)

    def result(self) -> Calibration:
        sites = {name: self.simulation.sites[name] for name in self.calibration.sites}
        return replace(self.calibration, sites=sites, weights=self.chosen)


@torch.no_grad()
def compensate(
    model: FloatModel,
    calibration: Calibration,
    images: NDArray[Any],
    progress: Progress | None = None,
) -> Calibration:
    """Return `calibration` with weights for every linear layer and convolution that reads a quantized site.

    images: uint8 [n, H, W, C], or RoI features float32 [n, side, side, C] for a detector's head
    """
    run = Compensation(model, calibration)
    if calibration.recipe.rounding == "weighted" and model.square is None:
        run.token_weights = token_weights(run.graph, model.preprocess, images)
    run.over(images, progress, "rounding weights")
    return run.result()


def column_blocks(columns: int) -> list[slice]:
    """Return consecutive blocks of columns, as few and as equal as possible, of at most MAX_COLUMNS columns."""
    count = -(-columns // MAX_COLUMNS)
    ends = [columns * i // count for i in range(count + 1)]
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def fit(
    node: Node,
    moments: Sequence[Moments],
    input_scales: NDArray[np.float64],
    recipe: Recipe,
    layer: LinearLayer,
    output_scales: NDArray[np.float64] | None = None,
) -> QuantizedLinear:
    """Quantize one linear layer, convolution or patch embedding whose inputs are codes with scales float64 [K] or [1].

    moments: those of consecutive blocks of columns. Errors are compensated within a block.
    output_scales: see weights.py
    """
    weight, bias = torch.from_numpy(layer.weight), torch.from_numpy(layer.bias)
    bits, group = bits_and_group(recipe, node)
    # Rounding to nearest decides scales and codebooks; the weights are then rounded again, column by column.
    scales = torch.from_numpy(np.broadcast_to(input_scales, weight.shape[1:]).copy())
    widths = [len(each.mean_float) for each in moments]
    covariances = [
        each.covariance / torch.outer(part, part) for each, part in zip(moments, torch.split(scales, widths), strict=True)
    ]
    importance = torch.cat([each.diagonal() for each in covariances]).numpy()
    plain = quantize_linear(
        weight.numpy(),
        bias.numpy(),
        input_scales,
        bits,
        group=group,
        importance=importance,
        output_scales=output_scales,
        halves=recipe.weight_ends == "halves",
    )
    unit = torch.from_numpy(plain.scale)[:, None]
    largest, first, parts = 2 ** (bits - 1) - 1, 0, []
    for part, covariance in zip(torch.split(weight * scales / unit, widths, 1), covariances, strict=True):
        parts.append(round_columns(part, covariance, largest, plain.groups, first))
        first += part.shape[1]
    w = torch.cat(parts, 1)
    mean_float, mean_simulated = (torch.cat(part) for part in zip(*((m.mean_float, m.mean_simulated) for m in moments)))
    corrected = bias + weight @ mean_float - (w * unit / scales) @ mean_simulated
    return QuantizedLinear(w.numpy().astype(np.int8), plain.scale, _integer_bias(corrected.numpy(), plain.scale), plain.groups)


def _integer_bias(bias: NDArray[np.float64], scale: NDArray[np.float64]) -> NDArray[np.int64]:
    limit = 2.0**30
    found: NDArray[np.int64] = np.floor(np.clip(bias / scale, -limit, limit) + 0.5).astype(np.int64)
    return found


def round_columns(units: Tensor, covariance: Tensor, largest: int, groups: Groups | None = None, offset: int = 0) -> Tensor:
    """Round weights [O, K], in units of their row's scale, so that the error of units @ x is small; see weights.rounded.

    covariance: covariance of the inputs x, [K, K]   offset: the first column's index in the layer
    Columns whose inputs have a large variance come first; the error of each column is distributed over the columns after it by
    the Cholesky factor of the inverse covariance.
    """
    size = units.shape[1]
    mean = float(covariance.diagonal().mean())
    if mean <= 0:
        return rounded(units, largest, groups, offset)
    order = torch.argsort(covariance.diagonal(), descending=True, stable=True)
    factor = _factor(covariance[order][:, order], mean)
    # Columns are stored as rows, so that all elements of a column are adjacent in memory.
    left = units.T[order].contiguous()
    found = torch.empty_like(left)
    for first in range(0, size, BLOCK):
        last = min(first + BLOCK, size)
        block, errors = left[first:last], torch.empty_like(left[first:last])
        inner = factor[first:last, first:last]
        for k in range(last - first):
            column = rounded(block[k, :, None], largest, groups, offset + int(order[first + k]))[:, 0]
            found[first + k] = column
            torch.div(block[k] - column, inner[k, k], out=errors[k])
            block[k + 1 :].addr_(inner[k, k + 1 :], errors[k], alpha=-1)
        left[last:] -= factor[first:last, last:].T @ errors
    return found[torch.argsort(order)].T.contiguous()


def _factor(covariance: Tensor, mean: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse covariance.

    With columns and rows in reverse order, A = R R^T for an upper triangular R, so A^-1 = U^T U for U = R^-1.
    The damping grows until the factor exists: a tiny covariance may be only rounding noise.
    """
    damping, eye = DAMPING * mean, torch.eye(len(covariance), dtype=torch.float64)
    while True:
        lower, failed = torch.linalg.cholesky_ex((covariance + damping * eye).flip(0, 1))
        if not failed:
            factor: Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
            return factor
        damping *= 10
