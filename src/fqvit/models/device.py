"""Where a float model runs: the one check of a device's name, the CPU's allocator and threads. Programs need no device."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from fqvit.distributed.workers import number_in
from fqvit.errors import FqvitError


def device_of(name: str) -> torch.device:
    """cpu, mps, cuda or cuda:N, if this machine has it. Torch knows more (meta, xpu, ...), on which nothing here is tested."""
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,4})?", name):
        raise FqvitError(f"device {name!r} is not available, expected cpu, cuda, cuda:N or mps. Use --device cpu.")
    try:
        device = torch.device(own_gpu(os.environ, torch.cuda.device_count()) if name == "cuda" else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise FqvitError(f"device {name!r} is not available here. Use --device cpu.") from None
    return device


def own_gpu(environment: Mapping[str, str], count: int) -> str:
    """Which of `count` GPUs is meant by plain `cuda`: workers that torchrun started on one machine take them in turn."""
    rank = number_in(environment, "LOCAL_RANK")
    return "cuda" if rank is None or count == 0 else f"cuda:{rank % count}"


def keep_freed_memory() -> None:
    """Tells glibc to keep what is freed for the next layer. For a process of our own: it is a setting of the whole process.

    Otherwise arrays that come and go beside a float pass make it return memory and fault it in again, at every layer: measured,
    a calibration of 1.8 times the time of the float pass in place of 1.2.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD of malloc.h
            mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD, at its largest


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch without threads, for many small steps: its threads spin while they wait for each other after every one.

    Measured, comparing two images of DeiT-Tiny on two cores that other processes use, too: 50 s of CPU with two threads of
    torch and of numpy, 4 s with one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
