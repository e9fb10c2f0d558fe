"""Simulate quantization in float: decode(encode(x)) at every site, and rounded weights.

Used to evaluate methods quickly and to find where accuracy is lost; deployed models run the integer program. Given the same
inputs, a node's codes equal those of the program almost everywhere (tests require 99.9 % of the codes, and 99.2 % at 16 bits).
"""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fqvit.models import general, layers, maps
from fqvit.models.graph import IMAGES, Graph, Node
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibration import Calibration
from fqvit.quant.exptable import EXP_TABLES
from fqvit.quant.fuse_relu import fuse_relus
from fqvit.quant.qparams import QParams
from fqvit.quant.weights import (
    LinearLeaf,
    QuantizedLinear,
    bits_and_group,
    depthwise_weights,
    pixel_linear,
    pixel_zero,
    quantize_linear,
    quantize_positions,
    short_output_scales,
    stem_linear,
    weight_rows,
)


class Simulation:
    """A float model with quantized sites and weights.

    If the recipe leaves nonlinear operations in float, position embeddings, prefix tokens, relative position biases and
    residual sums stay float as well.
    """

    def __init__(self, model: FloatModel, calibration: Calibration) -> None:
        self.model, self.calibration = model, calibration
        self.graph: Graph = calibration.graph(model)
        masked = any(isinstance(node.leaf, layers.Softmax) and node.leaf.mask is not None for node in self.graph.nodes)
        self.sites = {
            name: dataclasses.replace(q, zero_code=q.zero_code or (q.log2 and masked)) for name, q in calibration.sites.items()
        }
        if calibration.square is not None:
            self.sites[IMAGES] = calibration.square
        self.relus = fuse_relus(self.graph)
        self.units: dict[str, Tensor] = {}  # float64 [C], the value of one accumulator unit of a layer
        self.weights = {
            node.name: self._weights(node)
            for node in self.graph.nodes
            if isinstance(node.leaf, LinearLeaf | layers.Patches | general.Stem)
        }
        self.depthwise = {
            node.name: self._depthwise_weights(node) for node in self.graph.nodes if isinstance(node.leaf, general.Depthwise)
        }

    def input_q(self, node: Node) -> QParams | None:
        """Return the parameters of the codes that a node reads, directly or through nodes that only move data.

        None if it reads no codes.
        """
        name = node.inputs[0]
        times = 1
        while name not in self.sites:
            source = next((n for n in self.graph.nodes if n.name == name), None)
            if source is None or source.leaf.role != "route":
                return None
            if isinstance(source.leaf, layers.Take) and source.leaf.join:
                times *= source.leaf.index.shape[-1]
            elif isinstance(source.leaf, general.Route) and source.leaf.keeps_channels:
                times *= source.leaf.times
            name = source.inputs[0]
        return self.sites[name].tiled(times)

    def _head_scale(self, name: str) -> float:
        """Return the scale of Q, K or V, given the name of the node that splits it into heads."""
        part = None
        while name not in self.sites:
            node = self.graph.node(name)
            part = node.leaf.part if isinstance(node.leaf, layers.Heads) else part
            name = node.inputs[0]
        q = self.sites[name]
        return float((q if part is None else q.group(part)).scale[0])

    def value_site(self, node: Node) -> str | None:
        """Return the site of V if the node is attention times V with one scale per channel."""
        if not isinstance(node.leaf, layers.Context) or len(self.sites[node.name].scale) == 1:
            return None
        name = node.inputs[1]
        while name not in self.sites:
            name = self.graph.node(name).inputs[0]
        return name

    def _depthwise_weights(self, node: Node) -> tuple[Tensor, Tensor]:
        """Return the quantized weights [K, C] and bias [C] of a depthwise convolution, dequantized."""
        leaf, q = node.leaf, self.input_q(node)
        assert isinstance(leaf, general.Depthwise)
        if q is None:
            return leaf.weight.detach(), leaf.bias.detach()
        found, scales = depthwise_weights(leaf, q), q.channel_scales(leaf.weight.shape[1])
        weight = (found.w * found.scale[:, None] / scales[:, None]).T
        return torch.from_numpy(weight.copy()).float(), torch.from_numpy(found.bias * found.scale).float()

    def _weights(self, node: Node) -> tuple[Tensor, Tensor]:
        """Return the quantized weights and bias of a linear layer, convolution or patch embedding, dequantized."""
        chosen = self.calibration.weights.get(node.name)
        return self._dequantize(node, self.nearest(node) if chosen is None else chosen)

    def nearest(self, node: Node) -> QuantizedLinear:
        """Round the weights of a layer to the nearest codes."""
        leaf = node.leaf
        assert isinstance(leaf, LinearLeaf | layers.Patches | general.Stem)
        bits, group = bits_and_group(self.calibration.recipe, node)
        bias: NDArray[np.float64] | None
        if isinstance(leaf, layers.Patches):
            weight, bias = (part.detach().cpu().double().numpy() for part in (leaf.weight, leaf.bias))
            weight, bias, _ = pixel_linear(weight, bias, self.model.preprocess)
        elif isinstance(leaf, general.Stem):
            weight, bias, _ = stem_linear(leaf, self.model.preprocess)
        else:
            weight, bias = weight_rows(leaf)
        scales = self.input_scales(node)
        short, halves = self.short_output_scales(node), self.calibration.recipe.weight_ends == "halves"
        return quantize_linear(
            weight, bias, np.ones(1) if scales is None else scales, bits, group=group, output_scales=short, halves=halves
        )

    def _dequantize(self, node: Node, linear: QuantizedLinear) -> tuple[Tensor, Tensor]:
        leaf, scales = node.leaf, self.input_scales(node)
        self.units[node.name] = torch.from_numpy(linear.scale)
        weight, bias = linear.w * linear.scale[:, None] / (1.0 if scales is None else scales), linear.bias * linear.scale
        if isinstance(leaf, layers.Patches):
            # The simulation reads normalized images: undo the folding of the normalization into weight and bias.
            p, pixels = self.model.preprocess, leaf.patch**2
            bias = bias - weight @ (pixel_zero(p) / 255 - np.tile(p.mean, pixels))
            weight = (weight * np.tile(p.std, pixels)).reshape(len(weight), leaf.patch, leaf.patch, -1).transpose(0, 3, 1, 2)
        elif isinstance(leaf, general.Stem):
            p, pixels = self.model.preprocess, leaf.weight.shape[1]
            bias = bias - weight @ (pixel_zero(p) / 255 - np.tile(p.mean, pixels))
            weight = weight * np.tile(p.std, pixels)
        return torch.from_numpy(weight.copy()).float(), torch.from_numpy(bias).float()

    def short_output_scales(self, node: Node) -> NDArray[np.float64] | None:
        """Return the output scales [O] of a layer with exact 16-bit multipliers, else None; see weights.py."""
        assert isinstance(node.leaf, LinearLeaf | layers.Patches | general.Stem)
        outputs = (
            len(node.leaf.weight) if isinstance(node.leaf, layers.Patches | general.Stem) else len(weight_rows(node.leaf)[0])
        )
        site = self.sites.get(self.relus.get(node.name, node.name))
        return short_output_scales(self.calibration.recipe, node.leaf, site, outputs)

    def use(self, node: Node, found: QuantizedLinear) -> None:
        """Replace the weights and bias of a layer."""
        self.weights[node.name] = self._dequantize(node, found)

    def input_scales(self, node: Node) -> NDArray[np.float64] | None:
        """Return the scales [K] of the codes that a layer reads ([1] for pixels); None if it reads no codes."""
        if isinstance(node.leaf, layers.Patches | general.Stem):
            return np.array([1 / 255])
        q = self.input_q(node)
        assert isinstance(node.leaf, LinearLeaf)
        if q is not None and isinstance(node.leaf, maps.Conv2d):
            q = q.tiled(9)
        return None if q is None else q.channel_scales(weight_rows(node.leaf)[0].shape[1])

    def input_steps(self, node: Node) -> NDArray[np.float64] | None:
        """Deprecated: the name of `input_scales` in version 0.1.0."""
        warnings.warn("Simulation.input_steps is now called input_scales", DeprecationWarning, stacklevel=2)
        return self.input_scales(node)

    def call(self, node: Node, inputs: list[Tensor]) -> Tensor:
        """Compute a node in float with quantized weights; the result is not encoded yet."""
        leaf = node.leaf
        if isinstance(leaf, layers.Patches):
            weight, bias = self.weights[node.name]
            return F.conv2d(inputs[0], weight, bias, leaf.patch).flatten(2).transpose(1, 2)
        if isinstance(leaf, layers.Linear):
            return F.linear(inputs[0], *self.weights[node.name])
        if isinstance(leaf, general.Stem):
            return F.linear(leaf.rows(inputs[0]), *self.weights[node.name])
        if isinstance(leaf, general.Depthwise):
            return leaf.weighted(inputs[0], *self.depthwise[node.name])
        if isinstance(leaf, maps.Conv2d):
            weight, bias = self.weights[node.name]
            weight = weight.view(len(weight), 3, 3, -1).permute(0, 3, 1, 2)
            return F.conv2d(inputs[0].permute(0, 3, 1, 2), weight, bias, padding=1).permute(0, 2, 3, 1)
        if isinstance(leaf, maps.Deconv):
            return maps.depth_to_space(F.linear(inputs[0], *self.weights[node.name]))
        if self.calibration.recipe.nonlinear == "float":
            return leaf(*inputs, *node.params)  # type: ignore[no-any-return]
        if isinstance(leaf, layers.Embed):
            prefix, positions = node.params
            rounded, unit = quantize_positions(positions.cpu().double().numpy(), self.calibration.recipe.position_bits)
            q = self.sites.get(node.inputs[0])
            if q is None:
                units = self.units[node.inputs[0]]
                prefix = (prefix.cpu().double() / units + 0.5).floor().mul(units).to(inputs[0].dtype)
            else:
                prefix = q.decode(q.encode(prefix))
            return leaf(inputs[0], prefix, torch.from_numpy(rounded * unit).to(inputs[0].dtype))  # type: ignore[no-any-return]
        if isinstance(leaf, general.Shift):
            values = leaf.values.cpu().double().numpy()
            rounded, step = quantize_positions(values, self.calibration.recipe.position_bits)
            return inputs[0] + torch.from_numpy(rounded * step).to(inputs[0].dtype)
        if isinstance(leaf, layers.BiasedScores):
            scale = leaf.scale * self._head_scale(node.inputs[0]) * self._head_scale(node.inputs[1])
            units = scale * (torch.ones(1) if leaf.factors is None else leaf.factors).double()
            return leaf(*inputs, (node.params[0].double() / units + 0.5).floor().mul(units).to(inputs[0].dtype))  # type: ignore[no-any-return]
        if isinstance(leaf, layers.Softmax) and self.calibration.recipe.exp != "table":
            return table_softmax(leaf, inputs[0], self.sites[node.inputs[0]], self.calibration.recipe.exp)
        y: Tensor = leaf(*inputs, *node.params)
        return y

    def visit(self, node: Node, y: Tensor) -> Tensor:
        """Replace the values of a site by decode(encode(values))."""
        q = self.sites.get(node.name)
        return y if q is None else q.decode(q.encode(y))

    @torch.no_grad()
    def run(self, images: NDArray[np.uint8]) -> Tensor:
        """Run images uint8 [N, H, W, C] and return the main output: float logits [N, classes] (or features).

        If the calibration names outputs, return the first of them.
        """
        return self.run_all(images)[0 if self.calibration.outputs else -1]

    @torch.no_grad()
    def run_all(self, images: NDArray[np.uint8]) -> tuple[Tensor, ...]:
        """Run as `run` does, and return all outputs. images: codes of RoI features if the model is a detector's head."""
        return self.graph.run_all(self.values(images), self.visit, self.call)

    @torch.no_grad()
    def run_features(self, features: Tensor) -> tuple[Tensor, ...]:
        """Run a detector's head on float RoI features [N, side, side, C], which are quantized first; return all outputs."""
        return self.graph.run_all(self.encode_input(features), self.visit, self.call)

    def encode_input(self, x: Tensor) -> Tensor:
        """Replace the input of a detector's head, RoI features, by decode(encode(features)). Images are not changed."""
        q = self.sites.get(IMAGES)
        return x if q is None else q.decode(q.encode(x))

    def values(self, images: NDArray[np.uint8]) -> Tensor:
        """Return the input of the first node: normalized images [N, C, H, W], or RoI features [N, side, side, C]."""
        if self.calibration.square is None:
            return normalise(images, self.model.preprocess)
        return self.calibration.square.decode(torch.from_numpy(images).float())


def table_softmax(leaf: layers.Softmax, scores: Tensor, q: QParams, exp: str) -> Tensor:
    """Compute the softmax of float scores [..., T] with an integer table of the exponential, as programs do.

    q: the scores' parameters; distances from the row's maximum are rounded to multiples of its scale   exp: see Recipe.exp
    """
    scale = float(q.scale[0])
    table = torch.from_numpy(EXP_TABLES[exp](scale, q.last + 1, scores.shape[-1])).to(scores.device, scores.dtype)
    if leaf.mask is not None:
        scores = scores.masked_fill(~leaf.mask[:, None], float("-inf"))
    distance = ((scores.amax(-1, keepdim=True) - scores) / scale).round()
    e = table[distance.clamp(max=len(table) - 1).long()] * torch.isfinite(distance)
    return e / e.sum(-1, keepdim=True)
