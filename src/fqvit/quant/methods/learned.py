"""The parameters that are learned for one site and for one linear layer, and their conversion to integers.

See also: reconstruct.py (learns them), fakequant.py (rounding with gradients).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.models import layers
from fqvit.quant.channels import GELU_DEPTH, on_grid
from fqvit.quant.methods.fakequant import fake_quantize, fake_quantize_grid, straight_through
from fqvit.quant.qparams import QParams
from fqvit.quant.weights import QuantizedLinear, rounded, to_short

# Weights start at least this share of their rounding interval away from its ends, so that they are first rounded as given.
MARGIN = 0.05


class SiteParameters:
    """The learned scales and zero points of one site.

    logs: the logarithms of the factors that multiply the initial scales: one for all channels, one each for Q and K and one per
    channel of V, or one per channel. zeros: learned zero points, None if they are fixed.
    """

    def __init__(self, role: str, q: QParams, value: SiteParameters | None) -> None:
        self.role, self.q, self.value = role, q, value
        self.channels = len(q.scale)
        if role == "qkv" and self.channels > 3:
            third = self.channels // 3
            shared = len(q.group(2).scale) == 1  # one scale for all channels of V and of attention times V
            rest = torch.full((third,), 2) if shared else torch.arange(2, 2 + third)
            self.index = torch.cat([torch.zeros(third), torch.ones(third), rest]).long()
        elif role in ("context", "gelu"):
            self.index = torch.zeros(self.channels).long()
        else:
            self.index = torch.arange(self.channels)
        self.logs = torch.zeros(int(self.index.max()) + 1, requires_grad=True)
        self.first = torch.from_numpy(q.scale).float()
        self.zero = torch.from_numpy(q.zero.astype(np.float64)).float()
        self.learns_zeros = role == "norm"
        self.zero.requires_grad_(self.learns_zeros)
        if role == "context" and value is not None:
            self.ratio = float(q.scale[0] / value.q.scale[-len(q.scale)])

    def scale(self) -> Tensor:
        factor = self.logs.exp()[self.index]
        if self.role == "context" and self.value is not None:
            return self.value.scale()[-self.channels :] * self.ratio * factor
        return self.first * factor

    def zeros(self) -> Tensor:
        if self.role == "gelu" and not self.q.grid:
            return (GELU_DEPTH / self.scale().detach()).round().clamp(max=self.q.last)
        return self.zero

    def apply(self, x: Tensor) -> Tensor:
        if self.q.grid:
            return fake_quantize_grid(x, self.scale(), torch.tensor(self.q.grid).float() - self.zero)
        return fake_quantize(x, self.scale(), self.zeros(), self.q.last)

    @torch.no_grad()
    def result(self, value: QParams | None) -> QParams:
        factor = self.logs.double().exp()[self.index].numpy()
        zero = np.clip(np.rint(self.zeros().double().numpy()), 0, self.q.last).astype(np.int64)
        if self.role == "context" and value is not None:
            return QParams(self.q.bits, value.scale[-self.channels :] * self.ratio * factor, zero)
        scale = self.q.scale * factor
        if self.role == "qkv" and self.channels > 3:
            third = self.channels // 3
            scale[2 * third :] = on_grid(scale[2 * third :])
        elif self.role != "gelu" and self.channels > 1:
            scale = on_grid(scale)
        return replace(self.q, scale=scale, zero=zero)


class LayerParameters:
    """The learned weights of a linear layer: rounded(W * input_scale / scale + move * step), in units of scale.

    step: the mean distance between neighbouring levels of a weight's codebook; 1 without groups
    """

    def __init__(self, leaf: layers.Linear, start: QuantizedLinear, bits: int, scales: Tensor, spread: float) -> None:
        self.weight = leaf.weight.detach().float()
        self.groups, self.largest = start.groups, 2 ** (bits - 1) - 1
        w = torch.from_numpy(start.w.astype(np.float64)).float()
        if start.groups is None:
            self.step, (low, high) = torch.ones(1, 1), (w - 0.5, w + 0.5)
            self.extent = torch.tensor(-self.largest - 0.5), torch.tensor(self.largest + 0.5)
        else:
            self.step, (low, high) = start.groups.steps(w.shape[1]), start.groups.cells(start.w)
            self.extent = start.groups.extent(w.shape[1])
        self.first = torch.from_numpy(start.scale).float()[:, None]
        self.logs = torch.zeros_like(self.first, requires_grad=True)
        exact = self.weight * scales / self.first
        margin = MARGIN * (high - low)
        self.move = ((exact.clamp(low + margin, high - margin) - exact) / self.step).requires_grad_()
        self.bias0 = torch.from_numpy(start.bias * start.scale).float()
        self.spread = spread
        self.shift = torch.zeros_like(self.bias0, requires_grad=True)

    def levels(self, scales: Tensor) -> Tensor:
        exact = self.weight * scales / (self.first * self.logs.exp()) + self.move * self.step
        return straight_through(exact.clamp(*self.extent), rounded(exact.detach(), self.largest, self.groups))

    def decoded(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.levels(scales) * (self.first * self.logs.exp()) / scales
        return weight, self.bias0 + self.shift * self.spread

    @torch.no_grad()
    def result(self, scales: Tensor, output_scales: NDArray[np.float64] | None) -> QuantizedLinear:
        w = self.levels(scales).round().numpy().astype(np.int8)
        scale = (self.first * self.logs.exp())[:, 0].double().numpy()
        scale = scale if output_scales is None else to_short(scale, output_scales)
        bias = np.clip((self.bias0 + self.shift * self.spread).double().numpy() / scale, -(2.0**30), 2.0**30)
        return QuantizedLinear(w, scale, np.floor(bias + 0.5).astype(np.int64), self.groups)
