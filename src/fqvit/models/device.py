"""Where a float model runs: the one check of a device's name. Programs need no device; they run on the CPU."""

from __future__ import annotations

import re

import torch

from fqvit.errors import FqvitError


def device_of(name: str) -> torch.device:
    """cpu, mps, cuda or cuda:N, if this machine has it. Torch knows more (meta, xpu, ...), on which nothing here is tested."""
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,4})?", name):
        raise FqvitError(f"device {name!r} is not available, expected cpu, cuda, cuda:N or mps. Use --device cpu.")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise FqvitError(f"device {name!r} is not available here. Use --device cpu.") from None
    return device
