"""Wrap one operation in a small module, capture it, and compare the outputs of the graph with those of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fqvit.frontend.capture import capture
from fqvit.models.graph import Captured

SIZE = (3, 8, 8)
Body = Callable[..., Any]


class Tokens(nn.Module):
    """Embed patches of 2 x 2 pixels as tokens [N, 16, 8], then apply `body`.

    layers: modules that `body` uses; if `body` is a function, they are its second argument
    """

    def __init__(self, body: Body, **layers: nn.Module) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.layers = nn.ModuleDict(layers)
        self.body = body

    def forward(self, images: Tensor) -> Any:
        return self.run(self.patches(images).flatten(2).transpose(1, 2))

    def run(self, x: Tensor) -> Any:
        return self.body(x, self.layers) if self.layers and not isinstance(self.body, nn.Module) else self.body(x)


class Maps(Tokens):
    """Like Tokens, but `body` gets the same values as feature maps [N, 8, 4, 4]."""

    def forward(self, images: Tensor) -> Any:
        return self.run(self.patches(images))


def randomised(module: nn.Module) -> nn.Module:
    """Give parameters and statistics random values."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.data = 0.5 + noise.abs() if name.endswith("var") else 0.4 * noise + float(name.endswith("norm.weight"))
    return module.eval()


def captured(module: nn.Module, size: tuple[int, int, int] = SIZE, tolerance: float = 1e-5) -> Captured:
    """Capture a module and compare every output for three images."""
    randomised(module)
    graph = capture(module, size)
    images = torch.randn(3, *size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = module(images)
        *others, last = graph.graph.run_all(images)
    for want, have in zip(wanted if isinstance(wanted, tuple) else (wanted,), [last, *others], strict=True):
        torch.testing.assert_close(have.reshape(want.shape), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
    return graph


def tokens(body: Body, **layers: nn.Module) -> Captured:
    """Capture a function of tokens [N, 16, 8]."""
    return captured(Tokens(body, **layers))


def maps(body: Body, **layers: nn.Module) -> Captured:
    """Capture a function of feature maps [N, 8, 4, 4]."""
    return captured(Maps(body, **layers))


def kinds(graph: Captured) -> list[str]:
    """Return the class names of the leaves."""
    return [type(node.leaf).__name__ for node in graph.graph.nodes]
