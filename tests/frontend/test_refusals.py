"""Models outside the supported set are refused with FqvitError, which names the module and the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.errors import FqvitError
from fqvit.frontend.capture import capture
from tests.frontend.parity import SIZE, Tokens


class Body(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.sort(x)[0], r"body: aten\.sort is not supported"),
        (lambda x: torch.fft.fft(x).real, r"body: aten\.\w+ is not supported"),
        (lambda x: x / F.gelu(x), r"body: aten\.div by a value that depends on the image"),
        (lambda x: x.pow(3), r"body: aten\.pow other than a square"),
        (lambda x: F.layer_norm(x, (16, 8)), r"body: aten\.layer_norm over more than one axis"),
        # torch 2.6 refuses this index while it exports.
        (lambda x: x[:, x[0, :, 0].argmax()], r"body|torch\.export cannot capture this module \(.*data-dependent"),
        (lambda x: x + torch.rand(16, 8), r"body: aten\.rand returns different numbers in every run"),
        (lambda x: F.gelu(x) * torch.randn(16, 8, generator=None), r"body: aten\.randn"),
        (lambda x: F.gelu(x) * torch.arange(128.0).view(16, 8), r"a constant that differs between positions"),
        (lambda x: (lambda y: y + y.flip(1) * 2)(F.gelu(x)), r"body: adds a rearranged copy"),
        (lambda x: (F.gelu(x) > 0).float(), r"body: aten\.gt"),
        (lambda x: F.embedding(F.gelu(x).long().clamp(0, 3), torch.randn(4, 2)), r"body: aten\."),
        (lambda x: x.square(), r"an output is a norm or a square"),
        (lambda x: torch.ones(2), r"does not depend on the image"),
        (lambda x: None, r"no floating-point output"),
        (lambda x: F.avg_pool2d(x.reshape(-1, 8, 4, 4), 2, divisor_override=3), r"avg_pool2d with divisor_override"),
        (lambda x: F.max_pool2d(x.reshape(-1, 8, 4, 4), 3, ceil_mode=True), r"max_pool2d with ceil_mode"),
        (lambda x: x.view(1, 16, 8) if len(x) == 1 else x[:, :3], r"differ|cannot run|shape"),
    ],
)
def test_unsupported_operations_are_named(function: Callable[[Tensor], Any], message: str) -> None:
    body = Body(function)
    with pytest.raises(FqvitError, match=message):
        capture(Tokens(body), SIZE)


def test_a_module_that_export_cannot_follow_is_rejected() -> None:
    body = Body(lambda x: x if bool(x.sum() > 0) else -x)
    with pytest.raises(FqvitError, match=r"Tokens: torch\.export cannot capture this module"):
        capture(Tokens(body), SIZE)


def test_a_module_that_only_accepts_one_image_is_rejected() -> None:
    body = Body(lambda x: F.gelu(x).reshape(1, 16, 8))
    with pytest.raises(FqvitError, match="cannot run with several images"):
        capture(Tokens(body), SIZE)


def test_a_module_that_cannot_be_copied_is_rejected() -> None:
    model = Tokens(F.gelu)
    model.scale = torch.ones(1, requires_grad=True) * 2  # not a leaf of the autograd graph
    with pytest.raises(FqvitError, match="Tokens: cannot be copied"):
        capture(model, SIZE)


def test_a_wrong_number_of_channels_is_rejected() -> None:
    with pytest.raises(FqvitError, match=r"Tokens: torch\.export cannot capture this module"):
        capture(Tokens(F.gelu), (1, 8, 8))


def test_a_convolution_of_a_single_colour_channel_is_rejected() -> None:
    class Red(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 2, 2)

        def forward(self, images: Tensor) -> Tensor:
            return self.conv(images[:, :1])

    with pytest.raises(FqvitError, match="conv: reads single colour channels"):
        capture(Red(), SIZE)
