"""Capture a torch module: export it, read it, rewrite it, emit leaf modules, and compare the result with the module."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fqvit.errors import FqvitError
from fqvit.frontend.draft import Draft, Step, forget_positions
from fqvit.frontend.emit import Emitter
from fqvit.frontend.read import read
from fqvit.frontend.rewrite import REWRITES
from fqvit.models.graph import Captured

TOLERANCE = 2e-3  # relative to the largest output; another order of float32 operations causes far smaller differences
MANY_PIXELS = 256 * 256  # larger images are compared one at a time


def capture(module: nn.Module, size: tuple[int, int, int]) -> Captured:
    """Return a graph of leaf modules that computes what `module` computes for images of this size.

    module: takes normalised images [N, channels, height, width]   size: channels, height, width
    Raises FqvitError with the module path and the ATen op for a model that is not supported.
    """
    channels, height, width = size
    name = type(module).__name__
    with _refusing(f"{name}: cannot be copied"):
        given, module = module, copy.deepcopy(module).cpu().float().eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _refusing(f"{name}: torch.export cannot capture this module"):
            program = torch.export.export(module, (torch.zeros(1, channels, height, width),), strict=False)
        try:
            draft = Draft(read(program, Step("images", "", [], (height, width, channels))))
            for rewrite in REWRITES:
                with _refusing(f"{name}: {rewrite.__name__} does not support this model"):
                    rewrite(draft)
            with _refusing(f"{name}: cannot be expressed with leaf modules"):
                captured = Captured(Emitter(draft, lambda path: _is_module(module, path)).graph())
        finally:
            forget_positions()
        with _refusing(f"{name}: cannot run with several images"):
            # A second copy: in torch 2.6, modules that cache tensors, such as TinyViT, keep fake ones from the export.
            captured.parity = check(copy.deepcopy(given).cpu().float().eval(), captured, size)
    return captured


@torch.no_grad()
def share_weights(captured: Captured, module: nn.Module) -> None:
    """Let the graph share the memory of those weights of the module that capturing has not changed."""
    own: dict[int, list[Tensor]] = {}
    weight: Tensor
    for weight in module.parameters():
        own.setdefault(weight.numel(), []).append(weight)
    for parameter in captured.parameters():
        flat = parameter.flatten()
        for weight in own.get(parameter.numel(), ()):
            if weight.is_contiguous() and torch.equal(weight.flatten(), flat):
                parameter.data = weight.detach().view(parameter.shape)
                break


@contextmanager
def _refusing(problem: str) -> Iterator[None]:
    """Turn exceptions, from torch or from failed assumptions about the model, into FqvitError."""
    try:
        yield
    except FqvitError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise FqvitError(f"{problem} ({first}).") from error


def _is_module(module: nn.Module, path: str) -> bool:
    try:
        return next(module.get_submodule(path).children(), None) is None
    except AttributeError:
        return False


@torch.no_grad()
def check(module: nn.Module, captured: Captured, size: tuple[int, int, int]) -> float:
    """Compare module and graph on random images; return the largest relative difference of an output."""
    count = 2 if size[1] * size[2] <= MANY_PIXELS else 1
    images = torch.randn(count, *size, generator=torch.Generator().manual_seed(0))
    wanted = [x for x in _tensors(module(images)) if x.is_floating_point()]
    *others, last = captured.graph.run_all(images)
    errors = [
        float((want.reshape(have.shape) - have).abs().max() / want.abs().max().clamp(min=1e-12))
        for want, have in zip(wanted, [last, *others], strict=True)
    ]
    worst = next((error for error in errors if math.isnan(error)), max(errors))
    if not worst <= TOLERANCE:
        raise FqvitError(
            f"{type(module).__name__}: the captured graph differs from the module by {worst:.2g} of its largest output."
        )
    return worst


def _tensors(x: object) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        return [y for part in x.values() for y in _tensors(part)]
    if isinstance(x, list | tuple):
        return [y for part in x for y in _tensors(part)]
    return []
