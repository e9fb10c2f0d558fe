"""Tests of fake quantization: values as QParams computes them, gradients as in LSQ (learned step size quantization)."""

from __future__ import annotations

import numpy as np
import torch

from fqvit.quant.methods.fakequant import fake_quantize, fake_quantize_grid, straight_through
from fqvit.quant.qparams import QParams


def test_fake_quantized_values_equal_the_decoded_codes() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    scale, zero = torch.linspace(0.05, 0.4, 6), torch.arange(6.0) + 3
    q = QParams(4, scale.double().numpy(), zero.numpy().astype(np.int64))
    torch.testing.assert_close(fake_quantize(x, scale, zero, 15), q.decode(q.encode(x)))


def test_gradients_of_values_scales_and_zero_points() -> None:
    """Inside the range, dy/dx is 1. Outside, y is (last - zero) * scale or -zero * scale, where last = 15 is the last code."""
    x = torch.tensor([[0.9], [100.0], [-100.0]], requires_grad=True)
    scale, zero = torch.tensor([0.5], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    fake_quantize(x, scale, zero, 15).sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == [1.0, 0.0, 0.0]
    assert scale.grad is not None and abs(float(scale.grad) - ((2 - 0.9 / 0.5) + 12 - 3)) < 1e-5
    assert zero.grad is not None and float(zero.grad) == -0.5 * 2


def test_one_scale_for_all_channels_gets_the_sum_of_the_gradients() -> None:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    each = torch.full((4,), 0.2, requires_grad=True)
    one = torch.full((1,), 0.2, requires_grad=True)
    for scale in (each, one):
        fake_quantize(x, scale, torch.full_like(scale.detach(), 8.0), 15).square().sum().backward()
    assert each.grad is not None and one.grad is not None
    torch.testing.assert_close(each.grad.sum(), one.grad[0])


def test_fake_quantize_grid_rounds_to_the_nearest_step() -> None:
    x = torch.tensor([-9.0, -0.4, 0.3, 2.2, 99.0], requires_grad=True)
    scale = torch.tensor([0.5], requires_grad=True)
    y = fake_quantize_grid(x, scale, torch.tensor([-2.0, 0.0, 1.0, 8.0]))
    assert y.tolist() == [-1.0, 0.0, 0.5, 0.5, 4.0]
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert scale.grad is not None and abs(float(scale.grad) - (-2 + 0.8 + 0.4 - 3.4 + 8)) < 1e-5


def test_straight_through_has_the_gradient_of_its_first_and_the_value_of_its_second_argument() -> None:
    x = torch.tensor([0.3, 0.7], requires_grad=True)
    y = straight_through(x, x.round())
    assert y.tolist() == [0.0, 1.0]
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 1.0]
